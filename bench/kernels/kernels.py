"""Linear kernels and attention against this machine's limits: python -m bench.kernels.kernels [--threads N] [--dtype
bfloat16].

For each of SmolLM2-135M's layer shapes and several numbers of rows: milliseconds, bytes and products per
second, and the ratio to the memory's measured reading speed or to the best measured product, whichever
binds. Weights cycle through more memory than the caches hold, as in a real step. Attention of its heads likewise, for
prompts and decode rows; there the caches hold what is read.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch

from kvrelay.kernels.cpu.backend import CpuBackend
from kvrelay.kernels.oracle.grid_steps import KernelCase, KernelStep, make_step

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
ROWS = (1, 4, 16, 32, 128, 512)
COPIES = 30
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
STEPS = {  # (new tokens, context) of each sequence
    "prompt 128": ((128, 128),),
    "prompt 512": ((512, 512),),
    "its 4th chunk": ((512, 2048),),
    "decode 1 at 2048": ((1, 2048),),
    "decode 16 at 512": ((1, 512),) * 16,
}


def best_s(work: Callable[[], object], repeats: int) -> float:
    """The shortest of some runs, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def read_bytes_per_s() -> float:
    """How fast this many threads read memory that no cache holds."""
    data = torch.ones(64 << 20, dtype=torch.float32)
    return data.numel() * 4 / best_s(data.sum, 7)


def peak_flops(backend: CpuBackend, dtype: torch.dtype) -> float:
    """The best product of a large matrix among our kernel and torch's, in floating-point operations per second."""
    size = 1024
    x, weight = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    packed = backend.pack_linear(weight)
    candidates = (lambda: packed(x), lambda: x @ weight.T, lambda: x.float() @ weight.float().T)
    return 2 * size**3 / min(best_s(work, 3) for work in candidates)


def measure(backend: CpuBackend, dtype: torch.dtype) -> list[dict[str, float | str]]:
    """One line per shape and number of rows."""
    bandwidth, peak = read_bytes_per_s(), peak_flops(backend, dtype)
    print(f"reads {bandwidth / 1e9:.1f} GB/s, products {peak / 1e9:.0f} GFLOP/s, {backend.describe()}")
    lines: list[dict[str, float | str]] = []
    for name, (out_features, in_features) in SHAPES.items():
        linears = [backend.pack_linear(torch.randn(out_features, in_features).to(dtype)) for _ in range(COPIES)]
        for rows in ROWS:
            x = torch.randn(rows, in_features).to(dtype)
            seconds = best_s(lambda x=x, linears=linears: [linear(x) for linear in linears], 5) / COPIES
            num_bytes, flops = out_features * in_features * dtype.itemsize, 2 * rows * out_features * in_features
            figures = figures_of(seconds, num_bytes, flops, max(num_bytes / bandwidth, flops / peak))
            lines.append({"shape": name, "rows": rows, **figures})
            print(f"{name:8} rows {rows:4}  {formatted(figures)}")
    return lines


def figures_of(seconds: float, num_bytes: float, flops: float, limit_s: float) -> dict[str, float]:
    """What a call that took so long makes of the machine."""
    return {
        "ms": seconds * 1e3,
        "gb_per_s": num_bytes / seconds / 1e9,
        "gflop_per_s": flops / seconds / 1e9,
        "of_limit": limit_s / seconds,
    }


def formatted(figures: dict[str, float]) -> str:
    """They in a line."""
    return (
        f"{figures['ms']:8.3f} ms  {figures['gb_per_s']:6.1f} GB/s  {figures['gflop_per_s']:7.1f} GFLOP/s"
        f"  {figures['of_limit']:5.0%} of the limit"
    )


def measure_attention(backend: CpuBackend, dtype: torch.dtype) -> list[dict[str, float | str]]:
    """One line per step. Products count once for every pair of a query and a token that it sees."""
    bandwidth, peak = read_bytes_per_s(), peak_flops(backend, dtype)
    lines: list[dict[str, float | str]] = []
    for name, lengths in STEPS.items():
        step = make_step(KernelCase(lengths, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, dtype))
        plan = backend.plan(step.batch, step.case.shape)

        def attend(step: KernelStep = step, plan: object = plan) -> None:
            for _ in range(COPIES):
                backend.attention(step.q, step.kv_layer, plan, scale=0.125, window=None, softcap=None)

        seconds = best_s(attend, 5) / COPIES
        pairs = sum(new * context - new * (new - 1) // 2 for new, context in lengths)
        flops = 4 * HEADS * HEAD_DIM * pairs
        num_bytes = 2 * KV_HEADS * HEAD_DIM * dtype.itemsize * sum(context for _, context in lengths)
        figures = figures_of(seconds, num_bytes, flops, max(num_bytes / bandwidth, flops / peak))
        lines.append({"step": name, **figures})
        print(f"{name:18}  {formatted(figures)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", help="write the lines here")
    args = parser.parse_args()
    backend, dtype = CpuBackend(args.threads), getattr(torch, args.dtype)
    lines = measure(backend, dtype) + measure_attention(backend, dtype)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(lines, file, indent=1)


if __name__ == "__main__":
    main()
