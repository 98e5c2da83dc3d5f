"""Puts drafted tokens into a step's plan, and learns from what became of them. No torch.

Between `speculation.py` and `speculation_model.py`, which know what pays, and the engine. A drafted token takes a row of the step and
a slot of the sequence's blocks; what was wrong is overwritten by the next step. Nobody is pre-empted for a draft.
"""

from collections.abc import Collection
from collections.abc import Sequence as Rows
from typing import Any, Protocol

import numpy as np

from kvrelay.engine.scheduling.headroom import OutputLengths
from kvrelay.engine.scheduling.scheduler import Scheduled, StepPlan
from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.engine.speculation.draft_choice import DraftCandidate, Pass
from kvrelay.engine.speculation.prompt_lookup import PromptLookup
from kvrelay.engine.speculation.speculation import Acceptance, Speculation
from kvrelay.engine.speculation.speculation_model import ModelSpeculation
from kvrelay.kvcache.pool.block_pool import BlockPool

_MOST_IN_VAIN = 5  # then every 32nd step is asked about, as often as one is plain where drafts pay


class SequenceDrafts:
    """One sequence's: where its drafts come from, and how good they have been."""

    __slots__ = ("acceptance", "by_model", "is_by_model", "lookup")

    def __init__(self) -> None:
        self.lookup, self.acceptance, self.by_model = PromptLookup(), Acceptance(), Acceptance()
        self.is_by_model = False  # its last draft


class _Drafted(Protocol):
    """What is used of draft_model.Drafted."""

    tokens: dict[int, list[int]]
    passes: list[Pass]


class DraftModelProtocol(Protocol):
    """What is used of draft_model.DraftModel, which needs torch."""

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
    """One engine's drafts. most: tokens for a sequence in one step. lookup: whether they may come from its own text."""

    def __init__(
        self, pool: BlockPool, *, most: int, token_budget: int, max_model_len: int, lookup: bool = True
    ) -> None:
        self._pool, self._token_budget, self._max_model_len = pool, token_budget, max_model_len
        self._lookup = lookup
        self.speculation = Speculation(most)
        self._num_in_vain = 0  # steps, one after the other, that could have had drafts: nothing was found
        self._num_to_pass = 0  # steps that are not asked about
        self.model: DraftModelProtocol | None = None
        self.by_model: ModelSpeculation | None = None  # with a draft model
        self._lengths = OutputLengths()
        self._model_s = 0.0  # that the draft model took before the last plan

    def attach(self, model: DraftModelProtocol, lengths: OutputLengths) -> None:
        """It drafts, too, from now on. lengths: of late outputs."""
        self.model, self.by_model = model, ModelSpeculation(self.speculation, model.share)
        self._lengths = lengths

    def comes_next(self, running: list[Sequence]) -> bool:
        """Whether `widen` is to be asked about a step of these. If not, they have taken a plain one without it.

        For it to be asked, tokens must be known, which costs the time that the host could have worked ahead. So the more
        often nothing was found, the more steps pass before it is asked again.
        """
        if any(seq.num_uncomputed > 1 for seq in running):
            return False
        if self._num_to_pass:
            self._num_to_pass -= 1
            return False
        if self.model is not None:  # which guesses for whom, and whether that pays, is seen when tokens are known
            return self.speculation.begins_next(len(running))
        count, able = len(running), [seq for seq in running if _may_draft(seq)]
        return self.speculation.comes_next(count, [_drafts_of(seq).acceptance for seq in able])

    def note_plan(self, plan: StepPlan) -> None:
        """What `widen` has made of a plan."""
        self._num_in_vain = 0 if plan.num_drafted else min(self._num_in_vain + 1, _MOST_IN_VAIN)
        self._num_to_pass = 2**self._num_in_vain - 1

    def widen(self, plan: StepPlan) -> StepPlan:
        """The same plan, with as many drafted tokens as are expected to pay; not in steps that compute prompts, too."""
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
        """Drafted tokens that might be kept before the stream ends."""
        return max(0, min(seq.max_output - seq.num_output, self._max_model_len - seq.num_tokens) - 1)

    def _from_text(self, able: list[Sequence], num_running: int) -> dict[int, list[int]]:
        """What the sequences' own texts say, for those for which it is expected to pay; by identity."""
        drafters = [_drafts_of(seq) for seq in able]
        lengths = self.speculation.lengths(num_running, [drafter.acceptance for drafter in drafters])
        found: dict[int, list[int]] = {}
        for seq, drafter, length in zip(able, drafters, lengths, strict=True):
            if length and (draft := drafter.lookup.draft(seq.token_ids, min(length, self._most_for(seq)))):
                found[id(seq)] = draft
                drafter.is_by_model = False
        return found

    def _by_model(self, able: list[Sequence], found: dict[int, list[int]], num_running: int) -> None:
        """Replace and add what the draft model guesses, for those for which that is expected to pay more."""
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
        """As much of it as the step's budget and the sequences' blocks have room for."""
        drafts: dict[int, tuple[int, ...]] = {}
        for seq in able:
            if (draft := found.get(id(seq))) and (draft := self._with_room(seq, draft[: max(0, budget)], num_running)):
                drafts[id(seq)] = tuple(draft)
                budget -= len(draft)
        return drafts

    def _with_room(self, seq: Sequence, draft: list[int], num_running: int) -> list[int]:
        """As much of it as its blocks hold, and blocks that nobody else will need."""
        lacking = seq.blocks_for(seq.num_tokens + len(draft)) - len(seq.blocks)
        if draft and lacking > 0:
            fresh = self._pool.allocate(lacking) if lacking + num_running <= self._pool.num_available else None
            if fresh is None:
                return draft[: max(0, len(seq.blocks) * seq.block_size - seq.num_tokens)]
            seq.blocks += fresh
        return draft

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """How long a step took, the draft model's passes before it included."""
        model_s, self._model_s = self._model_s, 0.0  # the next step may be one for which it is not asked
        if plan.num_decode == (count := len(plan.work)):
            self.speculation.times.observe(count, plan.num_tokens - count, seconds - model_s)
            if self.by_model is not None:
                self.by_model.observe_step(seconds)

    def note(self, item: Scheduled, num_accepted: int) -> None:
        """So many of its drafted tokens were what would have been drawn."""
        drafter, num_drafted = _drafts_of(item.seq), len(item.drafts)
        if drafter.is_by_model and self.by_model is not None:
            self.by_model.observe(drafter.by_model, num_accepted, num_drafted)
        else:
            self.speculation.observe(drafter.acceptance, num_accepted, num_drafted)

    def forget(self, seq: Sequence) -> None:
        """The sequence ended here, or gave its place up."""
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
    """Not with penalties, nor before `min_tokens`, nor for a group, nor while KV is on its way."""
    params = seq.request.sampling
    return not (
        params.has_penalties
        or seq.group is not None
        or seq.load is not None
        or seq.hold
        or seq.num_output < params.min_tokens
    )
