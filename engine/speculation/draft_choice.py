"""For which sequences of a step a draft model drafts, and how many tokens: as many as pay. Pure.

The model drafts token after token: one pass of it for each, which serves all sequences that still want one. It must have computed
a sequence's text before; that is paid once for what is far behind, out of what its drafts bring until the sequence ends.
All is counted in tokens: what takes time costs the tokens that steps without drafts would have brought meanwhile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_BLEND = 0.25  # of the newest pass in times
_CATCHING_UP = 8  # tokens of a text that take as long as a pass, until it is measured
_LEAST_SHARE = 0.03  # of a step's time: a pass costs something beside reading weights
_FEW = 8  # tokens of a pass beyond one for each sequence, from which their time is measured


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A sequence that the model might draft for.

    rate: chance that a token of the model's is right when those before it were. most: tokens that may be drafted.
    num_behind: tokens that the model must compute before it has drafted one; at least 1.
    num_left: output tokens that are expected yet. instead: what its draft from its own text is worth, tokens; 0: it has none.
    """

    rate: float
    most: int
    num_behind: int
    num_left: float
    instead: float = 0.0


@dataclass(frozen=True, slots=True)
class Prices:
    """In tokens. fixed: of any drafts in a step. token: of verifying one. behind: of a token of text that the model computes.

    one_pass: of the model's pass over so many sequences. near: tokens behind that are made up for in every step anyway.
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
    """What the model's passes take, by the power of two of sequences.

    share: of its weights in the other model's: what a pass is taken to take of a step's time before any was measured. The first one of
    a size may be slower (it is recorded, and memory is touched), so measurements move away from that estimate little by little.
    """

    share: float
    behind_s: float | None = None  # a token of text
    _pass_s: dict[int, float] = field(default_factory=dict)

    def one_pass(self, num_sequences: int, plain_s: float) -> float:
        """Seconds of a pass over so many sequences, a token each. plain_s: of a step of as many."""
        return self._pass_s.get(num_sequences.bit_length(), max(_LEAST_SHARE, self.share) * plain_s)

    def behind(self, num_sequences: int, plain_s: float) -> float:
        """Seconds for a token of text."""
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
    return old + _BLEND * (min(newest, 2 * old) - old)  # a pause of the machine is no pass


def choose(candidates: Sequence[DraftCandidate], prices: Prices, most: int) -> list[int]:
    """Tokens to draft for each of the candidates, up to `most`; 0: none by the model."""
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
    """Whether what the model brings until the sequence ends is more than what it takes to compute its text first.

    gain: of a step, in tokens. It is asked of those far behind only: of the others that is part of the gain.
    """
    if one.num_behind <= prices.near:
        return True
    num_steps = one.num_left / (1 + sum(one.rate**index for index in range(1, length + 1)))
    return gain * num_steps > prices.behind * one.num_behind


def _deepest(candidates: Sequence[DraftCandidate], prices: Prices, most: int) -> tuple[int, list[int], list[float]]:
    """(passes that bring the most, tokens to draft for each candidate, what they bring more than its other draft).

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
