"""The contract of an eviction policy, and the record that a policy sees of each cached entry. Pure: no clock, no
random source.

A cache (the device's prefix index, or a tier) keeps an `EntryUsage` with each entry and asks its policy for a score.
Among the entries that may be evicted now (not held, not pinned, without a cached continuation) the lowest score goes
first. The cache asks for a score when an entry becomes evictable; the score holds until the entry is used again or
the policy's `num_revisions` grows.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvrelay.kvcache.eviction.reuse_rates import ReuseRates
from kvrelay.types import BlockHash

Key = TypeVar("Key")

_MAX_WATCHED = 8192  # requests that may still be continued, whether their blocks are cached or not


@dataclass(slots=True, eq=False)
class EntryUsage:
    """One entry: a run of blocks that are inserted and used together. Times are the caller's clock, in seconds."""

    digest: BlockHash  # of its last block
    num_blocks: int
    end_tokens: int  # tokens from the prompt's beginning to the entry's end
    used_s: float
    hits: int = 0  # matches since it was inserted
    rank: float = 0.0  # for the policy's own use
    above: "EntryUsage | None" = None  # the entry that this one continues, if it was cached at insertion
    note: object = None  # for the policy's own use

    def copy(self) -> "EntryUsage":
        """The same values for another entry. Written out: dataclasses.replace takes five times as long."""
        return EntryUsage(
            self.digest, self.num_blocks, self.end_tokens, self.used_s, self.hits, self.rank, self.above, self.note
        )


class EvictionPolicy(Protocol):
    """One policy's state for one cache."""

    name: str
    num_revisions: int  # grows when earlier scores are out of date: the cache then asks again

    def inserted(self, usage: EntryUsage, now_s: float) -> None:
        """The entry is cached from now on. Entries of one request arrive in prompt order."""

    def used(self, usage: EntryUsage, now_s: float) -> None:
        """A request matched the entry; `hits` and `used_s` are up to date."""

    def evicted(self, usage: EntryUsage, now_s: float) -> None:
        """The entry is no longer cached: evicted for room, or discarded."""

    def score(self, usage: EntryUsage, now_s: float) -> float:
        """The entry with the lowest score is evicted first."""


class EvictionQueue(Generic[Key]):
    """Lowest priority first, then lowest score, then lowest ticket, which is the first in.

    An item is valid while `is_valid(key, ticket)` holds. Invalid items are skipped, and removed when they outnumber the
    valid ones, so the queue holds at most about twice the entries.
    """

    def __init__(self, is_valid: Callable[[Key, int], bool]) -> None:
        self._is_valid = is_valid
        self.items: list[tuple[int, float, int, Key]] = []  # a heap: priority, score, ticket, key
        self._sweep_at = 64

    def push(self, priority: int, score: float, ticket: int, key: Key) -> None:
        items = self.items
        heapq.heappush(items, (priority, score, ticket, key))
        if len(items) >= self._sweep_at:
            self.items = [item for item in self.items if self._is_valid(item[3], item[2])]
            heapq.heapify(self.items)
            self._sweep_at = max(64, 2 * len(self.items))

    def pop(self) -> Key | None:
        """Remove and return the first valid entry; None when there is none."""
        while self.items:
            _, _, ticket, key = heapq.heappop(self.items)
            if self._is_valid(key, ticket):
                return key
        return None


class Lru:
    """Least recently used first. Keeps no state, so other policies derive from it."""

    name = "lru"
    num_revisions = 0

    def inserted(self, usage: EntryUsage, now_s: float) -> None:
        """Keeps no state."""

    def used(self, usage: EntryUsage, now_s: float) -> None:
        """Keeps no state: `used_s` is enough."""

    def evicted(self, usage: EntryUsage, now_s: float) -> None:
        """Keeps no state."""

    def score(self, usage: EntryUsage, now_s: float) -> float:
        return usage.used_s


class Lfu(Lru):
    """Least frequently used first, with dynamic ageing: a new entry starts from the score of the last evicted one.

    Source: LFU with dynamic ageing (Arlitt et al., 2000).
    """

    name = "lfu"

    def __init__(self) -> None:
        self._age = 0.0

    def inserted(self, usage: EntryUsage, now_s: float) -> None:
        usage.rank = self._age + 1 + usage.hits

    def used(self, usage: EntryUsage, now_s: float) -> None:
        usage.rank = self._age + 1 + usage.hits

    def evicted(self, usage: EntryUsage, now_s: float) -> None:
        self._age = max(self._age, usage.rank)

    def score(self, usage: EntryUsage, now_s: float) -> float:
        return usage.rank


@dataclass(slots=True, eq=False)
class _Request:
    """One request. All entries that it touched share this record: they are reused together."""

    now_s: float
    last_entry: EntryUsage
    turn: int  # length of the chain of requests that this one continues
    matched_tokens: int = 0
    watched_as: BlockHash | None = None  # the last entry's hash when it was watched: a run of blocks can grow

    @property
    def kind(self) -> tuple[int, int]:
        """Turn and new tokens, in coarse steps: they predict how soon a prompt is continued, if ever."""
        new = max(self.last_entry.end_tokens - self.matched_tokens, 1)
        return min(self.turn, 3) if self.turn < 4 else min(self.turn.bit_length() + 1, 7), min(new.bit_length(), 20)


@dataclass(slots=True, eq=False)
class _Note:
    request: _Request  # the last one that touched this entry
    num_children: int = 0


class Survival:
    """Evicts the entry with the fewest expected hits per second, given the request that last touched it and its age.

    A conversation is continued some time after its last answer, and more likely the more turns it has had; a one-off
    prompt is never continued. The rates are learned from requests, including those whose blocks were evicted (found by
    the hash of their last block). Until then the order is LRU's.

    The value of keeping an entry of age a is max over t of P(reused before a + t) / E[min(time until reuse, t)]: the
    Gittins index of a job that pays at its end. Times are seconds.
    """

    name = "survival"

    def __init__(self, capacity_blocks: int) -> None:
        self.num_revisions = 0
        self._rates = ReuseRates()
        self._watched: OrderedDict[BlockHash, _Request] = OrderedDict()  # by the last entry's hash, oldest first
        self._last: _Request | None = None
        self._revise_every = max(1, capacity_blocks // 16)
        self._inserted_blocks = 0
        self._next_fit = 64

    # ---- events

    def inserted(self, usage: EntryUsage, now_s: float) -> None:
        self._inserted_blocks += usage.num_blocks
        if self._inserted_blocks >= self._revise_every:
            self._revise(now_s)
        before = self._watched.pop(usage.digest, None)
        if before is not None:  # evicted since, and would have been a hit
            self._rates.reused(before.kind, now_s - before.now_s)
        request = self._request_of_new(usage, now_s)
        if before is not None:
            request.turn, request.matched_tokens = before.turn + 1, usage.end_tokens  # as if it had been matched
        usage.note = _Note(request)
        self._watch(request, usage)

    def _request_of_new(self, usage: EntryUsage, now_s: float) -> _Request:
        above = usage.above
        note = above.note if above is not None else None
        if above is None or not isinstance(note, _Note):
            self._last = _Request(now_s, usage, turn=0, matched_tokens=0)
            return self._last
        note.num_children += 1
        request = note.request
        if request.last_entry is above and request.now_s == now_s:  # the next entry of the same request
            if note.num_children > 1:  # prompts diverge here: a shared prefix, not an earlier turn
                request.turn = 0
        else:
            request = _Request(now_s, usage, turn=0, matched_tokens=above.end_tokens)
        self._last = request
        return request

    def used(self, usage: EntryUsage, now_s: float) -> None:
        note = usage.note
        if not isinstance(note, _Note):
            note = usage.note = _Note(_Request(now_s, usage, turn=0))
        before = note.request
        last = self._last
        if (
            last is not None
            and last.now_s == now_s
            and (usage.above is last.last_entry or last.last_entry.above is usage)
        ):
            request = last
        else:
            request = self._last = _Request(now_s, usage, turn=0)
        note.request = request
        if before is request:
            return
        if before.last_entry is usage and self._unwatch(before):
            self._rates.reused(before.kind, now_s - before.now_s)
        if usage.end_tokens >= request.last_entry.end_tokens:
            request.turn = before.turn + 1 if before.last_entry is usage else 0
            request.matched_tokens = usage.end_tokens
            self._watch(request, usage)

    def _watch(self, request: _Request, usage: EntryUsage) -> None:
        """This is the request's last entry so far: when it is used again, the request was continued."""
        self._unwatch(request)
        request.last_entry, request.watched_as = usage, usage.digest
        self._watched[usage.digest] = request
        if len(self._watched) > _MAX_WATCHED:
            _, oldest = self._watched.popitem(last=False)
            self._rates.lost(oldest.kind, request.now_s - oldest.now_s)

    def _unwatch(self, request: _Request) -> bool:
        """Stop watching; returns whether the request was watched."""
        if request.watched_as is None or self._watched.get(request.watched_as) is not request:
            return False
        del self._watched[request.watched_as]
        return True

    def evicted(self, usage: EntryUsage, now_s: float) -> None:
        above = usage.above.note if usage.above is not None else None
        if isinstance(above, _Note):
            above.num_children -= 1
        usage.above = None  # its request may be watched for long, which else kept every block of the prompt

    # ---- value

    def _revise(self, now_s: float) -> None:
        """A sixteenth of the cache was replaced: scores are out of date. Fit again after 5 % more reuses."""
        self._inserted_blocks = 0
        self.num_revisions += 1
        if self._rates.num_reused >= self._next_fit:
            self._next_fit = int(self._rates.num_reused * 1.05) + 16
            self._rates.fit((one.kind, now_s - one.now_s) for one in self._watched.values())

    def score(self, usage: EntryUsage, now_s: float) -> float:
        note = usage.note
        kind = note.request.kind if isinstance(note, _Note) else None
        return self._rates.value(kind, now_s - usage.used_s)


POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": lambda capacity_blocks: Lru(),
    "lfu": lambda capacity_blocks: Lfu(),
    "survival": Survival,
}


def make_policy(name: str, capacity_blocks: int) -> EvictionPolicy:
    """A new policy for one cache of so many blocks. Raises ValueError, listing the known names."""
    maker = POLICIES.get(name)
    if maker is None:
        raise ValueError(f"unknown eviction policy {name!r}; choose one of {', '.join(POLICIES)}")
    return maker(capacity_blocks)
