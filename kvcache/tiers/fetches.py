"""Blocks that queued requests want from the stores: looked up, read into the host tier, and held there for the request.

A request waits for its blocks as long as the settings say, then goes on with those that have arrived. A prefetch runs
ahead of its request: its blocks are pinned for a time, and a request that finds it under way waits for it. Engine's
thread; I/O threads call the stores. Pure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvrelay.kvcache.memory.jobs import IoJob, Threads, Urgency, batch_blocks
from kvrelay.kvcache.stores.store import BlockStore
from kvrelay.kvcache.tiers.host_tier import HostTier, TierRules
from kvrelay.kvcache.tiers.offload import Offload
from kvrelay.types import BlockHash, BlockMeta

MAX_PREFETCHES = 64  # under way at once


@dataclass(slots=True, eq=False)
class RequestFetch:
    """The blocks that one request wants."""

    request_id: str
    hashes: Sequence[BlockHash]  # of the blocks that neither pool nor host tier has
    metas: Sequence[BlockMeta]
    until_s: float  # a request waits until then; a prefetch pins its blocks until then
    on_found: Callable[[int], None] | None = None  # of a prefetch: called once, with the number of blocks being read
    num_jobs: int = 0  # not yet reported
    is_over: bool = False  # the request was admitted, or is gone
    held: list[int] = field(default_factory=list)  # rows that are held for it
    is_overdue: bool = False  # its request waits no longer
    followers: list["RequestFetch"] = field(default_factory=list)  # requests that wait for this prefetch


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of a fetch's blocks from one store, with the rows for them."""

    store: BlockStore
    hashes: Sequence[BlockHash]
    metas: Sequence[BlockMeta]
    rows: Sequence[int]


class Fetches:
    """All fetches from the stores, by request."""

    def __init__(
        self, host: HostTier, stores: Sequence[BlockStore], offload: Offload, threads: Threads, rules: TierRules
    ) -> None:
        self._host, self._stores, self._offload, self._threads = host, stores, offload, threads
        self._rules = rules
        self._speeds = {store.name: StoreSpeed() for store in stores}
        self._fetches: dict[str, RequestFetch] = {}
        self._prefetches: dict[str, RequestFetch] = {}  # under way
        self._num_jobs = 0  # of all fetches, finished ones included
        self._last_reply_s = 0.0  # when the last of these jobs reported, or the first of them began
        self.prefill_tokens_per_s = 0.0  # measured by the engine

    def __len__(self) -> int:
        return len(self._fetches)

    @property
    def is_on(self) -> bool:
        """Whether a fetch may bring anything."""
        return bool(self._stores) and self._rules.prefetch != "off"

    def fetch(self, request_id: str, hashes: Sequence[BlockHash], metas: Sequence[BlockMeta], start: int = 0) -> None:
        """Fetch a queued request's blocks from the stores, once; those before `start` are in the pool."""
        first = start + self._host.num_here(hashes, start)
        if not self.is_on or first >= len(hashes):
            return
        held = self._host.hold(hashes[start:first])  # the others are of no use without these
        now_s, hashes, metas = self._host.now_s(), hashes[first:], metas[first:]
        fetch = RequestFetch(request_id, hashes, metas, now_s + self._rules.longest_wait_s, held=held)
        fetch.is_overdue = fetch.until_s <= now_s or self._is_stalled(now_s)
        ahead = next((other for other in self._prefetches.values() if hashes[0] in other.hashes), None)
        if request_id in self._fetches or (ahead is None and not self._look_up(fetch)):
            self._host.unhold(fetch.held)
            return
        self._fetches[request_id] = fetch
        if ahead is not None:
            fetch.num_jobs += 1  # until `_resume`
            ahead.followers.append(fetch)

    def prefetch(
        self,
        request_id: str,
        hashes: Sequence[BlockHash],
        metas: Sequence[BlockMeta],
        pin_until_s: float,
        on_found: Callable[[int], None],
    ) -> bool:
        """Fetch these blocks ahead of their request; those that arrive are pinned until then.

        `on_found` is called once, with the number of blocks being read. False, and no call: too many are under way.
        """
        if not hashes or not self.is_on:
            on_found(0)
            return True
        fetch = RequestFetch(request_id, hashes, metas, pin_until_s, on_found)
        if request_id in self._prefetches or len(self._prefetches) >= MAX_PREFETCHES or not self._look_up(fetch):
            return False
        self._prefetches[request_id] = fetch
        return True

    # ---- waiting

    def is_waiting(self, request_id: str) -> bool:
        """Whether the request should not be admitted yet."""
        fetch = self._fetches.get(request_id)
        return fetch is not None and self._is_awaited(fetch)

    @staticmethod
    def _is_awaited(fetch: RequestFetch) -> bool:
        return fetch.num_jobs > 0 and not fetch.is_overdue

    def _is_stalled(self, now_s: float) -> bool:
        """No store has replied for longer than a request waits: until one does, no other request waits."""
        return self._num_jobs > 0 and now_s - self._last_reply_s >= self._rules.longest_wait_s

    def tick(self) -> None:
        """Requests past their deadline wait no longer. Once in every step."""
        now_s = self._host.now_s()
        for fetch in self._fetches.values():
            fetch.is_overdue |= fetch.until_s <= now_s

    def next_deadline_s(self) -> float | None:
        """When the next request stops waiting and a `tick` is due; None: no request waits."""
        return min((fetch.until_s for fetch in self._fetches.values() if self._is_awaited(fetch)), default=None)

    def end(self, request_id: str) -> None:
        """The request was admitted, or is gone: release the rows held for it."""
        fetch = self._fetches.pop(request_id, None)
        if fetch is not None:
            fetch.is_over = True
            self._host.unhold(fetch.held)
            fetch.held.clear()

    def end_all(self) -> None:
        """End the fetches of all requests."""
        for request_id in list(self._fetches):
            self.end(request_id)

    # ---- lookup and reads

    def _submit(
        self, fetch: RequestFetch, num_bytes: int, work: Callable[[], object], then: Callable[[object], None]
    ) -> bool:
        """False: no room in the queue."""

        def reported(result: object) -> None:
            fetch.num_jobs -= 1
            self._num_jobs -= 1
            self._last_reply_s = self._host.now_s()
            then(result)
            if not fetch.num_jobs:
                self._settled(fetch)

        if not self._threads.put(IoJob(Urgency.FETCH, num_bytes, work, reported)):
            return False
        if not self._num_jobs:
            self._last_reply_s = self._host.now_s()
        fetch.num_jobs += 1
        self._num_jobs += 1
        return True

    def _look_up(self, fetch: RequestFetch) -> bool:
        """Ask the stores which of its blocks they have. False: no room in the queue."""
        hashes, stores = fetch.hashes, self._stores

        def look_up() -> list[int]:
            """For each block the first store that has it; ends at the first block that no store has."""
            found: list[int] = []
            for index, store in enumerate(stores):
                left = hashes[len(found) :]
                has = store.contains(left) if left else []
                run = next((i for i, here in enumerate(has) if not here), len(has))
                found += [index] * run
            return found

        return self._submit(fetch, 0, look_up, lambda result: self._looked_up(fetch, result))

    def _looked_up(self, fetch: RequestFetch, result: object) -> None:
        num_reading = self._read_found(fetch, result) if isinstance(result, list) and not fetch.is_over else 0
        if fetch.on_found is not None:
            fetch.on_found(num_reading)

    def _read_found(self, fetch: RequestFetch, found: list[int]) -> int:
        """Read the found blocks (`found[i]`: index of the store); returns how many."""
        first = num_reading = 0
        while first < len(found):
            store = self._stores[found[first]]
            end = next((i for i in range(first, len(found)) if found[i] != found[first]), len(found))
            is_worth = fetch.on_found is not None or self._is_worth_reading(store)
            rows = self._host.reserve_for(fetch.metas[first:end]) if is_worth else []
            self._read(fetch, store, first, rows)
            num_reading += len(rows)
            if len(rows) < end - first:  # blocks after a gap are of no use
                break
            first = end
        return num_reading

    def _is_worth_reading(self, store: BlockStore) -> bool:
        """Whether its blocks are read sooner than computed."""
        bandwidth = self._speeds[store.name].bytes_per_s(self._host.now_s())
        block_bytes, block_tokens = self._host.block_bytes, self._rules.block_tokens
        return self._rules.prefetch == "wait" or is_worth_fetching(
            block_bytes, block_tokens, bandwidth, self.prefill_tokens_per_s
        )

    def _read(self, fetch: RequestFetch, store: BlockStore, first: int, rows: Sequence[int]) -> None:
        step = batch_blocks(self._host.block_bytes)
        for begin in range(0, len(rows), step):
            some = slice(first + begin, first + min(begin + step, len(rows)))
            part = _Part(store, fetch.hashes[some], fetch.metas[some], rows[begin : begin + step])
            read, then = partial(self._read_part, fetch, part), partial(self._arrived, fetch, part)
            if not self._submit(fetch, len(part.rows) * self._host.block_bytes, read, then):
                then(None)

    def _read_part(self, fetch: RequestFetch, part: _Part) -> list[int | None]:
        """Runs on an I/O thread: load blocks into rows; returns the checksum of each that arrived."""
        if fetch.is_over:  # too late to be of use
            return [None] * len(part.rows)
        clock, slab = self._host.now_s, self._host.slab
        began_s = clock()
        loaded = part.store.load(part.hashes, [slab.row(row) for row in part.rows], part.metas)
        now_s = clock()
        self._speeds[part.store.name].observe(sum(loaded) * slab.block_bytes, now_s - began_s, now_s)
        return [slab.checksum(row) if is_here else None for row, is_here in zip(part.rows, loaded, strict=True)]

    def _arrived(self, fetch: RequestFetch, part: _Part, result: object) -> None:
        checksums = result if isinstance(result, list) else [None] * len(part.rows)
        arrived: list[BlockHash] = []
        held: list[int] = []
        for digest, meta, row, checksum in zip(part.hashes, part.metas, part.rows, checksums, strict=True):
            if checksum is None:
                self._host.cancel((row,))
                continue
            self._host.put_block(digest, row, checksum, meta)
            held += self._host.hold((digest,))
            arrived.append(digest)
        self._offload.mark_stored(part.store, arrived)
        if fetch.on_found is not None:
            self._host.pin(part.hashes, fetch.until_s)
        if fetch.on_found is not None or fetch.is_over:
            self._host.unhold(held)
        else:
            fetch.held += held

    def _settled(self, fetch: RequestFetch) -> None:
        """All jobs of this fetch have reported."""
        if self._prefetches.get(fetch.request_id) is fetch:
            del self._prefetches[fetch.request_id]
        followers, fetch.followers = fetch.followers, []
        for follower in followers:
            self._resume(follower)

    def _resume(self, fetch: RequestFetch) -> None:
        """The prefetch that this request waited for has ended: hold what it brought, fetch the rest."""
        fetch.num_jobs -= 1
        if fetch.is_over:
            return
        here = self._host.hold(fetch.hashes[: self._host.num_here(fetch.hashes, 0)])
        fetch.held += here
        fetch.hashes, fetch.metas = fetch.hashes[len(here) :], fetch.metas[len(here) :]
        if fetch.hashes:
            self._look_up(fetch)


_FORGET_S = 30.0


class StoreSpeed:
    """A store's recent read bandwidth. Several threads report; a lost update costs one estimate."""

    def __init__(self) -> None:
        self._bytes_per_s = self._measured_s = 0.0

    def observe(self, num_bytes: int, seconds: float, now_s: float) -> None:
        """One call that read `num_bytes` in `seconds`."""
        if num_bytes and seconds > 0:
            speed, old = num_bytes / seconds, self.bytes_per_s(now_s)
            self._bytes_per_s = old + 0.3 * (speed - old) if old else speed
            self._measured_s = now_s

    def bytes_per_s(self, now_s: float) -> float:
        """0: not measured recently, so that a store that was slow once is tried again."""
        return self._bytes_per_s if now_s - self._measured_s < _FORGET_S else 0.0


def is_worth_fetching(block_bytes: int, block_tokens: int, bandwidth: float, prefill_tokens_per_s: float) -> bool:
    """Whether to fetch blocks rather than compute them; both costs are proportional to their number.

    A path without a measurement (bandwidth 0 bytes per second) is tried, to get one; without a measured prefill speed
    (0), fetching counts as faster.
    """
    if bandwidth <= 0 or prefill_tokens_per_s <= 0:
        return True
    return block_bytes / bandwidth < block_tokens / prefill_tokens_per_s
