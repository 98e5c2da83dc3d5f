"""SlabPeer: a client's connection to one owner of a slab. Asks, reads into its own slabs, gives back.

Used on one loop. Any request may raise PeerLost: the connection is gone or the owner did not answer in time, and then
everything that was asked of it fails at once. What the owner lent comes back to it with the lease.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from kvrelay.errors import PeerLost, PlaneError
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
    ToOwner,
    Whereabouts,
    decode_to_client,
    encode,
)
from kvrelay.kvtransfer.slabs.slabs import Fetch, Fetcher, Slab, StuckRead
from kvrelay.kvtransfer.transports.base import TransportError
from kvrelay.plane import connection as plane
from kvrelay.plane.framing import Connection
from kvrelay.plane.tls import ClusterTls

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply", Lent, Taken, Exist, Done, Places, Description)
Outcome = TypeVar("Outcome")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block to get: its key, and where it shall lie in which of the client's slabs."""

    key: bytes
    slab: int
    offset: int
    room_bytes: int


class SlabPeer:
    """One owner, as a client sees it."""

    def __init__(
        self, host: str, port: int, secret: bytes, slabs: Sequence[Slab], *, peer_id: str, block_bytes: int,
        answer_s: float = 1.0, stall_s: float = 1.0, tls: ClusterTls | None = None, tamper: Any = None,
    ) -> None:  # fmt: skip
        """`answer_s`: the longest that it may take to answer what needs no bytes; `tamper`: fault injection, as Arrival's."""
        self.host, self.port = host, port
        self._secret, self._slabs, self._tls = secret, list(slabs), tls
        self._peer_id, self._block_bytes = peer_id, block_bytes
        self._answer_s, self._stall_s, self._tamper = answer_s, stall_s, tamper
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._connection: Connection | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._fetchers: list[Fetcher] = []
        self.node_id = self.epoch = ""
        self.num_corrupt = 0

    @property
    def is_up(self) -> bool:
        return self._receiving is not None and not self._receiving.done()

    async def connect(self) -> None:
        """Raises PeerLost."""
        try:
            async with asyncio.timeout(self._answer_s):
                self._connection = await plane.connect(
                    self.host, self.port, self._secret, timeout_s=self._answer_s, tls=self._tls
                )
                hello = SlabHello(
                    protocol=SLAB_PROTOCOL, peer_id=self._peer_id, block_bytes=self._block_bytes,
                    topology=this_machine(), slabs=[slab.offer() for slab in self._slabs],
                )  # fmt: skip
                await self._connection.send(encode(hello))
                reply = decode_to_client(await self._connection.receive())
        except (PlaneError, TimeoutError, msgspec.DecodeError) as error:
            await self.aclose()
            raise PeerLost("", f"{self.host}:{self.port}: {error or 'no answer'}") from error
        except BaseException:
            await self.aclose()
            raise
        if not isinstance(reply, SlabWelcome):
            await self.aclose()
            why = reply.why if isinstance(reply, SlabRejected) else "it answered something else"
            raise PeerLost("", f"{self.host}:{self.port} refused: {why}")
        self.node_id, self.epoch = reply.node_id, reply.epoch
        for slab in self._slabs:
            route = slab.route_from(reply.slab, reply.topology)
            self._fetchers.append(Fetcher(slab.memory, route, stall_s=self._stall_s, tamper=self._tamper))
        self._receiving = asyncio.create_task(self._receive(self._connection), name="slab answers")

    async def aclose(self) -> None:
        """Every request that waits fails; then let go of the owner's memory."""
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.gather(self._receiving, return_exceptions=True)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        fetchers, self._fetchers = self._fetchers, []
        for fetcher in fetchers:
            await fetcher.aclose()

    # ---- requests

    async def get(self, wanted: Sequence[Wanted]) -> list[int]:
        """Bring blocks; the size of each that is in place and verified, else 0.

        Raises PeerLost (nothing lands any more), StuckRead (something may).
        """
        number = next(self._numbers)
        lent = await self._ask(Lend(number=number, keys=[one.key for one in wanted]), Lent)
        if not len(lent.offsets) == len(lent.sizes) == len(lent.checksums) == len(wanted):
            raise PeerLost("", f"{self.host}:{self.port} answered for other blocks")
        if all(offset == MISSING for offset in lent.offsets):
            return [0] * len(wanted)
        try:
            sizes = await self._while_it_lives(self._read(wanted, lent))
        except TransportError as error:
            if isinstance(error, StuckRead):
                raise
            raise PeerLost("", f"{self.host}:{self.port}: {error}") from error
        finally:
            self._tell(Release(number=number))
        if missed := sum(size == 0 and offset != MISSING for size, offset in zip(sizes, lent.offsets, strict=True)):
            self.num_corrupt += missed
            logger.warning(
                "%d blocks of %s:%d did not arrive as they left; they are deleted", missed, self.host, self.port
            )
            gone = [
                one.key for one, size, at in zip(wanted, sizes, lent.offsets, strict=True) if not size and at != MISSING
            ]
            self._tell(Forget(number=next(self._numbers), keys=gone))
        return sizes

    async def _read(self, wanted: Sequence[Wanted], lent: Lent) -> list[int]:
        sizes = [0] * len(wanted)
        for slab, fetcher in enumerate(self._fetchers):
            chosen = [
                i
                for i, one in enumerate(wanted)
                if one.slab == slab and lent.offsets[i] != MISSING and 0 < lent.sizes[i] <= one.room_bytes
            ]
            fetches = [Fetch(lent.offsets[i], wanted[i].offset, lent.sizes[i], lent.checksums[i]) for i in chosen]
            for i, good in zip(chosen, await fetcher.fetch(fetches), strict=True):
                sizes[i] = lent.sizes[i] if good else 0
        return sizes

    async def put(self, slab: int, blocks: Sequence[Offered], *, within_s: float) -> list[bool]:
        """Have the owner read these out of our slab; which of them it keeps. They must stay as they are until this ends.

        Raises PeerLost. What the owner reads after that is told by its checksum.
        """
        request = Take(number=next(self._numbers), slab=slab, hold_s=within_s, blocks=list(blocks))
        taken = await self._while_it_lives(self._ask(request, Taken, within_s))
        if len(taken.kept) != len(blocks):
            raise PeerLost("", f"{self.host}:{self.port} answered for other blocks")
        return taken.kept

    async def _while_it_lives(self, work: Coroutine[Any, Any, Outcome]) -> Outcome:
        """What takes long, with a look now and then whether the owner still answers. Raises PeerLost when it does not."""
        task = asyncio.create_task(work, name="slab work")
        try:
            while True:
                await asyncio.wait({task}, timeout=self._answer_s / 2)
                if task.done():
                    return task.result()
                await self.exists([])
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
                if not task.cancelled() and isinstance(error := task.exception(), StuckRead):
                    raise error

    async def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these are there. Raises PeerLost."""
        return (await self._ask(Exists(number=next(self._numbers), keys=list(keys)), Exist)).found

    async def forget(self, keys: Sequence[bytes]) -> int:
        """Delete; how many were there. Raises PeerLost."""
        return (await self._ask(Forget(number=next(self._numbers), keys=list(keys)), Done)).count

    async def pin(self, keys: Sequence[bytes], ttl_s: float) -> int:
        """Keep them for so long; how many are pinned. Raises PeerLost."""
        return (await self._ask(Pin(number=next(self._numbers), keys=list(keys), ttl_s=ttl_s), Done)).count

    async def replicate(self, keys: Sequence[bytes], *, within_s: float) -> int:
        """Have the owner bring these to as many nodes as placement wants; how many copies that took. Raises PeerLost."""
        return (await self._ask(Replicate(number=next(self._numbers), keys=list(keys)), Done, within_s)).count

    async def whereabouts(self, keys: Sequence[bytes]) -> list[str]:
        """ "host:port" of a worker that holds each of these; "": nobody known. Raises PeerLost."""
        return (await self._ask(Whereabouts(number=next(self._numbers), keys=list(keys)), Places)).addresses

    async def describe(self) -> bytes:
        """JSON. Raises PeerLost."""
        return (await self._ask(Describe(number=next(self._numbers)), Description)).text

    def tell_holding(self, host: str, port: int, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Our own slab holds these, and no longer those. Lost where the connection is."""
        self._tell(Holding(host=host, port=port, added=list(added), removed=list(removed)))

    def speed(self) -> tuple[float, float]:
        """(bytes per second, seconds of latency) measured over the path in use; (0, 0): not yet."""
        best = max(self._fetchers, key=lambda fetcher: fetcher.num_bytes, default=None)
        return (best.num_bytes / best.seconds, 0.0) if best is not None and best.seconds else (0.0, 0.0)

    # ---- inside

    def _tell(self, message: ToOwner) -> None:
        if self._connection is not None:
            with contextlib.suppress(PlaneError):
                self._connection.send_nowait(encode(message))

    async def _ask(self, request: Request, kind: type[Reply], within_s: float | None = None) -> Reply:
        if self._connection is None or not self.is_up:
            raise PeerLost("", f"{self.host}:{self.port}: not connected")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[request.number] = answer
        try:
            async with asyncio.timeout(self._answer_s if within_s is None else within_s):
                self._connection.send_nowait(encode(request))
                reply = await answer
        except PlaneError as error:
            raise PeerLost("", f"{self.host}:{self.port}: {error}") from error
        except TimeoutError as error:
            self._connection.abort()  # what it still answers is of no use, and the next request must not wait as long
            raise PeerLost("", f"{self.host}:{self.port} does not answer") from error
        finally:
            self._waiting.pop(request.number, None)
        if not isinstance(reply, kind):
            why = reply.why if isinstance(reply, Failed) else "it answered something else"
            raise PeerLost("", f"{self.host}:{self.port}: {why}")
        return reply

    async def _receive(self, connection: Connection) -> None:
        why = "the connection ended"
        try:
            while True:
                message = decode_to_client(await connection.receive())
                if isinstance(message, SlabWelcome | SlabRejected):
                    continue
                waiting = self._waiting.get(message.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
                elif isinstance(message, Lent):  # nobody waits for it any more
                    self._tell(Release(number=message.number))
        except (PlaneError, msgspec.DecodeError) as error:
            why = str(error)
        finally:
            connection.abort()
            for number, waiting in self._waiting.items():
                if not waiting.done():
                    waiting.set_result(Failed(number=number, why=why))
