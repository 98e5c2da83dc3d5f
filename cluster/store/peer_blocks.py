"""Other workers read blocks from this worker's host tier: a slab owner that serves reads and accepts no blocks.

The host tier belongs to the engine's thread, so reads are leased and released there, between two steps. Workers find
each other's blocks through the store's nodes: each worker announces its changes to the node that placement names for
a block, and a worker that finds a block nowhere asks that node. A hit costs the workers nothing, a miss one small
request.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from kvrelay.kvcache.tiers.host_tier import HostTier
from kvrelay.kvtransfer.slabs.server import ReadLease, SlabDelegate
from kvrelay.types import BlockHash

_CHECK_S = 0.2  # between two checks whether the engine is still alive
_MAX_HELD_SHARE = 0.25  # of the host tier's rows: the others stay evictable for the worker itself


class PeerBlocks(SlabDelegate):
    """Leases rows of one host tier to other workers."""

    def __init__(
        self,
        worker_id: str,
        epoch: str,
        host: HostTier,
        hashes: Mapping[bytes, BlockHash],
        *,
        call: Callable[[Callable[[], list[ReadLease | None]]], "asyncio.Future[list[ReadLease | None]]"],
        post: Callable[[Callable[[], None]], None],
        is_alive: Callable[[], bool],
    ) -> None:
        """`hashes`: of the host tier's blocks, by key. `call` and `post` run a function on the engine's thread; `post`
        does not wait for it.
        """
        self.node_id, self.epoch = worker_id, epoch
        self._host, self._hashes, self._call, self._post, self._is_alive = host, hashes, call, post, is_alive
        self.num_leased = 0
        self.is_closed = False  # the engine's thread is about to end, or waits for that

    async def lease(self, keys: Sequence[bytes]) -> list[ReadLease | None]:
        hashes = [self._hashes.get(key) for key in keys]
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
        host = self._host
        if digest not in host or host.counts().held > _MAX_HELD_SHARE * host.num_rows:
            return None
        [row] = host.hold((digest,))
        return ReadLease(row, row * host.block_bytes, host.block_bytes, *host.checksums((row,)))

    def release(self, leases: Sequence[ReadLease]) -> None:
        rows = [lease.row for lease in leases]
        self._post(lambda: self._host.unhold(rows))

    async def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._hashes for key in keys]

    def describe(self) -> bytes:
        return json.dumps({"node_id": self.node_id, "blocks": len(self._hashes), "leased": self.num_leased}).encode()


_MAX_KEYS = 500_000


class HolderDirectory:
    """The last announcement of each block. Bounded: the oldest keys are forgotten."""

    def __init__(self) -> None:
        self._holders: OrderedDict[bytes, tuple[object, str]] = OrderedDict()  # key -> (client, "host:port")
        self._announcers: set[object] = set()

    def __len__(self) -> int:
        return len(self._holders)

    def announced(self, client: object, address: str, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """This client's worker, at "host:port", has the added blocks, and no longer the removed ones."""
        self._announcers.add(client)
        self._holders.update(dict.fromkeys(added, (client, address)))
        self._forget(client, removed)
        while len(self._holders) > _MAX_KEYS:
            self._holders.popitem(last=False)

    def disconnected(self, client: object) -> None:
        """Forget this client's announcements."""
        if client in self._announcers:
            self._announcers.remove(client)
            self._forget(client, list(self._holders))

    def _forget(self, client: object, keys: Sequence[bytes]) -> None:
        for key in keys:
            if self._holders.get(key, (None, ""))[0] is client:
                del self._holders[key]

    def find(self, keys: Sequence[bytes]) -> list[str]:
        """For each key the "host:port" of a worker that announced it, or ""."""
        return [self._holders.get(key, (None, ""))[1] for key in keys]
