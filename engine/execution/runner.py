"""Runs a step plan on the model: metadata tensors in, logits out; and a step that is launched and not collected yet.

Where the device computes asynchronously (kernels/backend.py), the next step is planned and launched while it
works on this one; then this one's tokens are collected, which is the one wait of a step. While the scheduler plans
that next step, each sequence whose token is being drawn has a placeholder token: the number of tokens decides
everything that the scheduler decides. At any other time sequences hold only tokens that are known.
"""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvrelay.engine.execution.masks import WaitMasks
from kvrelay.engine.execution.sampler import WantedLogprobs
from kvrelay.engine.models.decoder import DecoderModel
from kvrelay.engine.scheduling.blocks import SequenceBlocks
from kvrelay.engine.scheduling.plan import StepPlan
from kvrelay.engine.scheduling.sequence import Scheduled, Sequence, State
from kvrelay.kernels.backend import AttentionBatch, Backend, GraphSpec, OnLayer, PendingTokens, TokenFeed
from kvrelay.kernels.common.sampling_search import to_device
from kvrelay.kvcache.memory.storage import KV_DTYPES
from kvrelay.types import KvLayout

_PLACEHOLDER = 0  # for a token that is being drawn; the device replaces it, and it is gone before it is read here


@dataclass(slots=True, eq=False)
class InFlightStep:
    """One launched step.

    rows: of `hidden`, from which tokens are drawn; seqs: the sequence of each row.
    pending: the tokens, and the log-probabilities wanted beside them; None: they are drawn when the step is collected,
    from `hidden`.
    """

    plan: StepPlan
    rows: list[int]
    seqs: list[Sequence]
    launched_s: float
    aside: SequenceBlocks
    hidden: Tensor | None = None
    pending: PendingTokens | None = None
    logprobs: WantedLogprobs = field(default_factory=lambda: WantedLogprobs([], []))
    wants_prompt_logprobs: bool = False
    masks: WaitMasks | None = None  # those of its constrained rows, if there are any
    _kept: list[int] = field(default_factory=list)  # keys for SequenceBlocks.unquarantine
    _placeholders: dict[int, int] = field(default_factory=dict)  # row by id(), of sequences with a placeholder token

    @property
    def is_wanted(self) -> bool:
        """Whether any of its sequences still runs."""
        return any(item.seq.state is State.RUNNING for item in self.plan.work)

    def keep(self, seq: Sequence) -> None:
        """`seq` is about to release its blocks: if the step computes it, they stay taken until `release_kept`."""
        if any(item.seq is seq for item in self.plan.work):
            self._kept.append(self.aside.keep(seq.blocks))

    def keep_blocks(self, blocks: Iterable[int]) -> None:
        """The step reads these blocks, which may have no other holder."""
        self._kept += [self.aside.keep((block,)) for block in blocks]

    def release_kept(self) -> None:
        """The device has done the step."""
        while self._kept:
            self.aside.unquarantine(self._kept.pop())

    @contextmanager
    def with_placeholders(self, is_last: Callable[[Sequence], bool]) -> Iterator[None]:
        """Meanwhile its sequences have a placeholder for the token that is being drawn, unless they end with it for
        certain.

        A sequence that ends with it has nothing to compute then, so the scheduler passes over it.
        """
        for row, seq in enumerate(self.seqs):
            if seq.state is State.RUNNING and not is_last(seq):
                self._placeholders[id(seq)] = row
                seq.token_ids.append(_PLACEHOLDER)
        try:
            yield
        finally:
            self.remove_placeholders()

    def remove_placeholders(self) -> None:
        """The end of `with_placeholders`, which may come early."""
        seqs = self.seqs
        for row in self._placeholders.values():
            seqs[row].token_ids.pop()
        self._placeholders.clear()

    def feed(self, plan: StepPlan) -> TokenFeed | None:
        """Where a step that is launched now finds the tokens of the placeholders. Those rows come first in its plan."""
        if self.pending is None or not self._placeholders:
            return None
        sources, row_of = np.full(plan.num_tokens, -1, dtype=np.int64), self._placeholders.get
        sources[: plan.num_single] = [row_of(id(item.seq), -1) for item in plan.work[: plan.num_single]]
        return TokenFeed(torch.from_numpy(sources), self.pending.tokens)


def sampled(plan: StepPlan) -> tuple[list[int], list[Sequence]]:
    """(row of its last token among the step's, sequence) of all whose end the step reaches, as two lists."""
    singles, chunks = plan.work[: plan.num_single], plan.work[plan.num_single :]
    seqs = [item.seq for item in singles if item.start + 1 == len(item.seq.token_ids)]
    rows = list(range(len(singles)))
    if len(seqs) < len(singles):  # the budget ended in the middle of one
        rows = [row for row, item in enumerate(singles) if item.samples]
    end = len(singles)
    for item in chunks:
        end += item.num_tokens
        if item.samples:
            rows += range(end - 1 - len(item.drafts), end)
            seqs += [item.seq] * (1 + len(item.drafts))
    return rows, seqs


def kv_layout(model: DecoderModel) -> KvLayout:
    """How KV of this model lies in blocks."""
    shape = model.attention_shape
    dtype = next(name for name, value in KV_DTYPES.items() if value is (shape.kv_dtype or shape.dtype))
    return KvLayout(
        model.spec.num_layers,
        1,
        shape.block_size,
        shape.num_kv_heads,
        shape.head_dim,
        dtype,
        order=shape.kv_layout,
        is_latent=shape.latent_dim is not None,
    )


class Runner:
    """One model on one device, with the block tables of the sequences that it is running."""

    def __init__(
        self,
        model: DecoderModel,
        backend: Backend,
        kv_layers: Rows[Tensor],
        *,
        block_size: int,
        max_running: int,
        max_blocks: int,
        max_tokens: int = 512,
    ) -> None:
        self._model, self._backend, self._kv_layers = model, backend, kv_layers
        self._device = backend.asynchronous
        self._block_size = block_size
        self._tables = np.zeros((max_running, max_blocks), dtype=np.int32)
        self._each = np.arange(max_running + 1, dtype=np.int32)  # read only
        self._free_rows = list(range(max_running - 1, -1, -1))
        self._spec = _graph_spec(model, max_blocks=max_blocks, max_running=max_running, max_tokens=max_tokens)
        self._graphs = backend.decode_graphs(self._spec)
        self._pieces = None if self._graphs is None else backend.piece_graphs(self._spec)

    def choose_kernels(self) -> None:
        """On a GPU, try attention kernels out for this model."""
        if self._pieces is not None:
            self._pieces.choose_kernels(self._spec.variants)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """On a GPU, choose kernels and capture steps now rather than in the first requests.

        No block may be in use yet.
        """
        self.choose_kernels()
        if self._graphs is not None:
            self._graphs.warm_up(self._forward)
        if self._pieces is not None:
            self._pieces.warm_up(self._forward)

    def forget(self, seq: Sequence) -> None:
        """Give back the sequence's row of the block table (it ended or was preempted)."""
        if seq.row >= 0:
            self._free_rows.append(seq.row)
            seq.row, seq.num_tabled_blocks = -1, 0

    def _rows(self, work: Rows[Scheduled]) -> list[int]:
        for item in work:
            seq = item.seq
            if seq.num_tabled_blocks != len(seq.blocks):
                self._table(seq)
        return [item.seq.row for item in work]

    def _table(self, seq: Sequence) -> None:
        """Write the blocks that it has come by into its row, which it has from now on."""
        if seq.row < 0:
            seq.row = self._free_rows.pop()
        written, seq.num_tabled_blocks = seq.num_tabled_blocks, len(seq.blocks)
        self._tables[seq.row, written : len(seq.blocks)] = seq.blocks[written:]

    def batch(self, plan: StepPlan) -> tuple[Tensor, AttentionBatch]:
        """Token ids [T] int64 and the attention metadata of a plan."""
        work = plan.work
        rows = np.array(self._rows(work), dtype=np.int64)
        if len(work) == plan.num_single:
            return self._decode_batch(work, rows)
        lengths = np.array([item.num_tokens for item in work], dtype=np.int32)
        starts = np.array([item.start for item in work], dtype=np.int32)
        contexts = starts + lengths
        query_starts = np.zeros(len(work) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        token_ids, positions = self._tokens(plan, query_starts)
        owner = np.repeat(rows, lengths)
        blocks = self._tables[owner, positions // self._block_size].astype(np.int64)
        slots = blocks * self._block_size + positions % self._block_size
        width = int(-(-contexts.max() // self._block_size))
        return torch.from_numpy(token_ids), AttentionBatch(
            query_starts=torch.from_numpy(query_starts),
            context_lens=torch.from_numpy(contexts),
            block_tables=torch.from_numpy(self._tables[rows, :width]),
            slot_mapping=torch.from_numpy(slots),
            positions=torch.from_numpy(positions),
            num_decode=plan.num_single,
            max_query_len=int(lengths.max()),
            max_context_len=int(contexts.max()),
        )

    def _decode_batch(self, work: Rows[Scheduled], rows: np.ndarray) -> tuple[Tensor, AttentionBatch]:
        """`batch` of sequences with one token each; rows: theirs in the block tables."""
        token_ids = np.array([item.seq.token_ids[item.start] for item in work], dtype=np.int64)
        positions = np.array([item.start for item in work], dtype=np.int64)
        contexts = (positions + 1).astype(np.int32)
        longest = int(contexts.max())
        in_block, offsets = np.divmod(positions, self._block_size)
        tables = self._tables[rows, : -(-longest // self._block_size)]
        slots = tables[self._each[: len(work)], in_block].astype(np.int64) * self._block_size + offsets
        return torch.from_numpy(token_ids), AttentionBatch(
            query_starts=torch.from_numpy(self._each[: len(work) + 1]),
            context_lens=torch.from_numpy(contexts),
            block_tables=torch.from_numpy(tables),
            slot_mapping=torch.from_numpy(slots),
            positions=torch.from_numpy(positions),
            num_decode=len(work),
            max_query_len=1,
            max_context_len=longest,
        )

    @staticmethod
    def _tokens(plan: StepPlan, query_starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        token_ids = np.empty(int(query_starts[-1]), dtype=np.int64)
        positions = np.empty(int(query_starts[-1]), dtype=np.int64)
        end = plan.num_single
        singles = plan.work[:end]
        token_ids[:end] = [item.seq.token_ids[item.start] for item in singles]
        positions[:end] = [item.start for item in singles]
        for item in plan.work[end:]:
            begin, end = end, end + item.num_tokens
            known = end - len(item.drafts)
            token_ids[begin:known] = item.seq.token_ids[item.start : item.start + known - begin]
            token_ids[known:end] = item.drafts
            positions[begin:end] = np.arange(item.start, item.start + item.num_tokens)
        return token_ids, positions

    @torch.inference_mode()
    def run(
        self,
        plan: StepPlan,
        on_layer: OnLayer | None = None,
        before_layer: OnLayer | None = None,
        feed: TokenFeed | None = None,
    ) -> Tensor:
        """Compute the plan's tokens, writing their KV; returns hidden states [T, hidden]. feed: tokens not known here.

        `before_layer` may wait for KV of that layer that is still on its way, `on_layer` hears when a layer is done.
        """
        if before_layer is not None:
            before_layer(0)
            on_layer = _then(on_layer, before_layer, len(self._kv_layers))
        token_ids, batch = self.batch(plan)
        if self._device is not None:
            token_ids = self._device.place(token_ids, feed)
        if self._model.reserve_positions(batch.max_context_len) and self._graphs is not None:
            self._graphs.reset()
            if self._pieces is not None:
                self._pieces.reset()
        graphs = self._graphs
        if graphs is not None and (on_layer is None or graphs.with_layers) and graphs.fits(batch):
            return graphs.run(token_ids, batch, self._forward, on_layer)
        if self._pieces is not None and self._pieces.fits(batch):
            return self._pieces.run(token_ids, batch, self._forward, on_layer)
        attention_plan = self._backend.plan(batch, self._model.attention_shape)
        return self._forward(token_ids.to(self._backend.device), batch, attention_plan, on_layer)

    def _forward(self, token_ids: Tensor, batch: AttentionBatch, plan: Any, on_layer: OnLayer | None = None) -> Tensor:
        return self._model.forward(token_ids, batch, plan, self._kv_layers, on_layer)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, rows: Rows[int]) -> Tensor:
        """Float32 logits [R, vocab] of some rows of the step's hidden states."""
        if len(rows) == hidden.shape[0]:
            known = self._graphs.logits_of(hidden) if self._graphs is not None else None
            return self._model.logits(hidden) if known is None else known
        return self._model.logits(hidden[to_device(torch.tensor(rows, dtype=torch.int64), hidden.device)])


def _then(on_layer: OnLayer | None, before_layer: OnLayer, num_layers: int) -> OnLayer:
    """Both, at the seam between two layers."""

    def at_seam(layer: int) -> None:
        if on_layer is not None:
            on_layer(layer)
        if layer + 1 < num_layers:
            before_layer(layer + 1)

    return at_seam


def _graph_spec(model: DecoderModel, *, max_blocks: int, max_running: int, max_tokens: int) -> GraphSpec:
    spec = model.spec
    return GraphSpec(
        shape=model.attention_shape,
        dtype=model.dtype,
        variants={(spec.query_scale, window, spec.attention_softcap) for window in spec.layer_windows},
        num_full_layers=sum(window is None for window in spec.layer_windows),
        expert_sizes=None if spec.experts is None else (spec.hidden_size, spec.experts.ffn_size),
        max_blocks=max_blocks,
        max_running=max_running,
        max_tokens=max_tokens,
        head=model.logits,
        reserve_positions=model.reserve_positions,
    )
