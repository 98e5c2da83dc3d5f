"""The interface of all kernels, which the backends `reference`, `cpu` and `cuda` implement.

Tensors live on `device`. T = tokens in this step, S = sequences in this step. A layer's cache is
[num_blocks, 2, block_size, num_kv_heads, head_dim]: keys at index 0, values at index 1. It is contiguous where
kv_layout is "NHD"; where it is "HND" heads stand before tokens in memory, and the cache is a transposed view.
A cache of fp8 (kv_dtype torch.float8_e4m3fn) is uint8 with a last dimension of head_dim + 4: see kvrelay/fp8.py.
The cache of latent attention (MLA) is [num_blocks, 1, block_size, 1, head_dim]: per token the latent, then the key's
rotary part, which all query heads share.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from kvrelay.kernels.common.quant_scheme import ExpertChoice, Scheme, WeightError
from kvrelay.kernels.common.stored_weights import AnyWeight, StoredWeight

Activation = Literal["silu", "gelu_tanh"]
KvOrder = Literal["NHD", "HND"]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The shape of a model's attention layers.

    latent_dim: size of the latent within a cache entry's head_dim numbers (MLA); None for other attention.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_layout: KvOrder = "NHD"
    kv_dtype: torch.dtype | None = None  # of the cache; None: dtype
    latent_dim: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which tokens of this step attend to which blocks. Metadata tensors are on the CPU.

    Sequence s owns tokens query_starts[s] : query_starts[s+1]; they are the last of its
    context_lens[s] tokens (this step's included) and attend causally. The first `num_decode`
    sequences have exactly one token each.

    query_starts: [S+1] int32. context_lens: [S] int32. block_tables: [S, max_blocks] int32,
    zero-padded. slot_mapping: [T] int64 = block_id * block_size + offset. positions: [T] int64.
    """

    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    positions: Tensor
    num_decode: int
    max_query_len: int
    max_context_len: int


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """One row per token to sample; CPU tensors. Penalties and bias are already in the logits.

    temperature: [R] float32, 0 = greedy. top_k: [R] int64, 0 = all. top_p, min_p: [R] float32.
    uniform: [R] float64 in [0, 1): the row's one random number. The token is the inverse CDF at it,
    so equal (logits, uniform) give equal tokens on every backend up to rounding.
    masks: [K, ceil(vocab / 32)] int32, bit b of word w is set where token 32 w + b is allowed; others count as -inf
    before all filters and are never drawn. mask_rows: [R] int32, each row's of `masks`; -1: all are allowed. Where no
    allowed logit is a number above -inf, the lowest allowed id is drawn; a mask without a bit gives any id.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor
    masks: Tensor | None = None
    mask_rows: Tensor | None = None


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """Arguments of Backend.norm_rope_store beside q, k and v.

    norms: weights [head_dim] of queries and of keys, or None. The rest: see Backend.rope and Backend.store_kv.
    """

    norms: tuple[Tensor, Tensor] | None
    eps: float
    cos_sin: Tensor
    positions: Tensor
    kv_layer: Tensor
    slot_mapping: Tensor


class Linear(Protocol):
    """A packed weight. Calling it with [T, in] gives [T, out] in the same dtype."""

    out_features: int

    def __call__(self, x: Tensor) -> Tensor: ...


class QuantizedLinear(Linear, Protocol):
    """A quantised weight as a Linear."""

    error: WeightError


class HeadLinears(Protocol):
    """A packed weight for each head. Calling it with [T, heads, in] gives [T, heads, out] in the same dtype."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Experts(Protocol):
    """A layer's packed experts, each a gated MLP.

    Calling it with x [T, H], and each token's weights [T, k] float32 and experts [T, k] int64, gives [T, H] in x's
    dtype: the weighted sum of the experts' outputs. base [T, H] is added, times the sigmoid of base_logits [T, 1]
    float32 if given. Sums are in float32.
    """

    @property
    def error(self) -> WeightError: ...  # of quantised weights

    def __call__(
        self, x: Tensor, weights: Tensor, chosen: Tensor, base: Tensor | None = None, base_logits: Tensor | None = None
    ) -> Tensor: ...


Facts = dict[str, Any]
"""What a kernel needs of a packed weight besides its bytes, as JSON has it."""


class PackedWeights(Protocol):
    """Where a backend places what it packs, in the order in which it packs it."""

    def place(self, num_bytes: int, fill: Callable[[Tensor], Facts]) -> tuple[Tensor, Facts]:
        """The next weight, uint8 [num_bytes], and its facts. `fill` packs it, where it is not there already."""


OnLayer = Callable[[int], None]
"""Called with a layer's number when its cache writes and compute have been issued."""


class ModelForward(Protocol):
    """(token ids, batch, attention plan) -> hidden states."""

    def __call__(
        self, token_ids: Tensor, batch: AttentionBatch, plan: Any, on_layer: OnLayer | None = None, /
    ) -> Tensor: ...


AttentionVariant = tuple[float, int | None, float | None]
"""Scale, window, softcap."""


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """A model whose steps may be captured.

    Args:
        shape, dtype: of its attention layers and its activations.
        variants: of attention that its layers ask for; num_full_layers: layers without a window.
        expert_sizes: (hidden size, size of an expert's MLP) of a model with experts, else None.
        max_blocks, max_running, max_tokens: of a sequence, of a step's sequences, and of a step's tokens.
        head: logits of hidden states.
        reserve_positions: grows the table of rotary positions, which captures read, to so many tokens at once.
    """

    shape: AttentionShape
    dtype: torch.dtype
    variants: Collection[AttentionVariant]
    num_full_layers: int
    expert_sizes: tuple[int, int] | None
    max_blocks: int
    max_running: int
    max_tokens: int
    head: Callable[[Tensor], Tensor]
    reserve_positions: Callable[[int], object]


class StepGraphs(Protocol):
    """Captured steps of one model."""

    @property
    def has_captures(self) -> bool: ...

    def fits(self, batch: AttentionBatch) -> bool:
        """Whether this batch can be run so."""

    def warm_up(self, forward: ModelForward) -> None:
        """Capture now what would be captured in the first requests. No block may be in use yet."""

    def reset(self) -> None:
        """Drop all captures: something that they read has moved."""


class DecodeGraphs(StepGraphs, Protocol):
    """Captured decode steps, or steps of any kind.

    with_layers: whether `run` calls `on_layer`.
    """

    with_layers: bool

    def run(
        self, token_ids: Tensor, batch: AttentionBatch, forward: ModelForward, on_layer: OnLayer | None = None
    ) -> Tensor:
        """Hidden states of a batch that fits; captures what is not captured yet. The next run overwrites them."""

    def logits_of(self, hidden: Tensor) -> Tensor | None:
        """Logits of all rows of the last run's result, where the capture has computed them."""


class PieceGraphs(StepGraphs, Protocol):
    """Captured pieces, between the attention calls, of steps with prompts."""

    def choose_kernels(self, variants: Collection[AttentionVariant]) -> None:
        """Try attention kernels out for these variants."""

    def run(
        self, token_ids: Tensor, batch: AttentionBatch, forward: ModelForward, on_layer: OnLayer | None = None
    ) -> Tensor: ...


# ---- devices whose calls return early: the engine launches a step before it has the last step's tokens


class PendingTokens(Protocol):
    """Sampled tokens that the device may still be computing.

    tokens: [R] int64 on the device, for work that is launched later; the host does not read it.
    packed: on the host after `wait`, see `packed_log_probabilities`; None: none were asked for.
    """

    tokens: Tensor
    packed: Tensor | None

    def wait(self) -> list[int]:
        """Block until the device has sampled the tokens; all work launched before them is done then, too."""


@dataclass(frozen=True, slots=True)
class TokenFeed:
    """Input tokens of a step that the host does not have yet.

    sources: [T] int64 on the CPU, the index into `tokens` of each of the step's tokens; -1: the host has the token.
    tokens: [R] int64 on the device.
    """

    sources: Tensor
    tokens: Tensor


class AsyncDevice(Protocol):
    """A device that runs work in launch order while the host continues."""

    def pending(
        self, tokens: Tensor, logits: Tensor | None = None, rows: Sequence[int] = (), most: int = 0
    ) -> PendingTokens:
        """Start copying the tokens of `sample_on_device` to the host, and the log-probabilities of `rows` under float32
        logits [R, vocab] beside those of the `most` likeliest tokens.
        """

    def place(self, token_ids: Tensor, feed: TokenFeed | None) -> Tensor:
        """A step's token ids [T] int64 on the device, with placeholders replaced from `feed`. Does not wait."""


class Backend(Protocol):
    """Kernels of one device. Stateless but for workspaces; one per engine thread. A method per kernel."""

    name: str
    device: torch.device
    kv_layouts: tuple[KvOrder, ...]  # cache layouts that its kernels support

    @property
    def asynchronous(self) -> AsyncDevice | None:
        """What a device offers whose calls return before they are computed; None: they return when they are."""

    def decode_graphs(self, spec: GraphSpec) -> DecodeGraphs | None:
        """Captures of this model's decode steps; None: they are not captured."""

    def piece_graphs(self, spec: GraphSpec) -> PieceGraphs | None:
        """Captures of this model's steps with prompts, where decode steps are captured; None: they are not."""

    @property
    def cascade_saved_tokens(self) -> int:
        """Tokens of KV that decode rows did not read again as another row of their step had read them, in a layer
        without a window; since the start.
        """

    def shares_prefixes(self, shape: AttentionShape) -> bool:
        """Whether decode rows of this shape read common blocks once, where that pays (cascade attention)."""

    def free_device_bytes(self) -> int | None:
        """Bytes that are free in the device's own memory; None: it computes in the host's."""

    @property
    def compiled_kernels(self) -> Any:
        """An object whose `lib` has the compiled kernels as functions, for profilers to wrap; None: there are none."""

    def is_batch_invariant(self, dtype: torch.dtype) -> bool:
        """Whether a row's bits do not depend on the rest of its batch, for weights of `dtype`."""

    def packing_of(self, dtype: torch.dtype) -> str | None:
        """Names what packed weights for products in `dtype` depend on: equal names, equal bytes. None: they cannot be
        placed elsewhere.
        """

    def packing(self, weights: PackedWeights) -> AbstractContextManager[None]:
        """Place all that is packed inside in `weights`. Unpacked weights may be on the meta device if all is there."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Pack weight [out, in] (and bias [out]) for fast products; may copy and reorder."""

    def pack_heads(self, weight: Tensor) -> HeadLinears:
        """Pack weights [heads, out, in], one per head."""

    def pack_quantized(
        self, weight: Tensor, bias: Tensor | None, scheme: Scheme, dtype: torch.dtype
    ) -> QuantizedLinear:
        """Quantise weight [out, in], of any floating type, by `scheme`, for products in `dtype`."""

    def pack_stored(self, weight: StoredWeight, bias: Tensor | None, dtype: torch.dtype) -> tuple[Linear, WeightError]:
        """Pack a quantised weight of a checkpoint for products in `dtype`: as it is where there is a product with it,
        else restored. With its error against `weight.restored()`.
        """

    def pack_experts(
        self,
        experts: Iterable[tuple[AnyWeight, AnyWeight]],
        activation: Activation,
        dtype: torch.dtype,
        scheme: Scheme | None = None,
    ) -> Experts:
        """Pack experts, in order, each as (gate and up stacked [2 F, H], down [H, F]), for products in `dtype`.

        The iterable is consumed one expert at a time, so that only one unpacked expert is in memory. scheme: quantise;
        None: tensors are of `dtype`, and quantised weights are packed as by pack_stored.
        """

    def choose_experts(self, logits: Tensor, correction: Tensor | None, choice: ExpertChoice) -> tuple[Tensor, Tensor]:
        """(weights [T, k] float32, experts [T, k] int64, best first) from the router's logits [T, num_experts] float32.

        correction: [num_experts] float32, added to the scores for the choice, not for the weights.
        """

    def embed(self, token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        """Rows of table [vocab, hidden] at token_ids [T] int64, times scale -> [T, hidden]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x * rsqrt(mean(x^2) + eps) * weight over the last dim, in float32, cast back to x.dtype.

        `weight` may be float32 while x is not (Gemma's 1 + w is folded in at load). x may have any
        leading shape (QK norm passes [T, heads, head_dim]).
        """

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual); may work in place on both inputs."""

    def rope(self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate (half-split, NeoX style) q [T, heads, head_dim] and k [T, kv_heads, head_dim].

        cos_sin: [max_positions, rotary_dim] float32, cosines then sines (rotary_dim/2 each);
        dims past rotary_dim pass through. May work in place. positions and store_kv's slot_mapping are the planned
        batch's own CPU tensors; a backend elsewhere moves them, once per step.
        """

    def gated_activation(self, gate_up: Tensor, kind: Activation) -> Tensor:
        """act(gate) * up, for gate_up [T, 2F] = gate then up -> [T, F]."""

    def store_kv(self, k: Tensor, v: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
        """Scatter k, v [T, kv_heads, head_dim] into the layer's cache at slot_mapping [T] int64, in place."""

    def norm_rope_store(self, q: Tensor, k: Tensor, v: Tensor, inputs: HeadInputs) -> Tensor:
        """Norms of queries and keys, rotation, and the cache write; returns the queries for `attention`.

        Equals rms_norm, rope and store_kv one after the other, to the bit. May work in place on q and k.
        """

    def plan(self, batch: AttentionBatch, shape: AttentionShape) -> Any:
        """The input of `attention`, computed once per step (device copies, schedules)."""

    def attention(
        self, q: Tensor, kv_layer: Tensor, plan: Any, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Causal paged attention of q [T, heads, head_dim] over the blocks of `plan` -> same shape.

        window: a token attends to itself and the window-1 tokens before it (Hugging Face's sliding_window).
        softcap: scores become softcap * tanh(scores / softcap).
        """

    def store_latent(self, latents: Tensor, keys: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
        """Scatter latents [T, latent_dim] beside rotary keys [T, rest of head_dim] into a latent layer's cache at
        slot_mapping [T] int64, in place.
        """

    def latent_attention(self, q: Tensor, q_rotary: Tensor, kv_layer: Tensor, plan: Any, *, scale: float) -> Tensor:
        """Causal paged attention of absorbed queries over cache entries, whose latents are the values.

        q: [T, heads, latent_dim], q_rotary: [T, heads, rest of head_dim] -> [T, heads, latent_dim].
        Source: DeepSeek-V2 (2024), section 2.1, with the up-projections absorbed.
        """

    def widened(self, x: Tensor) -> Tensor:
        """x as float32, exactly: logits before sampling. May be x itself."""

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """Sample one token id per row of float32 logits [R, vocab] -> [R] int64 on the CPU.

        Order of filters: masks, temperature, top-k, top-p, min-p (Hugging Face's and vLLM's); ties at the
        k-th value all stay. temperature 0: argmax, lowest id first.

        Raises:
            ValueError: the masks' shapes or types are others, or a row's mask is not among them.
        """

    def sample_on_device(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """`sample` with its result [R] int64 on the device; does not wait for it.

        Settings are cached by tensor identity: a caller that passes the same temperature, top_k, top_p and min_p
        tensors again must not have changed them. `uniform` may differ each time.
        """
