"""Speculative decoding of one engine: the drafts in a step's plan.

Drafted tokens are computed behind a sequence's next one, in the same step, each in a row of the step and a slot of the
sequence's blocks; those that match what would have been sampled anyway are kept, wrong ones are overwritten by the next
step. Drafts never preempt. `draft_choice.py` decides how many tokens are worth it.
"""

from collections.abc import Collection
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvrelay.engine.scheduling.blocks import OutputLengths
from kvrelay.engine.scheduling.plan import StepPlan
from kvrelay.engine.scheduling.sequence import Scheduled, Sequence
from kvrelay.engine.speculation.draft_choice import (
    Acceptance,
    DraftCandidate,
    DraftModelChoice,
    DraftSource,
    Speculation,
)
from kvrelay.engine.speculation.draft_model import DraftModel
from kvrelay.hashing import pack_tokens
from kvrelay.kvcache.pool.block_pool import BlockPool

LONGEST, SHORTEST = 4, 2  # tokens that must match; longer matches are tried first
_ITEM = 4  # bytes of a packed token


class PromptLookup:
    """One sequence's text, packed so that finding a few tokens is one search for bytes."""

    def __init__(self) -> None:
        self._packed = bytearray()

    def draft(self, token_ids: Rows[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow; empty: no earlier occurrence. `token_ids` only ever grows."""
        self._packed += pack_tokens(token_ids, len(self._packed) // _ITEM)
        if most <= 0:
            return []
        for size in range(min(LONGEST, len(token_ids) - 1), SHORTEST - 1, -1):
            if (after := self._after_last(size)) is not None:
                return self._continued(token_ids, after, most)
        return []

    def _after_last(self, size: int) -> int | None:
        """Position after the latest earlier occurrence of the last `size` tokens."""
        packed = self._packed
        wanted, end = packed[-size * _ITEM :], len(packed) - 1
        while (found := packed.rfind(wanted, 0, end)) >= 0:
            if found % _ITEM == 0:
                return found // _ITEM + size
            end = found + len(wanted) - 1
        return None

    @staticmethod
    def _continued(token_ids: Rows[int], after: int, most: int) -> list[int]:
        """Tokens from there on; at the end of the text it wraps around, which continues periodic text."""
        length = len(token_ids)
        return [token_ids[after + index % (length - after)] for index in range(most)]


_MOST_IN_VAIN = 5  # then every 32nd step is considered, as often as one is plain where drafts pay


@dataclass(slots=True)
class SequenceDrafts:
    """The sources of one sequence's drafts, and their acceptance."""

    lookup: PromptLookup = field(default_factory=PromptLookup)
    acceptance: Acceptance = field(default_factory=Acceptance)
    by_model: Acceptance = field(default_factory=Acceptance)
    is_by_model: bool = False  # whether the last draft was the draft model's


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
        lookup: bool,
        model: DraftModel | None,
        lengths: OutputLengths,
    ) -> None:
        self._pool, self._token_budget, self._max_model_len = pool, token_budget, max_model_len
        self._lookup, self.model, self._lengths = lookup, model, lengths
        self.speculation = Speculation(most)
        self._num_in_vain = 0  # consecutive steps for which no draft was found
        self._num_to_pass = 0  # steps to skip before drafts are considered again
        self.by_model = DraftSource(0.7, Acceptance(1.4, 2.0))
        self.choice = DraftModelChoice(model.share if model is not None else 0.0)
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
        drafters = None if self.model else [_drafts_of(seq).acceptance for seq in running if _may_draft(seq)]
        return self.speculation.comes_next(len(running), drafters)

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
            self._by_model(self.model, able, found, count)
        drafts = self._fitting(able, found, self._token_budget - plan.num_tokens, num_running=count)
        if not drafts:
            return plan
        singles = [item for item in plan.work if id(item.seq) not in drafts]
        drafted = [(item, drafts[id(item.seq)]) for item in plan.work if id(item.seq) in drafts]
        wide = [Scheduled(item.seq, item.start, 1 + len(draft), draft) for item, draft in drafted]
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

    def _by_model(self, model: DraftModel, able: list[Sequence], found: dict[int, list[int]], num_running: int) -> None:
        """Replace or add the draft model's drafts, for sequences where they are expected to pay more."""
        able = [seq for seq in able if model.most_for(seq)]
        candidates = self._candidates(model, able, found, num_running)
        times, most = self.speculation.times, self.speculation.most
        plain_s = times.plain(num_running)
        lengths = self.choice.lengths(
            candidates,
            most,
            num_running,
            plain_s,
            times.extra(num_running),
            has_drafts=bool(found),
            chunk=self._token_budget,
        )
        wanted = [(seq, length) for seq, length in zip(able, lengths, strict=True) if length]
        if not wanted:
            return
        drafted = model.draft(wanted, chunk=self._token_budget)
        self._model_s = sum(one.seconds for one in drafted.passes)
        if plain_s is not None:
            self.choice.observe_passes(drafted.passes, plain_s)
        for seq, _ in wanted:
            if id(seq) in drafted.tokens:
                found[id(seq)] = drafted.tokens[id(seq)]
                _drafts_of(seq).is_by_model = True

    def _candidates(
        self, model: DraftModel, able: list[Sequence], found: dict[int, list[int]], num_running: int
    ) -> list[DraftCandidate]:
        so_far = np.fromiter((seq.num_output for seq in able), np.float64, len(able))
        most = np.fromiter((seq.max_output for seq in able), np.float64, len(able))
        left = self._lengths.remaining(so_far, most).tolist()

        def candidate(seq: Sequence, num_left: float) -> DraftCandidate:
            drafter, from_text = _drafts_of(seq), len(found.get(id(seq), ()))
            return DraftCandidate(
                rate=self.by_model.rate(drafter.by_model),
                most=min(self.speculation.most, self._most_for(seq), model.most_for(seq)),
                num_behind=model.cache.num_behind(seq),
                num_left=num_left,
                instead=self.speculation.worth(num_running, drafter.acceptance, from_text) if from_text else 0.0,
            )

        return list(map(candidate, able, left))

    def _fitting(
        self, able: list[Sequence], found: dict[int, list[int]], budget: int, *, num_running: int
    ) -> dict[int, tuple[int, ...]]:
        """The drafts, cut to the step's budget and the sequences' blocks."""
        drafts: dict[int, tuple[int, ...]] = {}
        for seq in able:
            if (draft := found.get(id(seq))) and seq.constraint is not None:
                draft = seq.constraint.cut(seq.token_ids[seq.request.num_prompt_tokens :], draft)
            if draft and (draft := self._with_room(seq, draft[: max(0, budget)], num_running)):
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
            if self.model is not None:
                self.choice.observe_step(seconds)

    def note(self, item: Scheduled, num_accepted: int) -> None:
        """Record how many of its drafted tokens were accepted."""
        drafter, num_drafted = _drafts_of(item.seq), len(item.drafts)
        if drafter.is_by_model:
            self.by_model.observe(drafter.by_model, num_accepted, num_drafted)
        else:
            self.speculation.observe(drafter.acceptance, num_accepted, num_drafted)

    def forget(self, seq: Sequence) -> None:
        """The sequence ended here, or was preempted."""
        if self.model is not None:
            self.model.cache.forget(seq)

    def check(self, live: Collection[Sequence]) -> None:
        """Raise AssertionError unless the draft model's blocks are all accounted for."""
        if self.model is not None:
            self.model.cache.check(live)

    def load(self) -> dict[str, Any]:
        """LoadReport's fields."""
        by_text, by_model = self.speculation, self.by_model
        return {
            "drafted_tokens": by_text.num_drafted + by_model.num_drafted,
            "accepted_tokens": by_text.num_accepted + by_model.num_accepted,
            "model_drafted_tokens": by_model.num_drafted,
            "model_accepted_tokens": by_model.num_accepted,
        }


def _drafts_of(seq: Sequence) -> SequenceDrafts:
    if seq.drafter is None:
        seq.drafter = SequenceDrafts()
    assert isinstance(seq.drafter, SequenceDrafts)
    return seq.drafter


def _may_draft(seq: Sequence) -> bool:
    """Not with penalties, before `min_tokens`, in a group, or while KV is being loaded or transferred."""
    params = seq.request.sampling
    if params.has_penalties or seq.group is not None or seq.num_output < params.min_tokens:
        return False
    return seq.load is None and not seq.hold
