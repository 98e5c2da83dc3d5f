"""The CPU kernels in torch alone: without a compiler, for float16, or with KVRELAY_NATIVE=0.

Same results as the reference up to rounding; faster where torch has a fused kernel.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kvrelay.kernels.backend import SamplingBatch
from kvrelay.kernels.common import sampling_search
from kvrelay.kernels.common.sampling_search import SettingsCache
from kvrelay.kernels.oracle.reference import ReferenceBackend, ReferencePlan, attend, causal_mask, gather_kv


class TorchCpuBackend(ReferenceBackend):
    """Reference arithmetic with scaled_dot_product_attention for prompts."""

    name = "cpu"

    def __init__(self) -> None:
        super().__init__("cpu")
        self._settings = SettingsCache(self.device)

    def attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        plan: ReferencePlan,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        for sequence in plan.sequences:
            rows = slice(sequence.start, sequence.end)
            k, v = (x.to(q.dtype) for x in gather_kv(kv_layer, sequence))
            mask = causal_mask(sequence.end - sequence.start, sequence.context_len, window, q.device)
            if softcap is None:
                out[rows] = _sdpa(q[rows], k, v, mask, scale)
            else:
                out[rows] = attend(q[rows], k, v, mask, scale=scale, softcap=softcap).to(q.dtype)
        return out

    def sample_on_device(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        settings = self._settings.of(batch)
        if settings.has_top_k or settings.has_top_p:  # a sort takes longer than the search
            return sampling_search.draw(logits, settings, batch.uniform)
        return super().sample_on_device(logits, batch)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """torch's fused attention of q [Q, heads, d] over k, v [C, kv_heads, d]; mask [Q, C] is bottom-right causal."""
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))  # heads first
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)
