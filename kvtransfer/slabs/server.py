"""SlabServer: lends blocks of one slab to whoever knows the cluster's secret, and takes blocks into it.

Owns connections and leases; which block lies where is the Owner's to know. A client that goes, at any stage, leaves
nothing behind: what was lent to it comes back, what was being read from it is dropped or, if all of it had come and
verifies, kept.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvrelay.errors import BackendUnavailable, ConnectionLost, PlaneError, ProtocolError
from kvrelay.kvtransfer.paths.discovery import this_machine
from kvrelay.kvtransfer.slabs.messages import (
    MISSING,
    SLAB_PROTOCOL,
    Answer,
    Describe,
    Description,
    Done,
    Exist,
    Exists,
    Failed,
    Forget,
    Holding,
    Lend,
    Lent,
    Offered,
    Pin,
    Places,
    Release,
    Replicate,
    Request,
    SlabHello,
    SlabRejected,
    SlabWelcome,
    Take,
    Taken,
    ToClient,
    Whereabouts,
    decode_to_owner,
    encode,
)
from kvrelay.kvtransfer.slabs.slabs import Fetch, Fetcher, Slab, StuckRead
from kvrelay.kvtransfer.transports.base import TransportError
from kvrelay.plane import connection as plane
from kvrelay.plane.framing import Connection
from kvrelay.plane.tls import ClusterTls

logger = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 10.0
_MAX_REQUESTS = 32  # of one connection at once; more wait in the socket
_MAX_CONNECTIONS = 512
_MAX_KEYS = 65_536  # in one request


@dataclass(frozen=True, slots=True)
class Loan:
    """A block that stays where it is until it is given back."""

    slot: int  # the owner's own number
    offset: int
    num_bytes: int
    checksum: int
    generation: int


@dataclass(frozen=True, slots=True)
class Room:
    """Where an offered block may be written; ends with `keep` or `drop`."""

    slot: int
    offset: int


class Owner(Protocol):
    """Who knows what lies where. Called on the loop only."""

    node_id: str
    epoch: str

    async def lend(self, keys: Sequence[bytes]) -> list[Loan | None]:
        """Hold those that are there. Every loan comes to `give_back`, whatever happens."""

    def give_back(self, loans: Sequence[Loan]) -> None: ...

    def make_room(self, blocks: Sequence[Offered]) -> list[Room | bool]:
        """True: it is there already; False: not wanted, or no room."""

    def keep(self, block: Offered, room: Room) -> bool:
        """Its bytes are in place and verified; whether it can be found now."""

    def drop(self, room: Room, *, read: "asyncio.Future[None] | None" = None) -> None:
        """Nothing came of it. `read`: until it is done, bytes may still land there."""

    async def exists(self, keys: Sequence[bytes]) -> list[bool]: ...

    async def forget(self, keys: Sequence[bytes]) -> int: ...

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> int: ...

    async def replicate(self, keys: Sequence[bytes]) -> int: ...

    def on_holding(self, client: object, address: str, added: Sequence[bytes], removed: Sequence[bytes]) -> None: ...

    def on_gone(self, client: object) -> None: ...

    def whereabouts(self, keys: Sequence[bytes]) -> list[str]: ...

    def welcome(self, block_bytes: int) -> str | None:
        """Why a client whose blocks are so large cannot be served, or None."""

    def describe(self) -> bytes: ...


class SlabServer:
    """Serves one slab of one owner."""

    def __init__(
        self, slab: Slab, owner: Owner, secret: bytes, host: str, *, lease_s: float = 10.0, stall_s: float = 2.0,
        tls: ClusterTls | None = None,
    ) -> None:  # fmt: skip
        self._slab, self._owner, self._host = slab, owner, host
        self._lease_s, self._stall_s = lease_s, stall_s
        self._server = plane.Server(self._serve, secret, tls=tls)
        self._clients: set[_Client] = set()
        self.port = 0
        self.num_expired = 0

    async def start(self, port: int = 0) -> None:
        """The slab has been started. Raises BackendUnavailable."""
        try:
            self.port = await self._server.start(self._host, port)
        except OSError as error:
            raise BackendUnavailable("slab server", f"cannot listen on {self._host}: {error}") from error

    async def aclose(self) -> None:
        """End every connection; ends when nothing that was being read can land any more, but for what is stuck."""
        await self._server.aclose()

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    @property
    def num_lent(self) -> int:
        """Blocks on loan now."""
        return sum(client.num_lent for client in self._clients)

    async def _serve(self, connection: Connection) -> None:
        if len(self._clients) >= _MAX_CONNECTIONS:
            connection.send_nowait(encode(SlabRejected(why=f"{_MAX_CONNECTIONS} clients are connected already")))
            await connection.aclose()
            return
        client = _Client(self, connection)
        self._clients.add(client)
        try:
            await client.serve()
        finally:
            self._clients.discard(client)

    # ---- for the clients

    @property
    def slab(self) -> Slab:
        return self._slab

    @property
    def owner(self) -> Owner:
        return self._owner

    @property
    def lease_s(self) -> float:
        return self._lease_s

    @property
    def stall_s(self) -> float:
        return self._stall_s


class _Client:
    """One connection."""

    def __init__(self, server: SlabServer, connection: Connection) -> None:
        self._server, self._owner, self._connection = server, server.owner, connection
        self._fetchers: list[Fetcher] = []
        self._loans: dict[int, tuple[list[Loan], asyncio.TimerHandle]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._free = asyncio.Semaphore(_MAX_REQUESTS)

    @property
    def num_lent(self) -> int:
        return sum(len(loans) for loans, _ in self._loans.values())

    async def serve(self) -> None:
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                hello = decode_to_owner(await self._connection.receive())
            if await self._welcome(hello):
                while True:
                    await self._dispatch(decode_to_owner(await self._connection.receive()))
        except msgspec.DecodeError as error:
            raise ProtocolError(f"a malformed message: {error}") from error
        finally:
            await self._end()

    async def _end(self) -> None:
        """Give everything back. Requests that are being carried out end by themselves, within the stall time."""
        for number in list(self._loans):
            self._give_back(number)
        self._owner.on_gone(self)
        if self._tasks:
            await asyncio.wait(self._tasks)
        for number in list(self._loans):  # lent while the connection ended
            self._give_back(number)
        for fetcher in self._fetchers:
            await fetcher.aclose()

    async def _welcome(self, hello: object) -> bool:
        why: str | None = "the first message must be a hello"
        if isinstance(hello, SlabHello):
            why = self._owner.welcome(hello.block_bytes)
            if hello.protocol != SLAB_PROTOCOL:
                why = f"slab protocol {hello.protocol}, not {SLAB_PROTOCOL}: install the same kvrelay everywhere"
        if why is not None or not isinstance(hello, SlabHello):
            logger.warning("refused the slab client at %s: %s", self._connection.peer, why)
            self._send(SlabRejected(why=why or ""))
            await self._connection.aclose()
            return False
        slab = self._server.slab
        for theirs in hello.slabs:
            route = slab.route_from(theirs, hello.topology)
            self._fetchers.append(Fetcher(slab.memory, route, stall_s=self._server.stall_s))
        self._send(
            SlabWelcome(
                node_id=self._owner.node_id, epoch=self._owner.epoch, topology=this_machine(), slab=slab.offer()
            )
        )  # fmt: skip
        return True

    def _send(self, message: ToClient) -> None:
        """Queue one message; a lost connection shows at its reader."""
        try:
            self._connection.send_nowait(encode(message))
        except PlaneError as error:
            logger.debug("not sent: %s", error)

    async def _dispatch(self, message: object) -> None:
        match message:
            case Release(number=number):
                self._give_back(number)
            case Holding(host=host, port=port, added=added, removed=removed):
                self._owner.on_holding(self, f"{host}:{port}", added, removed)
            case SlabHello():
                raise ProtocolError("a second hello")
            case _:
                await self._free.acquire()
                task = asyncio.create_task(self._answer(message), name="slab request")  # type: ignore[arg-type]
                self._tasks.add(task)
                task.add_done_callback(self._on_answered)

    def _on_answered(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._free.release()

    async def _answer(self, request: Request) -> None:
        try:
            self._send(await self._carry_out(request))
        except Exception as error:  # a process edge: this request fails, the others go on
            logger.exception("a request of %s failed", self._connection.peer)
            self._send(Failed(number=request.number, why=str(error) or type(error).__name__))

    async def _carry_out(self, request: Request) -> Answer:
        owner, number = self._owner, request.number
        match request:
            case Take():
                return Taken(number=number, kept=await self._take(request))
            case Describe():
                return Description(number=number, text=owner.describe())
        if len(request.keys) > _MAX_KEYS:
            return Failed(number=number, why=f"more than {_MAX_KEYS} keys in one request")
        match request:
            case Lend():
                return self._lent(number, await owner.lend(request.keys))
            case Exists():
                return Exist(number=number, found=await owner.exists(request.keys))
            case Forget():
                return Done(number=number, count=await owner.forget(request.keys))
            case Pin():
                return Done(number=number, count=owner.pin(request.keys, request.ttl_s))
            case Replicate():
                return Done(number=number, count=await owner.replicate(request.keys))
            case Whereabouts():
                return Places(number=number, addresses=owner.whereabouts(request.keys))

    # ---- lending

    def _lent(self, number: int, entries: list[Loan | None]) -> Answer:
        loans = [loan for loan in entries if loan is not None]
        if number in self._loans:
            self._owner.give_back(loans)
            return Failed(number=number, why="this number is in use")
        if loans:
            timer = asyncio.get_running_loop().call_later(self._server.lease_s, self._expire, number)
            self._loans[number] = loans, timer
        return Lent(
            number=number, lease_s=self._server.lease_s,
            offsets=[MISSING if loan is None else loan.offset for loan in entries],
            sizes=[0 if loan is None else loan.num_bytes for loan in entries],
            checksums=[0 if loan is None else loan.checksum for loan in entries],
            generations=[0 if loan is None else loan.generation for loan in entries],
        )  # fmt: skip

    def _expire(self, number: int) -> None:
        self._server.num_expired += 1
        self._give_back(number)

    def _give_back(self, number: int) -> None:
        loans, timer = self._loans.pop(number, ((), None))
        if timer is not None:
            timer.cancel()
            self._owner.give_back(loans)

    # ---- taking

    async def _take(self, request: Take) -> list[bool]:
        owner, blocks = self._owner, request.blocks
        if not 0 <= request.slab < len(self._fetchers) or len(blocks) > _MAX_KEYS:
            raise ConnectionLost("a slab that was never offered, or too many blocks")
        rooms = owner.make_room(blocks)
        wanted = [index for index, room in enumerate(rooms) if isinstance(room, Room)]
        kept = [room is True for room in rooms]
        is_good = [False] * len(wanted)
        stuck: asyncio.Future[None] | None = None
        try:
            fetches = [
                Fetch(blocks[i].offset, room.offset, blocks[i].num_bytes, blocks[i].checksum)
                for i in wanted
                if isinstance(room := rooms[i], Room)
            ]
            async with asyncio.timeout(request.hold_s):  # afterwards the client uses its memory for something else
                is_good = await self._fetchers[request.slab].fetch(fetches)
        except StuckRead as error:
            logger.warning("%s: %s", self._connection.peer, error)
            stuck = error.read
        except (TransportError, TimeoutError) as error:
            logger.info("blocks of %s could not be taken: %s", self._connection.peer, error or "its hold ended")
        finally:
            for index, good in zip(wanted, is_good, strict=True):
                room = rooms[index]
                assert isinstance(room, Room)
                if good:
                    kept[index] = owner.keep(blocks[index], room)
                else:
                    owner.drop(room, read=stuck)
        return kept
