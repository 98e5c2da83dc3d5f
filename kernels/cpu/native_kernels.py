"""The compiled CPU kernels (kernels/cpu/native/*.c): their library and thread pool, packed weights, and the schedule of
attention. backend.py calls the other kernels.

Supports float32 and bfloat16; callers check that. ctypes releases the interpreter lock during every call. Idle pool
threads sleep after spinning for 40 us.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvrelay.kernels.backend import Activation, AttentionBatch, AttentionShape, Facts, PackedWeights
from kvrelay.kernels.common.quant_scheme import Scheme, WeightError
from kvrelay.kernels.common.quantized import unit_of
from kvrelay.kernels.common.stored_weights import AnyWeight, dequantised, plain_weight, shape_of
from kvrelay.kernels.cpu.stored import laid_out, native_form, scheme_of_pair
from kvrelay.native.build import NativeLibrary

SUPPORTED = frozenset((torch.float32, torch.bfloat16))
PART_TOKENS = 512  # PART of cascade.h
WORTH = 256  # fewest tokens of KV saved in a step, summed over rows: bench/results/2026-11-22-scheduling.md
KIND_F32, KIND_BF16, KIND_DOT, KIND_AMX = 0, 1, 2, 3
_FOLDER = Path(__file__).parent / "native"
LIBRARY = NativeLibrary("kernels", sorted(_FOLDER.glob("*.c")), sorted(_FOLDER.glob("*.h")))
_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    "kr_pool_create": ([_I], _P),
    "kr_pool_destroy": ([_P], None),
    "kr_panel_width": ([], _L),
    "kr_has_dot": ([], _I),
    "kr_use_tiles": ([_I], _I),
    "kr_pack": ([_P, _I, _P, _P, _L, _L], None),
    "kr_linear": ([_P, _I, _P, _L, _P, _P, _P, _L, _L, _L], None),
    "kr_quantized_bytes": ([_I, _L, _L, _L], _L),
    "kr_quantize": ([_P, _I, _I, _P, _P, _P, _L, _L, _L, _F], None),
    "kr_quant_linear": ([_P, _I, _I, _P, _L, _P, _P, _P, _L, _L, _L, _L, _F], None),
    "kr_rms_norm": ([_P, _I, _I, _P, _P, _P, _P, _L, _L, _L, _L, _L, _F], None),
    "kr_rope": ([_P, _I, _P, _P, _P, _P, *[_L] * 8], None),
    "kr_norm_rope_store": ([_P, _I, _I, _I, *[_P] * 9, *[_L] * 10, _F], None),
    "kr_gate": ([_P, _I, _I, _P, _P, _L, _L, _L], None),
    "kr_attention_tile_tokens": ([_L], _L),
    "kr_attention_tiles": ([_P, _L, _L, _P], _L),
    "kr_attention": ([_P, _I, *[_P] * 6, _L, _P, *[_L] * 10, _F, _F, _I, _L, _L, _P], None),
    "kr_cascade_words": ([_L, _L], _L),
    "kr_cascade_plan": ([_P] * 3 + [_L] * 8, _L),
    "kr_embed": ([_I, _P, _P, _P, _L, _L, _F], None),
    "kr_replay": ([_P, _L], None),
    "kr_widen": ([_P, _P, _P, _L], None),
    "kr_choose": ([*[_P] * 5, _L, _L, _L, _I, _L, _L, _I, _F], None),
    "kr_experts": ([_P, _I, _I, _I, _P, _L, *[_P] * 8, *[_L] * 6], None),
    "kr_sample": ([_P] * 10 + [_L, _L], None),
}


class PrivateWeights:
    """In this process's own memory."""

    def place(self, num_bytes: int, fill: Callable[[Tensor], Facts]) -> tuple[Tensor, Facts]:
        packed = torch.empty(num_bytes, dtype=torch.uint8)
        return packed, fill(packed)


PRIVATE = PrivateWeights()


def block_bytes(kv_layer: Tensor) -> int:
    """From one block of a layer's cache to the next."""
    return kv_layer.stride(0) * kv_layer.itemsize


def addresses(*tensors: Tensor | None) -> list[int | None]:
    """Where each one's numbers are; None stays None."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def contiguous_rows(x: Tensor) -> Tensor:
    """x with a contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


class Schedule:
    """Cascade attention: which of up to `max_rows` decode rows of up to `max_context_len` tokens read KV together.

    Sharing never changes a result: a row's sums run over the same tiles in the same order, with or without other rows
    (attention.c). It only has to pay, which `WORTH` decides. cascade.c computes the schedule from the block tables,
    once per step; this is its memory, which never moves.
    """

    def __init__(self, lib: Any, max_rows: int, max_context_len: int) -> None:
        self._lib = lib
        self.words = torch.zeros(lib.kr_cascade_words(max_rows, -(-max_context_len // PART_TOKENS)), dtype=torch.int32)

    def fill(self, batch: AttentionBatch, shape: AttentionShape, num_threads: int, worth: int) -> int:
        """Compute it for the batch's decode rows. Returns the tokens of KV that a layer without a window does not read
        again.

        context_lens and block_tables are int32 and contiguous. worth: fewest tokens that make sharing pay.
        """
        at = addresses(self.words, batch.block_tables, batch.context_lens)
        sizes = batch.num_decode, batch.block_tables.shape[1], -(-batch.max_context_len // PART_TOKENS)
        heads = shape.num_heads // shape.num_kv_heads, shape.num_kv_heads
        saved: int = self._lib.kr_cascade_plan(*at, *sizes, shape.block_size, *heads, num_threads, worth)
        return saved


@dataclass(frozen=True, slots=True)
class NativePlan:
    """One step's attention; tensors on the CPU, contiguous int32. tiles: [num_tiles, 2]."""

    batch: AttentionBatch
    shape: AttentionShape
    tiles: Tensor
    num_tiles: int
    schedule: Schedule


class NativeKernels:
    """The library with its own pool of `num_threads` threads, the caller's included.

    worth: fewest saved tokens that make cascade attention pay. spared_tokens: those that decode rows have not read
    again so far (in a layer).

    Raises:
        BackendUnavailable: it cannot be compiled here, or is switched off.
    """

    def __init__(self, num_threads: int) -> None:
        self.lib: Any = LIBRARY.load()
        for name, (arguments, result) in SIGNATURES.items():
            function = getattr(self.lib, name)
            function.argtypes, function.restype = arguments, result
        self.empty: Callable[[Sequence[int], torch.dtype], Tensor] = _empty
        self.pool: int = self.lib.kr_pool_create(num_threads)
        weakref.finalize(self, self.lib.kr_pool_destroy, self.pool)
        self.num_threads, self.worth, self.spared_tokens = num_threads, WORTH, 0
        self.panel_width: int = self.lib.kr_panel_width()
        self.has_dot, self.has_tiles = bool(self.lib.kr_has_dot()), bool(self.lib.kr_use_tiles(True))

    def without_tiles(self) -> None:
        """Use no AMX tiles in this process any more."""
        self.has_tiles = bool(self.lib.kr_use_tiles(False))

    def linear_kind(self, dtype: torch.dtype, in_features: int) -> int:
        """The packing for a weight: bf16 tiles or dot products if the processor has them."""
        if dtype == torch.float32:
            return KIND_F32
        if self.has_tiles and in_features % 32 == 0:
            return KIND_AMX
        return KIND_DOT if self.has_dot and in_features % 2 == 0 else KIND_BF16

    def pack_linear(self, weight: Tensor, bias: Tensor | None, weights: PackedWeights = PRIVATE) -> "NativeLinear":
        return NativeLinear(self, weight, bias, self.linear_kind(weight.dtype, weight.shape[1]), weights)

    def share(self, schedule: Schedule, batch: AttentionBatch, shape: AttentionShape) -> None:
        """Fill the schedule for the batch's decode rows."""
        self.spared_tokens += schedule.fill(batch, shape, self.num_threads, self.worth)

    def plan(self, batch: AttentionBatch, shape: AttentionShape, schedule: Schedule | None = None) -> NativePlan:
        """Attention of a step. `schedule`: its memory, which recordings need to stay in place."""
        names = ("query_starts", "context_lens", "block_tables")
        batch = replace(batch, **{name: getattr(batch, name).to(torch.int32).contiguous() for name in names})
        schedule = schedule or Schedule(self.lib, batch.num_decode, batch.max_context_len)
        self.share(schedule, batch, shape)
        starts, num_sequences = batch.query_starts, batch.context_lens.shape[0]
        tile_tokens = self.lib.kr_attention_tile_tokens(shape.num_heads // shape.num_kv_heads)
        tiles = torch.empty((int(starts[-1]) // tile_tokens + num_sequences, 2), dtype=torch.int32)
        num_tiles = self.lib.kr_attention_tiles(starts.data_ptr(), num_sequences, tile_tokens, tiles.data_ptr())
        return NativePlan(batch, shape, tiles, num_tiles, schedule)


class _PackedLinear:
    """A weight in panels of outputs. Every row's sums run in one order, whatever the batch."""

    _kernel: str  # name of the product's function
    _first: tuple[int, ...]  # its arguments before, and after, those of all products
    _last: tuple[float, ...] = ()

    def __init__(
        self, kernels: NativeKernels, shape: tuple[int, int], bias: Tensor | None, dtype: torch.dtype, packed: Tensor
    ) -> None:
        self.out_features, self.in_features = shape
        self._kernels, self._dtype, self._packed = kernels, dtype, packed
        self._bias = None if bias is None else bias.float().contiguous()
        self.address, self._bias_address = addresses(packed, self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != self._dtype:
            raise TypeError(f"the weight is for {self._dtype}, x is {x.dtype}")
        x, kernels, (rows, width) = contiguous_rows(x), self._kernels, x.shape
        assert width == self.in_features
        out, product = kernels.empty((rows, self.out_features), self._dtype), getattr(kernels.lib, self._kernel)
        at, sizes = (out.data_ptr(), self.address, self._bias_address), (rows, self.out_features, width)
        product(kernels.pool, *self._first, x.data_ptr(), x.stride(0), *at, *sizes, *self._last)
        return out


class NativeLinear(_PackedLinear):
    """A weight as given. kind: one of KIND_…"""

    _kernel = "kr_linear"

    def __init__(
        self, kernels: NativeKernels, weight: Tensor, bias: Tensor | None, kind: int, weights: PackedWeights = PRIVATE
    ) -> None:
        def fill(packed: Tensor) -> Facts:
            source = weight.contiguous()
            kernels.lib.kr_pack(kernels.pool, kind, *addresses(source, packed), *weight.shape)
            return {}

        rows = -(-weight.shape[0] // kernels.panel_width) * kernels.panel_width
        packed, _ = weights.place(rows * weight.shape[1] * weight.itemsize, fill)
        super().__init__(kernels, shape_of(weight), bias, weight.dtype, packed)
        self._first = (kind,)


class NativeQuantLinear(_PackedLinear):
    """A quantised weight.

    Args:
        weight: [N, K] of any floating type, quantised from its own values, not rounded to `dtype` first; or a
            checkpoint's integers, which are kept if they are of `scheme`.
        dtype: of x and y; one of SUPPORTED.
    """

    _kernel = "kr_quant_linear"

    def __init__(
        self,
        kernels: NativeKernels,
        weight: AnyWeight,
        bias: Tensor | None,
        scheme: Scheme,
        dtype: torch.dtype,
        weights: PackedWeights = PRIVATE,
    ) -> None:
        assert dtype in SUPPORTED
        form = native_form(weight)
        if form is not None and scheme == Scheme(form.bits, form.group):
            packed, self.unit, self.error = laid_out(form, kernels.panel_width)
        else:
            packed, self.unit, self.error = _quantized(kernels, plain_weight(weight), scheme, weights)
        super().__init__(kernels, shape_of(weight), bias, dtype, packed)
        self._first, self._last = (scheme.bits, dtype == torch.float32), (scheme.group, self.unit)


def _quantized(
    kernels: NativeKernels, weight: Tensor, scheme: Scheme, weights: PackedWeights
) -> tuple[Tensor, float, WeightError]:
    """(panels, unit, error)."""
    lib, bits, shape = kernels.lib, scheme.bits, (*weight.shape, scheme.group)

    def fill(packed: Tensor) -> Facts:
        source, wide = (weight if weight.dtype in SUPPORTED else weight.float()).contiguous(), torch.float32
        unit, errors = unit_of(source), torch.empty(-(-weight.shape[0] // kernels.panel_width), 2, dtype=torch.float64)
        lib.kr_quantize(kernels.pool, bits, source.dtype == wide, *addresses(source, packed, errors), *shape, unit)
        return {"unit": unit, "errors": (errors.sum(0) * unit**2).tolist()}

    packed, facts = weights.place(lib.kr_quantized_bytes(bits, *shape), fill)
    error, squares = facts["errors"]
    return packed, facts["unit"], WeightError(error, squares, weight.numel(), packed.numel())


class NativeExperts:
    """A layer's experts with packed weights (experts.c): all of them in one call. A token's result depends on its own
    row alone, bit for bit.

    Args:
        experts: in order, (gate and up [2 F, H], down [H, F]); each is packed before the next one is read.
        dtype: of x and of the result; one of SUPPORTED.
    """

    def __init__(
        self,
        kernels: NativeKernels,
        experts: Iterable[tuple[AnyWeight, AnyWeight]],
        activation: Activation,
        scheme: Scheme | None,
        dtype: torch.dtype,
        weights: PackedWeights = PRIVATE,
    ) -> None:
        self._kernels, self._dtype, self._is_gelu = kernels, dtype, activation == "gelu_tanh"
        self._weights = weights
        self._kind, self.error = 0, WeightError()
        self._packed: list[tuple[Any, Any]] = []
        for pair in experts:
            if not self._packed:  # one packing for all experts: the first one's, if it has integers
                scheme = self._scheme = scheme or scheme_of_pair(*pair)
                self._kind = 0 if scheme is None else scheme.bits
            self._hidden, self._ffn = shape_of(pair[1])
            assert shape_of(pair[0]) == (2 * self._ffn, self._hidden)
            self._packed.append((self._pack(pair[0]), self._pack(pair[1])))
        self._gate_ups = torch.tensor([gate_up.address for gate_up, _ in self._packed])
        self._downs = torch.tensor([down.address for _, down in self._packed])
        self._units: Tensor | None = None
        if scheme is not None:
            units = [[part.unit for part in pair] for pair in self._packed]
            self._units = torch.tensor(units, dtype=torch.float32).T.contiguous()

    def _pack(self, weight: AnyWeight) -> Any:
        if self._scheme is not None:
            quantized = NativeQuantLinear(self._kernels, weight, None, self._scheme, self._dtype, self._weights)
            self.error += quantized.error
            return quantized
        if not isinstance(weight, Tensor):
            weight, error = dequantised(weight, self._dtype)
            self.error += error
        # one packing for both products of all experts
        self._kind = self._kernels.linear_kind(self._dtype, self._hidden | self._ffn)
        return NativeLinear(self._kernels, weight, None, self._kind, self._weights)

    def __call__(
        self, x: Tensor, weights: Tensor, chosen: Tensor, base: Tensor | None = None, base_logits: Tensor | None = None
    ) -> Tensor:
        if x.dtype != self._dtype:
            raise TypeError(f"the experts are for {self._dtype}, x is {x.dtype}")
        x, kernels, (num_tokens, hidden) = contiguous_rows(x), self._kernels, x.shape
        assert hidden == self._hidden and chosen.dtype == torch.int64 and weights.dtype == torch.float32
        weights, chosen = weights.contiguous(), chosen.contiguous()
        base = None if base is None else base.contiguous()
        base_logits = None if base_logits is None else base_logits.contiguous()
        out, group = kernels.empty((num_tokens, hidden), self._dtype), 0 if self._scheme is None else self._scheme.group
        kind = self._kind, self._dtype == torch.float32, self._is_gelu
        at = addresses(weights, chosen, self._gate_ups, self._downs, self._units, base, base_logits, out)
        sizes = num_tokens, chosen.shape[1], len(self._packed), hidden, self._ffn
        kernels.lib.kr_experts(kernels.pool, *kind, x.data_ptr(), x.stride(0), *at, *sizes, group)
        return out
