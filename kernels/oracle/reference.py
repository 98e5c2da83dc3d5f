"""Every kernel in plain torch, written for clarity; any device, any float dtype.

The other backends are compared with this one. It imports no compiled code and no FlashInfer.
"""

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvrelay import fp8
from kvrelay.kernels.backend import (
    Activation,
    AsyncDevice,
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
    PieceGraphs,
    QuantizedLinear,
    SamplingBatch,
)
from kvrelay.kernels.common.experts import ExpertLoop, choose_experts
from kvrelay.kernels.common.quant_scheme import ExpertChoice, Scheme, WeightError
from kvrelay.kernels.common.quantized import TorchQuantLinear
from kvrelay.kernels.common.stored_weights import AnyWeight, StoredWeight, dequantised, plain_weight
from kvrelay.kernels.common.token_masks import token_masks_of

logger = logging.getLogger(__name__)


class ReferenceLinear:
    """A weight [out, in] as given."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.out_features = weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class ReferenceHeadLinears:
    """Weights [heads, out, in] as given."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty((*x.shape[:2], self.weight.shape[1]), dtype=x.dtype, device=x.device)
        torch.bmm(x.transpose(0, 1), self.weight.transpose(1, 2), out=out.transpose(0, 1))
        return out


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """One sequence's part of a step: its rows, its context, and its blocks."""

    start: int
    end: int
    context_len: int
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    sequences: tuple[SequencePlan, ...]
    block_size: int


def causal_mask(num_queries: int, context_len: int, window: int | None, device: torch.device) -> Tensor:
    """[num_queries, context_len] bool, True where the query attends; queries are the context's last tokens."""
    query = torch.arange(context_len - num_queries, context_len, device=device).unsqueeze(1)
    key = torch.arange(context_len, device=device).unsqueeze(0)
    mask = key <= query
    return mask if window is None else mask & (key > query - window)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float, softcap: float | None) -> Tensor:
    """Softmax attention in float32: q [Q, heads, d] over k, v [C, kv_heads, d] -> [Q, heads, d] float32."""
    group = q.shape[1] // k.shape[1]
    k = k.float().repeat_interleave(group, dim=1)
    v = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,chd->hqc", q.float(), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    probs = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqc,chd->qhd", probs, v)


class TorchBackend:
    """What each backend does in plain torch unless it has something of its own. It captures nothing and does not return
    early.
    """

    kv_layouts: tuple[KvOrder, ...] = ("NHD", "HND")

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._warned: set[str] = set()

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)

    @property
    def asynchronous(self) -> AsyncDevice | None:
        return None

    def packing_of(self, dtype: torch.dtype) -> str | None:
        return None

    def packing(self, weights: PackedWeights) -> AbstractContextManager[None]:
        raise NotImplementedError

    def decode_graphs(self, spec: GraphSpec) -> DecodeGraphs | None:
        return None

    def piece_graphs(self, spec: GraphSpec) -> PieceGraphs | None:
        return None

    def free_device_bytes(self) -> int | None:
        if self.device.type != "cuda":
            return None
        torch.cuda.empty_cache()  # what loading the weights left behind
        return torch.cuda.mem_get_info(self.device)[0]

    @property
    def compiled_kernels(self) -> Any:
        return None

    def is_batch_invariant(self, dtype: torch.dtype) -> bool:
        return False

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return ReferenceLinear(weight.to(self.device), None if bias is None else bias.to(self.device))

    def pack_heads(self, weight: Tensor) -> HeadLinears:
        return ReferenceHeadLinears(weight.to(self.device))

    def pack_stored(self, weight: StoredWeight, bias: Tensor | None, dtype: torch.dtype) -> tuple[Linear, WeightError]:
        plain, error = dequantised(weight, dtype)
        return self.pack_linear(plain, bias), error

    def choose_experts(self, logits: Tensor, correction: Tensor | None, choice: ExpertChoice) -> tuple[Tensor, Tensor]:
        return choose_experts(logits, correction, choice)

    def embed(self, token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        rows = F.embedding(token_ids.to(table.device), table)
        return rows if scale == 1.0 else rows * scale

    def widened(self, x: Tensor) -> Tensor:
        return x.float()

    def norm_rope_store(self: Any, q: Tensor, k: Tensor, v: Tensor, inputs: HeadInputs) -> Tensor:
        if inputs.norms is not None:
            q, k = (self.rms_norm(x, norm, inputs.eps) for x, norm in zip((q, k), inputs.norms, strict=True))
        q, k = self.rope(q, k, inputs.cos_sin, inputs.positions)
        self.store_kv(k, v, inputs.kv_layer, inputs.slot_mapping)
        return q

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return self.sample_on_device(logits, batch).cpu()

    def sample_on_device(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return draw(logits, batch)


class ReferenceBackend(TorchBackend):
    """Plain torch on one device. Backend's methods make it large."""

    name = "reference"

    @property
    def cascade_saved_tokens(self) -> int:
        return 0

    def shares_prefixes(self, shape: AttentionShape) -> bool:
        return False

    def describe(self) -> dict[str, str]:
        """Name and device."""
        return {"backend": self.name, "device": str(self.device)}

    def pack_quantized(
        self, weight: Tensor, bias: Tensor | None, scheme: Scheme, dtype: torch.dtype
    ) -> QuantizedLinear:
        return TorchQuantLinear(weight.to(self.device), None if bias is None else bias.to(self.device), scheme)

    def pack_experts(
        self,
        experts: Iterable[tuple[AnyWeight, AnyWeight]],
        activation: Activation,
        dtype: torch.dtype,
        scheme: Scheme | None = None,
    ) -> Experts:
        errors: list[WeightError] = []

        def pack(weight: AnyWeight) -> Linear:
            if scheme is not None:
                quantized = self.pack_quantized(plain_weight(weight), None, scheme, dtype)
                errors.append(quantized.error)
                return quantized
            if isinstance(weight, Tensor):
                return self.pack_linear(weight)
            linear, error = self.pack_stored(weight, None, dtype)
            errors.append(error)
            return linear

        pairs = [(pack(gate_up), pack(down)) for gate_up, down in experts]
        return ExpertLoop(pairs, lambda x: self.gated_activation(x, activation), sum(errors, WeightError()))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return (normed * weight.float()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rope(self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        table = cos_sin[positions.to(cos_sin.device)].unsqueeze(1)
        cos, sin = table.chunk(2, dim=-1)
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def gated_activation(self, gate_up: Tensor, kind: Activation) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        acted = F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")
        return (acted * up).to(gate_up.dtype)

    def store_kv(self, k: Tensor, v: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
        block_size = kv_layer.shape[2]
        slots = slot_mapping.to(kv_layer.device)
        block, offset = slots // block_size, slots % block_size
        for part, vectors in enumerate((k, v)):
            kv_layer[block, part, offset] = fp8.stored(vectors, kv_layer.dtype)

    def plan(self, batch: AttentionBatch, shape: AttentionShape) -> ReferencePlan:
        """Split the batch into sequences, each with the block ids that its context fills."""
        starts, tables = batch.query_starts.tolist(), batch.block_tables.to(device=self.device, dtype=torch.int64)
        sequences = tuple(
            SequencePlan(starts[s], starts[s + 1], context, tables[s, : -(-context // shape.block_size)])
            for s, context in enumerate(batch.context_lens.tolist())
        )
        return ReferencePlan(sequences, shape.block_size)

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
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for sequence in plan.sequences:
            rows = slice(sequence.start, sequence.end)
            mask = causal_mask(sequence.end - sequence.start, sequence.context_len, window, q.device)
            blocks = fp8.loaded(kv_layer[sequence.blocks])
            k, v = (blocks[:, part].flatten(0, 1)[: sequence.context_len] for part in (0, 1))
            out[rows] = self._attend(q[rows], k, v, mask, scale=scale, softcap=softcap).to(q.dtype)
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float, softcap: float | None) -> Tensor:
        """One sequence's attention, in any float dtype."""
        return attend(q, k, v, mask, scale=scale, softcap=softcap)

    def store_latent(self, latents: Tensor, keys: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
        block_size, entries = kv_layer.shape[2], torch.cat((latents, keys), dim=-1)
        slots = slot_mapping.to(kv_layer.device)
        kv_layer[slots // block_size, 0, slots % block_size, 0] = fp8.stored(entries, kv_layer.dtype)

    def latent_attention(
        self, q: Tensor, q_rotary: Tensor, kv_layer: Tensor, plan: ReferencePlan, *, scale: float
    ) -> Tensor:
        out, q = torch.empty_like(q), torch.cat((q, q_rotary), dim=-1)
        for sequence in plan.sequences:
            rows = slice(sequence.start, sequence.end)
            mask = causal_mask(sequence.end - sequence.start, sequence.context_len, None, q.device).unsqueeze(1)
            entries = kv_layer[sequence.blocks, 0, :, 0].flatten(0, 1)[: sequence.context_len]
            entries = fp8.loaded(entries).float()
            scores = q[rows].float() @ entries.T * scale  # [Q, heads, context]
            probs = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
            out[rows] = (probs @ entries[:, : out.shape[-1]]).to(q.dtype)
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim] rotated by cos, sin [T, 1, rotary_dim/2] in float32."""
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), dim=-1)


# ---- sampling: the rule that every backend's sampler follows; sorts the vocabulary, `sampling_search` does not


def _keep_top_k(scaled: Tensor, top_k: Tensor) -> Tensor:
    """Mask of [R, V]: at least the k-th largest value of its row; k <= 0 or >= V keeps all."""
    vocab = scaled.shape[1]
    k = torch.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    ordered = scaled.sort(dim=1, descending=True).values
    return scaled >= ordered.gather(1, (k - 1).unsqueeze(1))


def _keep_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    """Mask of [R, V]: the most likely tokens until their sum reaches top_p; equal ones, lowest id first."""
    ordered, ids = probs.sort(dim=1, descending=True, stable=True)
    before = ordered.cumsum(dim=1) - ordered
    keep = (before < top_p.unsqueeze(1)) | (top_p >= 1.0).unsqueeze(1)
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter(1, ids, keep)


def filtered_weights(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Unnormalised float64 probabilities [R, V] after temperature, top-k, top-p and min-p; rows of temperature 0 too.

    A row of temperature 0 is treated as temperature 1.
    """
    device = logits.device
    temperature = torch.where(batch.temperature > 0, batch.temperature, 1.0).double()
    scaled = logits.double() / temperature.to(device).unsqueeze(1)
    if bool((batch.top_k > 0).any()):
        scaled = scaled.masked_fill(~_keep_top_k(scaled, batch.top_k.to(device)), float("-inf"))
    probs = scaled.softmax(dim=1)
    if bool((batch.top_p < 1).any()):
        probs = probs * _keep_top_p(probs, batch.top_p.double().to(device))
    if bool((batch.min_p > 0).any()):
        floor = batch.min_p.double().to(device).unsqueeze(1) * probs.amax(dim=1, keepdim=True)
        probs = probs * (probs >= floor)
    return probs


def draw(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """One token id per row of logits [R, V] -> [R] int64 on logits' device.

    The token is the first id, in id order, whose cumulative weight exceeds uniform * total.
    """
    device, masks = logits.device, token_masks_of(batch, logits) if batch.masks is not None else None
    logits = logits if masks is None else masks.applied(logits)
    greedy = logits.argmax(dim=1)  # the first of equal maxima, as torch documents
    if bool((batch.temperature <= 0).all()):
        return greedy
    weights = filtered_weights(logits, batch)
    cumulative = weights.cumsum(dim=1)
    target = batch.uniform.to(device).unsqueeze(1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    last_kept = (weights.shape[1] - 1) - (weights > 0).flip(1).int().argmax(dim=1)
    return torch.where((batch.temperature > 0).to(device), torch.minimum(drawn, last_kept), greedy)
