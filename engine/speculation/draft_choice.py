"""For which sequences of a step a draft model drafts, and how many tokens: as many as pay. Pure.

The model drafts one token per pass, for all sequences that get one. It must have computed a sequence's text before; for
sequences that are far behind this is a one-time cost, weighed against what their drafts bring until the sequence ends.
The unit is tokens: time costs the tokens that steps without drafts would have produced in it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MARGIN = 1.3  # least ratio of a draft's expected tokens to its cost: rates are estimates
_TRY_SHARE = 0.03  # of the time is spent on trial drafts while drafts are not expected to pay
TRY_TOKENS = 2  # of a trial draft
_BLEND = 0.25  # weight of the newest pass in the average
_CATCHING_UP = 8  # tokens of text per pass time, until it is measured
_LEAST_SHARE = 0.03  # of a step's time: a pass costs more than reading its weights
_FEW = 8  # tokens of a pass beyond one per sequence, from which their time is measured


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
        elif more >= _FEW:
            newest = max(0.0, one.seconds - self.one_pass(one.num_sequences, plain_s)) / more
            self.behind_s = _moved(self.behind(one.num_sequences, plain_s), newest)


def _moved(old: float, newest: float) -> float:
    return old + _BLEND * (min(newest, 2 * old) - old)  # limits the effect of a pause of the machine


def choose(candidates: Sequence[DraftCandidate], prices: Prices, most: int) -> list[int]:
    """Tokens to draft for each candidate, up to `most`; 0: none by the model."""
    lengths = [0] * len(candidates)
    left = list(range(len(candidates)))
    while left:
        depth, found, gains = _deepest([candidates[index] for index in left], prices, most)
        if not depth:
            return lengths
        winners = [index for index, length in zip(left, found, strict=True) if length]
        share = depth * prices.one_pass(len(winners)) / len(winners)
        bad = {
            index
            for index, length, gain in zip(left, found, gains, strict=True)
            if length and not _is_worth_it(candidates[index], length, gain - share, prices)
        }
        if not bad:
            for index, length in zip(left, found, strict=True):
                lengths[index] = length
            return lengths
        left = [index for index in winners if index not in bad]
    return lengths


def _is_worth_it(one: DraftCandidate, length: int, gain: float, prices: Prices) -> bool:
    """Whether the model's drafts until the sequence ends bring more than computing its text first costs.

    gain: per step, in tokens. Only for sequences far behind; for others the gain includes the cost.
    """
    if one.num_behind <= prices.near:
        return True
    num_steps = one.num_left / (1 + sum(one.rate**index for index in range(1, length + 1)))
    return gain * num_steps > prices.behind * one.num_behind


def _deepest(candidates: Sequence[DraftCandidate], prices: Prices, most: int) -> tuple[int, list[int], list[float]]:
    """(the best number of passes, tokens to draft for each candidate, the gain over its other draft).

    (0, zeros, zeros) when none pays.
    """
    none = [0] * len(candidates), [0.0] * len(candidates)
    best, best_gain = (0, *none), 0.0
    chances, lengths = [1.0] * len(candidates), [0] * len(candidates)
    gains = [
        -one.instead - (prices.behind * (one.num_behind - 1) if one.num_behind <= prices.near else 0.0)
        for one in candidates
    ]
    for depth in range(1, most + 1):
        num_longer = 0
        for index, one in enumerate(candidates):
            if lengths[index] == depth - 1 and depth <= one.most:
                chances[index] *= one.rate
                if chances[index] > prices.token:
                    gains[index] += chances[index] - prices.token
                    lengths[index] = depth
                    num_longer += 1
        if not num_longer:
            break
        winners = [index for index, gain in enumerate(gains) if gain > 0]
        if not winners:
            continue
        gain = sum(gains[index] for index in winners) - depth * prices.one_pass(len(winners)) - prices.fixed
        if gain > best_gain:
            best_gain = gain
            best = depth, [0] * len(candidates), [0.0] * len(candidates)
            for index in winners:
                best[1][index], best[2][index] = lengths[index], gains[index]
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
