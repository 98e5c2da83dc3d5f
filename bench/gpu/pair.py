"""One prefill and one decode worker on the same device, end to end: real weights where there are any, and random
ones.
"""

import asyncio
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.engine.inprocess import random_prompt
from bench.gpu.engines import BLOCK_SIZE, request
from bench.gpu.models import folder_of
from bench.gpu.section import Context, LeftOut
from kvrelay.cluster.chaos.served import running_serve
from kvrelay.cluster.launch.local import LocalCluster, local_cluster
from kvrelay.config import Settings
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.errors import KvrelayError, UnsupportedModel
from kvrelay.settings.engine import EngineSettings, ModelSettings
from kvrelay.settings.router import RouterSettings

RANDOM = ("llama-8b", "qwen3-moe, 8 of 48 layers", "deepseek-v2-lite, 4 of 27 layers")


def run(context: Context) -> None:
    if context.model is not None:
        measure(context, f"real weights: {Path(context.model).name}", Path(context.model))
    else:
        context.add(model="real weights", left_out="no folder given: --model PATH")
    for name in RANDOM:
        try:
            folder = folder_of(context, name)
        except (LeftOut, UnsupportedModel) as error:
            context.add(model=name, left_out=str(error))
            continue
        measure(context, f"random weights: {name}", folder)


def settings_of(context: Context, folder: Path) -> Settings:
    kv_memory = (8 << 20) if context.tiny else context.room(6 << 30)
    return Settings(
        model=ModelSettings(source=str(folder), dtype="bfloat16"),
        engine=EngineSettings.model_validate(
            {
                "backend": "cuda" if context.is_cuda else "cpu",
                "device": context.device,
                "block_size": BLOCK_SIZE,
                "kv_memory": kv_memory,
                "token_budget": 64 if context.tiny else 4096,
                "num_threads": None if context.is_cuda else 1,
            }
        ),
        router=RouterSettings(local_prefill_tokens=0),
    )


def measure(context: Context, name: str, folder: Path) -> None:
    try:
        asyncio.run(one_pair(context, name, folder))
    except KvrelayError as error:
        context.add(model=name, ok=False, note=f"{type(error).__name__}: {error}")


async def one_pair(context: Context, name: str, folder: Path) -> None:
    began = time.perf_counter()
    async with local_cluster(settings_of(context, folder), folder, retry_budget=0) as cluster:
        start_s = time.perf_counter() - began
        spec = ModelSpec.from_folder(folder)
        for length in (40, 100) if context.tiny else (512, 4096):
            await one_length(context, cluster, spec, name, min(length, spec.max_position - 64), start_s)
        leaks = await cluster.pool_leaks()
        context.add(model=name, note=leaks[0] if leaks else "every block given back", ok=not leaks)


async def one_length(
    context: Context, cluster: LocalCluster, spec: ModelSpec, name: str, length: int, start_s: float
) -> None:
    """TTFT over both ways, what of the transfer was not hidden, and the decode's pace."""
    num_output, repeats = (8, 2) if context.tiny else (48, 4)
    times: dict[str, list[tuple[float, float]]] = {"local": [], "remote": []}
    tokens: dict[str, list[int]] = {}
    before = transfers(cluster)
    for repeat in range(repeats + 1):
        for way in times:
            prompt = random_prompt(length + repeat, length, spec.vocab_size)
            tokens[way], ttft_s, tpot_s = await query(cluster, request(next_id(), prompt, num_output), way)
            await reset(cluster)
            if repeat:  # the first of each way warms up
                times[way].append((ttft_s, tpot_s))
    after = transfers(cluster)
    count = after["transfers"] - before["transfers"]
    same = next(
        (i for i, (a, b) in enumerate(zip(tokens["local"], tokens["remote"], strict=True)) if a != b), num_output
    )
    median = {
        way: [1e3 * statistics.median(column) for column in zip(*rows, strict=True)] for way, rows in times.items()
    }
    context.add(
        model=name,
        prompt=length,
        local_ttft_ms=median["local"][0],
        remote_ttft_ms=median["remote"][0],
        tpot_ms=median["remote"][1],
        exposed_ms=1e3 * (after["exposed_s"] - before["exposed_s"]) / max(count, 1),
        kv_mib=(after["num_bytes"] - before["num_bytes"]) / max(count, 1) / (1 << 20),
        over=after["transport"],
        same_tokens=f"{same} of {num_output}",
        start_s=start_s,
        ok=count == repeats + 1 and len(tokens["remote"]) == num_output,
    )


_ids = iter(range(1_000_000, 2_000_000))


def next_id() -> int:
    return next(_ids)


async def query(cluster: LocalCluster, wanted: Any, way: str) -> tuple[list[int], float, float]:
    """(tokens, TTFT, TPOT)."""
    began, first, tokens = time.perf_counter(), 0.0, []
    async for output in cluster.dispatcher.generate(wanted, force=way):
        first = first or time.perf_counter()
        tokens += output.token_ids
    return tokens, first - began, (time.perf_counter() - first) / max(1, len(tokens) - 1)


async def reset(cluster: LocalCluster) -> None:
    for member in cluster.members:
        await cluster.dispatcher.queries.reset_cache(member.worker_id)


def transfers(cluster: LocalCluster) -> dict[str, Any]:
    """The decode worker's sums over its KV transfers."""
    found: dict[str, Any] = cluster.inside[0].status()["transfer"]
    return found


ROOT = Path(__file__).resolve().parent.parent.parent
_REPORT_S = 5.0
GRID = "test_attention_equals_the_reference"  # the section "kernels" has it, in the order of use and as time allows


def run_tests(context: Context) -> None:
    """pytest's GPU tests."""
    if not context.is_cuda:
        raise LeftOut("they need a GPU")
    report = context.scratch / "tests.xml"
    # without the project's own settings, which name plugins that such a machine may lack
    plain = ["-c", os.devnull, f"--rootdir={ROOT}", "--import-mode=importlib", "-p", "no:cacheprovider"]
    chosen = ["-m", "gpu and not slow", "-k", f"not {GRID}", f"--junitxml={report}", "tests/kernels"]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *plain, *chosen], cwd=ROOT)
    context.add(check="pytest -m gpu", ok=done.returncode == 0, note=suite_of(report))


def suite_of(report: Path) -> str:
    """The counts of a junit file."""
    import xml.etree.ElementTree as Tree

    try:
        suite = next(Tree.parse(report).getroot().iter("testsuite"))
    except (OSError, Tree.ParseError, StopIteration):
        return "no report"
    return ", ".join(f"{suite.get(name)} {name}" for name in ("tests", "failures", "errors", "skipped"))


def run_verify(context: Context) -> None:
    """Tokens equal Hugging Face's over every way of serving, in float32; a flipped bit is refused."""
    few = ["--max-model-len", "192", "--tokens", "16", *(["--transport", "shm"] if context.tiny else [])]
    verify(context, "--all", "--family", "llama", "--backend", "cuda" if context.is_cuda else "cpu", *few)


def run_parity(context: Context) -> None:
    """bf16: every kind of step beside the reference backend on the same device; a flipped bit is refused."""
    if not context.is_cuda:
        raise LeftOut("it needs a GPU")
    verify(context, "--family", "llama", "--device", context.device)


def verify(context: Context, *flags: str) -> None:
    """`kvrelay verify`, its rows as they are when it ends or the time does."""
    report = context.scratch / f"{context.rows_file.stem}.json"
    command = [sys.executable, "-m", "kvrelay.cluster.commands.cli", "verify", "--json", str(report), *flags]
    try:
        status = subprocess.run(command, cwd=ROOT, timeout=context.left_s - _REPORT_S).returncode
    except subprocess.TimeoutExpired:
        status = None
    found = json.loads(report.read_text()) if report.exists() else []
    for one in found:
        for row in one["rows"]:
            is_right = row["passed"] == row["total"] > 0
            context.add(check=row["name"], same=row["passed"], of=row["total"], ok=is_right, note=row["note"])
    is_whole = status == 0 and bool(found) and all(one["ok"] for one in found)
    context.add(check="verify as a whole", ok=is_whole, note="no time left" if status is None else f"exit {status}")


_SETUPS = {"1 prefill + 1 decode": ("1", "1", 0.5), "1 worker": ("0", "1", 1.0)}  # prefill, decode, share of the device
_LOADS = ((1, 512, 128, 6), (16, 2048, 128, 48), (64, 1024, 128, 192))  # clients, tokens in and out, requests
_LEAST_S = 20.0  # for one load
_STOP_S = 10.0


def run_served(context: Context) -> None:
    """`kvrelay serve` over HTTP and Ray: a Llama-8B of random weights, disaggregated and aggregated, under
    `kvrelay bench`. Both workers of a pair share the device: two devices give other figures.
    """
    if importlib.util.find_spec("ray") is None:
        raise LeftOut("Ray is not installed")
    folder, out = folder_of(context, "llama-8b"), context.scratch / "load.json"
    for name, (prefill, decode, share) in _SETUPS.items():
        flags = ["--model", str(folder), "--prefill", prefill, "--decode", decode]
        flags += ["--max-model-len", "1024" if context.tiny else "8192"]
        if context.is_cuda:
            kv_memory = "1GiB" if context.rehearse else "20GiB"
            flags += ["--kv-memory", kv_memory, "--set", f"cluster.num_gpus_per_worker={share}", "--backend", "cuda"]
        if context.left_s < 2 * _LEAST_S:
            context.add(setup=name, left_out="no time left")
            continue
        with running_serve(context.scratch, *flags, limit_s=context.left_s - _STOP_S) as served:
            for clients, tokens_in, tokens_out, requests in _LOADS[:1] if context.tiny else _LOADS:
                load = ["--concurrency", clients, "--input-tokens", tokens_in, "--output-tokens", tokens_out]
                load += ["--requests", requests, "--url", served.url, "--extra-body", '{"ignore_eos": true}']
                load += ["--token-range", "3:300" if context.tiny else "1000:30000", "--json", out]
                command = [sys.executable, "-m", "kvrelay.cluster.commands.cli", "bench", *map(str, load)]
                subprocess.run(command, check=True, timeout=max(1.0, context.left_s - _STOP_S))
                found = json.loads(out.read_text())["summary"]
                times = {
                    f"{what}_{at}_ms": 1e3 * found[f"{what}_s"][at] for what in ("ttft", "itl") for at in ("p50", "p99")
                }
                shape = {"setup": name, "clients": clients, "in": tokens_in, "out": tokens_out}
                context.add(**shape, **times, tokens_per_s=found["output_tokens_per_s"], ok=found["num_ok"] == requests)
