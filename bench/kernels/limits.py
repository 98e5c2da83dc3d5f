"""What this machine can do at most: memory reading and copying, GEMM. The yardsticks of the other scripts.

    python -m bench.kernels.limits [--threads 1 2] [--json FILE]

Memory is read by summing 1 GiB (far more than any cache holds); the best of several passes and of
two ways of summing counts. A GEMM's peak is the best over shapes of a transformer's prefill.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from bench.figures import available_cores, show

READ_BYTES = 1 << 30
COPY_BYTES = 512 << 20
GEMM_SHAPES = ((512, 576, 1536), (2048, 576, 1536), (512, 2048, 2048), (1024, 4096, 1024), (2048, 2048, 2048))


@dataclass(frozen=True, slots=True)
class Limits:
    """Best figures at one number of threads. GB are 10^9 bytes; copying counts its bytes once."""

    threads: int
    read_gb_s: float
    copy_gb_s: float
    fp32_gemm_gflop_s: float
    bf16_gemm_gflop_s: float


def best_seconds(action: Callable[[], object], *, repeats: int, budget_s: float = 4.0) -> float:
    """The shortest of up to `repeats` runs after one to warm up; stops when the budget is spent."""
    action()
    best_s, begin_s = float("inf"), time.perf_counter()
    for _ in range(repeats):
        start_s = time.perf_counter()
        action()
        now_s = time.perf_counter()
        best_s = min(best_s, now_s - start_s)
        if now_s - begin_s > budget_s:
            break
    return best_s


def read_gb_s(repeats: int = 5) -> float:
    """Bandwidth of reading memory once, with torch's current threads."""
    floats = torch.zeros(READ_BYTES // 4)
    half = floats.view(torch.int32)
    fastest_s = min(best_seconds(floats.sum, repeats=repeats), best_seconds(half.max, repeats=repeats))
    return READ_BYTES / fastest_s / 1e9


def copy_gb_s(repeats: int = 5) -> float:
    """Bandwidth of copying memory, counting each byte once."""
    source, target = torch.zeros(COPY_BYTES, dtype=torch.uint8), torch.zeros(COPY_BYTES, dtype=torch.uint8)
    return COPY_BYTES / best_seconds(lambda: target.copy_(source), repeats=repeats) / 1e9


def gemm_gflop_s(dtype: torch.dtype, repeats: int = 8) -> float:
    """The best rate over shapes and over the ways in which a linear layer can be computed here."""
    best = 0.0
    for rows, inner, columns in GEMM_SHAPES:
        x, weight = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
        ways = [partial(torch.nn.functional.linear, x, weight), *_packed_linear(x, weight)]
        seconds = min(best_seconds(way, repeats=repeats, budget_s=1.0) for way in ways)
        best = max(best, 2 * rows * inner * columns / seconds / 1e9)
    return best


def _packed_linear(x: torch.Tensor, weight: torch.Tensor) -> list[Callable[[], object]]:
    """oneDNN's linear with a weight laid out for it, where this build and CPU have it (private ops)."""
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, x.shape[0])
        way = partial(torch.ops.mkldnn._linear_pointwise, x, packed, None, "none", [], "")
        way()
    except (AttributeError, RuntimeError):
        return []
    return [way]


def measure_limits(threads: int) -> Limits:
    """All of them at `threads` threads; torch's own number is put back."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            return Limits(threads, read_gb_s(), copy_gb_s(), gemm_gflop_s(torch.float32), gemm_gflop_s(torch.bfloat16))
    finally:
        torch.set_num_threads(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, available_cores()}))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    show("limits of this machine", [asdict(measure_limits(threads)) for threads in options.threads], options.json)


if __name__ == "__main__":
    main()
