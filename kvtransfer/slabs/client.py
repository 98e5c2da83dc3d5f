"""SlabPeer: a client's connection to a slab server. Requests blocks, reads them into its own slab, offers its own.

Used on one loop. Any request may raise PeerLost: the connection ended or the server did not answer in time; then all
requests under way fail at once, and the server's leases end by themselves.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from kvrelay.errors import PeerLost, PlaneError, TransportError
from kvrelay.kvtransfer.slabs import messages as wire
from kvrelay.kvtransfer.slabs.messages import MISSING
from kvrelay.kvtransfer.slabs.slabs import BlockRead, SharedSlab, SlabReader, StuckRead
from kvrelay.kvtransfer.transports.topology import this_machine
from kvrelay.plane import connection as plane
from kvrelay.plane.framing import Connection
from kvrelay.plane.tls import ClusterTls

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply", wire.LeaseGranted, wire.Stored, wire.Done, wire.HolderAddresses, wire.Description)
Outcome = TypeVar("Outcome")


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """A block to get: its key, and where to write it in the client's slab."""

    key: bytes
    offset: int
    room_bytes: int


class SlabPeer:
    """One slab server, as a client sees it.

    More than 12 attributes: the connection's parameters, its state, and the peer's identity.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        slab: SharedSlab | None,
        *,
        peer_id: str,
        block_bytes: int,
        answer_s: float = 1.0,
        stall_s: float = 1.0,
        tls: ClusterTls | None = None,
    ) -> None:
        """`slab`: None: a client that moves no blocks. `answer_s`: timeout of requests that move no block data."""
        self.host, self.port = host, port
        self._secret, self._slab, self._tls = secret, slab, tls
        self._peer_id, self._block_bytes = peer_id, block_bytes
        self._answer_s, self._stall_s = answer_s, stall_s
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[wire.Answer]] = {}
        self._connection: Connection | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._reader: SlabReader | None = None
        self.node_id = self.epoch = ""
        self.num_corrupt = 0

    @property
    def is_up(self) -> bool:
        return self._receiving is not None and not self._receiving.done()

    async def connect(self) -> None:
        """Connect and exchange hellos. Raises PeerLost."""
        try:
            async with asyncio.timeout(self._answer_s):
                self._connection = await plane.connect(
                    self.host, self.port, self._secret, timeout_s=self._answer_s, tls=self._tls
                )
                hello = wire.SlabHello(
                    protocol=wire.SLAB_PROTOCOL,
                    peer_id=self._peer_id,
                    block_bytes=self._block_bytes,
                    topology=this_machine(),
                    slab=None if self._slab is None else self._slab.offer(),
                )
                await self._connection.send(wire.encode(hello))
                reply = wire.decode_to_client(await self._connection.receive())
        except (PlaneError, TimeoutError, msgspec.DecodeError) as error:
            await self.aclose()
            raise PeerLost("", f"{self.host}:{self.port}: {error or 'no answer'}") from error
        except BaseException:
            await self.aclose()
            raise
        if not isinstance(reply, wire.SlabWelcome):
            await self.aclose()
            why = reply.why if isinstance(reply, wire.SlabRejected) else "it answered something else"
            raise PeerLost("", f"{self.host}:{self.port} refused: {why}")
        self.node_id, self.epoch = reply.node_id, reply.epoch
        if self._slab is not None:
            self._reader = self._slab.reader_of(reply.slab, reply.topology, stall_s=self._stall_s)
        self._receiving = asyncio.create_task(self._receive(self._connection), name="slab answers")

    async def aclose(self) -> None:
        """Fail all waiting requests and detach from the server's memory."""
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.gather(self._receiving, return_exceptions=True)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.aclose()

    # ---- requests

    async def get(self, wanted: Sequence[BlockRequest]) -> list[int]:
        """Read blocks; returns the size in bytes of each that is in place and verified, else 0.

        Raises PeerLost (no more writes to our slab), StuckRead (there may be).
        """
        number = next(self._numbers)
        granted = await self._request(
            wire.AcquireLease(number=number, keys=[one.key for one in wanted]), wire.LeaseGranted
        )
        if not len(granted.offsets) == len(granted.sizes) == len(granted.checksums) == len(wanted):
            raise PeerLost("", f"{self.host}:{self.port} answered for other blocks")
        sizes = [0] * len(wanted)
        here = [i for i, offset in enumerate(granted.offsets) if offset != MISSING]
        if not here or self._reader is None:
            return sizes
        fits = [i for i in here if 0 < granted.sizes[i] <= wanted[i].room_bytes]
        reads = [BlockRead(granted.offsets[i], wanted[i].offset, granted.sizes[i], granted.checksums[i]) for i in fits]
        try:
            for i, is_good in zip(fits, await self._while_connected(self._reader.read(reads)), strict=True):
                sizes[i] = granted.sizes[i] if is_good else 0
        except TransportError as error:
            if isinstance(error, StuckRead):
                raise
            raise PeerLost("", f"{self.host}:{self.port}: {error}") from error
        finally:
            self._notify(wire.ReleaseLease(number=number))
        if gone := [wanted[i].key for i in here if not sizes[i]]:
            self.num_corrupt += len(gone)
            problem = "%d blocks of %s:%d failed their checksums; they are deleted"
            logger.warning(problem, len(gone), self.host, self.port)
            self._notify(wire.Forget(number=next(self._numbers), keys=gone))
        return sizes

    async def put(self, blocks: Sequence[wire.BlockOffer], *, within_s: float) -> list[bool]:
        """Have the server store these blocks of our slab, unchanged until this returns; returns which it stored.

        Raises PeerLost. A read that the server ends after that fails its checksum.
        """
        request = wire.PutBlocks(number=next(self._numbers), hold_s=within_s, blocks=list(blocks))
        taken = await self._while_connected(self._request(request, wire.Stored, within_s))
        if len(taken.found) != len(blocks):
            raise PeerLost("", f"{self.host}:{self.port} answered for other blocks")
        return taken.found

    async def _while_connected(self, work: Coroutine[Any, Any, Outcome]) -> Outcome:
        """Await `work`, checking meanwhile that the server still answers. Raises PeerLost."""
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
        """Which of these blocks are there. Raises PeerLost."""
        return (await self._request(wire.Exists(number=next(self._numbers), keys=list(keys)), wire.Stored)).found

    async def forget(self, keys: Sequence[bytes]) -> None:
        """Delete these blocks. Raises PeerLost."""
        await self._request(wire.Forget(number=next(self._numbers), keys=list(keys)), wire.Done)

    async def pin(self, keys: Sequence[bytes], ttl_s: float) -> None:
        """Pin these blocks for `ttl_s` seconds. Raises PeerLost."""
        await self._request(wire.Pin(number=next(self._numbers), keys=list(keys), ttl_s=ttl_s), wire.Done)

    async def find_holders(self, keys: Sequence[bytes]) -> list[str]:
        """For each block the "host:port" of a worker that announced it, or "". Raises PeerLost."""
        request = wire.FindHolders(number=next(self._numbers), keys=list(keys))
        return (await self._request(request, wire.HolderAddresses)).addresses

    async def describe(self) -> bytes:
        """The server's state as JSON. Raises PeerLost."""
        return (await self._request(wire.Describe(number=next(self._numbers)), wire.Description)).text

    def announce(self, host: str, port: int, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Announce changes of our own slab. Not answered; lost if the connection is."""
        self._notify(wire.AnnounceBlocks(host=host, port=port, added=list(added), removed=list(removed)))

    # ---- internals

    def _notify(self, message: wire.ToServer) -> None:
        if self._connection is not None:
            with contextlib.suppress(PlaneError):
                self._connection.send_nowait(wire.encode(message))

    async def _request(self, request: wire.Request, kind: type[Reply], within_s: float | None = None) -> Reply:
        if self._connection is None or not self.is_up:
            raise PeerLost("", f"{self.host}:{self.port}: not connected")
        answer: asyncio.Future[wire.Answer] = asyncio.get_running_loop().create_future()
        self._waiting[request.number] = answer
        try:
            async with asyncio.timeout(self._answer_s if within_s is None else within_s):
                self._connection.send_nowait(wire.encode(request))
                reply = await answer
        except PlaneError as error:
            raise PeerLost("", f"{self.host}:{self.port}: {error}") from error
        except TimeoutError as error:
            self._connection.abort()  # its late answer is of no use, and the next request must not wait as long
            raise PeerLost("", f"{self.host}:{self.port} does not answer") from error
        finally:
            self._waiting.pop(request.number, None)
        if not isinstance(reply, kind):
            why = reply.why if isinstance(reply, wire.SlabRequestFailed) else "it answered something else"
            raise PeerLost("", f"{self.host}:{self.port}: {why}")
        return reply

    async def _receive(self, connection: Connection) -> None:
        why = "the connection ended"
        try:
            while True:
                message = wire.decode_to_client(await connection.receive())
                if isinstance(message, wire.SlabWelcome | wire.SlabRejected):
                    continue
                waiting = self._waiting.get(message.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
                elif isinstance(message, wire.LeaseGranted):  # its request has ended
                    self._notify(wire.ReleaseLease(number=message.number))
        except (PlaneError, msgspec.DecodeError) as error:
            why = str(error)
        finally:
            connection.abort()
            for number, waiting in self._waiting.items():
                if not waiting.done():
                    waiting.set_result(wire.SlabRequestFailed(number=number, why=why))
