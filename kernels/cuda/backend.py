"""The CUDA backend over FlashInfer 0.7 (optional dependency), with torch where FlashInfer has no kernel.

UNVERIFIED ON A GPU: written against FlashInfer 0.7.2's source and type-checked; its tests are marked gpu.

FlashInfer's attention is planned per (scale, window, softcap), which our interface tells only at `attention`:
a step's plan keeps the metadata and plans each such combination at its first use, once per step.

`rope` and `store_kv` are handed the batch's own CPU tensors and find the device copies in the step's plan, by
identity: within a step nothing is copied from the host, so that the step can be captured as a CUDA graph.

FlashInfer knows one fp8 scale for a whole cache, not one for each vector. A cache of fp8, or of another dtype than the
model's, is unpacked block by block before FlashInfer reads it (`unpacked`): it saves memory, not time, and its steps are
not captured.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvrelay.errors import BackendUnavailable
from kvrelay.kernels.async_backend import TokenFeed
from kvrelay.kernels.backend import (
    Activation,
    AttentionBatch,
    AttentionShape,
    Experts,
    HeadInputs,
    HeadLinears,
    KvOrder,
    Linear,
    QuantizedLinear,
    SamplingBatch,
)
from kvrelay.kernels.common.expert_choice import ExpertChoice
from kvrelay.kernels.common.quant_scheme import Scheme
from kvrelay.kernels.cuda.cascade import CascadeDecode, Levels, make_levels
from kvrelay.kernels.cuda.experts import CudaExperts
from kvrelay.kernels.cuda.mla import has_latent_attention, make_wrapper, plan_latent, run_latent
from kvrelay.kernels.cuda.plan import (
    HALF,
    HEAD_DIMS,
    CudaPlan,
    PagedIndex,
    Variant,
    has_append,
    has_attention,
    in_memory_order,
    is_unpacked,
    options_of,
    paged_index,
    plan_decode,
    plan_prefill,
    unpacked,
)
from kvrelay.kernels.cuda.prefill import PrefillKernels
from kvrelay.kernels.cuda.recorder import Recorder, Rehearsal
from kvrelay.kernels.cuda.sampling import DeviceSampler
from kvrelay.kernels.cuda.staging import DeviceStaging, PinnedTokens
from kvrelay.kernels.norm_rope_store import norm_rope_store
from kvrelay.kernels.oracle.reference import ReferenceBackend

logger = logging.getLogger(__name__)

_WORKSPACE_BYTES = 256 << 20
DECODE_KERNELS = "fa2"  # on every processor from sm_80 on, with window and softcap at any block size


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
        self.staging = DeviceStaging(self.device)
        # FlashInfer asks for zeros at first use
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._wrappers: dict[tuple[str, KvOrder, Variant], Any] = {}
        self._whole_caches: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self.prefill_kernels = PrefillKernels(flashinfer, self._workspace)
        self._current: CudaPlan | None = None
        self._recorder: Recorder | Rehearsal | None = None
        self._graph_pool: Any = None
        self._warned: set[str] = set()
        self._sampler = DeviceSampler(self.device)
        self._shares_prefixes, self._cascade_saved_tokens = True, 0
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
            "attention": f"decode {DECODE_KERNELS}, prefill {self.prefill_kernels.describe()}",
            "sampling": self._sampler.kernels,
        }

    @property
    def cascade_saved_tokens(self) -> int:
        return self._cascade_saved_tokens

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

    @property
    def graph_pool(self) -> Any:
        """Of memory, for all captured graphs: no two of them run at a time."""
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
        return self._graph_pool

    def _warn_once(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("FlashInfer has no kernel for %s: torch is used, slower", what)

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self._plain.pack_linear(weight, bias)

    def pack_heads(self, weight: Tensor) -> HeadLinears:
        return self._plain.pack_heads(weight)

    def pack_quantized(
        self, weight: Tensor, bias: Tensor | None, scheme: Scheme, dtype: torch.dtype
    ) -> QuantizedLinear:
        raise BackendUnavailable(f"{scheme} weights", "the cuda backend has no products with them")

    def pack_experts(
        self,
        experts: Iterable[tuple[Tensor, Tensor]],
        activation: Activation,
        dtype: torch.dtype,
        scheme: Scheme | None = None,
    ) -> Experts:
        if scheme is not None:
            raise BackendUnavailable(f"{scheme} weights", "the cuda backend has no products with them")
        packed = CudaExperts(experts, lambda x: self.gated_activation(x, activation), self.device)
        if not packed.is_grouped and "experts" not in self._warned:
            self._warned.add("experts")
            logger.warning("torch has no grouped product for experts in %s here: one after the other, slower", dtype)
        return packed

    def choose_experts(self, logits: Tensor, correction: Tensor | None, choice: ExpertChoice) -> tuple[Tensor, Tensor]:
        return self._plain.choose_experts(logits, correction, choice)

    def embed(self, token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        return self._plain.embed(token_ids, table, scale)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype not in HALF or weight.dtype != x.dtype or x.dim() not in (2, 3):
            return self._plain.rms_norm(x, weight, eps)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._flashinfer.rmsnorm(x, weight, eps, out=out)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.dtype not in HALF or weight.dtype != x.dtype or x.dim() != 2:
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
        if q.dtype not in HALF or head_dim not in HEAD_DIMS or cos_sin.shape[1] % 16 or not cos_sin.is_contiguous():
            return self._plain.rope(q, k, cos_sin, positions)
        q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
        self._flashinfer.apply_rope_with_cos_sin_cache_inplace(positions, q, k, head_dim, cos_sin, is_neox=True)
        return q, k

    def gated_activation(self, gate_up: Tensor, kind: Activation) -> Tensor:
        if gate_up.dtype not in HALF or gate_up.shape[-1] % 16:
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
        if self._recorder is not None:
            self._recorder.store(k, v)
            return
        slots, zeros = self._slots(slot_mapping)
        kv_layout: KvOrder = "NHD" if kv_layer.is_contiguous() else "HND"
        kv_cache = in_memory_order(kv_layer, kv_layout)
        if not has_append(k, kv_cache):
            self._plain.store_kv(k, v, kv_layer, slots)
            return
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        indices, indptr, last_page_len = self._whole_cache(kv_layer)
        self._flashinfer.append_paged_kv_cache(k, v, zeros, slots, kv_cache, indices, indptr, last_page_len, kv_layout)

    def norm_rope_store(self, q: Tensor, k: Tensor, v: Tensor, inputs: HeadInputs) -> Tensor:
        return norm_rope_store(self, q, k, v, inputs)

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
        slots = self.staging.put(batch.slot_mapping.to(torch.int32))
        plan = CudaPlan(
            shape=shape,
            batch=batch,
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            device_positions=self.staging.put(batch.positions),
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
            self._warn_once(f"{kind} with head_dim {shape.head_dim} in {shape.dtype}")
            plan.fallback = self._plain.plan(batch, shape)
            return plan
        if is_latent:
            plan.latent = paged_index(batch.context_lens, batch.block_tables, shape.block_size)
            if is_unpacked(shape):
                plan.latent, plan.latent_blocks = self._in_own_order(plan.latent)
            plan.latent = self.staged(plan.latent)
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
        plan.decode, plan.prefill = self.staged(plan.decode), self.staged(plan.prefill)
        return plan

    def staged(self, index: PagedIndex | None) -> PagedIndex | None:
        """The same, so that FlashInfer's plan need not wait for the device: it looks at all but the indices on the CPU, too."""
        if index is None:
            return None
        return PagedIndex(index.indptr.pin_memory(), self.staging.put(index.indices), index.last_page_len.pin_memory())

    def _in_own_order(self, index: PagedIndex | None) -> tuple[PagedIndex | None, Tensor | None]:
        """The index of a cache that holds these blocks alone, one after the other; and the blocks, on the device."""
        if index is None:
            return None, None
        numbers = torch.arange(index.indices.shape[0], dtype=torch.int32)
        return replace(index, indices=numbers), self.staging.put(index.indices.to(torch.int64))

    def _decode_wrapper(self, kv_layout: KvOrder, variant: Variant) -> Any:
        """The wrapper of this variant; it is planned anew every step."""
        key = ("decode", kv_layout, variant)
        if key not in self._wrappers:
            make = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper
            # tensor cores: any group size
            self._wrappers[key] = make(self._workspace, kv_layout, backend=DECODE_KERNELS, use_tensor_cores=True)
        return self._wrappers[key]

    def _prefill_wrapper(self, shape: AttentionShape, variant: Variant) -> Any:
        kernels = self.prefill_kernels.of(shape, variant)
        key = (f"prefill {kernels}", shape.kv_layout, variant)
        if key not in self._wrappers:
            make = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper
            self._wrappers[key] = make(self._workspace, shape.kv_layout, backend=kernels)
        return self._wrappers[key]

    def _planned(self, plan: CudaPlan, variant: Variant) -> tuple[Any, Any]:
        """The decode and prefill wrappers, ready to run this step (None where the step has no such part)."""
        if variant not in plan.wrappers:
            decode: Any = None
            prefill: Any = None
            if plan.levels is not None and variant[1] is None:
                decode = self._cascade(plan, plan.levels, variant)
            elif plan.decode is not None:
                decode = self._decode_wrapper(plan.shape.kv_layout, variant)
                with self.staging.planning(decode):
                    plan_decode(decode, plan.decode, plan.shape, variant)
            if plan.prefill is not None:
                assert plan.qo_indptr is not None
                prefill = self._prefill_wrapper(plan.shape, variant)
                with self.staging.planning(prefill):
                    plan_prefill(prefill, plan.qo_indptr, plan.prefill, plan.shape, variant)
            plan.wrappers[variant] = (decode, prefill)
        return plan.wrappers[variant]

    def _cascade(self, plan: CudaPlan, levels: Levels, variant: Variant) -> CascadeDecode:
        """Decode rows in two levels, planned for this step. They read what they share once in every layer that asks."""
        key = ("cascade", plan.shape.kv_layout, variant)
        if key not in self._wrappers:
            self._wrappers[key] = CascadeDecode(self._flashinfer, self._workspace, plan.shape.kv_layout, DECODE_KERNELS)
        cascade: CascadeDecode = self._wrappers[key]
        with self.staging.planning(cascade):
            cascade.plan(levels, plan.shape, self.staging, options_of(variant, plan.shape.dtype))
        self._cascade_saved_tokens += levels.spared_tokens
        return cascade

    def attention(
        self, q: Tensor, kv_layer: Tensor, plan: CudaPlan, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        if plan.fallback is not None:
            return self._plain.attention(q, kv_layer, plan.fallback, scale=scale, window=window, softcap=softcap)
        if self._recorder is not None:
            return self._recorder.attend(q, kv_layer, (scale, window, softcap))
        q = q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.attend_into(out, q, kv_layer, plan, (scale, window, softcap))
        return out

    def attend_into(self, out: Tensor, q: Tensor, kv_layer: Tensor, plan: CudaPlan, variant: Variant) -> None:
        """`attention` where FlashInfer has it; q and out contiguous."""
        decode, prefill = self._planned(plan, variant)
        n, kv_cache = plan.num_decode, in_memory_order(kv_layer, plan.shape.kv_layout)
        if decode is not None:
            decode.run(q[:n], unpacked(kv_cache, plan.decode_blocks, q.dtype), out=out[:n])
        if prefill is not None:
            prefill.run(q[n:], unpacked(kv_cache, plan.prefill_blocks, q.dtype), out=out[n:])

    @contextmanager
    def attending_by(self, recorder: Recorder | Rehearsal) -> Iterator[None]:
        """While this lasts, keys go to and attention is computed by that one, which captures a forward pass."""
        self._recorder = recorder
        try:
            yield
        finally:
            self._recorder = None

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
                self._wrappers[key] = make_wrapper(self._flashinfer, self._workspace, DECODE_KERNELS)
            wrapper, index = self._wrappers[key], plan.latent
            with self.staging.planning(wrapper):
                plan_latent(self._flashinfer, wrapper, plan.batch, index.indptr, index.indices, plan.shape, scale)
            plan.wrappers[variant] = (wrapper, None)
        return run_latent(plan.wrappers[variant][0], q, unpacked(kv_layer, plan.latent_blocks, q.dtype), latent_dim)

    def widened(self, x: Tensor) -> Tensor:
        return self._plain.widened(x)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return self.sample_on_device(logits, batch).cpu()

    def sample_on_device(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return self._sampler(logits, batch)

    def pending(self, tokens: Tensor) -> PinnedTokens:
        return PinnedTokens(tokens)

    def place(self, token_ids: Tensor, feed: TokenFeed | None) -> Tensor:
        return self.staging.place(token_ids, feed)
