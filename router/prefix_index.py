"""Which worker holds which prefix: block hash -> bitmask of workers, fed by their KV events.

Owns the index alone; never imports torch, Ray, sockets or a clock. A hash is chained, so it
names a whole prefix; a worker's match is the number of leading hashes whose blocks it holds without a hole. A worker
whose blocks are k hashes long (its stride) names them by every k-th hash of a chain.

A plain dict of bitmasks, walked with C-level `map`: one pass finds the match of every worker of a stride, holes included.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat

from kvrelay.router.types import IndexState

REASK_EVERY = 256
"""While a snapshot is awaited, every so many further events it is asked for again."""


class _Held:
    """One worker's part of the index."""

    __slots__ = ("bit", "hashes", "ignored", "max_blocks", "name", "seq", "state", "stride")

    def __init__(self, name: str, bit: int, max_blocks: int, stride: int) -> None:
        self.name, self.bit, self.max_blocks, self.stride = name, bit, max_blocks, stride
        self.hashes: dict[bytes, None] = {}  # a dict of bytes, unlike a set, is nothing that the GC walks
        self.state = IndexState.STALE
        self.seq = 0
        self.ignored = 0  # events dropped since STALE began


class PrefixIndex:
    """Prefixes of many workers. A worker starts STALE and becomes EXACT with its first snapshot."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._workers: dict[str, _Held] = {}
        self._by_bit: dict[int, _Held] = {}
        self._free_bits: list[int] = []
        self._routable: dict[int, int] = {}  # stride -> bits of workers that are not STALE

    def __len__(self) -> int:
        """Number of distinct hashes held by any worker."""
        return len(self._holders)

    def add_worker(self, worker_id: str, *, max_blocks: int, stride: int = 1) -> None:
        """A new or restarted worker: starts empty. More than `max_blocks` hashes make it DEGRADED."""
        self.remove_worker(worker_id)
        bit = self._free_bits.pop() if self._free_bits else 1 << len(self._workers)
        held = _Held(worker_id, bit, max_blocks, stride)
        self._workers[worker_id] = self._by_bit[bit] = held

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker and every bit of it. Unknown ids are ignored."""
        held = self._workers.pop(worker_id, None)
        if held is None:
            return
        self._drop(held, held.hashes.keys())
        self._route(held, is_routable=False)
        del self._by_bit[held.bit]
        self._free_bits.append(held.bit)

    def mark_stale(self, worker_id: str) -> None:
        """Its event stream was interrupted (a reconnect): no hits until the next snapshot."""
        self._set_state(self._workers[worker_id], IndexState.STALE)

    def apply_events(self, worker_id: str, seq: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> bool:
        """One event message. False: a snapshot is needed now. Repeated and old events change nothing."""
        held = self._workers.get(worker_id)
        if held is None:
            return True
        if held.state is IndexState.STALE:
            held.ignored += 1
            return held.ignored % REASK_EVERY != 1
        if seq <= held.seq:
            return True
        if seq != held.seq + 1:
            self._set_state(held, IndexState.STALE)
            held.ignored = 1  # asked just now
            return False
        held.seq = seq
        complete = self._store(held, stored)
        known = [block_hash for block_hash in removed if block_hash in held.hashes]
        self._drop(held, known)
        complete = complete and len(known) == len(removed)
        return complete or self._degrade(held)

    def apply_snapshot(self, worker_id: str, seq: int, hashes: Sequence[bytes]) -> None:
        """Everything cached as of `seq`: heals every state. One older than the events applied is ignored."""
        held = self._workers.get(worker_id)
        if held is None or (held.state is not IndexState.STALE and seq < held.seq):
            return
        now = set(hashes)
        self._drop(held, held.hashes.keys() - now)
        complete = self._store(held, [block_hash for block_hash in hashes if block_hash not in held.hashes])
        held.seq, held.ignored = seq, 0
        self._set_state(held, IndexState.EXACT if complete else IndexState.DEGRADED)

    def match(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Leading ones of `hashes` that each worker's blocks cover; workers with none, and STALE ones, are absent."""
        found: dict[str, int] = {}
        for stride, mask in self._routable.items():
            self._match(hashes if stride == 1 else hashes[stride - 1 :: stride], stride, mask, found)
        return found

    def _match(self, hashes: Sequence[bytes], stride: int, mask: int, found: dict[str, int]) -> None:
        """Of the workers of `mask`, whose blocks have these names."""
        for depth, holders in enumerate(map(self._holders.get, hashes, repeat(0))):
            kept = mask & holders
            if kept != mask:
                if depth:
                    self._name(mask ^ kept, depth * stride, found)
                mask = kept
                if not mask:
                    return
        if hashes:
            self._name(mask, len(hashes) * stride, found)

    def state(self, worker_id: str) -> IndexState:
        return self._workers[worker_id].state

    def num_blocks(self, worker_id: str) -> int:
        """Hashes indexed for this worker."""
        return len(self._workers[worker_id].hashes)

    def _name(self, mask: int, depth: int, found: dict[str, int]) -> None:
        while mask:
            bit = mask & -mask
            found[self._by_bit[bit].name] = depth
            mask ^= bit

    def _store(self, held: _Held, hashes: Sequence[bytes]) -> bool:
        """False when some did not fit."""
        room = held.max_blocks - len(held.hashes)
        fitting = hashes if len(hashes) <= room else hashes[: max(room, 0)]
        holders, bit = self._holders, held.bit
        for block_hash in fitting:
            holders[block_hash] = holders.get(block_hash, 0) | bit
        held.hashes.update(dict.fromkeys(fitting))
        return len(fitting) == len(hashes)

    def _drop(self, held: _Held, hashes: Iterable[bytes]) -> None:
        holders, others = self._holders, ~held.bit
        for block_hash in set(hashes):
            del held.hashes[block_hash]
            left = holders[block_hash] & others
            if left:
                holders[block_hash] = left
            else:
                del holders[block_hash]

    def _degrade(self, held: _Held) -> bool:
        """Ask for a snapshot once per fall: True when it was degraded already."""
        already = held.state is IndexState.DEGRADED
        self._set_state(held, IndexState.DEGRADED)
        return already

    def _set_state(self, held: _Held, state: IndexState) -> None:
        held.state = state
        if state is IndexState.STALE:
            held.ignored = 0
        self._route(held, is_routable=state is not IndexState.STALE)

    def _route(self, held: _Held, *, is_routable: bool) -> None:
        """Let `match` find this worker, or not."""
        others = self._routable.pop(held.stride, 0) & ~held.bit
        mask = others | held.bit if is_routable else others
        if mask:
            self._routable[held.stride] = mask
