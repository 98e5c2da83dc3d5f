"""How many drafted tokens each sequence of a step gets: as many as pay, by what was measured. Pure.

Drafted tokens are computed behind a sequence's next one, in the same step; those that are what would have been drawn anyway
are kept. More rows make a step longer: a draft pays while the tokens that it is expected to bring over the time that it takes
are more than the step brings anyway. Where the device is busy with many sequences nothing pays, and nothing is drafted.
Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, ICML 2023 (the expected tokens).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

_LATE = (
    5  # plain steps whose median counts: with drafts in most steps they are rare, and one slow one would count for long
)
_ENOUGH_PLAIN = 3
_FORGET = 0.97  # of older steps in the fit
_RECENT = 0.9  # of older drafts in a sequence's rate of acceptance
_PRIOR = 4.0  # drafted tokens that a new sequence's rate starts with, at the rate of all
_FLOOR, _CEILING = 0.02, 0.98  # rates that are believed
_PLAIN_EVERY = 32  # steps: one without drafts, to see how long that takes
_TRY_EVERY = 16  # steps: a draft where it is not expected to pay, to see whether it would
_TRY_TOKENS = 2
MARGIN = 1.3  # what drafts are expected to bring, over what their time brings anyway: rates are guesses
_FEW = 1.5  # steps with drafts of one sequence, before anything is concluded


@dataclass(slots=True)
class Acceptance:
    """Of one sequence's drafted tokens, what share was right, given that those before were. Recent ones count more."""

    accepted: float = 0.0
    drafted: float = 0.0

    def observe(self, num_accepted: int, num_drafted: int) -> None:
        """Of a draft, the first `num_accepted` were right. What stands behind a wrong one says nothing."""
        looked_at = min(num_accepted + 1, num_drafted)
        self.accepted = self.accepted * _RECENT + num_accepted
        self.drafted = self.drafted * _RECENT + looked_at

    def rate(self, prior: float) -> float:
        share = (self.accepted + _PRIOR * prior) / (self.drafted + _PRIOR)
        return min(_CEILING, max(_FLOOR, share))


@dataclass(slots=True)
class SpeculationTimes:
    """What steps take without drafts, and what drafts add: a fixed part and a part per token. By the power of two of sequences."""

    plain_s: dict[int, float] = field(default_factory=dict)
    _late: dict[int, deque[float]] = field(default_factory=dict)
    _seen: set[tuple[int, int]] = field(default_factory=set)
    _sums: dict[int, list[float]] = field(default_factory=dict)  # weight, k, k², seconds, k · seconds

    @staticmethod
    def _class(num_sequences: int) -> int:
        return num_sequences.bit_length()

    def plain(self, num_sequences: int) -> float | None:
        """Seconds of a step without drafts; None: not measured."""
        return self.plain_s.get(self._class(num_sequences))

    def is_known(self, num_sequences: int) -> bool:
        """Whether there were plain steps enough: the first of a size is slow, it is recorded or touches memory."""
        return len(self._late.get(self._class(num_sequences), ())) >= _ENOUGH_PLAIN

    def observe(self, num_sequences: int, num_drafted: int, seconds: float) -> None:
        if not num_drafted:
            size = self._class(num_sequences)
            late = self._late.setdefault(size, deque(maxlen=_LATE))
            late.append(seconds)
            self.plain_s[size] = sorted(late)[(len(late) - 1) // 2]
            return
        if (plain := self.plain(num_sequences)) is None:
            return
        size = self._class(num_sequences)
        if (
            kind := (size, num_drafted if num_sequences == 1 else 0)
        ) not in self._seen:  # it is recorded, or touches memory
            self._seen.add(kind)
            return
        extra = min(max(0.0, seconds - plain), num_drafted * plain)  # a token more takes no longer than a step
        newest = (1.0, num_drafted, num_drafted**2, extra, num_drafted * extra)
        sums = self._sums.get(size, [0.0] * 5)
        self._sums[size] = [old * _FORGET + new for old, new in zip(sums, newest, strict=True)]

    def extra(self, num_sequences: int) -> tuple[float, float] | None:
        """(seconds that any draft adds, seconds per drafted token) to such a step; None: not measured yet."""
        weight, k, k2, seconds, ks = self._sums.get(self._class(num_sequences), [0.0] * 5)
        if weight < _FEW:
            return None
        spread = weight * k2 - k * k
        slope = (weight * ks - k * seconds) / spread if spread > 1e-6 * weight * k2 else seconds / k
        slope = min(max(slope, 0.0), seconds / k)
        return max(0.0, (seconds - slope * k) / weight), slope


class DraftSource:
    """What one source of drafts has brought. prior: the rate of acceptance before anything is known; overall: of all sequences."""

    def __init__(self, prior: float, overall: Acceptance) -> None:
        self._prior, self._all = prior, overall
        self.num_drafted = self.num_accepted = 0

    def observe(self, acceptance: Acceptance, num_accepted: int, num_drafted: int) -> None:
        """What became of one sequence's draft."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        acceptance.observe(num_accepted, num_drafted)
        self._all.observe(num_accepted, num_drafted)

    def rate(self, acceptance: Acceptance) -> float:
        """The chance that a drafted token is right, for a sequence with this past."""
        return acceptance.rate(self._all.rate(self._prior))


class Speculation(DraftSource):
    """One engine's: measures, and says how many tokens are worth drafting."""

    def __init__(self, most: int) -> None:
        """most: tokens drafted for a sequence in one step."""
        self.most = most
        self.times = SpeculationTimes()
        super().__init__(0.5, Acceptance(0.5, 1.0))
        self._num_steps = 0

    def comes_next(self, num_sequences: int, drafters: Sequence[Acceptance]) -> bool:
        """Whether the next step, which has yet to begin, may get drafts. False: it has begun, and is plain."""
        if not self.begins(num_sequences) or not any(self.lengths(num_sequences, drafters)):
            return False
        self._num_steps -= 1
        return True

    def begins_next(self, num_sequences: int) -> bool:
        """As `begins`, of a step that has yet to begin. False: it has begun."""
        if not self.begins(num_sequences):
            return False
        self._num_steps -= 1
        return True

    def begins(self, num_sequences: int) -> bool:
        """A step of so many sequences. False: it is to be plain, or no draft would pay in it, however good."""
        self._num_steps += 1
        plain_s = self.times.plain(num_sequences)
        if plain_s is None or not self.times.is_known(num_sequences) or self._num_steps % _PLAIN_EVERY == 0:
            return False
        extra = self.times.extra(num_sequences)
        return extra is None or self._is_try or MARGIN * extra[1] * num_sequences / plain_s < _CEILING

    @property
    def _is_try(self) -> bool:
        return self._num_steps % _TRY_EVERY == 0

    def lengths(self, num_sequences: int, drafters: Sequence[Acceptance]) -> list[int]:
        """Tokens worth drafting for each of `drafters`, sequences of a step of `num_sequences` that `begins`."""
        plain_s = self.times.plain(num_sequences)
        if not drafters or plain_s is None:
            return [0] * len(drafters)
        if (extra := self.times.extra(num_sequences)) is None:
            return self._try(drafters, self.most)
        fixed_s, token_s = extra
        rates = [self.rate(acceptance) for acceptance in drafters]
        pace = num_sequences / plain_s  # tokens per second without drafts
        found = [self._length(rate, MARGIN * token_s * pace) for rate in rates]
        gain = sum(expected(rate, length) for rate, length in zip(rates, found, strict=True))
        cost_s = fixed_s + token_s * sum(found)
        if gain <= MARGIN * pace * cost_s:
            return self._try(drafters, min(_TRY_TOKENS, self.most) * self._is_try)
        return found

    @staticmethod
    def _try(drafters: Sequence[Acceptance], length: int) -> list[int]:
        """Of one sequence alone: to see what it costs."""
        return [length] + [0] * (len(drafters) - 1)

    def _length(self, rate: float, price: float) -> int:
        """Draft while the next token's chance to be kept is more than the tokens that its time would bring anyway."""
        length, chance = 0, rate
        while length < self.most and chance > price:
            length += 1
            chance *= rate
        return length


def expected(rate: float, length: int) -> float:
    """Drafted tokens that are kept, of so many."""
    return sum(rate**index for index in range(1, length + 1))
