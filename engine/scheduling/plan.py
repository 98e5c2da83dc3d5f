"""Step planning: which tokens of which sequences the next step computes. Pure.

A step is filled up to the token budget: sequences that decode first, then prompts that have begun, swapped sequences,
and new ones.
"""

import math
from dataclasses import dataclass, field

import msgspec

from kvrelay.engine.scheduling.admit import Admission
from kvrelay.engine.scheduling.blocks import BlockCopy, SequenceBlocks
from kvrelay.engine.scheduling.preempt import MeasuredSpeeds, Preemption
from kvrelay.engine.scheduling.sequence import Scheduled, Sequence, State
from kvrelay.engine.scheduling.waiting_queue import Queues
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.types import ITL_SHARE

MIN_PREFILL_CUT, MIN_PREFILL_TOKENS = 8, (28, 256)
"""Prompts get at least this part of a step's token budget, between so many tokens, and the time of a step without
prompts, whatever inter-token latency is wanted.
"""


class StepPlan(msgspec.Struct, frozen=True):
    """One step's work: single-token rows first, then those with drafts, then chunks.

    Before them, the copies, in order.
    """

    work: tuple[Scheduled, ...]
    num_single: int
    preempted: tuple[Sequence, ...]
    copies: tuple[BlockCopy, ...] = ()
    num_drafted: int = 0  # sequences with drafts

    @property
    def num_decode(self) -> int:
        """Sequences that decode."""
        return self.num_single + self.num_drafted

    @property
    def num_tokens(self) -> int:
        chunks = self.work[self.num_single :]
        return self.num_single + (sum(item.num_tokens for item in chunks) if chunks else 0)


@dataclass(slots=True)
class _Draft:
    """A plan in the making. budget: tokens that are left."""

    budget: int
    singles: list[Scheduled] = field(default_factory=list)
    chunks: list[Scheduled] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    def add(self, seq: Sequence) -> None:
        """Schedule as much of `seq` as the budget allows."""
        take = min(seq.num_uncomputed, self.budget)
        (self.singles if take == 1 else self.chunks).append(Scheduled(seq, seq.num_computed, take))
        self.budget -= take


class StepPlanner:
    """Plans the steps of one engine. Takes the blocks that a step needs; `Scheduler.advance` applies its tokens."""

    def __init__(
        self,
        queues: Queues,
        pool: BlockPool,
        admission: Admission,
        preemption: Preemption,
        blocks: SequenceBlocks,
        speeds: MeasuredSpeeds,
        *,
        token_budget: int,
    ) -> None:
        self._queues, self._pool, self._admission, self._preemption = queues, pool, admission, preemption
        self._blocks, self._speeds, self._token_budget = blocks, speeds, token_budget

    def plan(self) -> StepPlan:
        """Plan the next step of all sequences."""
        return self.plan_for(self._queues.running.copy())

    def plan_for(self, running: list[Sequence]) -> StepPlan:
        """Plan the next step of these running sequences, and of queued and swapped ones.

        Each other running sequence takes one token of the budget, and needs no block; the caller computes it by itself.
        """
        num_others = len(self._queues.running) - len(running)
        draft = _Draft(self._token_budget - num_others)
        self._blocks.copied()
        self._admission.return_ready()
        prompts = self._schedule_decodes(running, draft)
        if prompts or self._queues.waiting:
            draft.budget = min(draft.budget, self._itl_capped_tokens(num_others + len(draft.singles)))
        self._schedule_prompts(prompts, draft)
        if not draft.preempted:
            self._swap_in(draft)
        if not draft.preempted and not self._queues.swapped:
            self._admit(draft)
        return self._finished(draft)

    def _finished(self, draft: _Draft) -> StepPlan:
        singles, chunks, copies = draft.singles, draft.chunks, self._blocks.copies
        if draft.preempted:
            gone = set(map(id, draft.preempted))
            singles = [item for item in singles if id(item.seq) not in gone]
            chunks = [item for item in chunks if id(item.seq) not in gone]
            copies = [copy for copy in copies if id(copy.seq) not in gone]
        return StepPlan((*singles, *chunks), len(singles), tuple(draft.preempted), tuple(copies))

    # ---- running sequences

    def _schedule_decodes(self, running: list[Sequence], draft: _Draft) -> list[Sequence]:
        """Schedule sequences that lack one token, as far as the budget goes; returns the others. A hot loop."""
        is_running, work, singles, budget = State.RUNNING, Scheduled, draft.singles, draft.budget
        others: list[Sequence] = []
        for seq in running:
            start = seq.num_computed
            if len(seq.token_ids) - start != 1:
                others.append(seq)
            elif (
                budget > 0
                and seq.state is is_running
                and (start < seq.writable_until or self.ensure_block(seq, draft.preempted))
            ):
                singles.append(work(seq, start, 1))
                budget -= 1
        draft.budget = budget
        return others

    def _itl_capped_tokens(self, num_decoding: int) -> int:
        """Prompt tokens of a step after which sequences that decode still meet their wanted inter-token latency."""
        speed, budget = self._speeds.compute_tokens_per_s, self._token_budget
        target_s = min((seq.request.tpot_target_s or math.inf for seq in self._queues.running), default=math.inf)
        if not num_decoding or target_s == math.inf or not speed:
            return budget
        low, high = MIN_PREFILL_TOKENS
        least = max(self._speeds.decode_step_s * speed, low, min(budget // MIN_PREFILL_CUT, high))
        return int(max(ITL_SHARE * target_s * speed - num_decoding, least))

    def _schedule_prompts(self, prompts: list[Sequence], draft: _Draft) -> None:
        """Schedule the rest of prompts that have begun, in the order in which they were queued; a few may pass them."""
        queues, num_passing = self._queues, 0
        for seq in sorted(prompts, key=lambda one: (queues.waiting.may_pass(one), one.queue_rank)):
            if seq.num_uncomputed > 1 and not draft.preempted and not queues.swapped and queues.waiting.may_pass(seq):
                num_running = len(queues.running)
                self._admit(draft, before=seq)
                num_passing += len(queues.running) - num_running
            seq.num_passed += num_passing
            if draft.budget <= 0:
                continue
            if seq.state is State.RUNNING and seq.num_uncomputed and self._has_room(seq, draft.preempted):
                draft.add(seq)
                if seq.overdue_tokens:
                    seq.num_passed = 0  # it yields between any two of its chunks

    # ---- blocks

    def ensure_block(self, seq: Sequence, preempted: list[Sequence]) -> bool:
        """Have a block for the next token of `seq`, for itself. False if `seq` was preempted for that.

        Need not be asked again until that block is full: another sequence comes to share it only by a fork, and a
        running sequence keeps its blocks.
        """
        if not self._has_room(seq, preempted):
            return False
        seq.writable_until = (seq.num_computed // seq.block_size + 1) * seq.block_size
        return True

    def _has_room(self, seq: Sequence, preempted: list[Sequence]) -> bool:
        """Have blocks for every token of `seq`, the next one for itself. False if `seq` was preempted for that."""
        while (need := seq.blocks_for(len(seq.token_ids)) - len(seq.blocks)) > 0:
            fresh = self._pool.allocate(need)
            if fresh is not None:
                seq.blocks += fresh
            elif not self._preemption.make_room(seq, preempted):
                return False
        return self._own_next(seq, preempted)

    def _own_next(self, seq: Sequence, preempted: list[Sequence]) -> bool:
        while not self._blocks.try_own(seq):
            if not self._preemption.make_room(seq, preempted):
                return False
        return True

    # ---- swapped and waiting sequences

    def _swap_in(self, draft: _Draft) -> None:
        """Swapped sequences continue in order of arrival, all of them before new ones."""
        swapped, preemption = self._queues.swapped, self._preemption
        while draft.budget > 0 and swapped and self._admission.fits_running(seq := swapped[0]):
            cached = preemption.match_swapped(seq)
            if cached is None:
                swapped.popleft()
                preemption.recompute(seq)
                continue
            blocks = self._admission.take(seq, cached)
            if blocks is None:
                break
            swapped.popleft()
            seq.blocks = blocks
            preemption.swap_in(seq, len(cached))
            self._join(seq, draft)

    def _admit(self, draft: _Draft, before: Sequence | None = None) -> None:
        """Begin queued sequences while there is room. before: only those that go before this begun prompt."""
        while draft.budget > 0 and (seq := self._admission.admit_waiting(draft.chunks, before)) is not None:
            self._join(seq, draft)

    def _join(self, seq: Sequence, draft: _Draft) -> None:
        """`seq` has its blocks: it runs from now on."""
        seq.move_to(State.RUNNING)
        self._queues.join_batch(seq)
        has_own = self._own_next(seq, draft.preempted)
        assert has_own, "a block for the copy was left over"
        draft.add(seq)
