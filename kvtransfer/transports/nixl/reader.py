"""NIXL (UCX): the target's agent READs the source's pool. CUDA and RDMA; host memory too.

A read lists its runs of bytes: few, since a block's layers are one run. See agent.py for what NIXL cannot do and how
that is dealt with.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np

from kvrelay.errors import BackendUnavailable, TransportError
from kvrelay.kvtransfer.mover.copy_plan import LARGE_TURN_BYTES, CopyList
from kvrelay.kvtransfer.transports.base import Landed, Transport
from kvrelay.kvtransfer.transports.nixl import ucx
from kvrelay.kvtransfer.transports.nixl.agent import NixlAgent, agent_for, device_index, import_nixl, memory_type
from kvrelay.kvtransfer.transports.topology import this_machine, ucx_devices
from kvrelay.types import KvMemory

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20  # posted at once, then verified while the next one comes
_CONNECT_TIMEOUT_S = 20.0
_CLOSE_WAIT_S = 0.5


class _Descriptor(msgspec.Struct, frozen=True):
    agent: str
    metadata: bytes
    address: int
    num_bytes: int
    memory_type: str
    device_index: int


def _describe(memory: KvMemory, agent: str, metadata: bytes) -> _Descriptor:
    size, device = memory.layout.num_bytes, memory.device
    return _Descriptor(agent, metadata, memory.address, size, memory_type(device), device_index(device))


def _devices(memory: KvMemory, host: str) -> dict[str, str]:
    """The variable that names the NICs for this pool, where there is a choice."""
    names = ucx_devices(this_machine(), memory.device, host)
    return {"UCX_NET_DEVICES": ",".join(names)} if names else {}


class NixlExporter:
    """Registers the pool with its agent and gives out the agent's metadata."""

    def __init__(self, memory: KvMemory, secret: bytes, host: str) -> None:
        self._memory, self._host = memory, host
        self._agent: NixlAgent | None = None
        self._description = b""

    async def start(self) -> None:
        agent = self._agent = await agent_for(self._memory, lambda: _devices(self._memory, self._host))
        metadata = await agent.call(lambda: agent.api.get_agent_metadata())
        self._description = msgspec.msgpack.encode(_describe(self._memory, agent.name, metadata))

    def describe(self) -> bytes:
        return self._description

    def set_busy(self, num_open: int) -> None:
        if self._agent is not None:
            self._agent.set_busy(num_open > 0)

    async def aclose(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.set_busy(False)
            agent.release()


# ---- what a read asks of the agent


Piece = tuple[CopyList, int]  # and its number of bytes


def pieces_of(copies: CopyList) -> Iterator[Piece]:
    """The read in pieces of PIECE_BYTES, whole copies, as many as fit, but at least one.

    NIXL itself refuses what lies outside a pool.
    """
    ends = np.cumsum(copies.num_bytes)
    first = before = 0
    while first < len(ends):
        stop = max(int(np.searchsorted(ends, before + PIECE_BYTES, side="right")), first + 1)
        some, end = slice(first, stop), int(ends[stop - 1])
        piece = CopyList(copies.source_offset[some], copies.target_offset[some], copies.num_bytes[some])
        yield piece, end - before
        first, before = stop, end


@dataclass(slots=True, eq=False)
class NixlPeer:
    """A source as the target's agent knows it: shared by all readers of that source. Used in the agent's turn only."""

    source: _Descriptor
    target: _Descriptor  # our own pool; its metadata is not needed
    is_lost: bool = False  # a read failed, and NIXL has forgotten the peer
    num_readers: int = 0

    def join(self, api: Any) -> None:
        """Raises what NIXL raises."""
        api.add_remote_agent(self.source.metadata)
        self.is_lost = False

    def leave(self, api: Any) -> None:
        """Forget the peer. With a read of it in flight NIXL would lose sight of that."""
        with contextlib.suppress(Exception):  # the peer may be gone already
            api.remove_remote_agent(self.source.agent)

    def post(self, api: Any, piece: CopyList, *, is_quiet: bool) -> Any:
        if self.is_lost:
            if not is_quiet:
                raise TransportError("nixl: the connection is lost, and its last reads have not ended yet")
            self.leave(api)
            self.join(api)
        targets = self._descs(api, self.target, piece.target_offset, piece.num_bytes)
        sources = self._descs(api, self.source, piece.source_offset, piece.num_bytes)
        return api.initialize_xfer("READ", targets, sources, self.source.agent)

    @staticmethod
    def _descs(api: Any, pool: _Descriptor, offsets: Any, sizes: Any) -> Any:
        rows = np.empty((len(sizes), 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = offsets + pool.address, sizes, pool.device_index
        return api.get_xfer_descs(rows, pool.memory_type)


class NixlReader:
    """Reads one source through the target's agent."""

    max_in_flight = 4

    def __init__(self, memory: KvMemory, secret: bytes, host: str) -> None:
        self._memory, self._host = memory, host
        self._agent: NixlAgent | None = None
        self._source: _Descriptor | None = None
        self._peer: NixlPeer | None = None
        self._reads: set[asyncio.Future[None]] = set()
        self._is_closed = False

    async def connect(self, descriptor: bytes) -> None:
        try:
            self._source = msgspec.msgpack.decode(descriptor, type=_Descriptor)
            self._agent = await agent_for(self._memory, lambda: _devices(self._memory, self._host) | ucx.FOR_READING)
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self._agent.call(partial(self._meet, self._agent, self._source))
        except (msgspec.DecodeError, BackendUnavailable, TimeoutError) as error:
            raise TransportError(f"nixl: {error}") from error

    def _meet(self, agent: NixlAgent, source: _Descriptor) -> None:
        """In the agent's turn."""
        if self._is_closed:  # it took too long
            return
        peer = agent.peers.get(source.agent)
        if peer is None:
            peer = NixlPeer(source, _describe(self._memory, agent.name, b""))
            try:
                peer.join(agent.api)
            except Exception as error:  # NIXL's own classes
                peer.leave(agent.api)
                raise TransportError(f"nixl: {type(error).__name__}: {error}") from error
            agent.peers[source.agent] = peer
        peer.num_readers += 1
        self._peer = peer

    def read(self, copies: CopyList, landed: Landed | None = None) -> "asyncio.Future[None]":
        assert self._agent is not None and self._peer is not None
        read = self._agent.read(self._peer, pieces_of(copies), copies.total_bytes, landed)
        if not read.done():
            self._reads.add(read)
            read.add_done_callback(self._on_end)
        return read

    def _on_end(self, read: "asyncio.Future[None]") -> None:
        self._reads.discard(read)
        if self._is_closed and not self._reads:
            self._let_go()

    def abandon(self, read: "asyncio.Future[None]") -> None:
        if self._agent is not None:
            self._agent.abandon(read)

    async def aclose(self) -> None:
        """Forget the peer when the last read has ended: to tear it down earlier would be worse than to keep it."""
        if self._is_closed:
            return
        if self._reads:
            await asyncio.wait(set(self._reads), timeout=_CLOSE_WAIT_S)
        self._is_closed = True
        if self._reads:
            logger.warning("%d NIXL reads have not ended; their blocks stay in quarantine", len(self._reads))
        else:
            self._let_go()

    def _let_go(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.submit(partial(self._part, agent))
            agent.release()

    def _part(self, agent: NixlAgent) -> None:
        """In the agent's turn: the last reader of a peer forgets it."""
        peer, self._peer = self._peer, None
        if peer is None:
            return
        peer.num_readers -= 1
        if not peer.num_readers:
            del agent.peers[peer.source.agent]
            peer.leave(agent.api)


def _why_not(memory: KvMemory) -> str | None:
    if why := ucx.problem():
        return why
    try:
        import_nixl()
    except BackendUnavailable as error:
        return error.why
    return None


NIXL = Transport("nixl", NixlExporter, NixlReader, _why_not, LARGE_TURN_BYTES)
