"""Other workers read blocks from this worker's host tier: a slab owner that serves reads and accepts no blocks.

The host tier belongs to the engine's thread, so reads are leased and released there, between two steps. Workers find
each other's blocks through the store's nodes: each worker announces its changes to the node that placement names for
a block, and a worker that finds a block nowhere asks that node. A hit costs the workers nothing, a miss one small
request.
"""

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvrelay.kvcache.tiers.host_tier import HostTier
from kvrelay.kvtransfer.slabs.messages import BlockOffer
from kvrelay.kvtransfer.slabs.server import ReadLease, ReservedRange
from kvrelay.types import BlockHash

logger = logging.getLogger(__name__)

_CHECK_S = 0.2  # between two checks whether the engine is still alive
_MAX_HELD_SHARE = 0.25  # of the host tier's rows: the others stay evictable for the worker itself


class SharedKeys:
    """The keys of the blocks in a worker's host tier. The engine's thread writes, the store's loop reads."""

    def __init__(self, key_of: Callable[[BlockHash], bytes]) -> None:
        self._key_of = key_of
        self._hashes: dict[bytes, BlockHash] = {}

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._hashes

    def changed(self, stored: Sequence[BlockHash], removed: Sequence[BlockHash]) -> tuple[list[bytes], list[bytes]]:
        """Apply a change of the host tier; returns (added keys, removed keys)."""
        gone = [self._key_of(digest) for digest in removed]
        for key in gone:
            self._hashes.pop(key, None)
        added = {self._key_of(digest): digest for digest in stored}
        self._hashes.update(added)
        return list(added), gone

    def keys(self) -> list[bytes]:
        """All keys."""
        return list(self._hashes)

    def digest(self, key: bytes) -> BlockHash | None:
        """The block's hash; None: it is not in the host tier."""
        return self._hashes.get(key)


class PeerBlocks:
    """Leases rows of one host tier to other workers. An SlabDelegate."""

    def __init__(
        self,
        worker_id: str,
        epoch: str,
        host: HostTier,
        keys: SharedKeys,
        *,
        call: Callable[[Callable[[], list[ReadLease | None]]], "asyncio.Future[list[ReadLease | None]]"],
        post: Callable[[Callable[[], None]], None],
        is_alive: Callable[[], bool],
    ) -> None:
        """`call` and `post` run a function on the engine's thread; `post` does not wait for it."""
        self.node_id, self.epoch = worker_id, epoch
        self._host, self._keys, self._call, self._post, self._is_alive = host, keys, call, post, is_alive
        self.num_leased = 0
        self.is_closed = False  # the engine's thread is about to end, or waits for that

    async def lease(self, keys: Sequence[bytes]) -> list[ReadLease | None]:
        hashes = [self._keys.digest(key) for key in keys]
        if not any(hashes):
            return [None] * len(keys)
        leasing = self._call(lambda: [None if digest is None else self._lease(digest) for digest in hashes])
        while not leasing.done():  # during a step this takes a while
            await asyncio.wait({leasing}, timeout=_CHECK_S)
            if not leasing.done() and (self.is_closed or not self._is_alive()):
                leasing.cancel()
                return [None] * len(keys)
        leases = leasing.result()
        self.num_leased += sum(lease is not None for lease in leases)
        return leases

    def _lease(self, digest: BlockHash) -> ReadLease | None:
        """Runs on the engine's thread."""
        held = self._host.hold_one(digest, _MAX_HELD_SHARE)
        if held is None:
            return None
        return ReadLease(held.row, held.offset, held.num_bytes, held.checksum, held.generation)

    def release(self, leases: Sequence[ReadLease]) -> None:
        rows = [lease.row for lease in leases]
        self._post(lambda: self._host.unhold(rows))

    def welcome(self, block_bytes: int) -> str | None:
        return None

    async def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._keys for key in keys]

    def describe(self) -> bytes:
        return json.dumps({"node_id": self.node_id, "blocks": len(self._keys), "leased": self.num_leased}).encode()

    def reserve(self, blocks: Sequence[BlockOffer]) -> list[ReservedRange | bool]:
        return [False] * len(blocks)

    def keep(self, block: BlockOffer, room: ReservedRange) -> bool:
        raise AssertionError("a worker accepts no blocks of others")

    def drop(self, room: ReservedRange, *, read: "asyncio.Future[None] | None" = None) -> None:
        raise AssertionError("a worker accepts no blocks of others")

    async def forget(self, keys: Sequence[bytes]) -> int:
        return 0  # another worker's report is no reason to drop our own block; our own loads verify it

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> int:
        return 0

    def on_announced(self, client: object, address: str, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Only the store's nodes keep such announcements."""

    def on_disconnected(self, client: object) -> None:
        """No state is kept for clients."""

    def find_holders(self, keys: Sequence[bytes]) -> list[str]:
        return [""] * len(keys)


_MAX_KEYS = 500_000


class HolderDirectory:
    """The last announcement of each block. Bounded: the oldest keys are forgotten."""

    def __init__(self) -> None:
        self._holders: OrderedDict[bytes, tuple[object, str]] = OrderedDict()  # key -> (client, "host:port")
        self._keys_of: dict[object, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def announced(self, client: object, address: str, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """This client's worker, at "host:port", has the added blocks, and no longer the removed ones."""
        own = self._keys_of.setdefault(client, set())
        for key in added:
            self._holders[key] = client, address
            own.add(key)
        for key in removed:
            own.discard(key)
            if self._holders.get(key, (None, ""))[0] is client:
                del self._holders[key]
        while len(self._holders) > _MAX_KEYS:
            key, (holder, _) = self._holders.popitem(last=False)
            self._keys_of[holder].discard(key)

    def disconnected(self, client: object) -> None:
        """Forget this client's announcements."""
        for key in self._keys_of.pop(client, ()):
            if self._holders.get(key, (None, ""))[0] is client:
                del self._holders[key]

    def find(self, keys: Sequence[bytes]) -> list[str]:
        """For each key the "host:port" of a worker that announced it, or ""."""
        return [self._holders.get(key, (None, ""))[1] for key in keys]
