"""How many tokens are drafted for which sequences of a step, from their text or by a draft model: as many as pay. Pure.

More rows make a step longer: a draft pays while its expected tokens per second are more than the step's own. On a busy
device nothing pays, and nothing is drafted. A draft model drafts one token per pass, for all sequences that get one. It
must have computed a sequence's text before; for sequences that are far behind this is a one-time cost, spread over the
steps until the sequence ends. The unit is tokens: time costs the tokens that steps without drafts would have produced
in it.
Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, ICML 2023 (the expected tokens).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

DRAFT_TOKENS = 8  # at most, for a sequence in one step: what pays is measured, and mostly less
MARGIN = 1.3  # least ratio of a draft's expected tokens to its cost: rates are estimates
_RECENT_STEPS = 5  # plain ones, whose median counts: among drafted ones they are rare, and a slow one counts for long
_ENOUGH_PLAIN = 3
_FORGET = 0.97  # weight of older steps in the fit
_RECENT = 0.9  # weight of older drafts in a sequence's acceptance rate
_PRIOR = 4.0  # drafted tokens of prior for a new sequence, at the overall rate
_FLOOR, _CEILING = 0.02, 0.98  # limits of rates
_PLAIN_EVERY = 32  # steps: one runs without drafts, to measure it
_TRY_EVERY = 16  # steps: one draft that is not expected to pay, to measure it
_FEW = 1.5  # weight of steps with drafts before the fit is used
_TRY_SHARE = 0.03  # of the time is spent on a draft model's trial drafts while they are not expected to pay
TRY_TOKENS = 2  # of a trial draft
_BLEND = 0.25  # weight of the newest pass in the average
_CATCHING_UP = 8  # tokens of text per pass time, until it is measured
_LEAST_SHARE = 0.03  # of a step's time: a pass costs more than reading its weights
MEASURABLE = 8  # tokens of a pass beyond one per sequence, from which their time is measured


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

    def comes_next(self, num_sequences: int, drafters: Sequence[Acceptance] | None) -> bool:
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

    def lengths(self, num_sequences: int, drafters: Sequence[Acceptance]) -> list[int]:
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
    def _try(drafters: Sequence[Acceptance], length: int) -> list[int]:
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


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A sequence that the model might draft for.

    rate: chance that a drafted token is right if those before it were. most: tokens that may be drafted.
    num_behind: tokens that the model must compute for its first draft; at least 1.
    num_left: expected remaining output tokens. instead: value of its draft from its own text, tokens; 0: it has none.
    """

    rate: float
    most: int
    num_behind: int
    num_left: float
    instead: float = 0.0


@dataclass(frozen=True, slots=True)
class Prices:
    """Costs in tokens. fixed: of any drafts in a step. token: of verifying one. behind: of computing one token of text.

    one_pass: of the model's pass over a number of sequences. near: tokens behind that are caught up in every step
    anyway.
    """

    fixed: float
    token: float
    behind: float
    one_pass: Callable[[int], float]
    near: int

    def gain(self, one: DraftCandidate, length: int, kept: float) -> float:
        """Tokens that a draft of this length, of which so many are expected to be kept, brings over the other draft."""
        steps_left = 1.0 if one.num_behind <= self.near else one.num_left / (1 + kept)
        lacking = one.num_behind - (one.num_behind <= self.near)
        return kept - self.token * length - one.instead - self.behind * lacking / max(steps_left, 1e-9)


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of the draft model: sequences, tokens, seconds."""

    num_sequences: int
    num_tokens: int
    seconds: float


@dataclass(slots=True)
class PassTimes:
    """Durations of the model's passes, by the power of two of sequences.

    share: its weights relative to the target model's, which gives the estimate before a pass was measured. The first
    pass of a size may be slow (recording, first touch of memory), so measurements move the estimate gradually.
    """

    share: float
    behind_s: float | None = None  # per token of text
    _pass_s: dict[int, float] = field(default_factory=dict)

    def one_pass(self, num_sequences: int, plain_s: float) -> float:
        """Seconds of a pass over this many sequences, one token each. plain_s: of a step of as many."""
        return self._pass_s.get(num_sequences.bit_length(), max(_LEAST_SHARE, self.share) * plain_s)

    def behind(self, num_sequences: int, plain_s: float) -> float:
        """Seconds per token of text."""
        if self.behind_s is not None:
            return self.behind_s
        return self.one_pass(num_sequences, plain_s) / _CATCHING_UP

    def observe(self, one: Pass, plain_s: float) -> None:
        size, more = one.num_sequences.bit_length(), one.num_tokens - one.num_sequences
        if more == 0:
            self._pass_s[size] = _moved(self.one_pass(one.num_sequences, plain_s), one.seconds)
        elif more >= MEASURABLE:
            newest = max(0.0, one.seconds - self.one_pass(one.num_sequences, plain_s)) / more
            self.behind_s = _moved(self.behind(one.num_sequences, plain_s), newest)


def _moved(old: float, newest: float) -> float:
    return old + _BLEND * (min(newest, 2 * old) - old)  # limits the effect of a pause of the machine


def choose(candidates: Sequence[DraftCandidate], prices: Prices, most: int) -> list[int]:
    """Tokens to draft for each candidate, up to `most`; 0: none by the model. All share the passes."""
    count, best_gain = len(candidates), 0.0
    best, lengths, kept, chances = [0] * count, [0] * count, [0.0] * count, [1.0] * count
    for depth in range(1, most + 1):
        for index, one in enumerate(candidates):
            chance = chances[index] * one.rate
            if lengths[index] == depth - 1 and depth <= one.most and chance > prices.token:
                lengths[index], chances[index] = depth, chance
                kept[index] += chance
        if depth not in lengths:
            break
        gains = list(map(prices.gain, candidates, lengths, kept))
        num_winners = sum(gain > 0 for gain in gains)
        total = sum(gain for gain in gains if gain > 0) - prices.fixed
        if num_winners and (gain := total - depth * prices.one_pass(num_winners)) > best_gain:
            best_gain = gain
            best = [length if gain > 0 else 0 for length, gain in zip(lengths, gains, strict=True)]
    return best


class DraftModelChoice:
    """Measures one draft model's passes, and from them how many tokens it drafts for which sequences.

    share: its weights relative to the target model's, by bytes.
    """

    def __init__(self, share: float) -> None:
        self.times = PassTimes(share)
        self._credit_s = 0.0  # for trial drafts

    def observe_passes(self, passes: Sequence[Pass], plain_s: float) -> None:
        """Record the passes before a step. plain_s: of a step of as many sequences, without drafts."""
        for one in passes:
            self.times.observe(one, plain_s)

    def observe_step(self, seconds: float) -> None:
        self._credit_s += _TRY_SHARE * seconds

    def lengths(
        self,
        candidates: Sequence[DraftCandidate],
        most: int,
        num_sequences: int,
        plain_s: float | None,
        extra: tuple[float, float] | None,
        *,
        has_drafts: bool,
        chunk: int,
    ) -> list[int]:
        """Tokens that the model drafts for each candidate of a step of `num_sequences`, up to `most`.

        Args:
            plain_s: of such a step without drafts; None: not measured.
            extra: seconds that drafts add to it, and seconds per drafted token; None: not measured.
            has_drafts: the step has prompt lookup drafts.
            chunk: most tokens of text that the model computes before a step.
        """
        nothing = [0] * len(candidates)
        if not candidates or plain_s is None:
            return nothing
        if extra is None:
            return nothing if has_drafts else self._for_nearest(candidates, most)
        fixed_s, token_s = extra
        price = MARGIN * num_sequences / plain_s  # tokens per second
        prices = Prices(
            fixed=0.0 if has_drafts else price * fixed_s,
            token=price * token_s,
            behind=price * self.times.behind(num_sequences, plain_s),
            one_pass=lambda count: price * self.times.one_pass(count, plain_s),
            near=most + 2,
        )
        found = choose(candidates, prices, most)
        if any(found) or has_drafts:
            return found
        num_behind = min(one.num_behind for one in candidates)
        cost_s = min(num_behind, chunk) * self.times.behind(1, plain_s) + TRY_TOKENS * self.times.one_pass(1, plain_s)
        if self._credit_s < cost_s:
            return nothing
        self._credit_s = 0.0  # a trial: the nearest one's text may take several of them
        return self._for_nearest(candidates, min(TRY_TOKENS, most))

    @staticmethod
    def _for_nearest(candidates: Sequence[DraftCandidate], length: int) -> list[int]:
        nearest = min(range(len(candidates)), key=lambda index: candidates[index].num_behind)
        lengths = [0] * len(candidates)
        lengths[nearest] = min(length, candidates[nearest].most)
        return lengths
