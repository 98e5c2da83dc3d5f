"""Adds drafted tokens to a step's plan and records how many were accepted. No torch.

Connects `speculation.py` and `speculation_model.py`, which decide what pays, with the engine. A drafted token takes a
row of the step and a slot of the sequence's blocks; wrong ones are overwritten by the next step. Drafts never preempt.
"""

from collections.abc import Collection
from collections.abc import Sequence as Rows
from typing import Any, Protocol

import numpy as np

from kvrelay.engine.scheduling.headroom import OutputLengths
from kvrelay.engine.scheduling.plan import Scheduled, StepPlan
from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.engine.speculation.draft_choice import DraftCandidate, Pass
from kvrelay.engine.speculation.speculation import Acceptance, PromptLookup, Speculation
from kvrelay.engine.speculation.speculation_model import ModelSpeculation
from kvrelay.kvcache.pool.block_pool import BlockPool

_MOST_IN_VAIN = 5  # then every 32nd step is considered, as often as one is plain where drafts pay


class SequenceDrafts:
    """The sources of one sequence's drafts, and their acceptance."""

    __slots__ = ("acceptance", "by_model", "is_by_model", "lookup")

    def __init__(self) -> None:
        self.lookup, self.acceptance, self.by_model = PromptLookup(), Acceptance(), Acceptance()
        self.is_by_model = False  # whether the last draft was the draft model's


class _Drafted(Protocol):
    """The part of draft_model.Drafted that is used here."""

    tokens: dict[int, list[int]]
    passes: list[Pass]


class DraftModelProtocol(Protocol):
    """The part of draft_model.DraftModel that is used here: that module needs torch."""

    share: float
    num_blocks: int

    @property
    def num_used_blocks(self) -> int: ...
    def most_for(self, seq: Sequence) -> int: ...
    def num_behind(self, seq: Sequence) -> int: ...
    def draft(self, wanted: Rows[tuple[Sequence, int]], *, chunk: int) -> _Drafted: ...
    def forget(self, seq: Sequence) -> None: ...
    def check(self, live: Collection[Sequence]) -> None: ...


class DraftSteps:
    """One engine's drafts. most: tokens per sequence and step. lookup: whether prompt lookup is on.

    model: the draft model, if there is one. lengths: of recent outputs.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        most: int,
        token_budget: int,
        max_model_len: int,
        lookup: bool = True,
        model: DraftModelProtocol | None = None,
        lengths: OutputLengths | None = None,
    ) -> None:
        self._pool, self._token_budget, self._max_model_len = pool, token_budget, max_model_len
        self._lookup = lookup
        self.speculation = Speculation(most)
        self._num_in_vain = 0  # consecutive steps for which no draft was found
        self._num_to_pass = 0  # steps to skip before drafts are considered again
        self.model = model
        self.by_model = None if model is None else ModelSpeculation(self.speculation, model.share)
        self._lengths = lengths or OutputLengths()
        self._model_s = 0.0  # of the draft model's passes for the last plan

    @property
    def is_enabled(self) -> bool:
        """Whether any step may have drafts."""
        return self.speculation.most > 0

    def comes_next(self, running: list[Sequence]) -> bool:
        """Whether to call `widen` for a step of these sequences. If not, the step counts as one without drafts.

        `widen` needs the previous step's tokens, so the host cannot work ahead. The more often no draft was found, the
        more steps are skipped before drafts are considered again.
        """
        if any(seq.num_uncomputed > 1 for seq in running):
            return False
        if self._num_to_pass:
            self._num_to_pass -= 1
            return False
        if self.model is not None:  # what pays is decided once tokens are known
            return self.speculation.begins_next(len(running))
        count, able = len(running), [seq for seq in running if _may_draft(seq)]
        return self.speculation.comes_next(count, [_drafts_of(seq).acceptance for seq in able])

    def note_plan(self, plan: StepPlan) -> None:
        """Record whether `widen` found drafts."""
        self._num_in_vain = 0 if plan.num_drafted else min(self._num_in_vain + 1, _MOST_IN_VAIN)
        self._num_to_pass = 2**self._num_in_vain - 1

    def widen(self, plan: StepPlan) -> StepPlan:
        """The plan with as many drafted tokens as are expected to pay; unchanged for steps that compute prompts."""
        self._model_s, count = 0.0, len(plan.work)
        if plan.num_single < count or not self.speculation.begins(count):
            return plan
        able = [item.seq for item in plan.work if item.samples and _may_draft(item.seq)]
        found = self._from_text(able, count) if self._lookup else {}
        if self.model is not None:
            self._by_model(able, found, count)
        drafts = self._fitting(able, found, self._token_budget - plan.num_tokens, num_running=count)
        if not drafts:
            return plan
        singles = [item for item in plan.work if id(item.seq) not in drafts]
        wide = [
            Scheduled(item.seq, item.start, 1 + len(drafts[id(item.seq)]), drafts[id(item.seq)])
            for item in plan.work
            if id(item.seq) in drafts
        ]
        return StepPlan((*singles, *wide), len(singles), plan.preempted, plan.copies, count - len(singles))

    def _most_for(self, seq: Sequence) -> int:
        """Drafted tokens that can be kept before the output ends."""
        return max(0, min(seq.max_output - seq.num_output, self._max_model_len - seq.num_tokens) - 1)

    def _from_text(self, able: list[Sequence], num_running: int) -> dict[int, list[int]]:
        """Prompt lookup drafts where they are expected to pay, by the identity of the sequence."""
        drafters = [_drafts_of(seq) for seq in able]
        lengths = self.speculation.lengths(num_running, [drafter.acceptance for drafter in drafters])
        found: dict[int, list[int]] = {}
        for seq, drafter, length in zip(able, drafters, lengths, strict=True):
            if length and (draft := drafter.lookup.draft(seq.token_ids, min(length, self._most_for(seq)))):
                found[id(seq)] = draft
                drafter.is_by_model = False
        return found

    def _by_model(self, able: list[Sequence], found: dict[int, list[int]], num_running: int) -> None:
        """Replace or add the draft model's drafts, for sequences where they are expected to pay more."""
        assert self.model is not None and self.by_model is not None
        able = [seq for seq in able if self.model.most_for(seq)]
        candidates = self._candidates(able, found, num_running)
        lengths = self.by_model.lengths(num_running, candidates, has_drafts=bool(found), chunk=self._token_budget)
        wanted = [(seq, length) for seq, length in zip(able, lengths, strict=True) if length]
        if not wanted:
            return
        drafted = self.model.draft(wanted, chunk=self._token_budget)
        self._model_s = sum(one.seconds for one in drafted.passes)
        self.by_model.observe_passes(num_running, drafted.passes)
        for seq, _ in wanted:
            if id(seq) in drafted.tokens:
                found[id(seq)] = drafted.tokens[id(seq)]
                _drafts_of(seq).is_by_model = True

    def _candidates(self, able: list[Sequence], found: dict[int, list[int]], num_running: int) -> list[DraftCandidate]:
        assert self.model is not None and self.by_model is not None
        so_far = np.fromiter((seq.num_output for seq in able), np.float64, len(able))
        most = np.fromiter((seq.max_output for seq in able), np.float64, len(able))
        left = self._lengths.remaining(so_far, most).tolist()
        candidates: list[DraftCandidate] = []
        for seq, num_left in zip(able, left, strict=True):
            drafter, from_text = _drafts_of(seq), len(found.get(id(seq), ()))
            candidates.append(
                DraftCandidate(
                    rate=self.by_model.rate(drafter.by_model),
                    most=min(self.speculation.most, self._most_for(seq), self.model.most_for(seq)),
                    num_behind=self.model.num_behind(seq),
                    num_left=num_left,
                    instead=self.by_model.worth(num_running, drafter.acceptance, from_text) if from_text else 0.0,
                )
            )
        return candidates

    def _fitting(
        self, able: list[Sequence], found: dict[int, list[int]], budget: int, *, num_running: int
    ) -> dict[int, tuple[int, ...]]:
        """The drafts, cut to the step's budget and the sequences' blocks."""
        drafts: dict[int, tuple[int, ...]] = {}
        for seq in able:
            if (draft := found.get(id(seq))) and (draft := self._with_room(seq, draft[: max(0, budget)], num_running)):
                drafts[id(seq)] = tuple(draft)
                budget -= len(draft)
        return drafts

    def _with_room(self, seq: Sequence, draft: list[int], num_running: int) -> list[int]:
        """The draft, cut to the sequence's blocks and to free blocks that running sequences will not need."""
        lacking = seq.blocks_for(seq.num_tokens + len(draft)) - len(seq.blocks)
        if draft and lacking > 0:
            fresh = self._pool.allocate(lacking) if lacking + num_running <= self._pool.num_available else None
            if fresh is None:
                return draft[: max(0, len(seq.blocks) * seq.block_size - seq.num_tokens)]
            seq.blocks += fresh
        return draft

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Record a step's duration, the draft model's passes included."""
        model_s, self._model_s = self._model_s, 0.0  # the next step may not call `widen`
        if plan.num_decode == (count := len(plan.work)):
            self.speculation.times.observe(count, plan.num_tokens - count, seconds - model_s)
            if self.by_model is not None:
                self.by_model.observe_step(seconds)

    def note(self, item: Scheduled, num_accepted: int) -> None:
        """Record how many of its drafted tokens were accepted."""
        drafter, num_drafted = _drafts_of(item.seq), len(item.drafts)
        if drafter.is_by_model and self.by_model is not None:
            self.by_model.observe(drafter.by_model, num_accepted, num_drafted)
        else:
            self.speculation.observe(drafter.acceptance, num_accepted, num_drafted)

    def forget(self, seq: Sequence) -> None:
        """The sequence ended here, or was preempted."""
        if self.model is not None:
            self.model.forget(seq)

    def check(self, live: Collection[Sequence]) -> None:
        """Raise AssertionError unless the draft model's blocks are all accounted for."""
        if self.model is not None:
            self.model.check(live)

    def load(self) -> dict[str, Any]:
        """LoadReport's fields."""
        drafted, accepted = self.speculation.num_drafted, self.speculation.num_accepted
        if self.model is None or self.by_model is None:
            return {"drafted_tokens": drafted, "accepted_tokens": accepted}
        return {
            "drafted_tokens": drafted + self.by_model.num_drafted,
            "accepted_tokens": accepted + self.by_model.num_accepted,
            "model_drafted_tokens": self.by_model.num_drafted,
            "model_accepted_tokens": self.by_model.num_accepted,
            "draft_used_blocks": self.model.num_used_blocks,
            "draft_total_blocks": self.model.num_blocks,
        }


def _drafts_of(seq: Sequence) -> SequenceDrafts:
    if seq.drafter is None:
        seq.drafter = SequenceDrafts()
    assert isinstance(seq.drafter, SequenceDrafts)
    return seq.drafter


def _may_draft(seq: Sequence) -> bool:
    """Not with penalties, before `min_tokens`, in a group, or while KV is being loaded or transferred."""
    params = seq.request.sampling
    return not (
        params.has_penalties
        or seq.group is not None
        or seq.load is not None
        or seq.hold
        or seq.num_output < params.min_tokens
    )
