"""The fast CPU backend: compiled kernels if there is a C compiler, else torch.

float32 results of the compiled kernels are batch-invariant: they do not depend on the rest of the batch, on prompt
chunking or on the number of threads, because every sum runs in one fixed order. bfloat16 results are, too, if the
linear kernel is the compiled one (see `describe`).
"""

import contextlib
import functools
import hashlib
import logging
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from kvrelay.errors import BackendUnavailable
from kvrelay.kernels.backend import (
    Activation,
    AttentionBatch,
    AttentionShape,
    DecodeGraphs,
    Experts,
    GraphSpec,
    HeadInputs,
    HeadLinears,
    KvOrder,
    Linear,
    PackedWeights,
    QuantizedLinear,
    SamplingBatch,
)
from kvrelay.kernels.common import sampling_search
from kvrelay.kernels.common.quant_scheme import ExpertChoice, Scheme, WeightError
from kvrelay.kernels.common.quantized import HeadByHead
from kvrelay.kernels.common.stored_weights import AnyWeight, StoredWeight
from kvrelay.kernels.common.token_masks import token_masks_of
from kvrelay.kernels.cpu.linear import Pack, can_place, choose_linear
from kvrelay.kernels.cpu.native_kernels import (
    PRIVATE,
    SUPPORTED,
    NativeExperts,
    NativeKernels,
    NativeLinear,
    NativePlan,
    NativeQuantLinear,
    addresses,
    block_bytes,
    contiguous_rows,
)
from kvrelay.kernels.cpu.recorded_steps import RecordedSteps
from kvrelay.kernels.cpu.selfcheck import first_wrong_kernel
from kvrelay.kernels.cpu.stored import scheme_of_pair
from kvrelay.kernels.oracle.reference import ReferenceBackend, ReferencePlan
from kvrelay.machine import usable_cores
from kvrelay.native.build import processor

logger = logging.getLogger(__name__)

KV_KINDS = {torch.bfloat16: 0, torch.float32: 1, torch.uint8: 2}  # as enumerated in kv.h; uint8: fp8 with scales
_SLOW = "compiled CPU kernels are off (%s): with torch's decoding was 1.4 (1 stream) to 2.4 times (16) slower"


@functools.lru_cache(maxsize=8)
def _warn_slow(why: str) -> None:
    """Once per process and reason."""
    logger.warning(_SLOW, why)


class TorchCpuBackend(ReferenceBackend):
    """Torch alone: without a compiler, for float16, or with KVRELAY_NATIVE=0. The reference's results up to rounding,
    faster where torch has a fused kernel.
    """

    name = "cpu"

    def __init__(self) -> None:
        super().__init__("cpu")
        self._settings = sampling_search.SettingsCache(self.device)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float, softcap: float | None) -> Tensor:
        k, v = k.to(q.dtype), v.to(q.dtype)
        if softcap is not None:
            return super()._attend(q, k, v, mask, scale=scale, softcap=softcap)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # heads first
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)

    def sample_on_device(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        settings = self._settings.of(batch)
        if settings.has_top_k or settings.has_top_p:  # a sort takes longer than the search
            masks = token_masks_of(batch, logits) if batch.masks is not None else None
            return sampling_search.draw(logits if masks is None else masks.applied(logits), settings, batch.uniform)
        return super().sample_on_device(logits, batch)


def _can_place(q: Tensor, k: Tensor, v: Tensor, inputs: HeadInputs) -> bool:
    """Whether kr_norm_rope_store supports these: adjacent heads, contiguous tables and blocks, norms of one dtype."""
    kinds = {norm.dtype for norm in inputs.norms or ()}
    return (
        all(x.stride()[1:] == (x.shape[2], 1) for x in (q, k, v))
        and len(kinds) <= 1
        and kinds <= SUPPORTED
        and inputs.kv_layer.dtype in KV_KINDS
        and inputs.kv_layer[0].is_contiguous()
        and inputs.cos_sin.dtype == torch.float32
        and inputs.cos_sin.is_contiguous()
    )


class CpuBackend(TorchCpuBackend):
    """Kernels on `num_threads` cores; None: one for each physical core that this thread may run on,
    fewer where its container has a CPU quota.

    Sets torch's own thread count (process-wide) to the same number. Backend's methods make it large: each takes the
    compiled kernel where it supports the arguments, else torch.
    """

    kv_layouts: tuple[KvOrder, ...] = ("NHD",)  # of the compiled kernels

    def __init__(self, num_threads: int | None = None) -> None:
        super().__init__()
        self.num_threads = num_threads or usable_cores()
        torch.set_num_threads(self.num_threads)
        self._packers: dict[torch.dtype, tuple[str, Pack]] = {}
        self._weights: PackedWeights = PRIVATE
        self._native: NativeKernels | None = None
        self._why_not = self._load()
        if self._native is None:
            _warn_slow(self._why_not)

    def _load(self) -> str:
        """Take the compiled kernels; returns why there are none."""
        try:
            native = self._native = NativeKernels(self.num_threads)
        except BackendUnavailable as error:
            return error.why
        wrong = first_wrong_kernel(self)
        if wrong in ("linear", "attention") and native.has_tiles:
            native.without_tiles()
            wrong = first_wrong_kernel(self)
        if wrong == "linear" and native.has_dot:
            native.has_dot = False
            wrong = first_wrong_kernel(self)
        if wrong is None:
            return ""
        self._native = None
        return f"the compiled {wrong} kernel gives wrong results here"

    @property
    def compiled_kernels(self) -> NativeKernels | None:
        """The compiled kernels, or None where torch's are used."""
        return self._native

    def is_batch_invariant(self, dtype: torch.dtype) -> bool:
        return isinstance(self.pack_linear(torch.zeros(16, 16, dtype=dtype)), NativeLinear)

    def decode_graphs(self, spec: GraphSpec) -> DecodeGraphs | None:
        native = self._attention_for(spec.shape)
        if native is None or spec.shape.latent_dim is not None:
            return None
        blocks, running, tokens = spec.max_blocks, spec.max_running, spec.max_tokens
        return RecordedSteps(
            native, spec.shape, max_blocks=blocks, max_running=running, max_tokens=tokens, head=spec.head
        )

    @property
    def cascade_saved_tokens(self) -> int:
        return 0 if self._native is None else self._native.spared_tokens

    def shares_prefixes(self, shape: AttentionShape) -> bool:
        return self._attention_for(shape) is not None

    def describe(self) -> dict[str, str]:
        """The kernels in use, as short texts; linear kernels appear once a weight has been packed."""
        native = self._native
        kernels = f"torch ({self._why_not})" if native is None else f"native, panels of {native.panel_width}"
        linears = {f"linear_{str(dtype).removeprefix('torch.')}": name for dtype, (name, _) in self._packers.items()}
        slow = {} if native else {"warning": _SLOW % self._why_not}
        has = {} if native is None else {"bf16_dot": native.has_dot, "amx": native.has_tiles}
        dot = {name: "yes" if value else "no" for name, value in has.items()}
        return {"backend": self.name, "threads": str(self.num_threads), "kernels": kernels, **dot, **linears, **slow}

    def _for(self, dtype: torch.dtype) -> NativeKernels | None:
        """The compiled kernels, if there are any and they support this."""
        return self._native if dtype in SUPPORTED else None

    def _attention_for(self, shape: AttentionShape) -> NativeKernels | None:
        """The compiled kernels if they have attention for this shape."""
        native = self._for(shape.dtype)
        if native is not None and shape.kv_dtype not in (None, torch.float8_e4m3fn, *SUPPORTED):
            self._warn_once(f"attention over a cache of {shape.kv_dtype} is not compiled; torch's is used, slower")
            return None
        return native

    def _packer(self, dtype: torch.dtype) -> tuple[str, Pack]:
        if dtype not in self._packers:
            key = hashlib.sha256(f"{processor()} {torch.__version__} {self.describe()}".encode()).hexdigest()[:12]
            self._packers[dtype] = choose_linear(self._native, dtype, self.num_threads, key)
        return self._packers[dtype]

    def packing_of(self, dtype: torch.dtype) -> str | None:
        native, (name, _) = self._for(dtype), self._packer(dtype)
        if native is None or name == "torch" or (name == "onednn" and not can_place()):
            return None
        parts = [processor(), native.lib._name.rpartition("/")[2], native.has_dot, name]
        return " ".join(map(str, [*parts, torch.__version__, self.num_threads] if name == "onednn" else parts))

    @contextlib.contextmanager
    def packing(self, weights: PackedWeights) -> Iterator[None]:
        self._weights = weights
        try:
            yield
        finally:
            self._weights = PRIVATE

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self._packer(weight.dtype)[1](weight, bias, self._weights)

    def pack_heads(self, weight: Tensor) -> HeadLinears:
        native = self._for(weight.dtype)
        if native is None:
            return super().pack_heads(weight)
        return HeadByHead([native.pack_linear(head, None, self._weights) for head in weight])

    def pack_quantized(
        self, weight: Tensor, bias: Tensor | None, scheme: Scheme, dtype: torch.dtype
    ) -> QuantizedLinear:
        native = self._for(dtype)
        if native is None:
            return super().pack_quantized(weight, bias, scheme, dtype)
        return NativeQuantLinear(native, weight, bias, scheme, dtype, self._weights)

    def pack_stored(self, weight: StoredWeight, bias: Tensor | None, dtype: torch.dtype) -> tuple[Linear, WeightError]:
        native, scheme = self._for(dtype), scheme_of_pair(weight)
        if native is None or scheme is None:
            return super().pack_stored(weight, bias, dtype)
        linear = NativeQuantLinear(native, weight, bias, scheme, dtype, self._weights)
        return linear, linear.error

    def pack_experts(
        self,
        experts: Iterable[tuple[AnyWeight, AnyWeight]],
        activation: Activation,
        dtype: torch.dtype,
        scheme: Scheme | None = None,
    ) -> Experts:
        native = self._for(dtype)
        if native is None:
            return super().pack_experts(experts, activation, dtype, scheme)
        return NativeExperts(native, experts, activation, scheme, dtype, self._weights)

    def choose_experts(self, logits: Tensor, correction: Tensor | None, choice: ExpertChoice) -> tuple[Tensor, Tensor]:
        """Ties go to the lower expert."""
        native = self._for(logits.dtype)
        if native is None:
            return super().choose_experts(logits, correction, choice)
        logits, shape = logits.contiguous(), (logits.shape[0], choice.num_chosen)
        weights, chosen = native.empty(shape, torch.float32), native.empty(shape, torch.int64)
        sizes = logits.shape[0], choice.num_experts, choice.num_chosen
        groups, is_sigmoid = (choice.num_groups, choice.num_chosen_groups), choice.scoring == "sigmoid"
        at = addresses(logits, correction, weights, chosen)
        native.lib.kr_choose(native.pool, *at, *sizes, is_sigmoid, *groups, choice.normalise, choice.scale)
        return weights, chosen

    def embed(self, token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        native = self._for(table.dtype)
        if native is None or not (table.is_contiguous() and token_ids.is_contiguous()):
            return super().embed(token_ids, table, scale)
        shape = token_ids.shape[0], table.shape[1]
        out = native.empty(shape, table.dtype)
        native.lib.kr_embed(table.dtype == torch.float32, *addresses(token_ids, table, out), *shape, scale)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        native = self._for(x.dtype)
        if native is None or weight.dtype not in SUPPORTED:
            return super().rms_norm(x, weight, eps)
        return _rms_norm(native, x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        native = self._for(x.dtype)
        if native is None or weight.dtype not in SUPPORTED or not residual.is_contiguous():
            return super().add_rms_norm(x, residual, weight, eps)
        return _rms_norm(native, x, residual, weight, eps), residual

    def rope(self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """In place when q and k have contiguous heads."""
        native = self._for(q.dtype)
        if native is None or cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous():
            return super().rope(q, k, cos_sin, positions)
        q, k = contiguous_rows(q), contiguous_rows(k)
        sizes = *q.shape[:2], k.shape[1], *q.stride()[:2], *k.stride()[:2], cos_sin.shape[1]
        native.lib.kr_rope(native.pool, q.dtype == torch.float32, *addresses(q, k, cos_sin, positions), *sizes)
        return q, k

    def gated_activation(self, gate_up: Tensor, kind: Activation) -> Tensor:
        native = self._for(gate_up.dtype)
        if native is None:
            return super().gated_activation(gate_up, kind)
        gate_up = contiguous_rows(gate_up)
        shape, wide = (gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype == torch.float32
        out = native.empty(shape, gate_up.dtype)
        at = addresses(gate_up, out)
        native.lib.kr_gate(native.pool, wide, kind == "gelu_tanh", *at, *shape, gate_up.stride(0))
        return out

    def norm_rope_store(self, q: Tensor, k: Tensor, v: Tensor, inputs: HeadInputs) -> Tensor:
        native = self._for(q.dtype)
        if native is None or not _can_place(q, k, v, inputs):
            return super().norm_rope_store(q, k, v, inputs)
        cos_sin, kv_layer, norms = inputs.cos_sin, inputs.kv_layer, inputs.norms or (None, None)
        wide_norm = norms[0] is not None and norms[0].dtype == torch.float32
        at = addresses(q, k, v, *norms, cos_sin, inputs.positions, inputs.slot_mapping, kv_layer)
        (tokens, heads, dim), strides = q.shape, (q.stride(0), k.stride(0), v.stride(0))
        sizes = tokens, heads, k.shape[1], *strides, dim, cos_sin.shape[1], kv_layer.shape[2], block_bytes(kv_layer)
        kinds = q.dtype == torch.float32, KV_KINDS[kv_layer.dtype], wide_norm
        native.lib.kr_norm_rope_store(native.pool, *kinds, *at, *sizes, inputs.eps)
        return q

    def plan(self, batch: AttentionBatch, shape: AttentionShape) -> NativePlan | ReferencePlan:  # type: ignore[override]
        native = self._attention_for(shape)
        return super().plan(batch, shape) if native is None else native.plan(batch, shape)

    def attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        plan: NativePlan | ReferencePlan,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """For a latent cache (one part) results are as wide as cache entries: values are whole entries here."""
        if isinstance(plan, ReferencePlan):
            return super().attention(q, kv_layer, plan, scale=scale, window=window, softcap=softcap)
        native, batch, shape = self._native, plan.batch, plan.shape
        assert native is not None and kv_layer[0].is_contiguous() and kv_layer.dtype in KV_KINDS
        q = contiguous_rows(q)
        out, (_, heads, head_dim) = native.empty(q.shape, q.dtype), q.shape
        at = addresses(q, out, kv_layer, batch.query_starts, batch.context_lens, batch.block_tables)
        tiles = batch.block_tables.shape[1], plan.tiles.data_ptr(), plan.num_tiles
        sizes = heads, shape.num_kv_heads, head_dim, shape.block_size, *q.stride()[:2]
        reach = batch.max_query_len, batch.max_context_len, window or 0, scale, softcap or 0.0
        cache = KV_KINDS[kv_layer.dtype], kv_layer.shape[1], block_bytes(kv_layer), plan.schedule.words.data_ptr()
        native.lib.kr_attention(native.pool, q.dtype == torch.float32, *at, *tiles, *sizes, *reach, *cache)
        return out

    def latent_attention(
        self, q: Tensor, q_rotary: Tensor, kv_layer: Tensor, plan: NativePlan | ReferencePlan, *, scale: float
    ) -> Tensor:
        if isinstance(plan, NativePlan):
            whole = torch.cat((q, q_rotary), dim=-1)
            return self.attention(whole, kv_layer, plan, scale=scale, window=None, softcap=None)[..., : q.shape[-1]]
        return super().latent_attention(q, q_rotary, kv_layer, plan, scale=scale)

    def widened(self, x: Tensor) -> Tensor:
        native = self._native
        if native is None or x.dtype != torch.bfloat16 or not x.is_contiguous():
            return super().widened(x)
        out = native.empty(x.shape, torch.float32)
        native.lib.kr_widen(native.pool, *addresses(x, out), x.numel())
        return out

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        native = self._native
        if native is None:
            return super().sample(logits, batch)
        logits, out = logits.contiguous(), torch.empty(logits.shape[0], dtype=torch.int64)
        floats = (x.to(torch.float32).contiguous() for x in (batch.temperature, batch.top_p, batch.min_p))
        temperature, top_p, min_p = floats
        top_k, uniform = batch.top_k.to(torch.int64).contiguous(), batch.uniform.to(torch.float64).contiguous()
        masks = token_masks_of(batch, logits) if batch.masks is not None else None
        masked = (None, None) if masks is None else (masks.words.contiguous(), masks.rows.contiguous())
        at = addresses(logits, temperature, top_k, top_p, min_p, uniform, out, *masked)
        native.lib.kr_sample(native.pool, *at, *logits.shape)
        return out

    def sample_on_device(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return self.sample(logits, batch) if self._native is not None else super().sample_on_device(logits, batch)


def _rms_norm(native: NativeKernels, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """rms_norm of x, or of x + residual (written to residual; contiguous), with any leading shape."""
    x, columns = contiguous_rows(x), x.shape[-1]
    if x.dim() == 2:
        layout = 1, x.stride(0), 0
    elif x.dim() == 3:
        layout = x.shape[1], x.stride(0), x.stride(1)
    else:
        x, layout = x.contiguous(), (1, columns, 0)
    out, kinds = native.empty(x.shape, x.dtype), (x.dtype == torch.float32, weight.dtype == torch.float32)
    at, sizes = addresses(x, residual, out, weight), (x.numel() // columns, columns)
    native.lib.kr_rms_norm(native.pool, *kinds, *at, *sizes, *layout, eps)
    return out
