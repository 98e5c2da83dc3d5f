"""One client's connections to the store's nodes, and to other workers that share blocks.

A node that is down or does not answer costs one timeout; then the client backs off, twice as long each time, and
skips it. Used on one loop. Must not import Ray.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvrelay.errors import PeerLost
from kvrelay.kvcache.stores.placement import StoreAddress, ranked
from kvrelay.kvcache.stores.store import BackOff
from kvrelay.kvtransfer.slabs.client import SlabPeer

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_MAX_WORKERS = 64  # connections to other workers at once


@dataclass(slots=True, eq=False)
class NodeLink:
    """The connection to one node, or to a worker."""

    address: StoreAddress
    peer: SlabPeer | None = None
    connecting: "asyncio.Task[SlabPeer] | None" = None
    back_off: BackOff = field(default_factory=BackOff)


class StoreLinks:
    """Nodes and workers by address, with connections, back-off, and the order in which to try them."""

    def __init__(
        self,
        make_peer: Callable[[StoreAddress], SlabPeer],
        *,
        num_replicas: int,
        on_connected: Callable[[NodeLink], Coroutine[None, None, None]],
    ) -> None:
        self._make_peer, self._num_replicas, self._on_connected = make_peer, num_replicas, on_connected
        self.nodes: list[NodeLink] = []
        self._workers: dict[str, NodeLink] = {}  # by "host:port", most recently used last
        self._background: set[asyncio.Task[None]] = set()
        self._num_corrupt = 0  # of connections that are closed

    async def aclose(self) -> None:
        for node in [*self.nodes, *self._workers.values()]:
            self._drop(node)
        await asyncio.gather(*self._background, return_exceptions=True)

    @property
    def num_corrupt(self) -> int:
        """Blocks that failed their checksums so far."""
        peers = [node.peer for node in (*self.nodes, *self._workers.values()) if node.peer is not None]
        return self._num_corrupt + sum(peer.num_corrupt for peer in peers)

    def set_nodes(self, nodes: Sequence[StoreAddress]) -> None:
        known = {node.address: node for node in self.nodes}
        for address, node in known.items():
            if address not in nodes:
                self._drop(node)
        ordered = sorted(nodes, key=lambda node: node.node_id)
        self.nodes = [known.get(address) or NodeLink(address) for address in ordered]

    def order(self, keys: Sequence[bytes]) -> list[list[NodeLink]]:
        """For each key the nodes to try, in order: its replicas, and one that may have been one before."""
        nodes = self.nodes
        rows = ranked(keys, [node.address for node in nodes]).tolist()
        return [[nodes[i] for i in row[: self._num_replicas + 1]] for row in rows]

    @staticmethod
    async def by_rank(
        order: list[list[NodeLink]],
        done: list[bool],
        call: Callable[[NodeLink, list[int]], Coroutine[None, None, None]],
    ) -> None:
        """Call each key's first node, all nodes at once; then the second for keys that are not `done`, and so on."""
        for rank in range(max(map(len, order), default=0)):
            groups: defaultdict[NodeLink, list[int]] = defaultdict(list)
            for index, choices in enumerate(order):
                if not done[index] and rank < len(choices):
                    groups[choices[rank]].append(index)
            async with asyncio.TaskGroup() as group:
                for node, chosen in groups.items():
                    group.create_task(call(node, chosen))

    async def everywhere(self, call: Callable[[SlabPeer], Awaitable[Answer]]) -> list[Answer]:
        """The results of all nodes that answer."""
        answers = await asyncio.gather(*(self.ask(node, call) for node in self.nodes))
        return [answer for answer in answers if answer is not None]

    async def ask(self, node: NodeLink, call: Callable[[SlabPeer], Awaitable[Answer]]) -> Answer | None:
        """One node's result; None when it does not answer."""
        peer = await self.peer_of(node)
        if peer is None:
            return None
        try:
            return await call(peer)
        except PeerLost as error:
            self.failed(node, error.why)
            return None

    def worker(self, address: str) -> NodeLink:
        """The link to another worker's slab server, whose address came from a node of the store."""
        node = self._workers.pop(address, None)
        if node is None:
            host, _, port = address.rpartition(":")
            node = NodeLink(StoreAddress(address, host, int(port), 0))
        self._workers[address] = node  # the most recently used
        while len(self._workers) > _MAX_WORKERS:
            self._drop(self._workers.pop(next(iter(self._workers))))
        return node

    async def peer_of(self, node: NodeLink) -> SlabPeer | None:
        """A connected peer; None during back-off, or when connecting fails."""
        if node.peer is not None and node.peer.is_up:
            return node.peer
        if node.peer is not None:
            self.failed(node, "the connection ended")
        if node.back_off.is_backing_off(time.monotonic()):
            return None
        if node.connecting is None:
            node.connecting = asyncio.create_task(self._connect(node), name=f"connect {node.address.node_id}")
        try:
            return await asyncio.shield(node.connecting)
        except PeerLost:
            return None

    async def _connect(self, node: NodeLink) -> SlabPeer:
        peer = self._make_peer(node.address)
        try:
            await peer.connect()
        except PeerLost as error:
            self._back_off_from(node, error.why)
            raise
        finally:
            node.connecting = None
        node.peer = peer
        node.back_off.succeeded()
        self._in_background(self._on_connected(node))
        return peer

    def failed(self, node: NodeLink, why: str) -> None:
        """A call failed: drop the connection and back off."""
        if node.peer is not None:  # else another call has failed already
            self._drop(node)
            self._back_off_from(node, why)

    @staticmethod
    def _back_off_from(node: NodeLink, why: str) -> None:
        back_off_s = node.back_off.failed(time.monotonic())
        logger.warning("backing off from store node %s for %.0f s: %s", node.address.node_id, back_off_s, why)

    def _drop(self, node: NodeLink) -> None:
        """Close its connection, as far as what is in flight lets it."""
        peer, node.peer = node.peer, None
        if node.connecting is not None:
            node.connecting.cancel()
        if peer is not None:
            self._num_corrupt += peer.num_corrupt
            self._in_background(peer.aclose())

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name="store node")
        self._background.add(task)
        task.add_done_callback(self._background.discard)
