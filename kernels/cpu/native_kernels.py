"""The compiled CPU kernels (kernels/cpu/native/*.c) as functions of torch tensors.

Owns the library and a thread pool. Supports float32 and bfloat16; callers check that. ctypes releases the interpreter
lock during every call. Idle pool threads sleep after spinning for 40 us.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvrelay.kernels.backend import Activation, AttentionBatch, AttentionShape, HeadInputs, SamplingBatch
from kvrelay.kernels.common.cascade import WORTH, Schedule
from kvrelay.native.build import load_native

SUPPORTED = frozenset((torch.float32, torch.bfloat16))
KV_KINDS = {torch.bfloat16: 0, torch.float32: 1, torch.uint8: 2}  # as enumerated in kv.h; uint8: fp8 with scales
_FOLDER = Path(__file__).parent / "native"
_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    "kr_pool_create": ([_I], _P),
    "kr_pool_destroy": ([_P], None),
    "kr_panel_width": ([], _L),
    "kr_has_dot": ([], _I),
    "kr_pack": ([_P, _I, _P, _P, _L, _L], None),
    "kr_linear": ([_P, _I, _P, _L, _P, _P, _P, _L, _L, _L], None),
    "kr_quantized_bytes": ([_I, _L, _L, _L], _L),
    "kr_quantize": ([_P, _I, _I, _P, _P, _P, _L, _L, _L, _F], None),
    "kr_quant_linear": ([_P, _I, _I, _P, _L, _P, _P, _P, _L, _L, _L, _L, _F], None),
    "kr_rms_norm": ([_P, _I, _I, _P, _P, _P, _P, _L, _L, _L, _L, _L, _F], None),
    "kr_rope": ([_P, _I, _P, _P, _P, _P, *[_L] * 8], None),
    "kr_norm_rope_store": ([_P, _I, _I, _I, *[_P] * 9, *[_L] * 9, _F], None),
    "kr_gate": ([_P, _I, _I, _P, _P, _L, _L, _L], None),
    "kr_store_kv": ([_P, _P, _P, _P, *[_L] * 5], None),
    "kr_attention_tile_tokens": ([_L], _L),
    "kr_attention_tiles": ([_P, _L, _L, _P], _L),
    "kr_store_kv_as": ([_I, _I, *[_P] * 4, *[_L] * 6], None),
    "kr_attention": ([_P, _I, *[_P] * 6, _L, _P, *[_L] * 10, _F, _F, _I, _L, _P], None),
    "kr_cascade_words": ([_L, _L], _L),
    "kr_cascade_plan": ([_P] * 3 + [_L] * 8, _L),
    "kr_embed": ([_I, _P, _P, _P, _L, _L, _F], None),
    "kr_replay": ([_P, _L], None),
    "kr_widen": ([_P, _P, _P, _L], None),
    "kr_choose": ([*[_P] * 5, _L, _L, _L, _I, _L, _L, _I, _F], None),
    "kr_experts": ([_P, _I, _I, _I, _P, _L, *[_P] * 8, *[_L] * 6], None),
    "kr_sample": ([_P] * 8 + [_L, _L], None),
}
KIND_F32, KIND_BF16, KIND_DOT = 0, 1, 2


@dataclass(frozen=True, slots=True)
class NativePlan:
    """One step's attention schedule; tensors on the CPU, contiguous. tiles: [num_tiles, 2] int32."""

    query_starts: Tensor
    context_lens: Tensor
    tables: Tensor
    tiles: Tensor
    num_tiles: int
    num_kv_heads: int
    block_size: int
    max_query_len: int
    max_context_len: int
    schedule: Schedule  # KV that decode rows read together


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


def contiguous_rows(x: Tensor) -> Tensor:
    """x with a contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rows_for(x: Tensor, dtype: torch.dtype, in_features: int) -> Tensor:
    """Rows [T, in] as input for a packed weight. Raises TypeError if their dtype is not the weight's."""
    if x.dtype != dtype:
        raise TypeError(f"the weight is for {dtype}, x is {x.dtype}")
    assert x.shape[1] == in_features
    return contiguous_rows(x)


def places(q: Tensor, k: Tensor, v: Tensor, inputs: HeadInputs) -> bool:
    """Whether kr_norm_rope_store supports these: adjacent heads, contiguous tables and caches, norms of one dtype."""
    side_by_side = all(x.stride()[1:] == (x.shape[2], 1) for x in (q, k, v))
    kinds = {norm.dtype for norm in inputs.norms or ()}
    return (
        side_by_side
        and q.dtype in SUPPORTED
        and len(kinds) <= 1
        and kinds <= SUPPORTED
        and inputs.kv_layer.dtype in KV_KINDS
        and inputs.kv_layer.is_contiguous()
        and inputs.cos_sin.dtype == torch.float32
        and inputs.cos_sin.is_contiguous()
    )


class NativeLinear:
    """A weight in panels of outputs. Every row's sums run in one order, whatever the batch."""

    def __init__(self, kernels: "NativeKernels", weight: Tensor, bias: Tensor | None, kind: int) -> None:
        self.out_features, self.in_features = weight.shape
        self._kernels, self._kind, self._dtype = kernels, kind, weight.dtype
        panels = -(-self.out_features // kernels.panel_width)
        self._packed = torch.empty(panels * kernels.panel_width * self.in_features, dtype=weight.dtype)
        source = weight.contiguous()
        kernels.lib.kr_pack(
            kernels.pool, kind, source.data_ptr(), self._packed.data_ptr(), self.out_features, self.in_features
        )
        self._bias = None if bias is None else bias.float().contiguous()
        self._args = (self._packed.data_ptr(), None if self._bias is None else self._bias.data_ptr())

    @property
    def address(self) -> int:
        """Address of the packed weight."""
        return self._packed.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        x = rows_for(x, self._dtype, self.in_features)
        num_rows, width = x.shape
        kernels = self._kernels
        out = kernels.empty((num_rows, self.out_features), self._dtype)
        kernels.lib.kr_linear(
            kernels.pool,
            self._kind,
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            *self._args,
            num_rows,
            self.out_features,
            width,
        )
        return out


class NativeKernels:
    """The library with its own pool of `num_threads` threads, the caller's included.

    Raises:
        BackendUnavailable: it cannot be compiled here, or is switched off.
    """

    def __init__(self, num_threads: int) -> None:
        sources = sorted(_FOLDER.glob("*.c"))
        self.lib: Any = load_native("kernels", sources, sorted(_FOLDER.glob("*.h")))
        for name, (arguments, result) in SIGNATURES.items():
            function = getattr(self.lib, name)
            function.argtypes, function.restype = arguments, result
        self.empty: Callable[[Sequence[int], torch.dtype], Tensor] = _empty
        self.pool: int = self.lib.kr_pool_create(num_threads)
        weakref.finalize(self, self.lib.kr_pool_destroy, self.pool)
        self.num_threads = num_threads
        # cascade attention: whether it is on, the fewest saved tokens that make it pay, and the tokens
        # that decode rows have not read again so far (in a layer)
        self.shares_prefixes, self.worth, self.spared_tokens = True, WORTH, 0
        self.panel_width: int = self.lib.kr_panel_width()
        self.has_dot = bool(self.lib.kr_has_dot())

    def linear_kind(self, dtype: torch.dtype, in_features: int) -> int:
        """The packing for a weight: bf16 dot products if the processor has them."""
        if dtype == torch.float32:
            return KIND_F32
        return KIND_DOT if self.has_dot and in_features % 2 == 0 else KIND_BF16

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> NativeLinear:
        return NativeLinear(self, weight, bias, self.linear_kind(weight.dtype, weight.shape[1]))

    def embed(self, token_ids: Tensor, table: Tensor, scale: float) -> Tensor:
        """token_ids: [T] int64, contiguous, each a row of table (contiguous)."""
        tokens, columns = token_ids.shape[0], table.shape[1]
        out = self.empty((tokens, columns), table.dtype)
        wide = table.dtype == torch.float32
        self.lib.kr_embed(wide, token_ids.data_ptr(), table.data_ptr(), out.data_ptr(), tokens, columns, scale)
        return out

    def rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """rms_norm of x, or of x + residual (written to residual; contiguous), with any leading shape."""
        x = contiguous_rows(x)
        columns = x.shape[-1]
        if x.dim() == 2:
            inner, outer_stride, inner_stride = 1, x.stride(0), 0
        elif x.dim() == 3:
            inner, outer_stride, inner_stride = x.shape[1], x.stride(0), x.stride(1)
        else:
            x = x.contiguous()
            inner, outer_stride, inner_stride = 1, columns, 0
        out = self.empty(x.shape, x.dtype)
        self.lib.kr_rms_norm(
            self.pool,
            x.dtype == torch.float32,
            weight.dtype == torch.float32,
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            weight.data_ptr(),
            x.numel() // columns,
            columns,
            inner,
            outer_stride,
            inner_stride,
            eps,
        )
        return out

    def rope(self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """In place when q and k have contiguous heads."""
        q, k = contiguous_rows(q), contiguous_rows(k)
        self.lib.kr_rope(
            self.pool,
            q.dtype == torch.float32,
            q.data_ptr(),
            k.data_ptr(),
            cos_sin.data_ptr(),
            positions.data_ptr(),
            q.shape[0],
            q.shape[1],
            k.shape[1],
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            cos_sin.shape[1],
        )
        return q, k

    def norm_rope_store(self, q: Tensor, k: Tensor, v: Tensor, inputs: HeadInputs) -> Tensor:
        """In place on q and k, for which `places` must hold."""
        cos_sin, kv_layer, (q_norm, k_norm) = inputs.cos_sin, inputs.kv_layer, inputs.norms or (None, None)
        self.lib.kr_norm_rope_store(
            self.pool,
            q.dtype == torch.float32,
            KV_KINDS[kv_layer.dtype],
            q_norm is not None and q_norm.dtype == torch.float32,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            cos_sin.data_ptr(),
            inputs.positions.data_ptr(),
            inputs.slot_mapping.data_ptr(),
            kv_layer.data_ptr(),
            q.shape[0],
            q.shape[1],
            k.shape[1],
            q.stride(0),
            k.stride(0),
            v.stride(0),
            q.shape[2],
            cos_sin.shape[1],
            kv_layer.shape[2],
            inputs.eps,
        )
        return q

    def gated_activation(self, gate_up: Tensor, kind: Activation) -> Tensor:
        gate_up = contiguous_rows(gate_up)
        num_rows, features = gate_up.shape[0], gate_up.shape[1] // 2
        out = self.empty((num_rows, features), gate_up.dtype)
        self.lib.kr_gate(
            self.pool,
            gate_up.dtype == torch.float32,
            kind == "gelu_tanh",
            gate_up.data_ptr(),
            out.data_ptr(),
            num_rows,
            features,
            gate_up.stride(0),
        )
        return out

    def store_kv(self, k: Tensor, v: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
        heads, head_dim = k.shape[1:]
        k = k if k.stride()[1:] == (head_dim, 1) else k.contiguous()
        v = v if v.stride()[1:] == (head_dim, 1) else v.contiguous()
        if k.dtype != kv_layer.dtype:
            self.lib.kr_store_kv_as(
                k.dtype == torch.float32,
                KV_KINDS[kv_layer.dtype],
                k.data_ptr(),
                v.data_ptr(),
                kv_layer.data_ptr(),
                slot_mapping.data_ptr(),
                k.shape[0],
                k.stride(0),
                v.stride(0),
                kv_layer.shape[2],
                heads,
                head_dim,
            )
            return
        item = k.element_size()
        self.lib.kr_store_kv(
            k.data_ptr(),
            v.data_ptr(),
            kv_layer.data_ptr(),
            slot_mapping.data_ptr(),
            k.shape[0],
            k.stride(0) * item,
            v.stride(0) * item,
            kv_layer.shape[2],
            heads * head_dim * item,
        )

    def share(self, schedule: Schedule, batch: AttentionBatch, shape: AttentionShape) -> None:
        """Fill the schedule for the batch's decode rows. context_lens, block_tables: contiguous int32."""
        if not self.shares_prefixes or batch.num_decode < 2:
            schedule.clear()
            return
        self.spared_tokens += schedule.fill(
            batch.context_lens,
            batch.block_tables,
            batch.num_decode,
            batch.max_context_len,
            block_size=shape.block_size,
            group=shape.num_heads // shape.num_kv_heads,
            num_kv_heads=shape.num_kv_heads,
            num_threads=self.num_threads,
            worth=self.worth,
        )

    def plan(self, batch: AttentionBatch, shape: AttentionShape, schedule: Schedule | None = None) -> NativePlan:
        """The schedule of attention for a step. `schedule`: its memory, which recordings need to stay in place."""
        batch = replace(
            batch,
            context_lens=batch.context_lens.to(torch.int32).contiguous(),
            block_tables=batch.block_tables.to(torch.int32).contiguous(),
        )
        schedule = schedule or Schedule(self.lib, batch.num_decode, batch.max_context_len)
        self.share(schedule, batch, shape)
        starts = batch.query_starts.to(torch.int32).contiguous()
        tile_tokens = self.lib.kr_attention_tile_tokens(shape.num_heads // shape.num_kv_heads)
        num_sequences = batch.context_lens.shape[0]
        room = int(starts[-1]) // tile_tokens + num_sequences
        tiles = torch.empty((room, 2), dtype=torch.int32)
        num_tiles = self.lib.kr_attention_tiles(starts.data_ptr(), num_sequences, tile_tokens, tiles.data_ptr())
        return NativePlan(
            starts,
            batch.context_lens,
            batch.block_tables,
            tiles,
            num_tiles,
            shape.num_kv_heads,
            shape.block_size,
            batch.max_query_len,
            batch.max_context_len,
            schedule,
        )

    def attention(
        self, q: Tensor, kv_layer: Tensor, plan: NativePlan, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """For a latent cache (one part) results are as wide as cache entries: values are whole entries here."""
        q = contiguous_rows(q)
        num_tokens, heads, head_dim = q.shape
        out = self.empty((num_tokens, heads, head_dim), q.dtype)
        self.lib.kr_attention(
            self.pool,
            q.dtype == torch.float32,
            q.data_ptr(),
            out.data_ptr(),
            kv_layer.data_ptr(),
            plan.query_starts.data_ptr(),
            plan.context_lens.data_ptr(),
            plan.tables.data_ptr(),
            plan.tables.shape[1],
            plan.tiles.data_ptr(),
            plan.num_tiles,
            heads,
            plan.num_kv_heads,
            head_dim,
            plan.block_size,
            q.stride(0),
            q.stride(1),
            plan.max_query_len,
            plan.max_context_len,
            window or 0,
            scale,
            softcap or 0.0,
            KV_KINDS[kv_layer.dtype],
            kv_layer.shape[1],
            plan.schedule.address,
        )
        return out

    def widened(self, x: Tensor) -> Tensor:
        """x (bfloat16, contiguous) as float32, exactly."""
        out = self.empty(x.shape, torch.float32)
        self.lib.kr_widen(self.pool, x.data_ptr(), out.data_ptr(), x.numel())
        return out

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        logits = logits.contiguous()
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        settings = [
            batch.temperature.to(torch.float32).contiguous(),
            batch.top_k.to(torch.int64).contiguous(),
            batch.top_p.to(torch.float32).contiguous(),
            batch.min_p.to(torch.float32).contiguous(),
            batch.uniform.to(torch.float64).contiguous(),
        ]
        self.lib.kr_sample(
            self.pool, logits.data_ptr(), *(t.data_ptr() for t in settings), out.data_ptr(), *logits.shape
        )
        return out
