"""What token masks cost the sampler on CPUs: python -m bench.kernels.masks [--threads N] [--rounds N] [--json FILE].

One draw of --rows rows, with a mask for each row and without, in turn; beside them torch's in-place helpers of xgrammar
and llguidance, which only set masked logits to -inf, for a sampler to run after. Median and range of the rounds, in
microseconds for all rows. Masks: 8 tokens anywhere, every second token, all but one in 32, and all.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.figures import available_cores, show
from kvrelay.kernels.backend import SamplingBatch
from kvrelay.kernels.cpu.backend import CpuBackend

VOCABS = (49_152, 151_936)
SAMPLING = {"greedy": (0.0, 0, 1.0), "temperature 0.8": (0.8, 0, 1.0), "top_k 50, top_p 0.9": (0.8, 50, 0.9)}


def batch_of(rows: int, kind: str) -> SamplingBatch:
    temperature, top_k, top_p = SAMPLING[kind]
    return SamplingBatch(
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.zeros(rows),
        torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    )


def masks_of(rows: int, vocab: int) -> dict[str, Tensor]:
    """[rows, ceil(vocab / 32)] int32 of each kind."""
    words = vocab // 32
    few, most = torch.zeros(rows, words, dtype=torch.int32), torch.full((rows, words), -1, dtype=torch.int32)
    draw = torch.Generator().manual_seed(2)
    few.scatter_(1, torch.randint(words, (rows, 8), generator=draw), 1 << 7)
    return {
        "8 tokens": few,
        "every second": torch.full_like(most, 0x55555555),
        "all but 1 in 32": most ^ (1 << torch.randint(31, (rows, words), generator=draw)).to(torch.int32),
        "all": most,
    }


def microseconds(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Of each way, in every round, to and fro; the first round is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(rounds + 1):
        for name, work in list(ways.items())[:: 1 if index % 2 else -1]:
            began_s = time.perf_counter()
            work()
            if index:
                taken[name].append(1e6 * (time.perf_counter() - began_s))
    return taken


def helpers(logits: Tensor, masks: Tensor) -> dict[str, Callable[[], object]]:
    """In place, on copies: from the second time on they change nothing and cost the same."""
    import llguidance.torch
    import xgrammar

    first, second = logits.clone(), logits.clone()
    return {
        "xgrammar's helper": lambda: xgrammar.apply_token_bitmask_inplace(first, masks),
        "llguidance's helper": lambda: llguidance.torch.apply_token_bitmask_inplace(second, masks),
    }


def measure(backend: CpuBackend, vocab: int, kind: str, rows: int, rounds: int) -> list[dict[str, Any]]:
    """A row of the table for each kind of mask, and for the helpers."""
    logits = 4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3))
    masks, plain = masks_of(rows, vocab), batch_of(rows, kind)
    own = torch.arange(rows, dtype=torch.int32)
    batches = {"no mask": plain} | {name: replace(plain, masks=m, mask_rows=own) for name, m in masks.items()}
    ways: dict[str, Callable[[], object]] = {
        name: partial(backend.sample, logits, batch) for name, batch in batches.items()
    }
    beside = helpers(logits, masks["every second"]) if kind == "greedy" else {}
    taken = microseconds(ways | beside, rounds)
    base = statistics.median(taken["no mask"])
    return [
        {
            "vocabulary": vocab,
            "sampling": "none" if name in beside else kind,
            "mask": name,
            "µs": statistics.median(values),
            "least": min(values),
            "most": max(values),
            "beyond no mask": statistics.median(values) - (0.0 if name in beside else base),
        }
        for name, values in taken.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    backend = CpuBackend(options.threads)
    cases = product(VOCABS, SAMPLING)
    found = [row for case in cases for row in measure(backend, *case, options.rows, options.rounds)]
    show(f"a draw of {options.rows} rows, {options.threads} threads", found, options.json)


if __name__ == "__main__":
    main()
