"""Keeps as many copies of each block as placement wants, when nodes of the store come and go.

After a change every node goes through what it holds: where one that should have a copy has none, it offers it one,
and it lets go of what no longer belongs here once all who should have it do. At a bounded rate; a block that is evicted
somewhere is not brought back, or full nodes would push each other's blocks out for ever.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kvrelay.errors import PeerLost
from kvrelay.kvcache.stores.placement import StoreAddress, places
from kvrelay.kvtransfer.slabs.client import SlabPeer
from kvrelay.kvtransfer.slabs.messages import Offered
from kvrelay.kvtransfer.slabs.server import Loan

logger = logging.getLogger(__name__)

BATCH_BLOCKS = 64
_PUT_S = 20.0
_AGAIN_S = 2.0  # after a sweep in which some node did not answer
_MAX_AGAIN = 5


class Holder(Protocol):
    """The node, as far as repair sees it."""

    node_id: str

    def keys(self) -> list[bytes]: ...

    def block(self, slot: int) -> Offered: ...

    async def lend(self, keys: Sequence[bytes]) -> list[Loan | None]: ...

    def give_back(self, loans: Sequence[Loan]) -> None: ...

    async def forget(self, keys: Sequence[bytes]) -> int: ...


class Repairer:
    """Spreads one node's blocks. Used on the node's loop."""

    def __init__(
        self,
        node: Holder,
        make_peer: Callable[[StoreAddress], SlabPeer],
        *,
        num_replicas: int,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node, self._make_peer = node, make_peer
        self._num_replicas, self._bytes_per_s, self._clock = num_replicas, bytes_per_s, clock
        self._nodes: tuple[StoreAddress, ...] = ()
        self._peers: dict[StoreAddress, SlabPeer] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self.num_copied = self.num_handed_over = self.num_sweeps = 0
        self.is_settled = True  # nothing left to do since the last change

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="store repair")

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for peer in self._peers.values():
            await peer.aclose()
        self._peers.clear()

    def set_nodes(self, nodes: Sequence[StoreAddress]) -> None:
        """All live nodes, this one included."""
        ordered = tuple(sorted(nodes, key=lambda node: node.node_id))
        if ordered != self._nodes:
            self._nodes = ordered
            self.is_settled = False
            self._changed.set()

    async def _run(self) -> None:
        num_again = 0
        while True:
            await self._changed.wait()
            self._changed.clear()
            for address in [address for address in self._peers if address not in self._nodes]:
                await self._peers.pop(address).aclose()
            try:
                is_complete = await self.sweep()
            except Exception:  # a process edge: repair must outlive whatever a sweep meets
                logger.exception("repair of %s failed", self._node.node_id)
                is_complete = False
            num_again = 0 if is_complete else num_again + 1
            if is_complete or num_again > _MAX_AGAIN:
                self.is_settled = not self._changed.is_set()
            else:
                asyncio.get_running_loop().call_later(_AGAIN_S, self._changed.set)

    async def sweep(self) -> bool:
        """Go through all that the node holds, until done or the nodes change; whether every node answered."""
        nodes, is_complete = self._nodes, True
        keys = self._node.keys()
        self.num_sweeps += 1
        for first in range(0, len(keys), BATCH_BLOCKS):
            if nodes is not self._nodes:
                return False
            is_complete &= await self._spread(keys[first : first + BATCH_BLOCKS], may_let_go=True)
        return is_complete

    async def spread(self, keys: Sequence[bytes]) -> int:
        """Bring these to where placement wants them, now; how many copies that took."""
        before = self.num_copied
        await self._spread(keys, may_let_go=False)
        return self.num_copied - before

    async def _spread(self, keys: Sequence[bytes], *, may_let_go: bool) -> bool:
        wanted_at: defaultdict[StoreAddress, list[bytes]] = defaultdict(list)
        foreign: dict[bytes, int] = {}  # key -> copies elsewhere that are still to be confirmed
        for key, nodes in zip(keys, places(keys, self._nodes, self._num_replicas), strict=True):
            others = [node for node in nodes if node.node_id != self._node.node_id]
            for node in others:
                wanted_at[node].append(key)
            if len(others) == len(nodes) and nodes:
                foreign[key] = len(nodes)
        is_complete = True
        for address, some in wanted_at.items():
            try:
                for key in await self._bring(address, some):
                    if key in foreign:
                        foreign[key] -= 1
            except PeerLost as error:
                logger.info("repair: %s", error.why)
                is_complete = False
        gone = [key for key, missing in foreign.items() if missing == 0]
        if gone and may_let_go:
            self.num_handed_over += await self._node.forget(gone)
        return is_complete

    async def _bring(self, address: StoreAddress, keys: Sequence[bytes]) -> list[bytes]:
        """Which of these that node has afterwards. Raises PeerLost."""
        async with self._lock:  # one batch at a time: the rate is the node's, whoever asks
            peer = await self._peer(address)
            found = await peer.exists(keys)
            there = [key for key, here in zip(keys, found, strict=True) if here]
            missing = [key for key, here in zip(keys, found, strict=True) if not here]
            if not missing:
                return there
            loans = [loan for loan in await self._node.lend(missing) if loan is not None]
            try:
                offers = [msgspec.structs.replace(self._node.block(loan.slot), offset=loan.offset) for loan in loans]
                began = self._clock()
                kept = await peer.put(0, offers, within_s=_PUT_S) if offers else []
            finally:
                self._node.give_back(loans)
            self.num_copied += sum(kept)
            num_bytes = sum(offer.num_bytes for offer in offers)
            await asyncio.sleep(max(num_bytes / self._bytes_per_s - (self._clock() - began), 0.0))
            return there + [offer.key for offer, is_kept in zip(offers, kept, strict=True) if is_kept]

    async def _peer(self, address: StoreAddress) -> SlabPeer:
        peer = self._peers.get(address)
        if peer is not None and peer.is_up:
            return peer
        if peer is not None:
            await peer.aclose()
        peer = self._peers[address] = self._make_peer(address)
        await peer.connect()
        return peer
