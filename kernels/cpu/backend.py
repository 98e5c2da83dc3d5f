"""The fast CPU backend: compiled kernels if there is a C compiler, else torch.

float32 results of the compiled kernels are batch-invariant: they do not depend on the rest of the batch, on prompt
chunking or on the number of threads, because every sum runs in one fixed order. bfloat16 results are, too, if the
linear kernel is the compiled one (see `describe`).
"""

import hashlib
import logging
from collections.abc import Iterable

import torch
from torch import Tensor

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
    QuantizedLinear,
    SamplingBatch,
)
from kvrelay.kernels.common.expert_choice import ExpertChoice
from kvrelay.kernels.common.quant_scheme import Scheme
from kvrelay.kernels.common.quantized import HeadByHead
from kvrelay.kernels.cpu.linear import Pack, choose_linear
from kvrelay.kernels.cpu.native_kernels import KV_KINDS, SUPPORTED, NativeKernels, NativeLinear, NativePlan, places
from kvrelay.kernels.cpu.native_weights import NativeExperts, NativeQuantLinear, choose_experts
from kvrelay.kernels.cpu.recorded_steps import RecordedSteps
from kvrelay.kernels.cpu.selfcheck import first_wrong_kernel
from kvrelay.kernels.cpu.torch_fallback import TorchCpuBackend
from kvrelay.kernels.oracle.reference import ReferencePlan, TorchBackend
from kvrelay.machine import own_cores
from kvrelay.native.build import processor

logger = logging.getLogger(__name__)

_SLOW = "compiled CPU kernels are off (%s): with torch's decoding was 1.4 (1 stream) to 2.4 times (16) slower"


def _load(num_threads: int) -> tuple[NativeKernels | None, str]:
    """The compiled kernels, or None and the reason."""
    try:
        native = NativeKernels(num_threads)
    except BackendUnavailable as error:
        return None, error.why
    wrong = first_wrong_kernel(native)
    if wrong == "linear" and native.has_dot:
        native.has_dot = False
        wrong = first_wrong_kernel(native)
    return (native, "") if wrong is None else (None, f"the compiled {wrong} kernel gives wrong results here")


class CpuBackend(TorchBackend):
    """Kernels on `num_threads` cores; None: one for each physical core that this thread may run on.

    Sets torch's own thread count (process-wide) to the same number. Backend's methods make it large.
    """

    name = "cpu"
    kv_layouts: tuple[KvOrder, ...] = ("NHD",)  # of the compiled kernels
    quantizes = True

    def __init__(self, num_threads: int | None = None) -> None:
        super().__init__("cpu")
        self.num_threads = num_threads or len(own_cores())
        torch.set_num_threads(self.num_threads)
        self._torch = TorchCpuBackend()
        self._native, self._why_not = _load(self.num_threads)
        self._packers: dict[torch.dtype, tuple[str, Pack]] = {}
        if self._native is None:
            logger.warning(_SLOW, self._why_not)

    @property
    def compiled_kernels(self) -> NativeKernels | None:
        """The compiled kernels, or None where torch's are used."""
        return self._native

    def is_batch_invariant(self, dtype: torch.dtype) -> bool:
        return isinstance(self.pack_linear(torch.zeros(16, 16, dtype=dtype)), NativeLinear)

    def decode_graphs(self, spec: GraphSpec) -> DecodeGraphs | None:
        native = self.native_for(spec.shape)
        if native is None or spec.shape.latent_dim is not None:
            return None
        return RecordedSteps(native, spec.shape, max_blocks=spec.max_blocks, head=spec.head)

    @property
    def cascade_saved_tokens(self) -> int:
        return 0 if self._native is None else self._native.spared_tokens

    def share_prefixes(self, *, enabled: bool) -> None:
        if self._native is not None:
            self._native.shares_prefixes = enabled

    def shares_prefixes(self, shape: AttentionShape) -> bool:
        native = self.native_for(shape)
        return native is not None and native.shares_prefixes

    def describe(self) -> dict[str, str]:
        """The kernels in use, as short texts; linear kernels appear once a weight has been packed."""
        native = self._native
        kernels = f"torch ({self._why_not})" if native is None else f"native, panels of {native.panel_width}"
        linears = {f"linear_{str(dtype).removeprefix('torch.')}": name for dtype, (name, _) in self._packers.items()}
        slow = {} if native else {"warning": _SLOW % self._why_not}
        dot = {} if native is None else {"bf16_dot": "yes" if native.has_dot else "no"}
        return {"backend": self.name, "threads": str(self.num_threads), "kernels": kernels, **dot, **linears, **slow}

    def native_for(self, shape: AttentionShape) -> NativeKernels | None:
        """The compiled kernels if they have attention for this shape."""
        native = self._native_for(shape.dtype)
        if native is not None and shape.kv_dtype not in (None, torch.float8_e4m3fn, *SUPPORTED):
            self._warn_once(f"attention over a cache of {shape.kv_dtype} is not compiled; torch's is used, slower")
            return None
        return native

    def _native_for(self, dtype: torch.dtype) -> NativeKernels | None:
        return self._native if dtype in SUPPORTED else None

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        if weight.dtype not in self._packers:
            key = hashlib.sha256(f"{processor()} {torch.__version__} {self.describe()}".encode()).hexdigest()[:12]
            self._packers[weight.dtype] = choose_linear(self._native, weight.dtype, self.num_threads, key)
        return self._packers[weight.dtype][1](weight, bias)

    def pack_heads(self, weight: Tensor) -> HeadLinears:
        native = self._native_for(weight.dtype)
        if native is None:
            return self._torch.pack_heads(weight)
        return HeadByHead([native.pack_linear(head, None) for head in weight])

    def pack_quantized(
        self, weight: Tensor, bias: Tensor | None, scheme: Scheme, dtype: torch.dtype
    ) -> QuantizedLinear:
        native = self._native_for(dtype)
        if native is None:
            return self._torch.pack_quantized(weight, bias, scheme, dtype)
        return NativeQuantLinear(native, weight, bias, scheme, dtype)

    def pack_experts(
        self,
        experts: Iterable[tuple[Tensor, Tensor]],
        activation: Activation,
        dtype: torch.dtype,
        scheme: Scheme | None = None,
    ) -> Experts:
        native = self._native_for(dtype)
        if native is None:
            return self._torch.pack_experts(experts, activation, dtype, scheme)
        return NativeExperts(native, experts, activation, scheme, dtype)

    def choose_experts(self, logits: Tensor, correction: Tensor | None, choice: ExpertChoice) -> tuple[Tensor, Tensor]:
        native = self._native_for(logits.dtype)
        if native is None:
            return self._torch.choose_experts(logits, correction, choice)
        return choose_experts(native, logits, correction, choice)

    def embed(self, token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        native = self._native_for(table.dtype)
        if native is None or not (table.is_contiguous() and token_ids.is_contiguous()):
            return self._torch.embed(token_ids, table, scale)
        return native.embed(token_ids, table, scale)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        native = self._native_for(x.dtype)
        if native is None or weight.dtype not in SUPPORTED:
            return self._torch.rms_norm(x, weight, eps)
        return native.rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        native = self._native_for(x.dtype)
        if native is None or weight.dtype not in SUPPORTED or not residual.is_contiguous():
            return self._torch.add_rms_norm(x, residual, weight, eps)
        return native.rms_norm(x, residual, weight, eps), residual

    def rope(self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        native = self._native_for(q.dtype)
        if native is None or cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous():
            return self._torch.rope(q, k, cos_sin, positions)
        return native.rope(q, k, cos_sin, positions)

    def gated_activation(self, gate_up: Tensor, kind: Activation) -> Tensor:
        native = self._native_for(gate_up.dtype)
        return (native or self._torch).gated_activation(gate_up, kind)

    def store_kv(self, k: Tensor, v: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
        native = self._native
        as_it_is = k.dtype == kv_layer.dtype
        can_cast = k.dtype in SUPPORTED and kv_layer.dtype in KV_KINDS
        if native is None or not kv_layer.is_contiguous() or not (as_it_is or can_cast):
            self._torch.store_kv(k, v, kv_layer, slot_mapping)
        else:
            native.store_kv(k, v, kv_layer, slot_mapping)

    def norm_rope_store(self, q: Tensor, k: Tensor, v: Tensor, inputs: HeadInputs) -> Tensor:
        if self._native is None or not places(q, k, v, inputs):
            return super().norm_rope_store(q, k, v, inputs)
        return self._native.norm_rope_store(q, k, v, inputs)

    def plan(self, batch: AttentionBatch, shape: AttentionShape) -> NativePlan | ReferencePlan:
        native = self.native_for(shape)
        return (native or self._torch).plan(batch, shape)

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
        if isinstance(plan, ReferencePlan):
            return self._torch.attention(q, kv_layer, plan, scale=scale, window=window, softcap=softcap)
        assert self._native is not None and kv_layer.is_contiguous() and kv_layer.dtype in KV_KINDS
        return self._native.attention(q, kv_layer, plan, scale=scale, window=window, softcap=softcap)

    def store_latent(self, entries: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
        self._torch.store_latent(entries, kv_layer, slot_mapping)

    def latent_attention(
        self, q: Tensor, kv_layer: Tensor, plan: NativePlan | ReferencePlan, *, scale: float, latent_dim: int
    ) -> Tensor:
        if isinstance(plan, NativePlan):
            return self.attention(q, kv_layer, plan, scale=scale, window=None, softcap=None)[..., :latent_dim]
        return self._torch.latent_attention(q, kv_layer, plan, scale=scale, latent_dim=latent_dim)

    def widened(self, x: Tensor) -> Tensor:
        native = self._native
        if native is None or x.dtype != torch.bfloat16 or not x.is_contiguous():
            return self._torch.widened(x)
        return native.widened(x)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return (self._native or self._torch).sample(logits, batch)

    def sample_on_device(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return self.sample(logits, batch)
