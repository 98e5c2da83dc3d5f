"""The CUDA backend over FlashInfer 0.7 (optional dependency), with torch where FlashInfer has no kernel.

`rope` and `store_kv` receive the batch's own CPU tensors and find the device copies in the step's plan, by identity:
within a step nothing is copied from the host, so that the step can be captured as a CUDA graph.

FlashInfer supports one fp8 scale for a whole cache, not one for each vector. A cache of fp8, or of another dtype than
the model's, is unpacked block by block before FlashInfer reads it (`unpacked`): it saves memory, not time, and its
steps are not captured.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvrelay.errors import BackendUnavailable
from kvrelay.kernels.backend import (
    Activation,
    AsyncDevice,
    AttentionBatch,
    AttentionShape,
    AttentionVariant,
    Experts,
    KvOrder,
    Linear,
    QuantizedLinear,
    SamplingBatch,
    TokenFeed,
)
from kvrelay.kernels.common import sampling_search
from kvrelay.kernels.common.logits import packed_log_probabilities
from kvrelay.kernels.common.quant_scheme import Scheme, WeightError
from kvrelay.kernels.common.quantized import TorchQuantLinear
from kvrelay.kernels.common.sampling_search import SamplingSettings, SettingsCache, to_device
from kvrelay.kernels.common.stored_weights import AnyWeight, StoredWeight
from kvrelay.kernels.common.token_masks import TokenMasks, token_masks_of
from kvrelay.kernels.cuda.experts import pack_experts
from kvrelay.kernels.cuda.jit import import_flashinfer
from kvrelay.kernels.cuda.paged_attention import CudaPlan, PagedAttention, Queries
from kvrelay.kernels.cuda.plan import HALF, HEAD_DIMS, has_append, has_attention, has_latent_append, in_memory_order
from kvrelay.kernels.cuda.quantized import Products
from kvrelay.kernels.cuda.staging import DeviceStaging, PinnedTokens
from kvrelay.kernels.oracle.reference import ReferenceBackend, TorchBackend

logger = logging.getLogger(__name__)


Draw = Callable[[Tensor, SamplingSettings, Tensor, TokenMasks | None], Tensor]


class DeviceSampler:
    """Samples tokens [R] int64 on the device, from float32 logits [R, V] and a batch."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._settings = device, SettingsCache(device)
        self.kernels, self._draw = self._chosen()

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        settings = self._settings.of(batch)
        uniform = to_device(batch.uniform, self._device) if settings.draws else batch.uniform
        return self._draw(logits, settings, uniform, token_masks_of(batch, logits))

    def _chosen(self) -> tuple[str, Draw]:
        """("triton" | "torch", the function). Builds Triton's kernels at start."""
        if self._device.type != "cuda":
            return "torch", draw_by_torch
        try:
            from kvrelay.kernels.cuda import sampling_triton

            _try_out(sampling_triton.draw, self._device)
        except Exception as error:  # not installed, or an error of its compiler or the driver
            logger.warning("tokens are drawn by torch, slower: triton's kernels do not work here (%s)", error)
            return "torch", draw_by_torch
        return "triton", sampling_triton.draw


def draw_by_torch(logits: Tensor, settings: SamplingSettings, uniform: Tensor, masks: TokenMasks | None) -> Tensor:
    """As `sampling_triton.draw`."""
    logits = logits if masks is None else masks.applied(logits)
    return sampling_search.draw(logits, settings, uniform)


@dataclass(frozen=True, slots=True)
class Call:
    """One layer's attention: queries, and what it stores, as the graph before it leaves them, padding included.

    stored: keys and values, or latents and rotary keys. Queries of latent attention have two parts.
    """

    queries: Queries
    stored: tuple[Tensor, Tensor]
    kv_layer: Tensor
    variant: AttentionVariant


class Recorder:
    """Takes the calls of a backend's attention while a forward pass is captured.

    out: [size, heads, head_dim or latent_dim], the buffer for the result of every attention call. pool: of the graphs'
    memory; None: a rehearsal captures nothing, to create lazy library handles, which is impossible during capture.
    """

    def __init__(self, out: Tensor, pool: Any) -> None:
        self.out, self._pool = out, pool
        self.graphs: list[Any] = []
        self.calls: list[Call] = []
        self._stored: tuple[Tensor, Tensor] | None = None
        self._capturing: Any = None

    def begin(self) -> None:
        if self._pool is None:
            return
        self._capturing = torch.cuda.CUDAGraph()
        # thread_local: threads that move KV may use the device meanwhile
        self._capturing.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        """End the open graph, if any."""
        if self._capturing is not None:
            graph, self._capturing = self._capturing, None
            graph.capture_end()
            self.graphs.append(graph)

    def store(self, k: Tensor, v: Tensor) -> None:
        self._stored = k, v

    def attend(self, queries: Queries, kv_layer: Tensor, variant: AttentionVariant) -> Tensor:
        self.end()
        assert self._stored is not None, "keys are stored before they are attended to"
        (k, v), self._stored = self._stored, None
        kept = tuple(unowned(q) for q in queries)
        self.calls.append(Call(kept, (unowned(k), unowned(v)), kv_layer, variant))
        self.begin()
        return self.out


def unowned(x: Tensor) -> Tensor:
    """x, on a GPU without owning its memory: later graphs of the pool may reuse it."""
    return alias_of(x) if x.device.type == "cuda" else x


def _is_launched(x: Tensor) -> bool:
    """Whether FlashInfer's kernels take it: they have no float32, and a launch for no rows is an error of CUDA."""
    return x.dtype in HALF and x.numel() > 0


def alias_of(x: Tensor) -> Tensor:
    """A tensor with the same memory, shape and strides that does not own the memory: the caller ensures that it
    stays.
    """
    storage = x.untyped_storage()
    again = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), x.device, storage.nbytes())
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(again, x.storage_offset(), x.shape, x.stride())


class CudaBackend(TorchBackend):
    """FlashInfer kernels on one device. The methods of Backend and AsyncBackend make it large.

    Raises:
        BackendUnavailable: no CUDA device, FlashInfer is not installed, or it cannot build its kernels.
    """

    name = "cuda"

    def __init__(self, device: str | torch.device = "cuda") -> None:
        if not torch.cuda.is_available():
            raise BackendUnavailable("cuda", "torch finds no CUDA device")
        try:
            flashinfer = import_flashinfer()
        except (ImportError, OSError) as error:
            raise BackendUnavailable("cuda", f"flashinfer does not import: {error}") from error
        self._flashinfer = flashinfer
        super().__init__(device)
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(self.device)  # of the engine's thread, which makes streams and events
        self._plain = ReferenceBackend(self.device)
        self.staging = DeviceStaging(self.device)
        self.paged = PagedAttention(flashinfer, self.device, self.staging)
        self._current: CudaPlan | None = None
        self._recorder: Recorder | None = None
        self._graph_pool: Any = None
        self._sampler = DeviceSampler(self.device)
        self._has_norms = self._try_out()
        self._products = Products(self.device)

    def _try_out(self) -> bool:
        """Build and run small kernels, so that failures show at start. Whether the norms are FlashInfer's.

        They need headers that the others do not (`jit.import_flashinfer`): without them norms run in torch.
        """
        x = torch.ones(1, 64, dtype=torch.float16, device=self.device)
        try:
            self._flashinfer.silu_and_mul(x)
            torch.cuda.synchronize(self.device)
        except Exception as error:  # its compiler and the driver raise errors of many types
            raise BackendUnavailable("cuda", f"flashinfer cannot build or run its kernels: {error}") from error
        try:
            self._flashinfer.rmsnorm(x, x[0].clone(), 1e-6)
            torch.cuda.synchronize(self.device)
        except Exception as error:
            logger.warning("norms run in torch, slower: flashinfer cannot build its own (%s)", error)
            return False
        return True

    def describe(self) -> dict[str, str]:
        """Device, versions and the kernels in use, as short texts."""
        version = str(getattr(self._flashinfer, "__version__", "unknown"))
        return {
            "backend": self.name,
            "device": torch.cuda.get_device_name(self.device),
            "flashinfer": version,
            "attention": self.paged.describe(),
            "sampling": self._sampler.kernels,
        }

    @property
    def asynchronous(self) -> AsyncDevice:
        return self

    @property
    def cascade_saved_tokens(self) -> int:
        return self.paged.saved_tokens

    def shares_prefixes(self, shape: AttentionShape) -> bool:
        return self.paged.can_share_prefixes(shape)

    @property
    def graph_pool(self) -> Any:
        """The memory pool of all captured graphs: no two of them run at a time."""
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
        return self._graph_pool

    def pack_quantized(
        self, weight: Tensor, bias: Tensor | None, scheme: Scheme, dtype: torch.dtype
    ) -> QuantizedLinear:
        weight, bias = weight.to(self.device), None if bias is None else bias.to(self.device)
        return self._products.quantized(weight, bias, scheme, dtype) or TorchQuantLinear(weight, bias, scheme)

    def pack_stored(self, weight: StoredWeight, bias: Tensor | None, dtype: torch.dtype) -> tuple[Linear, WeightError]:
        return self._products.linear(weight, bias, dtype) or super().pack_stored(weight, bias, dtype)

    def pack_experts(
        self,
        experts: Iterable[tuple[AnyWeight, AnyWeight]],
        activation: Activation,
        dtype: torch.dtype,
        scheme: Scheme | None = None,
    ) -> Experts:
        packed = pack_experts(experts, self._products, lambda x: self.gated_activation(x, activation), dtype, scheme)
        if not packed.is_grouped:
            self._warn_once(
                f"torch has no grouped product for experts in {dtype} here: they run one after the other, slower"
            )
        return packed

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not self._has_norms or not _is_launched(x) or weight.dtype != x.dtype or x.dim() not in (2, 3):
            return self._plain.rms_norm(x, weight, eps)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._flashinfer.rmsnorm(x, weight, eps, out=out)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if not self._has_norms or not _is_launched(x) or weight.dtype != x.dtype or x.dim() != 2:
            return self._plain.add_rms_norm(x, residual, weight, eps)
        self._flashinfer.fused_add_rmsnorm(x, residual, weight, eps)
        return x, residual

    def rope(self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        current = self._current
        if current is not None and positions is current.batch.positions:
            positions = current.device_positions
        else:  # no planned step, as in tests
            positions = positions.to(self.device)
        head_dim = q.shape[-1]
        if not _is_launched(q) or head_dim not in HEAD_DIMS or cos_sin.shape[1] % 16 or not cos_sin.is_contiguous():
            return self._plain.rope(q, k, cos_sin, positions)
        q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
        self._flashinfer.apply_rope_with_cos_sin_cache_inplace(positions, q, k, head_dim, cos_sin, is_neox=True)
        return q, k

    def gated_activation(self, gate_up: Tensor, kind: Activation) -> Tensor:
        if not _is_launched(gate_up) or gate_up.shape[-1] % 16:
            return self._plain.gated_activation(gate_up, kind)
        fused: Callable[[Tensor], Tensor] = (
            self._flashinfer.silu_and_mul if kind == "silu" else self._flashinfer.gelu_tanh_and_mul
        )
        return fused(gate_up.contiguous())

    def _slots(self, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
        """The slots on the device and as many zeros, int32."""
        current = self._current
        if current is not None and slot_mapping is current.batch.slot_mapping:
            return current.device_slots, current.device_zeros
        slots = slot_mapping.to(device=self.device, dtype=torch.int32)  # no planned step, as in tests
        return slots, torch.zeros_like(slots)

    def store_kv(self, k: Tensor, v: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
        if self._recorder is not None:
            self._recorder.store(k, v)
            return
        slots, zeros = self._slots(slot_mapping)
        kv_layout: KvOrder = "NHD" if kv_layer.stride(2) >= kv_layer.stride(3) else "HND"
        kv_cache = in_memory_order(kv_layer, kv_layout)
        if not has_append(k, kv_cache):
            self._plain.store_kv(k, v, kv_layer, slots)
            return
        self.paged.append(k, v, kv_cache, kv_layout, slots, zeros)

    def plan(self, batch: AttentionBatch, shape: AttentionShape) -> CudaPlan:
        slots = self.staging.put(batch.slot_mapping.to(torch.int32))
        positions = self.staging.put(batch.positions)
        self._current = plan = CudaPlan(shape, batch, positions, slots, torch.zeros_like(slots))
        if has_attention(shape):
            self.paged.fill_plan(plan)
        else:
            kind = "attention" if shape.latent_dim is None else f"latent attention of {shape.num_heads} heads"
            what = f"{kind} with head_dim {shape.head_dim} in {shape.dtype}"
            self._warn_once(f"FlashInfer has no kernel for {what}: torch is used, slower")
            plan.fallback = self._plain.plan(batch, shape)
        return plan

    def attention(
        self, q: Tensor, kv_layer: Tensor, plan: CudaPlan, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        if plan.fallback is not None:
            return self._plain.attention(q, kv_layer, plan.fallback, scale=scale, window=window, softcap=softcap)
        return self._attend((q.contiguous(),), kv_layer, plan, (scale, window, softcap))

    def _attend(self, queries: Queries, kv_layer: Tensor, plan: CudaPlan, variant: AttentionVariant) -> Tensor:
        if self._recorder is not None:
            return self._recorder.attend(queries, kv_layer, variant)
        out = torch.empty(queries[0].shape, dtype=queries[0].dtype, device=self.device)
        self.paged.attend(out, queries, kv_layer, plan, variant)
        return out

    @contextmanager
    def attending_by(self, recorder: Recorder) -> Iterator[None]:
        """Within this context the recorder, which captures a forward pass, takes keys and attention calls."""
        self._recorder = recorder
        try:
            yield
        finally:
            self._recorder = None

    def store_latent(self, latents: Tensor, keys: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
        if self._recorder is not None:
            self._recorder.store(latents, keys)
            return
        slots, zeros = self._slots(slot_mapping)
        if has_latent_append(latents, keys, kv_layer):
            self.paged.append_latent(latents, keys, kv_layer, slots, zeros)
        else:
            self._plain.store_latent(latents, keys, kv_layer, slots)

    def latent_attention(
        self, q: Tensor, q_rotary: Tensor, kv_layer: Tensor, plan: CudaPlan, *, scale: float
    ) -> Tensor:
        if plan.fallback is not None:
            return self._plain.latent_attention(q, q_rotary, kv_layer, plan.fallback, scale=scale)
        return self._attend((q.contiguous(), q_rotary), kv_layer, plan, (scale, None, None))

    def sample_on_device(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return self._sampler(logits, batch)

    def pending(
        self, tokens: Tensor, logits: Tensor | None = None, rows: Sequence[int] = (), most: int = 0
    ) -> PinnedTokens:
        packed = None if logits is None else packed_log_probabilities(logits, tokens, rows, most)
        return PinnedTokens(tokens, packed)

    def place(self, token_ids: Tensor, feed: TokenFeed | None) -> Tensor:
        return self.staging.place(token_ids, feed)


def _try_out(draw: Draw, device: torch.device) -> None:
    """Raises RuntimeError: it draws a token that it must not. And the errors of its compiler and the driver."""
    batch = SamplingBatch(
        *(torch.ones(1), torch.tensor([2]), torch.full((1,), 0.5), torch.full((1,), 0.1), torch.zeros(1).double()),
        masks=torch.tensor([[-1, (1 << 31) - 1]], dtype=torch.int32),
        mask_rows=torch.zeros(1, dtype=torch.int32),
    )
    logits = torch.arange(64, dtype=torch.float32, device=device).unsqueeze(0)
    settings, uniform = sampling_search.settings_of(batch, device), batch.uniform.to(device)
    for masks, right in ((None, 63), (token_masks_of(batch, logits), 62)):
        if (token := int(draw(logits, settings, uniform, masks))) != right:
            raise RuntimeError(f"token {right} is the only one that stays; it drew {token}")
