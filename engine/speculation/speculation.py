"""Speculative decoding of one engine: how many drafted tokens each sequence gets, and the drafts in a step's plan.

Drafted tokens are computed behind a sequence's next one, in the same step, each in a row of the step and a slot of the
sequence's blocks; those that match what would have been sampled anyway are kept, wrong ones are overwritten by the next
step. More rows make a step longer: a draft pays while its expected tokens per second are more than the step's own. On a
busy device nothing pays, and nothing is drafted. Drafts never preempt.
Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, ICML 2023 (the expected tokens).
"""

from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvrelay.engine.scheduling.blocks import OutputLengths
from kvrelay.engine.scheduling.plan import StepPlan
from kvrelay.engine.scheduling.sequence import Scheduled, Sequence
from kvrelay.engine.speculation.draft_choice import MARGIN, TRY_TOKENS, DraftCandidate, DraftModelChoice
from kvrelay.engine.speculation.draft_model import DraftModel
from kvrelay.hashing import pack_tokens
from kvrelay.kvcache.pool.block_pool import BlockPool

_RECENT_STEPS = 5  # plain ones, whose median counts: among drafted ones they are rare, and a slow one counts for long
_ENOUGH_PLAIN = 3
_FORGET = 0.97  # weight of older steps in the fit
_RECENT = 0.9  # weight of older drafts in a sequence's acceptance rate
_PRIOR = 4.0  # drafted tokens of prior for a new sequence, at the overall rate
_FLOOR, _CEILING = 0.02, 0.98  # limits of rates
_PLAIN_EVERY = 32  # steps: one runs without drafts, to measure it
_TRY_EVERY = 16  # steps: one draft that is not expected to pay, to measure it
_FEW = 1.5  # weight of steps with drafts before the fit is used


@dataclass(slots=True)
class Acceptance:
    """Share of one sequence's drafted tokens that were right if those before were. Recent ones count more."""

    accepted: float = 0.0
    drafted: float = 0.0

    def observe(self, num_accepted: int, num_drafted: int) -> None:
        """The first `num_accepted` of a draft were right. Tokens behind a wrong one are not counted."""
        counted = min(num_accepted + 1, num_drafted)
        self.accepted = self.accepted * _RECENT + num_accepted
        self.drafted = self.drafted * _RECENT + counted

    def rate(self, prior: float) -> float:
        share = (self.accepted + _PRIOR * prior) / (self.drafted + _PRIOR)
        return min(_CEILING, max(_FLOOR, share))


@dataclass(slots=True)
class SpeculationTimes:
    """Durations of steps without drafts, and what drafts add: a fixed part and a part per token.

    By the power of two of sequences.
    """

    plain_s: dict[int, float] = field(default_factory=dict)
    _recent_s: dict[int, deque[float]] = field(default_factory=dict)
    _seen: set[tuple[int, int]] = field(default_factory=set)
    _moments: dict[int, list[float]] = field(default_factory=dict)  # weight, k, k², seconds, k · seconds

    def plain(self, num_sequences: int) -> float | None:
        """Seconds of a step without drafts; None: not measured."""
        return self.plain_s.get(num_sequences.bit_length())

    def is_known(self, num_sequences: int) -> bool:
        """Whether there were enough plain steps: the first of a size is slow (recording, first touch of memory)."""
        return len(self._recent_s.get(num_sequences.bit_length(), ())) >= _ENOUGH_PLAIN

    def observe(self, num_sequences: int, num_drafted: int, seconds: float) -> None:
        size = num_sequences.bit_length()
        if not num_drafted:
            recent_s = self._recent_s.setdefault(size, deque(maxlen=_RECENT_STEPS))
            recent_s.append(seconds)
            self.plain_s[size] = sorted(recent_s)[(len(recent_s) - 1) // 2]
            return
        if (plain := self.plain(num_sequences)) is None:
            return
        kind = (size, num_drafted if num_sequences == 1 else 0)
        if kind not in self._seen:  # slow: recording, first touch of memory
            self._seen.add(kind)
            return
        extra = min(max(0.0, seconds - plain), num_drafted * plain)  # a token more takes no longer than a step
        newest = (1.0, num_drafted, num_drafted**2, extra, num_drafted * extra)
        moments = self._moments.get(size, [0.0] * 5)
        self._moments[size] = [old * _FORGET + new for old, new in zip(moments, newest, strict=True)]

    def extra(self, num_sequences: int) -> tuple[float, float] | None:
        """(seconds that any draft adds, seconds per drafted token) to such a step; None: not measured yet."""
        weight, k, k2, seconds, ks = self._moments.get(num_sequences.bit_length(), [0.0] * 5)
        if weight < _FEW:
            return None
        spread = weight * k2 - k * k
        slope = (weight * ks - k * seconds) / spread if spread > 1e-6 * weight * k2 else seconds / k
        slope = min(max(slope, 0.0), seconds / k)
        return max(0.0, (seconds - slope * k) / weight), slope


class DraftSource:
    """Results of one source of drafts. prior: the acceptance rate before any draft; overall: of all sequences."""

    def __init__(self, prior: float, overall: Acceptance) -> None:
        self._prior, self._all = prior, overall
        self.num_drafted = self.num_accepted = 0

    def observe(self, acceptance: Acceptance, num_accepted: int, num_drafted: int) -> None:
        """Record the result of one sequence's draft."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        acceptance.observe(num_accepted, num_drafted)
        self._all.observe(num_accepted, num_drafted)

    def rate(self, acceptance: Acceptance) -> float:
        """The chance that a drafted token is right, for a sequence with this acceptance."""
        return acceptance.rate(self._all.rate(self._prior))


class Speculation(DraftSource):
    """One engine's measurements, and from them how many tokens are worth drafting."""

    def __init__(self, most: int) -> None:
        """most: tokens drafted for a sequence in one step."""
        self.most = most
        self.times = SpeculationTimes()
        super().__init__(0.5, Acceptance(0.5, 1.0))
        self._num_steps = 0

    def comes_next(self, num_sequences: int, drafters: Rows[Acceptance] | None) -> bool:
        """Whether the next step may get drafts. False: it counts as begun, without drafts.

        drafters: those that prompt lookup could draft for; None: what pays is decided once tokens are known.
        """
        if not self.begins(num_sequences) or (drafters is not None and not any(self.lengths(num_sequences, drafters))):
            return False
        self._num_steps -= 1
        return True

    def begins(self, num_sequences: int) -> bool:
        """Count a step of this many sequences. False: no drafts, to measure it, or since not even a sure one pays."""
        self._num_steps += 1
        plain_s = self.times.plain(num_sequences)
        if plain_s is None or not self.times.is_known(num_sequences) or self._num_steps % _PLAIN_EVERY == 0:
            return False
        extra, is_try = self.times.extra(num_sequences), self._num_steps % _TRY_EVERY == 0
        return extra is None or is_try or MARGIN * extra[1] * num_sequences / plain_s < _CEILING

    def lengths(self, num_sequences: int, drafters: Rows[Acceptance]) -> list[int]:
        """Tokens worth drafting for each of `drafters`, sequences of a step of `num_sequences` that `begins`."""
        plain_s = self.times.plain(num_sequences)
        if not drafters or plain_s is None:
            return [0] * len(drafters)
        if (extra := self.times.extra(num_sequences)) is None:
            return self._try(drafters, self.most)
        fixed_s, token_s = extra
        rates = list(map(self.rate, drafters))
        tokens_per_s = num_sequences / plain_s  # without drafts
        found = [self._length(rate, MARGIN * token_s * tokens_per_s) for rate in rates]
        gain = sum(expected(rate, length) for rate, length in zip(rates, found, strict=True))
        cost_s = fixed_s + token_s * sum(found)
        if gain <= MARGIN * tokens_per_s * cost_s:
            return self._try(drafters, min(TRY_TOKENS, self.most) * (self._num_steps % _TRY_EVERY == 0))
        return found

    def worth(self, num_sequences: int, acceptance: Acceptance, length: int) -> float:
        """The expected tokens of a draft from the text less the cost of verifying it, in tokens."""
        tokens, plain_s = expected(self.rate(acceptance), length), self.times.plain(num_sequences)
        extra = self.times.extra(num_sequences)
        if plain_s is None or extra is None:
            return tokens
        return tokens - MARGIN * num_sequences / plain_s * extra[1] * length

    @staticmethod
    def _try(drafters: Rows[Acceptance], length: int) -> list[int]:
        """A draft for one sequence, to measure its cost."""
        return [length] + [0] * (len(drafters) - 1)

    def _length(self, rate: float, price: float) -> int:
        """Draft while the next token's chance to be kept is more than its cost in tokens."""
        length, chance = 0, rate
        while length < self.most and chance > price:
            length += 1
            chance *= rate
        return length


def expected(rate: float, length: int) -> float:
    """Expected number of drafted tokens that are kept."""
    return sum(rate**index for index in range(1, length + 1))


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
                num_behind=model.num_behind(seq),
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
            self.model.forget(seq)

    def check(self, live: Collection[Sequence]) -> None:
        """Raise AssertionError unless the draft model's blocks are all accounted for."""
        if self.model is not None:
            self.model.check(live)

    def load(self) -> dict[str, Any]:
        """LoadReport's fields."""
        by_text, by_model, model = self.speculation, self.by_model, self.model
        return {
            "drafted_tokens": by_text.num_drafted + by_model.num_drafted,
            "accepted_tokens": by_text.num_accepted + by_model.num_accepted,
            "model_drafted_tokens": by_model.num_drafted,
            "model_accepted_tokens": by_model.num_accepted,
            "draft_used_blocks": model.num_used_blocks if model is not None else 0,
            "draft_total_blocks": model.num_blocks if model is not None else 0,
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
