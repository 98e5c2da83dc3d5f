"""What requests in line have asked of the stores below the host tier: looked up, brought into the host tier, held there.

A request waits for its blocks as long as the settings say and then goes on with those that have come. A prefetch asks ahead
of its request: what comes is pinned for a time, and a request that finds it under way waits for it. Owned by `TierController`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvrelay.kvcache.memory.jobs import IoJob, Urgency
from kvrelay.kvcache.stores.store import BlockMeta, BlockStore
from kvrelay.types import BlockHash

_BATCH_BYTES = 8 << 20
_LOOKUP_BYTES = 0
MAX_PREFETCHES = 64  # under way at once


@dataclass(slots=True, eq=False)
class Fetch:
    """One request's wishes."""

    request_id: str
    hashes: Sequence[BlockHash]  # of the blocks that neither pool nor host tier has
    metas: Sequence[BlockMeta]
    until_s: float  # longest wait; after it the request goes on without. Of a prefetch: how long what comes is pinned
    told: Callable[[int], None] | None = None  # of a prefetch: called once, with the number of blocks on their way
    num_jobs: int = 0  # not yet reported
    is_over: bool = False  # nobody waits for it any more
    held: list[int] = field(default_factory=list)  # slots that are kept for it
    is_late: bool = False  # its request waits no longer
    followers: list["Fetch"] = field(default_factory=list)  # requests that wait for what a prefetch brings


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of a fetch's blocks that one store has, with the slots for them."""

    store: BlockStore
    first: int  # index in Fetch.hashes
    slots: tuple[int, ...]


class Host(Protocol):
    """What TierController does for fetches."""

    stores: Sequence[BlockStore]

    def now_s(self) -> float: ...

    def submit(self, job: IoJob) -> bool: ...

    def slots_for(self, metas: Sequence[BlockMeta]) -> list[int]:
        """Reserved slots for the first of these blocks, as many as there is room for."""

    def read_into(self, store: BlockStore, hashes: Sequence[BlockHash], slots: Sequence[int]) -> list[int | None]:
        """On an I/O thread: load into these slots; the checksum of each that came."""

    def arrived(
        self, store: BlockStore, hashes: Sequence[BlockHash], metas: Sequence[BlockMeta], slots: Sequence[int],
        checksums: Sequence[int | None],
    ) -> list[int]:  # fmt: skip
        """Put them in the index, those that came, and hold them; the slots that are held."""

    def unhold(self, slots: Sequence[int]) -> None: ...

    def hold_first(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Hold those of the beginning that are here; their slots."""

    def pin_here(self, hashes: Sequence[BlockHash], until_s: float) -> None:
        """Keep these, those that are here, until then."""

    def worth(self, store: BlockStore, num_blocks: int) -> int:
        """How many of so many blocks are brought sooner than they are computed."""

    @property
    def block_bytes(self) -> int: ...


class Fetches:
    """All that is being fetched, by request."""

    def __init__(self, host: Host, *, wait_s: Callable[[], float]) -> None:
        self._host, self._wait_s = host, wait_s
        self._fetches: dict[str, Fetch] = {}
        self._prefetches: dict[str, Fetch] = {}  # under way
        self._num_jobs = 0  # of all fetches, those that are over too
        self._heard_s = 0.0  # when the last of them reported, or the first of them began

    def __len__(self) -> int:
        return len(self._fetches)

    def begin(
        self, request_id: str, hashes: Sequence[BlockHash], metas: Sequence[BlockMeta], held: Sequence[int] = ()
    ) -> None:
        """Ask the stores for these; a request asks once. `held`: slots, to be let go with what comes."""
        now_s = self._host.now_s()
        fetch = Fetch(request_id, hashes, metas, now_s + self._wait_s(), held=list(held))
        fetch.is_late = fetch.until_s <= now_s or self._is_stalled(now_s)
        ahead = next((other for other in self._prefetches.values() if hashes[0] in other.hashes), None)
        if request_id in self._fetches or (ahead is None and not self._look_up(fetch)):
            self._host.unhold(fetch.held)
            return
        self._fetches[request_id] = fetch
        if ahead is not None:
            fetch.num_jobs += 1  # until `_go_on`
            ahead.followers.append(fetch)

    def prefetch(
        self, name: str, hashes: Sequence[BlockHash], metas: Sequence[BlockMeta], pin_until_s: float,
        told: Callable[[int], None],
    ) -> bool:  # fmt: skip
        """Ask the stores for these ahead of the request; what comes is pinned until then, and nobody need end this.

        `told`: gets the number of blocks that are on their way, once that is known. False, and never told: too many are
        under way.
        """
        if not hashes:
            told(0)
            return True
        fetch = Fetch(name, hashes, metas, pin_until_s, told)
        if name in self._prefetches or len(self._prefetches) >= MAX_PREFETCHES or not self._look_up(fetch):
            return False
        self._prefetches[name] = fetch
        return True

    def _look_up(self, fetch: Fetch) -> bool:
        """Ask the stores which of its blocks they have. False: no room in line."""
        hashes, stores = fetch.hashes, self._host.stores

        def look_up() -> list[int]:
            """For each block the first store that has it; ends at the first that none has."""
            found: list[int] = []
            for index, store in enumerate(stores):
                left = hashes[len(found) :]
                has = store.contains(left) if left else []
                run = next((i for i, here in enumerate(has) if not here), len(has))
                found += [index] * run
            return found

        return self._submit(fetch, _LOOKUP_BYTES, look_up, lambda result: self._looked_up(fetch, result))

    def _submit(self, fetch: Fetch, num_bytes: int, work: Callable[[], object], then: Callable[[object], None]) -> bool:
        """False: no room in line."""

        def reported(result: object) -> None:
            fetch.num_jobs -= 1
            self._num_jobs -= 1
            self._heard_s = self._host.now_s()
            then(result)
            if not fetch.num_jobs:
                self._settled(fetch)

        if not self._host.submit(IoJob(Urgency.FETCH, num_bytes, work, reported)):
            return False
        if not self._num_jobs:
            self._heard_s = self._host.now_s()
        fetch.num_jobs += 1
        self._num_jobs += 1
        return True

    def _is_stalled(self, now_s: float) -> bool:
        """The stores have not answered for longer than a request waits: until they do, nobody else waits for them."""
        return self._num_jobs > 0 and now_s - self._heard_s >= self._wait_s()

    def is_waiting(self, request_id: str) -> bool:
        """Whether the request should not be admitted yet."""
        fetch = self._fetches.get(request_id)
        return fetch is not None and self._is_awaited(fetch)

    @staticmethod
    def _is_awaited(fetch: Fetch) -> bool:
        return fetch.num_jobs > 0 and not fetch.is_late

    def tick(self) -> None:
        """Requests whose time is over wait no longer from now on. Once in every step."""
        now_s = self._host.now_s()
        for fetch in self._fetches.values():
            fetch.is_late |= fetch.until_s <= now_s

    def next_deadline_s(self) -> float | None:
        """When a request stops waiting, if any waits; then a `tick` is due."""
        return min((fetch.until_s for fetch in self._fetches.values() if self._is_awaited(fetch)), default=None)

    def end(self, request_id: str) -> None:
        """The request was admitted, or is gone: what came for it is held no more."""
        fetch = self._fetches.pop(request_id, None)
        if fetch is not None:
            fetch.is_over = True
            self._host.unhold(fetch.held)
            fetch.held.clear()

    def end_all(self) -> None:
        """Nobody is in line any more."""
        for request_id in list(self._fetches):
            self.end(request_id)

    def _looked_up(self, fetch: Fetch, result: object) -> None:
        num_coming = self._read_found(fetch, result) if isinstance(result, list) and not fetch.is_over else 0
        if fetch.told is not None:
            fetch.told(num_coming)

    def _read_found(self, fetch: Fetch, found: list[int]) -> int:
        """Bring the blocks for which a store is named; how many are on their way."""
        begin = num_coming = 0
        while begin < len(found):
            store = self._host.stores[found[begin]]
            end = next((i for i in range(begin, len(found)) if found[i] != found[begin]), len(found))
            count = self._host.worth(store, end - begin) if fetch.told is None else end - begin
            slots = self._host.slots_for(fetch.metas[begin : begin + count])
            self._read(fetch, store, begin, slots)
            num_coming += len(slots)
            if len(slots) < end - begin:  # what follows a gap is of no use
                break
            begin = end
        return num_coming

    def _read(self, fetch: Fetch, store: BlockStore, first: int, slots: Sequence[int]) -> None:
        step = max(1, _BATCH_BYTES // self._host.block_bytes)
        for begin in range(0, len(slots), step):
            part = _Part(store, first + begin, tuple(slots[begin : begin + step]))
            hashes = fetch.hashes[part.first : part.first + len(part.slots)]

            def read(part: _Part = part, hashes: Sequence[BlockHash] = hashes) -> list[int | None]:
                if fetch.is_over:  # it would come too late
                    return [None] * len(part.slots)
                return self._host.read_into(part.store, hashes, part.slots)

            def then(result: object, part: _Part = part, hashes: Sequence[BlockHash] = hashes) -> None:
                self._arrived(fetch, part, hashes, result)

            if not self._submit(fetch, len(part.slots) * self._host.block_bytes, read, then):
                self._arrived(fetch, part, hashes, None)

    def _arrived(self, fetch: Fetch, part: _Part, hashes: Sequence[BlockHash], result: object) -> None:
        checksums = result if isinstance(result, list) else [None] * len(part.slots)
        metas = fetch.metas[part.first : part.first + len(part.slots)]
        held = self._host.arrived(part.store, hashes, metas, part.slots, checksums)
        if fetch.told is not None:
            self._host.pin_here(hashes, fetch.until_s)
        if fetch.told is not None or fetch.is_over:
            self._host.unhold(held)
        else:
            fetch.held += held

    def _settled(self, fetch: Fetch) -> None:
        """All that was asked for it has been answered."""
        if self._prefetches.get(fetch.request_id) is fetch:
            del self._prefetches[fetch.request_id]
        followers, fetch.followers = fetch.followers, []
        for follower in followers:
            self._go_on(follower)

    def _go_on(self, fetch: Fetch) -> None:
        """The prefetch that this request has waited for is through: hold what it brought, ask for the rest."""
        fetch.num_jobs -= 1
        if fetch.is_over:
            return
        here = self._host.hold_first(fetch.hashes)
        fetch.held += here
        fetch.hashes, fetch.metas = fetch.hashes[len(here) :], fetch.metas[len(here) :]
        if fetch.hashes:
            self._look_up(fetch)
