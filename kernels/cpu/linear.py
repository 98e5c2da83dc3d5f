"""Selects the fastest linear kernel on this processor; the torch candidates.

Candidates: the compiled panels, oneDNN with a packed weight (private torch operators, feature-tested), and F.linear.
float32 always takes the compiled panels where they exist, because they are batch-invariant; so does bfloat16 where they
use AMX tiles, as oneDNN would. For other bfloat16 a short measurement decides, once per machine and thread count, so
that all workers agree.
"""

import ctypes
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from kvrelay.environment import cache_dir
from kvrelay.kernels.backend import Facts, Linear, PackedWeights
from kvrelay.kernels.cpu.native_kernels import PRIVATE, SUPPORTED, NativeKernels, PrivateWeights
from kvrelay.kernels.oracle.reference import ReferenceLinear

logger = logging.getLogger(__name__)

_PROBE_SHAPE = (1536, 576)
_PROBE_ROWS = {1: 2.0, 16: 1.0, 256: 1.0}  # rows -> weight of their time
_MARGIN = 1.25  # another candidate must be this much faster than the compiled panels: with it, steps are not recorded
_PROBE_S = 0.02  # longest measurement of one (candidate, rows) in a pass
_PROBE_PASSES = 4  # over all candidates in turn, so that other load does not hit only one of them
_I64, _I32, _MKLDNN = ctypes.c_int64, ctypes.c_int32, 3  # the layout's number in torch
Pack = Callable[..., Linear]  # (weight, bias, PackedWeights)


class OneDnnLinear:
    """A weight in oneDNN's packed layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None, weights: PackedWeights = PRIVATE) -> None:
        self.out_features, self._bias = weight.shape[0], bias
        if weights is PRIVATE:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        else:
            self._packed, self._bytes = _placed(weight, weights)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out


def _placed(weight: Tensor, weights: PackedWeights) -> tuple[Tensor, Tensor]:
    """(the packed weight, its bytes, which it does not keep alive) in `weights`.

    First its layout, whose facts are its size and oneDNN's description of it; then the bytes. Through operators and the
    stable C functions of torch for compiled models.
    """
    ops, packed = torch.ops.mkldnn, None

    def describe(nothing: Tensor) -> Facts:
        nonlocal packed
        packed = ops._reorder_linear_weight(weight.contiguous(), None)
        return {"num_bytes": ops._nbytes(packed), "layout": bytes(ops._get_mkldnn_serialized_md(packed)).hex()}

    def fill(target: Tensor) -> Facts:
        ctypes.memmove(target.data_ptr(), ops.data_ptr(packed), len(target))
        return {}

    _, facts = weights.place(0, describe)
    raw, _ = weights.place(facts["num_bytes"], fill)
    return _over(raw, weight, torch.tensor(list(bytes.fromhex(facts["layout"])), dtype=torch.uint8)), raw


def _over(raw: Tensor, weight: Tensor, layout: Tensor) -> Tensor:
    """A packed weight of the shape and dtype of `weight` over the bytes `raw`. Raises RuntimeError."""
    lib, handle = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")), ctypes.c_void_p()
    dtype = getattr(lib, f"aoti_torch_dtype_{str(weight.dtype).removeprefix('torch.')}")()
    sizes, strides = ((ctypes.c_int64 * 2)(*pair) for pair in (weight.shape, (weight.shape[1], 1)))
    create, address = lib.aoti_torch_create_tensor_from_blob_v2, ctypes.c_void_p
    create.argtypes = [address, _I64, address, address, _I64, _I32, _I32, _I32, address, _I32, address, _I64]
    place = (0, dtype, lib.aoti_torch_device_type_cpu(), 0, ctypes.byref(handle), _MKLDNN)
    if create(raw.data_ptr(), 2, sizes, strides, *place, layout.data_ptr(), len(layout)):
        raise RuntimeError("torch cannot place a packed weight over given memory")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [address, ctypes.c_char_p, address]
    made: Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule(handle, None, None))
    return made


def can_place() -> bool:
    """Whether a weight that oneDNN packs can lie in given memory with this torch: its product is the same there."""
    weight, x = torch.randn(48, 32).bfloat16(), torch.randn(3, 32).bfloat16()
    try:
        return torch.equal(OneDnnLinear(weight, None, PrivateWeights())(x), OneDnnLinear(weight, None)(x))
    except (RuntimeError, AttributeError, OSError, TypeError):
        return False


def _candidates(native: NativeKernels | None, dtype: torch.dtype) -> dict[str, Pack]:
    found: dict[str, Pack] = {}
    if native is not None and dtype in SUPPORTED:
        found["native"] = native.pack_linear
    found["onednn"] = OneDnnLinear
    found["torch"] = lambda weight, bias, weights=PRIVATE: ReferenceLinear(weight, bias)
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
    if "native" in candidates and (dtype == torch.float32 or (native is not None and native.has_tiles)):
        return "native", candidates["native"]
    path = cache_dir() / "native" / f"linear-{key}-{str(dtype).removeprefix('torch.')}-{num_threads}.txt"
    winner = path.read_text(errors="replace") if path.is_file() else ""
    if winner not in candidates:
        winner = _measure(candidates, dtype)
        _remember(path, winner)
    return winner, candidates[winner]
