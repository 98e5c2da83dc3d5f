"""SlabServer: leases blocks of one slab to clients that know the cluster's secret, and stores blocks for them.

Owns connections and leases; its delegate knows which block is where. A client that disconnects leaves nothing behind:
its leases end, and a block that was being read from it is stored if all of it arrived and verifies, else dropped.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvrelay.errors import BackendUnavailable, ConnectionLost, PlaneError, ProtocolError, TransportError
from kvrelay.kvtransfer.slabs import messages as wire
from kvrelay.kvtransfer.slabs.messages import MISSING
from kvrelay.kvtransfer.slabs.slabs import BlockRead, SharedSlab, SlabReader, StuckRead
from kvrelay.kvtransfer.transports.topology import this_machine
from kvrelay.plane import connection as plane
from kvrelay.plane.framing import Connection
from kvrelay.plane.tls import ClusterTls

logger = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 10.0
_MAX_REQUESTS = 32  # of one connection at once; more wait in the socket
_MAX_CONNECTIONS = 512
_MAX_KEYS = 65_536  # in one request


@dataclass(frozen=True, slots=True)
class ReadLease:
    """A block that stays as it is until the lease is released."""

    row: int  # the delegate's own number
    offset: int  # bytes from the slab's beginning
    num_bytes: int
    checksum: int  # XXH3-64


@dataclass(frozen=True, slots=True)
class ReservedRange:
    """Where an offered block is written; ends with `keep` or `drop`."""

    row: int
    offset: int


class SlabDelegate:
    """Knows which block is where in the slab: a store node, or a worker's host tier. Called on the loop.

    The defaults are those of a slab that is only read and accepts no blocks.
    """

    node_id: str
    epoch: str

    async def lease(self, keys: Sequence[bytes]) -> list[ReadLease | None]:
        """Hold these blocks; None for each that is not there. Every lease is passed to `release` in the end."""
        raise NotImplementedError

    def release(self, leases: Sequence[ReadLease]) -> None:
        """End these leases."""
        raise NotImplementedError

    async def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these blocks are there."""
        raise NotImplementedError

    def describe(self) -> bytes:
        """The state as JSON."""
        raise NotImplementedError

    def welcome(self, block_bytes: int) -> str | None:
        """Why a client with blocks of this size is refused; None: it is accepted."""
        return None

    def reserve(self, blocks: Sequence[wire.BlockOffer]) -> list[ReservedRange | bool]:
        """Where to write each block. True: it is stored already; False: not wanted, or no room."""
        return [False] * len(blocks)

    def keep(self, block: wire.BlockOffer, room: ReservedRange) -> None:
        """The block's bytes are in place and verified: it is stored from now on."""

    def drop(self, room: ReservedRange, *, read: "asyncio.Future[None] | None" = None) -> None:
        """The block did not arrive. `read`: until it is done, bytes may still be written there."""

    async def forget(self, keys: Sequence[bytes]) -> None:
        """Delete these blocks."""

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> None:
        """Pin these blocks; 0: end their pins."""

    def on_announced(self, client: object, address: str, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """A worker at "host:port" has the added blocks, and no longer the removed ones."""

    def on_disconnected(self, client: object) -> None:
        """This client's announcements are void."""

    def find_holders(self, keys: Sequence[bytes]) -> list[str]:
        """For each block the "host:port" of a worker that announced it, or ""."""
        return [""] * len(keys)


class SlabServer:
    """Serves one slab."""

    def __init__(
        self,
        slab: SharedSlab,
        delegate: SlabDelegate,
        secret: bytes,
        host: str,
        *,
        lease_s: float = 10.0,
        stall_s: float = 2.0,
        tls: ClusterTls | None = None,
    ) -> None:
        self.slab, self.delegate, self._host = slab, delegate, host
        self.lease_s, self.stall_s = lease_s, stall_s
        self._server = plane.Server(self._serve, secret, tls=tls)
        self._clients: set[_Client] = set()
        self.port = 0

    async def start(self, port: int = 0) -> None:
        """Listen; the slab is started. Raises BackendUnavailable."""
        try:
            self.port = await self._server.start(self._host, port)
        except OSError as error:
            raise BackendUnavailable("slab server", f"cannot listen on {self._host}: {error}") from error

    async def aclose(self) -> None:
        """End every connection and wait for reads under way, stuck ones excepted."""
        await self._server.aclose()

    async def _serve(self, connection: Connection) -> None:
        if len(self._clients) >= _MAX_CONNECTIONS:
            connection.send_nowait(
                wire.encode(wire.SlabRejected(why=f"{_MAX_CONNECTIONS} clients are connected already"))
            )
            await connection.aclose()
            return
        client = _Client(self, connection)
        self._clients.add(client)
        try:
            await client.serve()
        finally:
            self._clients.discard(client)


class _Client:
    """One connection."""

    def __init__(self, server: SlabServer, connection: Connection) -> None:
        self._server, self._delegate, self._connection = server, server.delegate, connection
        self._reader: SlabReader | None = None
        self._leases: dict[int, tuple[list[ReadLease], asyncio.TimerHandle]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._free = asyncio.Semaphore(_MAX_REQUESTS)

    async def serve(self) -> None:
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                hello = wire.decode_to_server(await self._connection.receive())
            if await self._welcome(hello):
                while True:
                    await self._dispatch(wire.decode_to_server(await self._connection.receive()))
        except msgspec.DecodeError as error:
            raise ProtocolError(f"a malformed message: {error}") from error
        finally:
            await self._end()

    async def _end(self) -> None:
        """Release all leases. Requests under way end on their own, within the stall time."""
        for number in list(self._leases):
            self._release(number)
        self._delegate.on_disconnected(self)
        if self._tasks:
            await asyncio.wait(self._tasks)
        for number in list(self._leases):  # leased while the connection ended
            self._release(number)
        if self._reader is not None:
            await self._reader.aclose()

    async def _welcome(self, hello: object) -> bool:
        why: str | None = "the first message must be a hello"
        if isinstance(hello, wire.SlabHello):
            why = self._delegate.welcome(hello.block_bytes)
            if hello.protocol != wire.SLAB_PROTOCOL:
                why = f"slab protocol {hello.protocol}, not {wire.SLAB_PROTOCOL}: install the same kvrelay everywhere"
        if why is not None or not isinstance(hello, wire.SlabHello):
            logger.warning("refused the slab client at %s: %s", self._connection.peer, why)
            self._send(wire.SlabRejected(why=why or ""))
            await self._connection.aclose()
            return False
        slab = self._server.slab
        if hello.slab is not None:
            self._reader = slab.reader_of(hello.slab, hello.topology, stall_s=self._server.stall_s)
        self._send(
            wire.SlabWelcome(
                node_id=self._delegate.node_id, epoch=self._delegate.epoch, topology=this_machine(), slab=slab.offer()
            )
        )
        return True

    def _send(self, message: wire.ToClient) -> None:
        """Queue a message; the receiving side notices a lost connection."""
        try:
            self._connection.send_nowait(wire.encode(message))
        except PlaneError as error:
            logger.debug("not sent: %s", error)

    async def _dispatch(self, message: object) -> None:
        match message:
            case wire.ReleaseLease(number=number):
                self._release(number)
            case wire.AnnounceBlocks(host=host, port=port, added=added, removed=removed):
                self._delegate.on_announced(self, f"{host}:{port}", added, removed)
            case wire.SlabHello():
                raise ProtocolError("a second hello")
            case _:
                await self._free.acquire()
                task = asyncio.create_task(self._answer(message), name="slab request")  # type: ignore[arg-type]
                self._tasks.add(task)
                task.add_done_callback(self._on_answered)

    def _on_answered(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._free.release()

    async def _answer(self, request: wire.Request) -> None:
        try:
            self._send(await self._carry_out(request))
        except Exception as error:  # a process edge: this request fails, the others go on
            logger.exception("a request of %s failed", self._connection.peer)
            self._send(wire.SlabRequestFailed(number=request.number, why=str(error) or type(error).__name__))

    async def _carry_out(self, request: wire.Request) -> wire.Answer:
        delegate, number = self._delegate, request.number
        match request:
            case wire.PutBlocks():
                return wire.Stored(number=number, found=await self._put(request))
            case wire.Describe():
                return wire.Description(number=number, text=delegate.describe())
        if len(request.keys) > _MAX_KEYS:
            return wire.SlabRequestFailed(number=number, why=f"more than {_MAX_KEYS} keys in one request")
        match request:
            case wire.AcquireLease():
                return self._grant(number, await delegate.lease(request.keys))
            case wire.Exists():
                return wire.Stored(number=number, found=await delegate.exists(request.keys))
            case wire.Forget():
                await delegate.forget(request.keys)
                return wire.Done(number=number)
            case wire.Pin():
                delegate.pin(request.keys, request.ttl_s)
                return wire.Done(number=number)
            case wire.FindHolders():
                return wire.HolderAddresses(number=number, addresses=delegate.find_holders(request.keys))

    # ---- leases

    def _grant(self, number: int, entries: list[ReadLease | None]) -> wire.Answer:
        leases = [lease for lease in entries if lease is not None]
        if number in self._leases:
            self._delegate.release(leases)
            return wire.SlabRequestFailed(number=number, why="this number is in use")
        if leases:
            timer = asyncio.get_running_loop().call_later(self._server.lease_s, self._release, number)
            self._leases[number] = leases, timer
        return wire.LeaseGranted(
            number=number,
            offsets=[MISSING if lease is None else lease.offset for lease in entries],
            sizes=[0 if lease is None else lease.num_bytes for lease in entries],
            checksums=[0 if lease is None else lease.checksum for lease in entries],
        )

    def _release(self, number: int) -> None:
        leases, timer = self._leases.pop(number, ((), None))
        if timer is not None:
            timer.cancel()
            self._delegate.release(leases)

    # ---- puts

    async def _put(self, request: wire.PutBlocks) -> list[bool]:
        delegate, blocks = self._delegate, request.blocks
        if self._reader is None or len(blocks) > _MAX_KEYS:
            raise ConnectionLost("a slab that was never offered, or too many blocks")
        rooms = delegate.reserve(blocks)
        wanted = {index: room for index, room in enumerate(rooms) if isinstance(room, ReservedRange)}
        kept = [room is True for room in rooms]
        is_good = [False] * len(wanted)
        stuck: asyncio.Future[None] | None = None
        try:
            reads = [
                BlockRead(blocks[i].offset, room.offset, blocks[i].num_bytes, blocks[i].checksum)
                for i, room in wanted.items()
            ]
            async with asyncio.timeout(request.hold_s):  # then the client reuses its memory
                is_good = await self._reader.read(reads)
        except StuckRead as error:
            logger.warning("%s: %s", self._connection.peer, error)
            stuck = error.read
        except (TransportError, TimeoutError) as error:
            logger.info("blocks of %s could not be read: %s", self._connection.peer, error or "its hold time ended")
        finally:
            for (index, room), good in zip(wanted.items(), is_good, strict=True):
                kept[index] = good
                if good:
                    delegate.keep(blocks[index], room)
                else:
                    delegate.drop(room, read=stuck)
        return kept
