"""Selects the fastest linear kernel on this processor; the torch candidates.

Candidates: the compiled panels, oneDNN with a packed weight (private torch operators, feature-tested), and F.linear.
float32 always takes the compiled panels where they exist, because they are batch-invariant. For bfloat16 a short
measurement decides, once per machine and thread count, so that all workers agree.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from kvrelay.environment import cache_dir
from kvrelay.kernels.backend import Linear
from kvrelay.kernels.cpu.native_kernels import SUPPORTED, NativeKernels
from kvrelay.kernels.oracle.reference import ReferenceLinear

logger = logging.getLogger(__name__)

_PROBE_SHAPE = (1536, 576)
_PROBE_ROWS = {1: 2.0, 16: 1.0, 256: 1.0}  # rows -> weight of their time
_MARGIN = 1.25  # another candidate must be this much faster than the compiled panels: with it, steps are not recorded
_PROBE_S = 0.02  # longest measurement of one (candidate, rows) in a pass
_PROBE_PASSES = 4  # over all candidates in turn, so that other load does not hit only one of them
Pack = Callable[[Tensor, Tensor | None], Linear]


class OneDnnLinear:
    """A weight in oneDNN's packed layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features = weight.shape[0]
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out


def _candidates(native: NativeKernels | None, dtype: torch.dtype) -> dict[str, Pack]:
    found: dict[str, Pack] = {}
    if native is not None and dtype in SUPPORTED:
        found["native"] = native.pack_linear
    found["onednn"] = OneDnnLinear
    found["torch"] = ReferenceLinear
    return found


def _is_right(pack: Pack, weight: Tensor, x: Tensor) -> Linear | None:
    """The packed weight if its product is right, else None (a private operator may be missing or limited)."""
    try:
        linear = pack(weight, None)
        out = linear(x)
    except (RuntimeError, AttributeError, TypeError, NotImplementedError):
        return None
    expected = F.linear(x.float(), weight.float())
    tolerance = 1e-3 if weight.dtype == torch.float32 else 5e-2
    return linear if torch.allclose(out.float(), expected, atol=tolerance, rtol=tolerance) else None


def _seconds(linear: Linear, x: Tensor) -> float:
    """The shortest of a few calls."""
    best, end = float("inf"), time.perf_counter() + _PROBE_S
    for _ in range(20):
        start = time.perf_counter()
        linear(x)
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() > end:
            break
    return best


def _measure(candidates: dict[str, Pack], dtype: torch.dtype) -> str:
    """The candidate with the least weighted time, relative to the best for each number of rows."""
    generator = torch.Generator().manual_seed(0)
    out_features, in_features = _PROBE_SHAPE
    weight = (torch.randn(out_features, in_features, generator=generator) / in_features**0.5).to(dtype)
    inputs = {rows: torch.randn(rows, in_features, generator=generator).to(dtype) for rows in _PROBE_ROWS}
    linears = {name: linear for name, pack in candidates.items() if (linear := _is_right(pack, weight, inputs[16]))}
    times = {name: dict.fromkeys(inputs, float("inf")) for name in linears}
    for _ in range(_PROBE_PASSES):
        for name, linear in linears.items():
            for rows, x in inputs.items():
                times[name][rows] = min(times[name][rows], _seconds(linear, x))
    best = {rows: min(t[rows] for t in times.values()) for rows in inputs}
    score = {name: sum(_PROBE_ROWS[r] * t[r] / best[r] for r in inputs) for name, t in times.items()}
    logger.debug("linear probe %s: %s", dtype, score)
    winner = min(score, key=lambda name: score[name])
    if "native" in score and score["native"] <= score[winner] * _MARGIN:
        return "native"
    return winner


def _remember(path: Path, winner: str) -> None:
    scratch = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(winner)
        os.replace(scratch, path)
    except OSError as error:
        logger.warning("cannot remember the choice of linear kernel in %s: %s", path, error)


def choose_linear(native: NativeKernels | None, dtype: torch.dtype, num_threads: int, key: str) -> tuple[str, Pack]:
    """The name and packer for weights of `dtype`. `key` identifies processor and build in the cached choice."""
    candidates = _candidates(native, dtype)
    if dtype == torch.float32 and "native" in candidates:
        return "native", candidates["native"]
    path = cache_dir() / "native" / f"linear-{key}-{str(dtype).removeprefix('torch.')}-{num_threads}.txt"
    winner = path.read_text(errors="replace") if path.is_file() else ""
    if winner not in candidates:
        winner = _measure(candidates, dtype)
        _remember(path, winner)
    return winner, candidates[winner]
