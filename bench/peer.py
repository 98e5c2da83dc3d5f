"""The same closed-loop load against several OpenAI servers in turn, side by side.

    python bench/peer.py kvrelay=http://127.0.0.1:8000 vllm=http://127.0.0.1:8100 [name=url=model ...]
        [--concurrency 1 4 16 32] [--input 128] [--output 64] [--shared-prefix 0] [--chat] [--json FILE]

Every server gets the same prompts and lengths, each shape is run --rounds times in turn (ABAB, not
AABB) and medians count; the last columns are ratios to the first server. Prompts never repeat, within
a run or (the seed is the time, unless given) between runs, so prefix caches help nobody. Load one server at a time:
the others must be idle, and no two servers may spin on the same cores.

Starting peers (FOLDER has config.json and safetensors; the default model's is in ~/.cache/kvrelay/checkpoints):
  vLLM on CPU     VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=0-1 vllm serve FOLDER --port 8100
                  --dtype bfloat16 --max-model-len 4096 --served-model-name model   (package vllm-cpu)
  llama.cpp       python -m llama_cpp.server --model FILE.gguf --n_ctx 4096 --port 8200
                  (llama-cpp-python; its token-id prompts differ: use --text)
  transformers    transformers serve --port 8300 --device cpu   and here --chat --plain, model = FOLDER
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from figures import show

from kvrelay.cluster.loadgen.client import Job, Target, require_loopback, run_load, served_model
from kvrelay.cluster.loadgen.prompts import PromptSpec, synthetic_prompt
from kvrelay.cluster.loadgen.stats import Summary

FIGURES: dict[str, Callable[[Summary], float]] = {
    "TTFT p50 ms": lambda s: 1000 * s.ttft_s.p50,
    "TTFT p99 ms": lambda s: 1000 * s.ttft_s.p99,
    "TPOT p50 ms": lambda s: 1000 * s.tpot_s.p50,
    "ITL p99 ms": lambda s: 1000 * s.itl_s.p99,
    "output tok/s": lambda s: s.output_tokens_per_s,
}


async def as_target(text: str, options: argparse.Namespace) -> tuple[str, Target]:
    """name=url or name=url=model."""
    name, _, rest = text.partition("=")
    url, _, model = rest.partition("=")
    require_loopback(url, allow_remote=False)
    endpoint = "chat" if options.chat else "completions"
    model = model or await served_model(url)
    return name, Target(url, model, endpoint, as_text=options.text, is_plain=options.plain)  # type: ignore[arg-type]


async def one_round(target: Target, concurrency: int, seed: int, options: argparse.Namespace) -> Summary:
    """One closed-loop run of fresh prompts, after a short one to warm up."""
    spec = PromptSpec(options.input, options.shared_prefix, options.low, options.high, seed)
    count = concurrency * options.per_client
    warm = (Job(index, synthetic_prompt(spec, index), 4) for index in range(1 << 30, (1 << 30) + concurrency))
    await run_load(target, warm, concurrency=concurrency)
    jobs = (Job(index, synthetic_prompt(spec, index), options.output) for index in range(count))
    result = await run_load(target, jobs, concurrency=concurrency)
    summary = result.summary()
    if summary.num_ok != count:
        print(f"{target.url}: only {summary.num_ok} of {count} succeeded: {summary.errors} {result.first_failure}")
    if summary.num_wrong_length or summary.num_estimated:
        print(f"{target.url}: {summary.num_wrong_length} wrong lengths, {summary.num_estimated} without usage")
    return summary


async def run(options: argparse.Namespace) -> None:
    targets = [await as_target(text, options) for text in options.servers]
    rows: list[dict[str, Any]] = []
    for concurrency in options.concurrency:
        found: dict[str, list[Summary]] = {name: [] for name, _ in targets}
        for seed in range(options.rounds):
            for name, target in targets:
                found[name].append(await one_round(target, concurrency, options.seed + seed, options))
        rows += _rows(concurrency, found)
    shape = f"{options.input} in ({options.shared_prefix} shared), {options.output} out"
    show(f"closed loop, {shape}, medians of {options.rounds}, seed {options.seed}", rows, options.json)


def _rows(concurrency: int, found: dict[str, list[Summary]]) -> list[dict[str, Any]]:
    first: dict[str, float] = {}
    rows = []
    for name, summaries in found.items():
        values = {key: statistics.median(map(figure, summaries)) for key, figure in FIGURES.items()}
        first = first or values
        rows.append(
            {
                "server": name,
                "clients": concurrency,
                **values,
                "ok": sum(summary.num_ok for summary in summaries),
                "TPOT ratio": values["TPOT p50 ms"] / first["TPOT p50 ms"] if first["TPOT p50 ms"] else None,
                "tok/s ratio": values["output tok/s"] / first["output tok/s"] if first["output tok/s"] else None,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="name=url[=model]")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--shared-prefix", type=int, default=0)
    parser.add_argument("--per-client", type=int, default=3, help="requests of each client in a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 31))
    parser.add_argument("--low", type=int, default=1000, help="lowest token id of prompts")
    parser.add_argument("--high", type=int, default=30000)
    parser.add_argument("--chat", action="store_true", help="/v1/chat/completions with text")
    parser.add_argument("--text", action="store_true", help="text prompts in /v1/completions")
    parser.add_argument("--plain", action="store_true", help="only OpenAI's own fields, no usage")
    parser.add_argument("--json", type=Path)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
