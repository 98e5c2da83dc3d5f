"""Decode speed without drafts, with drafts from a sequence's own text, by a draft model, and with both, in one run.

    python -m bench.engine.speculation [--model M] [--concurrency 1 4 16] [--texts repeat edit open] [--tokens 96]
    [--draft-tokens 8]
                                [--draft-model D] [--draft-quantization int4] [--quantization none]
                                [--rounds 2] [--threads N] [--dtype bfloat16] [--json FILE]

A draft model without a download: the model itself with int4 weights (`--draft-model` as `--model`,
`--draft-quantization int4`), or its first layers (bench/engine/truncated.py).

Texts, all greedy, decoded from prompts of about 200 tokens: `repeat`, a list that goes on with its pattern; `edit`,
a paragraph that is to be written again; `open`, one to go on from freely. Steps that only decode are timed; engines
alternate, the best round counts. The tokens of
all are compared: they must be the same (exit code 1 otherwise).
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from bench.engine import inprocess
from bench.figures import available_cores, show
from kvrelay.config import settings_from
from kvrelay.engine.speculation.draft_model import make_draft_model
from kvrelay.engine.step.build import Extensions, load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.engine.step.engine import Engine
from kvrelay.kernels.select import select_backend

STORY = (
    "The harbour was quiet that morning. Two boats had come in before dawn, and their crews were already asleep "
    "in the small hotel behind the market. An old man counted the nets on the pier, once from the left and once "
    "from the right, and wrote both numbers into a book, because they were never the same. When the sun rose "
    "above the lighthouse, he closed the book and went home."
)
PROMPTS = {
    "repeat": "\n".join(
        f"item {n}: name=widget, colour=blue, size=medium, stock=yes, price={n}.00" for n in range(1, 9)
    )
    + "\nitem",
    "edit": f"{STORY}\n\nThe same text again:\n\nThe harbour was quiet",
    "open": f"{STORY} On the way",
}


def engine_of(folder: Path, options: argparse.Namespace, kind: str) -> Engine:
    """kind: plain, lookup (from a sequence's own text), model (by the draft model) or both."""
    torch.set_num_threads(options.threads)
    backend = select_backend("cpu", "cpu", options.threads)
    config = EngineConfig(
        kv_memory_bytes=1 << 29, prefix_caching=False, quantization=inprocess.scheme(options.quantization),
        draft_tokens=0 if kind == "plain" else options.draft_tokens, prompt_lookup=kind != "model",
    )  # fmt: skip
    model = None
    if kind in ("model", "both"):
        settings = settings_from({
            "model": {"source": str(folder), "dtype": options.dtype, "quantization": options.quantization},
            "engine": {"draft_model": options.draft_model, "draft_quantization": options.draft_quantization},
        })  # fmt: skip
        model = make_draft_model(settings, folder, backend)
        assert model is not None
    return load_engine(folder, backend, inprocess.DTYPES[options.dtype], config, Extensions(draft_model=model))


def decode(
    engine: Engine, prompt: list[int], concurrency: int, tokens: int, salt: int
) -> tuple[float, list[list[int]]]:
    """(tokens per second of steps without prompts, what each stream printed). Streams begin one token apart in the
    prompt.
    """
    printed: dict[str, list[int]] = {}
    for index in range(concurrency):
        wanted = inprocess.request(salt * 1000 + index, prompt[index:], tokens, engine.config.block_size)
        printed[wanted.request_id] = []
        engine.add(wanted)
    seconds, count = 0.0, 0
    while engine.scheduler.has_work:
        result = engine.step()
        for output in result.outputs:
            printed[output.request_id] += output.token_ids
        if result.num_decode == concurrency:  # all of them
            seconds += result.seconds
            count += sum(len(output.token_ids) for output in result.outputs)
    return count / seconds, list(printed.values())


def compare(options: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    folder = inprocess.prepare(options.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    kinds = ["plain", "lookup", *(["model", "both"] if options.draft_model else [])]
    engines = {kind: engine_of(folder, options, kind) for kind in kinds}
    for engine in engines.values():
        decode(engine, list(range(1000, 1100)), max(options.concurrency), 8, 999)  # compiles, touches memory
    rows, same = [], True
    for name in options.texts:
        prompt = tokenizer(PROMPTS[name]).input_ids
        for concurrency in options.concurrency:
            row, is_same = compare_one(engines, prompt, concurrency, options)
            same = same and is_same
            rows.append({"text": name, "streams": concurrency, **row})
            print(rows[-1], flush=True)
    return rows, same


def compare_one(
    engines: dict[str, Engine], prompt: list[int], concurrency: int, options: argparse.Namespace
) -> tuple[dict[str, Any], bool]:
    """(a row's figures, whether all printed the same)."""
    best, printed = dict.fromkeys(engines, 0.0), {}
    before = {kind: engine.load() for kind, engine in engines.items()}
    for turn in range(options.rounds):
        for kind, engine in engines.items():
            speed, printed[kind] = decode(engine, prompt, concurrency, options.tokens, turn * 100 + concurrency)
            best[kind] = max(best[kind], speed)
    row: dict[str, Any] = {"plain tok/s": best["plain"]}
    for kind, engine in engines.items():
        if kind != "plain":
            after = engine.load()
            drafted = after.drafted_tokens - before[kind].drafted_tokens
            accepted = after.accepted_tokens - before[kind].accepted_tokens
            row[f"{kind} ratio"] = best[kind] / best["plain"]
            row[f"{kind} drafted per token"] = drafted / (options.rounds * concurrency * options.tokens)
            row[f"{kind} right"] = accepted / drafted if drafted else None
    is_same = all(tokens == printed["plain"] for tokens in printed.values())
    return {**row, "same tokens": str(is_same)}, is_same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--texts", nargs="+", choices=list(PROMPTS), default=list(PROMPTS))
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--draft-tokens", type=int, default=8)
    parser.add_argument("--draft-model", help="whatever --model takes; default: none drafts")
    parser.add_argument("--draft-quantization", choices=["none", "int8", "int4"], default="none")
    parser.add_argument("--quantization", choices=["none", "int8", "int4"], default="none", help="of the model itself")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--dtype", choices=list(inprocess.DTYPES), default="bfloat16")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows, same = compare(options)
    show(f"{options.model}, {options.dtype}, {options.threads} threads", rows, options.json)
    sys.exit(not same)


if __name__ == "__main__":
    main()
