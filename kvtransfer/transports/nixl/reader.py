"""NIXL (UCX): the target's agent READs the source's pool. CUDA and RDMA; host memory too.

Each pool is described to NIXL once per peer as rows of one region; a read of whole regions names
rows, any other lists its addresses. See agent.py for what NIXL cannot do and how that is
dealt with.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np

from kvrelay.errors import BackendUnavailable, TransportError
from kvrelay.kvtransfer.mover.copy_plan import CopyList
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
    region_bytes: int
    memory_type: str
    device_index: int


def _describe(memory: KvMemory, agent: str, metadata: bytes) -> _Descriptor:
    layout, device = memory.layout, memory.device
    return _Descriptor(
        agent,
        metadata,
        memory.address,
        layout.num_bytes,
        layout.region_bytes,
        memory_type(device),
        device_index(device),
    )


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


@dataclass(frozen=True, slots=True)
class _Regions:
    """A piece of a read of whole regions: row numbers on both sides, int32."""

    sources: Any
    targets: Any
    region_bytes: int


@dataclass(frozen=True, slots=True)
class _Spans:
    """A piece of any other read: offsets from the pools' bases, and lengths."""

    sources: Any
    targets: Any
    sizes: Any


Piece = tuple[_Regions | _Spans, int]  # and its number of bytes


def pieces_of(copies: CopyList, source_region_bytes: int, region_bytes: int) -> Iterator[Piece]:
    """The read in pieces, in the order of `copies`. NIXL itself refuses what lies outside a pool."""
    plain = (copies.source_offset, copies.target_offset, copies.num_bytes)
    spans = np.array(plain if copies.repeats == 1 else copies.expanded())  # [3, num_copies]
    rows, rest = np.divmod(spans, region_bytes)
    if rest.any() or source_region_bytes != region_bytes:
        yield from _cut_spans(*spans)
        return
    sources, targets, counts = rows.astype(np.int32)
    if (counts != 1).any():
        sources, targets = _each(sources, counts), _each(targets, counts)
    step = max(PIECE_BYTES // region_bytes, 1)
    for first in range(0, len(sources), step):
        some = slice(first, first + step)
        yield _Regions(sources[some], targets[some], region_bytes), len(sources[some]) * region_bytes


def _each(first: Any, counts: Any) -> Any:
    """Every row of runs that begin at `first` and are `counts` long."""
    within = np.arange(counts.sum(), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    return (np.repeat(first, counts) + within).astype(np.int32)


def _cut_spans(sources: Any, targets: Any, sizes: Any) -> Iterator[Piece]:
    """Whole spans, as many as fit into a piece, but at least one."""
    ends = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        before = int(ends[first - 1]) if first else 0
        stop = max(int(np.searchsorted(ends, before + PIECE_BYTES, side="right")), first + 1)
        yield _Spans(sources[first:stop], targets[first:stop], sizes[first:stop]), int(ends[stop - 1]) - before
        first = stop


@dataclass(slots=True, eq=False)
class NixlPeer:
    """A source as the target's agent knows it: shared by all readers of that source. Used in the agent's turn only."""

    source: _Descriptor
    target: _Descriptor  # our own pool; its metadata is not needed
    is_lost: bool = False  # a read failed, and NIXL has forgotten the peer
    num_readers: int = 0
    _rows: dict[int, list[Any]] = field(default_factory=dict)  # by region size: prepared lists, source's and target's

    def join(self, api: Any) -> None:
        """Raises what NIXL raises."""
        api.add_remote_agent(self.source.metadata)
        self._prepared(api, self.source.region_bytes)
        self.is_lost = False

    def _prepared(self, api: Any, region_bytes: int) -> list[Any]:
        """Lists of every region of either pool. Readers of one source may see its memory in regions of unlike size."""
        if region_bytes not in self._rows:
            lists = self._rows[region_bytes] = []
            for name, pool in ((self.source.agent, self.source), ("NIXL_INIT_AGENT", self.target)):
                rows = [[pool.address, region_bytes, pool.device_index, region_bytes, pool.num_bytes // region_bytes]]
                described = np.array(rows, dtype=np.uint64)  # address, length, device, stride, count
                lists.append(api.prep_xfer_dlist(name, described, pool.memory_type))
        return self._rows[region_bytes]

    def leave(self, api: Any) -> None:
        """Forget the peer. With a read of it in flight NIXL would lose sight of that."""
        rows, self._rows = self._rows, {}
        for handle in itertools.chain.from_iterable(rows.values()):
            with contextlib.suppress(Exception):  # NIXL's own classes; only memory is at stake
                handle.release()
        with contextlib.suppress(Exception):  # the peer may be gone already
            api.remove_remote_agent(self.source.agent)

    def post(self, api: Any, piece: _Regions | _Spans, *, is_quiet: bool) -> Any:
        if self.is_lost:
            if not is_quiet:
                raise TransportError("nixl: the connection is lost, and its last reads have not ended yet")
            self.leave(api)
            self.join(api)
        if isinstance(piece, _Regions):
            sources, targets = self._prepared(api, piece.region_bytes)
            return api.make_prepped_xfer("READ", targets, piece.targets, sources, piece.sources)
        spans = (
            self._descs(api, self.target, piece.targets, piece.sizes),
            self._descs(api, self.source, piece.sources, piece.sizes),
        )
        return api.initialize_xfer("READ", *spans, self.source.agent)

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
        pieces = pieces_of(copies, self._peer.source.region_bytes, self._memory.layout.region_bytes)
        read = self._agent.read(self._peer, pieces, copies.total_bytes, landed)
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


NIXL = Transport("nixl", NixlExporter, NixlReader, _why_not)
