"""Eviction by what was learned of when prompts are continued. Pure."""

from collections import OrderedDict
from dataclasses import dataclass

from kvrelay.kvcache.eviction.reuse_rates import ReuseRates
from kvrelay.kvcache.eviction.usage import Usage
from kvrelay.types import BlockHash

_MOST_WATCHED = 8192  # requests whose continuation is waited for, their blocks cached or not


@dataclass(slots=True, eq=False)
class _Request:
    """One request's way through the cache: all blocks that it touched share its fate, so they share this."""

    now_s: float
    tail: Usage
    turn: int  # requests that this one continues, one continuing the other
    matched_tokens: int = 0
    watched_as: BlockHash | None = None  # its tail's hash when it was last looked at: a run of blocks can grow

    @property
    def kind(self) -> tuple[int, int]:
        """Turn and new tokens, both coarse: what tells how soon a prompt is continued, if ever."""
        new = max(self.tail.end_tokens - self.matched_tokens, 1)
        return min(self.turn, 3) if self.turn < 4 else min(self.turn.bit_length() + 1, 7), min(new.bit_length(), 20)


@dataclass(slots=True, eq=False)
class _Note:
    request: _Request  # the last one that touched the entry
    num_children: int = 0


class Survival:
    """Lowest expected hits per second of staying first, given the kind of request that last touched it and how long ago.

    A conversation is not continued before its reader has read, most often soon after, and the likelier the more turns it
    has had; a one-off prompt never is. None of that is assumed: the rates are learned from the requests, those included
    whose blocks were evicted (by the hash of their last block). Before anything is learned it is LRU.

    The value of keeping an entry of age a is the best over t of P(reused before a + t) / E[time until reuse or t]: the
    Gittins index of a job that pays at its end. Times are seconds.
    """

    name = "survival"

    def __init__(self, capacity_blocks: int, attention_tokens: float = float("inf")) -> None:
        """`attention_tokens`: prompt length at which attending to the prefix costs as much as all else in a model.

        A block's recompute cost is 1 + end_tokens / attention_tokens, so infinite means: hits count alike.
        """
        self.num_revisions = 0
        self._attention_tokens = attention_tokens
        self._rates = ReuseRates()
        self._watched: OrderedDict[BlockHash, _Request] = OrderedDict()  # by the tail's hash, oldest first
        self._last: _Request | None = None
        self._every = max(1, capacity_blocks // 16)
        self._inserted_blocks = 0
        self._next_fit = 64

    @classmethod
    def by_cost(cls, capacity_blocks: int) -> "Survival":
        """Recompute cost counts: at 32k tokens a block is worth two at the beginning (about a 30B dense model's ratio)."""
        policy = cls(capacity_blocks, attention_tokens=32768)
        policy.name = "cost"
        return policy

    # ---- what happens

    def inserted(self, usage: Usage, now_s: float) -> None:
        self._inserted_blocks += usage.num_blocks
        if self._inserted_blocks >= self._every:
            self._revise(now_s)
        before = self._watched.pop(usage.digest, None)
        if before is not None:  # it was evicted, and would have been a hit
            self._rates.reused(before.kind, now_s - before.now_s)
        request = self._request_of_new(usage, now_s)
        if before is not None:
            request.turn, request.matched_tokens = before.turn + 1, usage.end_tokens  # as if it had been matched
        usage.note = _Note(request)
        self._watch(request, usage)

    def _request_of_new(self, usage: Usage, now_s: float) -> _Request:
        above = usage.above
        note = above.note if above is not None else None
        if above is None or not isinstance(note, _Note):
            self._last = _Request(now_s, usage, turn=0, matched_tokens=0)
            return self._last
        note.num_children += 1
        request = note.request
        if request.tail is above and request.now_s == now_s:  # the same request's next
            if note.num_children > 1:  # prompts part here: a shared beginning, not an earlier turn
                request.turn = 0
        else:
            request = _Request(now_s, usage, turn=0, matched_tokens=above.end_tokens)
        self._last = request
        return request

    def used(self, usage: Usage, now_s: float) -> None:
        note = usage.note
        if not isinstance(note, _Note):
            note = usage.note = _Note(_Request(now_s, usage, turn=0))
        before = note.request
        last = self._last
        if last is not None and last.now_s == now_s and (usage.above is last.tail or last.tail.above is usage):
            request = last
        else:
            request = self._last = _Request(now_s, usage, turn=0)
        note.request = request
        if before is request:
            return
        if before.tail is usage and self._unwatch(before):
            self._rates.reused(before.kind, now_s - before.now_s)
        if usage.end_tokens >= request.tail.end_tokens:
            request.turn = before.turn + 1 if before.tail is usage else 0
            request.matched_tokens = usage.end_tokens
            self._watch(request, usage)

    def _watch(self, request: _Request, usage: Usage) -> None:
        """The request reaches this far: its last block tells whether it is continued."""
        self._unwatch(request)
        request.tail, request.watched_as = usage, usage.digest
        self._watched[usage.digest] = request
        if len(self._watched) > _MOST_WATCHED:
            _, oldest = self._watched.popitem(last=False)
            self._rates.lost(oldest.kind, request.now_s - oldest.now_s)

    def _unwatch(self, request: _Request) -> bool:
        """Whether it was watched."""
        if request.watched_as is None or self._watched.get(request.watched_as) is not request:
            return False
        del self._watched[request.watched_as]
        return True

    def evicted(self, usage: Usage, now_s: float) -> None:
        above = usage.above.note if usage.above is not None else None
        if isinstance(above, _Note):
            above.num_children -= 1

    # ---- what it is worth

    def _revise(self, now_s: float) -> None:
        """Entries have aged by a sixteenth of a turnover: ask again. Learn, where there is a twentieth more to learn from."""
        self._inserted_blocks = 0
        self.num_revisions += 1
        if self._rates.num_reused >= self._next_fit:
            self._next_fit = int(self._rates.num_reused * 1.05) + 16
            self._rates.fit((one.kind, now_s - one.now_s) for one in self._watched.values())

    def score(self, usage: Usage, now_s: float) -> float:
        note = usage.note
        kind = note.request.kind if isinstance(note, _Note) else None
        worth = self._rates.value(kind, now_s - usage.used_s)
        return worth * (1 + usage.end_tokens / self._attention_tokens)
