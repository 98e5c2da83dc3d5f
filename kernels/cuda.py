"""The CUDA backend over FlashInfer 0.7 (optional dependency), with torch where FlashInfer has no kernel.

UNVERIFIED ON A GPU: written against FlashInfer 0.7.2's source and type-checked; its tests are marked gpu.

FlashInfer's attention is planned per (scale, window, softcap), which our interface tells only at `attention`:
a step's plan keeps the metadata and plans each such combination at its first use, once per step.

`rope` and `store_kv` are handed the batch's own CPU tensors and find the device copies in the step's plan, by
identity: within a step nothing is copied from the host, so that the step can be captured as a CUDA graph.

FlashInfer knows one fp8 scale for a whole cache, not one for each vector. A cache of fp8, or of another dtype than the
model's, is unpacked block by block before FlashInfer reads it (`_unpacked`): it saves memory, not time, and its steps are
not captured.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvrelay import fp8
from kvrelay.errors import BackendUnavailable
from kvrelay.kernels import sampling
from kvrelay.kernels.backend import (
    Activation,
    AttentionBatch,
    AttentionShape,
    HeadLinears,
    KvOrder,
    Linear,
    QuantizedLinear,
    SamplingBatch,
)
from kvrelay.kernels.cuda_cascade import CascadeDecode, Levels, make_levels
from kvrelay.kernels.cuda_mla import has_latent_attention, make_wrapper, plan_latent, run_latent
from kvrelay.kernels.quant_scheme import Scheme
from kvrelay.kernels.reference import ReferenceBackend, ReferencePlan

logger = logging.getLogger(__name__)

_HALF = frozenset((torch.float16, torch.bfloat16))
_HEAD_DIMS = frozenset((64, 128, 256))
_WORKSPACE_BYTES = 256 << 20
_MAX_THREADS = 1024  # of one CUDA block
# fa2 serves every processor from sm_80 on, with window and softcap at any block size; "auto" may pick per shape
_ATTENTION_KERNELS = "fa2"
Variant = tuple[float, int | None, float | None]  # scale, window, softcap


@dataclass(frozen=True, slots=True)
class PagedIndex:
    """FlashInfer's view of some sequences' blocks: indptr and last_page_len on the CPU, int32.

    indptr: [S+1] into indices [sum of blocks], block ids. last_page_len: [S] tokens in the last block.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


@dataclass(slots=True)
class CudaPlan:
    """One step: device copies of its rows, and the attention wrappers that were planned for it so far.

    positions, slot_mapping: the batch's own, on the CPU. device_positions: [T] int64, device_slots: [T] int32,
    device_zeros: [T] int32, on the device. `decode` covers the first `num_decode` sequences, `prefill` the rest,
    with qo_indptr [P+1] on the CPU. decode_blocks, prefill_blocks: [n] int64 on the device, blocks that are to be unpacked
    for them; the indices of `decode` and `prefill` then count from the first of these. Latent attention takes all sequences
    in one: `latent` and `latent_blocks` are theirs.
    """

    shape: AttentionShape
    batch: AttentionBatch
    positions: Tensor
    slot_mapping: Tensor
    device_positions: Tensor
    device_slots: Tensor
    device_zeros: Tensor
    num_decode: int
    decode: PagedIndex | None
    prefill: PagedIndex | None
    qo_indptr: Tensor | None
    fallback: ReferencePlan | None
    decode_blocks: Tensor | None = None
    prefill_blocks: Tensor | None = None
    latent: PagedIndex | None = None
    latent_blocks: Tensor | None = None
    levels: Levels | None = None  # of decode rows that share prefixes, for variants without a window
    wrappers: dict[Variant, tuple[Any, Any]] = field(default_factory=dict)


def has_attention(shape: AttentionShape) -> bool:
    """Whether FlashInfer has attention kernels for this shape; else its steps run in plain torch."""
    return shape.dtype in _HALF and shape.head_dim in _HEAD_DIMS


def is_unpacked(shape: AttentionShape) -> bool:
    """Whether the cache is of another dtype than FlashInfer is to read."""
    return shape.kv_dtype not in (None, shape.dtype)


def in_memory_order(kv_layer: Tensor, kv_layout: KvOrder) -> Tensor:
    """The cache as FlashInfer takes it under `kv_layout`: its dimensions in the order in which they lie in memory."""
    return kv_layer.transpose(2, 3) if kv_layout == "HND" else kv_layer


def has_append(k: Tensor, kv_cache: Tensor) -> bool:
    """Whether FlashInfer can append k [T, kv_heads, head_dim] to this cache, given as it lies in memory.

    Its kernel takes one CUDA block of kv_heads * head_dim / max(8, head_dim / 32) threads for each token.
    """
    _, num_heads, head_dim = k.shape
    if k.dtype not in _HALF or k.dtype != kv_cache.dtype or head_dim not in _HEAD_DIMS or not kv_cache.is_contiguous():
        return False
    return num_heads * head_dim // max(8, head_dim // 32) <= _MAX_THREADS


def paged_index(context_lens: Tensor, block_tables: Tensor, block_size: int) -> PagedIndex:
    """Flatten block tables [S, max_blocks] to the blocks in use."""
    counts = (context_lens + block_size - 1) // block_size
    indptr = torch.zeros(counts.shape[0] + 1, dtype=torch.int32)
    indptr[1:] = counts.cumsum(0)
    used = torch.arange(block_tables.shape[1]).unsqueeze(0) < counts.unsqueeze(1)
    last = context_lens - (counts - 1) * block_size
    return PagedIndex(indptr, block_tables[used].to(torch.int32), last.to(torch.int32))


class CudaBackend:
    """FlashInfer kernels on one device.

    Raises:
        BackendUnavailable: no CUDA device, FlashInfer is not installed, or it cannot build its kernels.
    """

    name = "cuda"
    kv_layouts: tuple[KvOrder, ...] = ("NHD", "HND")
    quantizes = False

    def __init__(self, device: str | torch.device = "cuda") -> None:
        if not torch.cuda.is_available():
            raise BackendUnavailable("cuda", "torch sees no CUDA device")
        try:
            import flashinfer
        except (ImportError, OSError) as error:
            raise BackendUnavailable("cuda", f"flashinfer does not import: {error}") from error
        self._flashinfer = flashinfer
        self.device = torch.device(device)
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._plain = ReferenceBackend(self.device)
        # FlashInfer asks for zeros at first use
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._wrappers: dict[tuple[str, KvOrder, Variant], Any] = {}
        self._whole_caches: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self._current: CudaPlan | None = None
        self._told: set[str] = set()
        self._shares_prefixes, self._spared_kv_tokens = True, 0
        self._try_out()

    def _try_out(self) -> None:
        """Build and run one small kernel now rather than in the first request."""
        x = torch.ones(1, 64, dtype=torch.float16, device=self.device)
        try:
            self._flashinfer.rmsnorm(x, x[0].clone(), 1e-6)
            torch.cuda.synchronize(self.device)
        except Exception as error:  # whatever its compiler or driver raises
            raise BackendUnavailable("cuda", f"flashinfer cannot build or run its kernels: {error}") from error

    def describe(self) -> dict[str, str]:
        """What was chosen, in short words."""
        version = str(getattr(self._flashinfer, "__version__", "unknown"))
        return {
            "backend": self.name,
            "device": torch.cuda.get_device_name(self.device),
            "flashinfer": version,
            "attention": _ATTENTION_KERNELS,
        }

    @property
    def spared_kv_tokens(self) -> int:
        return self._spared_kv_tokens

    def share_prefixes(self, *, enabled: bool) -> None:
        self._shares_prefixes = enabled

    def shares_prefixes(self, shape: AttentionShape) -> bool:
        is_possible = has_attention(shape) and not is_unpacked(shape) and shape.latent_dim is None
        return self._shares_prefixes and is_possible

    def levels(self, batch: AttentionBatch, shape: AttentionShape) -> Levels | None:
        """What the batch's decode rows share, where it pays."""
        n = batch.num_decode
        if n < 2 or not self.shares_prefixes(shape):
            return None
        return make_levels(batch.context_lens[:n], batch.block_tables[:n], shape.block_size)

    def _tell_once(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.warning("FlashInfer has no kernel for %s: torch is used, slower", what)

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self._plain.pack_linear(weight, bias)

    def pack_heads(self, weight: Tensor) -> HeadLinears:
        return self._plain.pack_heads(weight)

    def pack_quantized(
        self, weight: Tensor, bias: Tensor | None, scheme: Scheme, dtype: torch.dtype
    ) -> QuantizedLinear:
        raise BackendUnavailable(f"{scheme} weights", "the cuda backend has no products with them")

    def embed(self, token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        return self._plain.embed(token_ids, table, scale)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype not in _HALF or weight.dtype != x.dtype or x.dim() not in (2, 3):
            return self._plain.rms_norm(x, weight, eps)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._flashinfer.rmsnorm(x, weight, eps, out=out)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.dtype not in _HALF or weight.dtype != x.dtype or x.dim() != 2:
            return self._plain.add_rms_norm(x, residual, weight, eps)
        self._flashinfer.fused_add_rmsnorm(x, residual, weight, eps)
        return x, residual

    def rope(self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        current = self._current
        if current is not None and positions is current.positions:
            positions = current.device_positions
        else:  # no planned step: a test
            positions = positions.to(self.device)
        head_dim = q.shape[-1]
        if q.dtype not in _HALF or head_dim not in _HEAD_DIMS or cos_sin.shape[1] % 16 or not cos_sin.is_contiguous():
            return self._plain.rope(q, k, cos_sin, positions)
        q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
        self._flashinfer.apply_rope_with_cos_sin_cache_inplace(positions, q, k, head_dim, cos_sin, is_neox=True)
        return q, k

    def gated_activation(self, gate_up: Tensor, kind: Activation) -> Tensor:
        if gate_up.dtype not in _HALF or gate_up.shape[-1] % 16:
            return self._plain.gated_activation(gate_up, kind)
        fused: Callable[[Tensor], Tensor] = (
            self._flashinfer.silu_and_mul if kind == "silu" else self._flashinfer.gelu_tanh_and_mul
        )
        return fused(gate_up.contiguous())

    def _slots(self, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
        """The slots on the device and as many zeros, int32."""
        current = self._current
        if current is not None and slot_mapping is current.slot_mapping:
            return current.device_slots, current.device_zeros
        slots = slot_mapping.to(device=self.device, dtype=torch.int32)  # no planned step: a test
        return slots, torch.zeros_like(slots)

    def store_kv(self, k: Tensor, v: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
        slots, zeros = self._slots(slot_mapping)
        kv_layout: KvOrder = "NHD" if kv_layer.is_contiguous() else "HND"
        kv_cache = in_memory_order(kv_layer, kv_layout)
        if not has_append(k, kv_cache):
            self._plain.store_kv(k, v, kv_layer, slots)
            return
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        indices, indptr, last_page_len = self._whole_cache(kv_layer)
        self._flashinfer.append_paged_kv_cache(k, v, zeros, slots, kv_cache, indices, indptr, last_page_len, kv_layout)

    def _whole_cache(self, kv_layer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(kv_indices, kv_indptr, kv_last_page_len) of one sequence that fills the whole cache, its blocks in order.

        A token's position in that sequence is its slot, so the append needs no block tables.
        """
        num_blocks, block_size = kv_layer.shape[0], kv_layer.shape[2]
        key = (num_blocks, block_size)
        if key not in self._whole_caches:
            numbers = ([0, num_blocks], [block_size])
            indptr, last = (torch.tensor(row, dtype=torch.int32, device=self.device) for row in numbers)
            self._whole_caches[key] = torch.arange(num_blocks, dtype=torch.int32, device=self.device), indptr, last
        return self._whole_caches[key]

    def plan(self, batch: AttentionBatch, shape: AttentionShape) -> CudaPlan:
        # These copies from pageable memory wait for the device. FlashInfer's plan relies on that: it re-uses a
        # pinned buffer whose copy of the step before must have ended.
        slots = batch.slot_mapping.to(device=self.device, dtype=torch.int32)
        plan = CudaPlan(
            shape=shape,
            batch=batch,
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            device_positions=batch.positions.to(self.device),
            device_slots=slots,
            device_zeros=torch.zeros_like(slots),
            num_decode=batch.num_decode,
            decode=None,
            prefill=None,
            qo_indptr=None,
            fallback=None,
        )
        self._current = plan
        is_latent = shape.latent_dim is not None
        if not (has_latent_attention(shape) if is_latent else has_attention(shape)):
            kind = f"latent attention of {shape.num_heads} heads" if is_latent else "attention"
            self._tell_once(f"{kind} with head_dim {shape.head_dim} in {shape.dtype}")
            plan.fallback = self._plain.plan(batch, shape)
            return plan
        if is_latent:
            plan.latent = paged_index(batch.context_lens, batch.block_tables, shape.block_size)
            if is_unpacked(shape):
                plan.latent, plan.latent_blocks = self._in_own_order(plan.latent)
            return plan
        n = batch.num_decode
        if n:
            plan.levels = self.levels(batch, shape)
            plan.decode = paged_index(batch.context_lens[:n], batch.block_tables[:n], shape.block_size)
        if n < batch.context_lens.shape[0]:
            plan.prefill = paged_index(batch.context_lens[n:], batch.block_tables[n:], shape.block_size)
            plan.qo_indptr = (batch.query_starts[n:] - batch.query_starts[n]).to(torch.int32)
        if is_unpacked(shape):
            plan.decode, plan.decode_blocks = self._in_own_order(plan.decode)
            plan.prefill, plan.prefill_blocks = self._in_own_order(plan.prefill)
        return plan

    def _in_own_order(self, index: PagedIndex | None) -> tuple[PagedIndex | None, Tensor | None]:
        """The index of a cache that holds these blocks alone, one after the other; and the blocks, on the device."""
        if index is None:
            return None, None
        numbers = torch.arange(index.indices.shape[0], dtype=torch.int32)
        return replace(index, indices=numbers), index.indices.to(device=self.device, dtype=torch.int64)

    def _wrapper(self, kind: str, kv_layout: KvOrder, variant: Variant) -> Any:
        """The wrapper of this kind and variant; it is planned anew every step."""
        key = (kind, kv_layout, variant)
        if key not in self._wrappers:
            make = (
                self._flashinfer.BatchPrefillWithPagedKVCacheWrapper
                if kind == "prefill"
                else self._flashinfer.BatchDecodeWithPagedKVCacheWrapper
            )
            options = {} if kind == "prefill" else {"use_tensor_cores": True}  # any group size
            self._wrappers[key] = make(self._workspace, kv_layout, backend=_ATTENTION_KERNELS, **options)
        return self._wrappers[key]

    def _planned(self, plan: CudaPlan, variant: Variant) -> tuple[Any, Any]:
        """The decode and prefill wrappers, ready to run this step (None where the step has no such part)."""
        if variant not in plan.wrappers:
            decode: Any = None
            prefill: Any = None
            if plan.levels is not None and variant[1] is None:
                decode = self._cascade(plan, plan.levels, variant)
            elif plan.decode is not None:
                decode = self._wrapper("decode", plan.shape.kv_layout, variant)
                plan_decode(decode, plan.decode, plan.shape, variant)
            if plan.prefill is not None:
                prefill = self._wrapper("prefill", plan.shape.kv_layout, variant)
                plan_prefill(prefill, plan, variant)
            plan.wrappers[variant] = (decode, prefill)
        return plan.wrappers[variant]

    def _cascade(self, plan: CudaPlan, levels: Levels, variant: Variant) -> CascadeDecode:
        """Decode rows in two levels, planned for this step. They read what they share once in every layer that asks."""
        key = ("cascade", plan.shape.kv_layout, variant)
        if key not in self._wrappers:
            self._wrappers[key] = CascadeDecode(
                self._flashinfer, self._workspace, plan.shape.kv_layout, _ATTENTION_KERNELS
            )
        cascade: CascadeDecode = self._wrappers[key]
        cascade.plan(levels, plan.shape, self.device, _options(variant, plan.shape.dtype))
        self._spared_kv_tokens += levels.spared_tokens
        return cascade

    def attention(
        self, q: Tensor, kv_layer: Tensor, plan: CudaPlan, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        if plan.fallback is not None:
            return self._plain.attention(q, kv_layer, plan.fallback, scale=scale, window=window, softcap=softcap)
        decode, prefill = self._planned(plan, (scale, window, softcap))
        q = q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        n, kv_cache = plan.num_decode, in_memory_order(kv_layer, plan.shape.kv_layout)
        if decode is not None:
            decode.run(q[:n], _unpacked(kv_cache, plan.decode_blocks, q.dtype), out=out[:n])
        if prefill is not None:
            prefill.run(q[n:], _unpacked(kv_cache, plan.prefill_blocks, q.dtype), out=out[n:])
        return out

    def store_latent(self, entries: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
        self._plain.store_latent(entries, kv_layer, self._slots(slot_mapping)[0])

    def latent_attention(self, q: Tensor, kv_layer: Tensor, plan: CudaPlan, *, scale: float, latent_dim: int) -> Tensor:
        if plan.latent is None:
            assert plan.fallback is not None
            return self._plain.latent_attention(q, kv_layer, plan.fallback, scale=scale, latent_dim=latent_dim)
        variant: Variant = (scale, None, None)
        if variant not in plan.wrappers:
            key = ("latent", plan.shape.kv_layout, variant)
            if key not in self._wrappers:
                self._wrappers[key] = make_wrapper(self._flashinfer, self._workspace, _ATTENTION_KERNELS)
            wrapper, index = self._wrappers[key], plan.latent
            plan_latent(self._flashinfer, wrapper, plan.batch, index.indptr, index.indices, plan.shape, scale)
            plan.wrappers[variant] = (wrapper, None)
        return run_latent(plan.wrappers[variant][0], q, _unpacked(kv_layer, plan.latent_blocks, q.dtype), latent_dim)

    def widened(self, x: Tensor) -> Tensor:
        return self._plain.widened(x)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return self.sample_on_device(logits, batch).cpu()

    def sample_on_device(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return sampling.draw(logits, batch)


def _unpacked(kv_cache: Tensor, blocks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """These blocks of the cache in another dtype, one after the other; None: the cache itself."""
    return kv_cache if blocks is None else fp8.loaded(kv_cache[blocks]).to(dtype)


def _options(variant: Variant, dtype: torch.dtype) -> dict[str, Any]:
    scale, window, softcap = variant
    return {
        "sm_scale": scale,
        "window_left": -1 if window is None else window - 1,
        "logits_soft_cap": softcap,
        "q_data_type": dtype,
        "kv_data_type": dtype,
    }


def plan_decode(wrapper: Any, index: PagedIndex, shape: AttentionShape, variant: Variant) -> None:
    """Plan a BatchDecodeWithPagedKVCacheWrapper for one-token sequences."""
    wrapper.plan(
        index.indptr,
        index.indices,
        index.last_page_len,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.block_size,
        **_options(variant, shape.dtype),
    )


def plan_prefill(wrapper: Any, plan: CudaPlan, variant: Variant) -> None:
    """Plan a BatchPrefillWithPagedKVCacheWrapper for the step's chunks; causal, bottom-right."""
    assert plan.prefill is not None
    shape = plan.shape
    wrapper.plan(
        plan.qo_indptr,
        plan.prefill.indptr,
        plan.prefill.indices,
        plan.prefill.last_page_len,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.block_size,
        causal=True,
        **_options(variant, shape.dtype),
    )
