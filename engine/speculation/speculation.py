"""How many drafted tokens each sequence of a step gets: as many as pay, from measured times; and prompt lookup. Pure.

Drafted tokens are computed behind a sequence's next one, in the same step; those that match what would have been
sampled anyway are kept. More rows make a step longer: a draft pays while its expected tokens per second are more than
the step's own. On a busy device nothing pays, and nothing is drafted.
Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, ICML 2023 (the expected tokens).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.hashing import pack_tokens

# plain steps whose median counts: with drafts in most steps they are rare, and a slow one would count for long
_RECENT_STEPS = 5
_ENOUGH_PLAIN = 3
_FORGET = 0.97  # weight of older steps in the fit
_RECENT = 0.9  # weight of older drafts in a sequence's acceptance rate
_PRIOR = 4.0  # drafted tokens of prior for a new sequence, at the overall rate
_FLOOR, _CEILING = 0.02, 0.98  # limits of rates
_PLAIN_EVERY = 32  # steps: one runs without drafts, to measure it
_TRY_EVERY = 16  # steps: one draft that is not expected to pay, to measure it
_TRY_TOKENS = 2
MARGIN = 1.3  # least ratio of a draft's expected tokens to its cost: rates are estimates
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

    @staticmethod
    def _class(num_sequences: int) -> int:
        return num_sequences.bit_length()

    def plain(self, num_sequences: int) -> float | None:
        """Seconds of a step without drafts; None: not measured."""
        return self.plain_s.get(self._class(num_sequences))

    def is_known(self, num_sequences: int) -> bool:
        """Whether there were enough plain steps: the first of a size is slow (recording, first touch of memory)."""
        return len(self._recent_s.get(self._class(num_sequences), ())) >= _ENOUGH_PLAIN

    def observe(self, num_sequences: int, num_drafted: int, seconds: float) -> None:
        if not num_drafted:
            size = self._class(num_sequences)
            recent_s = self._recent_s.setdefault(size, deque(maxlen=_RECENT_STEPS))
            recent_s.append(seconds)
            self.plain_s[size] = sorted(recent_s)[(len(recent_s) - 1) // 2]
            return
        if (plain := self.plain(num_sequences)) is None:
            return
        size = self._class(num_sequences)
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
        weight, k, k2, seconds, ks = self._moments.get(self._class(num_sequences), [0.0] * 5)
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

    def comes_next(self, num_sequences: int, drafters: Sequence[Acceptance]) -> bool:
        """Whether the next step may get drafts. False: it counts as begun, without drafts."""
        if not self.begins(num_sequences) or not any(self.lengths(num_sequences, drafters)):
            return False
        self._num_steps -= 1
        return True

    def begins_next(self, num_sequences: int) -> bool:
        """As `begins`, before the step begins: True does not count it as begun yet."""
        if not self.begins(num_sequences):
            return False
        self._num_steps -= 1
        return True

    def begins(self, num_sequences: int) -> bool:
        """Count a step of this many sequences. False: no drafts, to measure it, or because not even a sure draft would
        pay.
        """
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
        tokens_per_s = num_sequences / plain_s  # without drafts
        found = [self._length(rate, MARGIN * token_s * tokens_per_s) for rate in rates]
        gain = sum(expected(rate, length) for rate, length in zip(rates, found, strict=True))
        cost_s = fixed_s + token_s * sum(found)
        if gain <= MARGIN * tokens_per_s * cost_s:
            return self._try(drafters, min(_TRY_TOKENS, self.most) * self._is_try)
        return found

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


LONGEST, SHORTEST = 4, 2  # tokens that must match; longer matches are tried first
_ITEM = 4  # bytes of a packed token


class PromptLookup:
    """One sequence's text, packed so that finding a few tokens is one search for bytes."""

    def __init__(self, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        self._longest, self._shortest = longest, shortest
        self._packed = bytearray()

    def draft(self, token_ids: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow; empty: no earlier occurrence. `token_ids` only ever grows."""
        self._packed += pack_tokens(token_ids, len(self._packed) // _ITEM)
        if most <= 0:
            return []
        for size in range(min(self._longest, len(token_ids) - 1), self._shortest - 1, -1):
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
    def _continued(token_ids: Sequence[int], after: int, most: int) -> list[int]:
        """Tokens from there on; at the end of the text it wraps around, which continues periodic text."""
        length = len(token_ids)
        return [token_ids[after + index % (length - after)] for index in range(most)]
