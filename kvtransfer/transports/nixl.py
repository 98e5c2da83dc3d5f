"""NIXL (UCX): the target's agent READs the source's pool. CUDA and RDMA; host memory too.

Descriptors are prepared once per peer: every region of both pools is a row, and a read names
rows. See nixl_agent.py for what NIXL cannot do and how that is dealt with.
"""

import asyncio
import contextlib
import logging
from functools import partial
from typing import Any

import msgspec
import numpy as np

from kvrelay.errors import BackendUnavailable
from kvrelay.kvtransfer.plans import CopyList
from kvrelay.kvtransfer.transports.base import Landed, Transport, TransportError, check_bounds
from kvrelay.kvtransfer.transports.nixl_agent import NixlAgent, device_index, import_nixl, keep, memory_type
from kvrelay.types import KvMemory

logger = logging.getLogger(__name__)

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


def _rows(address: int, num_bytes: int, region_bytes: int, device: int) -> Any:
    """Every region as (address, length, device): [num_regions, 3]."""
    addresses = np.arange(address, address + num_bytes, region_bytes, dtype=np.uint64)
    rows = np.empty((len(addresses), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, region_bytes, device
    return rows


def _indices(offsets: Any, sizes: Any, region_bytes: int) -> Any:
    """Row numbers of the regions in these spans, in order: int32."""
    counts = sizes // region_bytes
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return (np.repeat(offsets // region_bytes, counts) + within).astype(np.int32)


class NixlExporter:
    """Registers the pool with an agent and gives out its metadata."""

    def __init__(self, memory: KvMemory, secret: bytes, host: str) -> None:
        self._memory = memory
        self._agent = NixlAgent(memory)
        self._metadata = b""

    async def start(self) -> None:
        await self._agent.start()
        keep(self._agent)
        self._metadata = await self._agent.call(lambda: self._agent.api.get_agent_metadata())

    def describe(self) -> bytes:
        layout, device = self._memory.layout, self._memory.device
        return msgspec.msgpack.encode(
            _Descriptor(
                agent=self._agent.name, metadata=self._metadata, address=self._memory.address,
                num_bytes=layout.num_bytes, region_bytes=layout.region_bytes,
                memory_type=memory_type(device), device_index=device_index(device),
            )
        )  # fmt: skip

    def set_busy(self, num_open: int) -> None:
        self._agent.set_busy(num_open > 0)

    async def aclose(self) -> None:
        self._agent.set_busy(False)
        self._agent.stop()


_targets: dict[tuple[int, int], NixlAgent] = {}  # one agent for each target pool, shared by its readers


async def _agent_for(memory: KvMemory) -> NixlAgent:
    """The started agent of this target pool. Raises BackendUnavailable."""
    key = (memory.address, memory.layout.num_bytes)
    agent = _targets.get(key)
    if agent is None:
        agent = _targets[key] = NixlAgent(memory)
        keep(agent)
    agent.num_users += 1
    try:
        await agent.ensure_started()
    except BackendUnavailable:
        _targets.pop(key, None)
        raise
    return agent


class NixlReader:
    """Reads one source through the target's agent."""

    max_in_flight = 4

    def __init__(self, memory: KvMemory, secret: bytes, host: str) -> None:
        self._memory = memory
        self._agent: NixlAgent | None = None
        self._source: _Descriptor | None = None
        self._source_rows: Any = None  # prepared descriptor lists
        self._target_rows: Any = None
        self._reads: set[asyncio.Future[None]] = set()

    async def connect(self, descriptor: bytes) -> None:
        try:
            self._source = msgspec.msgpack.decode(descriptor, type=_Descriptor)
            self._agent = await _agent_for(self._memory)
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self._agent.call(self._prepare)
        except (msgspec.DecodeError, BackendUnavailable, TimeoutError) as error:
            raise TransportError(f"nixl: {error}") from error

    def _prepare(self) -> None:
        """On the agent's thread: learn the peer, prepare both lists."""
        source, agent = self._source, self._agent
        assert source is not None and agent is not None
        layout, device = self._memory.layout, self._memory.device
        if source.region_bytes != layout.region_bytes:
            raise TransportError("the pools' regions differ in size")
        try:
            agent.api.add_remote_agent(source.metadata)
            theirs = _rows(source.address, source.num_bytes, source.region_bytes, source.device_index)
            mine = _rows(self._memory.address, layout.num_bytes, layout.region_bytes, device_index(device))
            self._source_rows = agent.api.prep_xfer_dlist(source.agent, theirs, source.memory_type)
            self._target_rows = agent.api.prep_xfer_dlist("NIXL_INIT_AGENT", mine, memory_type(device))
        except Exception as error:  # NIXL's own classes
            raise TransportError(f"nixl: {type(error).__name__}: {error}") from error

    def read(self, copies: CopyList, landed: Landed | None = None) -> "asyncio.Future[None]":
        assert self._agent is not None
        done = self._agent.read(
            lambda: self._make(copies), None if landed is None else partial(landed, copies.total_bytes)
        )
        self._reads.add(done)
        done.add_done_callback(self._reads.discard)
        return done

    def _make(self, copies: CopyList) -> Any:
        assert self._agent is not None and self._source is not None
        layout = self._memory.layout
        check_bounds(copies, self._source.num_bytes, layout.num_bytes)
        sources, targets, sizes = copies.expanded()
        return self._agent.api.make_prepped_xfer(
            "READ",
            self._target_rows, _indices(targets, sizes, layout.region_bytes),
            self._source_rows, _indices(sources, sizes, layout.region_bytes),
        )  # fmt: skip

    def abandon(self, read: "asyncio.Future[None]") -> None:
        if self._agent is not None:
            self._agent.abandon(read)

    @property
    def in_flight(self) -> int:
        return len(self._reads)

    async def aclose(self) -> None:
        """Forget the peer. Reads that do not end soon keep everything as it is: tearing it down would be worse."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        if self._reads:
            await asyncio.wait(set(self._reads), timeout=_CLOSE_WAIT_S)
        agent.num_users -= 1
        if not self._reads:
            await agent.call(lambda: self._forget(agent))
            if not agent.num_users:
                _targets.pop((self._memory.address, self._memory.layout.num_bytes), None)
                agent.stop()

    def _forget(self, agent: NixlAgent) -> None:
        rows = (self._source_rows, self._target_rows)
        self._source_rows = self._target_rows = None
        for handle in rows:
            if handle is not None:
                with contextlib.suppress(Exception):  # NIXL's own classes; only memory is at stake
                    handle.release()
        if self._source is not None:
            with contextlib.suppress(Exception):  # the peer may be gone already
                agent.api.remove_remote_agent(self._source.agent)


def _why_not(memory: KvMemory) -> str | None:
    try:
        import_nixl()
    except BackendUnavailable as error:
        return error.why
    return None


NIXL = Transport("nixl", NixlExporter, NixlReader, _why_not)
