"""The target's side of the stream protocol: reads, dealt to one or more connections to one source."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from functools import partial

import msgspec

from kvrelay.errors import TransportError
from kvrelay.kvtransfer.mover.copy_plan import CopyList
from kvrelay.kvtransfer.transports.base import Landed, Transport, host_id, open_off_loop, why_not_on_host
from kvrelay.kvtransfer.transports.tcp.channels import LOOK_S, Channel, TlsChannel, tune
from kvrelay.kvtransfer.transports.tcp.connection import Share, Stream, StreamRead
from kvrelay.kvtransfer.transports.tcp.exporter import TcpDescriptor, TcpExporter
from kvrelay.kvtransfer.transports.tcp.protocol import (
    HANDSHAKE_S,
    Piece,
    Request,
    bytes_of,
    cut_into_pieces,
    deal,
    greet_source,
    requests_for,
)
from kvrelay.plane.tls import ClusterTls
from kvrelay.types import KvMemory

logger = logging.getLogger(__name__)

_BETWEEN_HOSTS = 4  # streams
INLINE_BYTES = 128 << 10  # a read up to this is tried on the loop
INLINE_S = 100e-6  # and waited for there so long; a source on another host may need more, then the loop must not wait
_MAX_SKIPPED = 64  # small reads that go to the thread unasked, at most, before the loop is tried again


class TcpReader:
    """Reads over one or more TCP connections, under TLS where the cluster has it.

    One connection is bound by one core at each end, by its window over the round trip, and in clouds by a limit on each
    flow (5 Gbit/s in places): between hosts a read is spread over four of them. On one host one connection is faster.
    """

    max_in_flight = 2  # the second's request is under way before the first one's answer has ended

    def __init__(
        self, memory: KvMemory, secret: bytes, host: str, tls: ClusterTls | None = None, num_streams: int = 0
    ) -> None:
        """`num_streams`: connections to the source; 0: as many as suit the pair."""
        assert memory.view is not None
        self._tls, self._num_streams = tls, num_streams
        self._pool, self._secret = bytes_of(memory.view), secret
        self._source_bytes = 0
        self._streams: list[Stream] = []
        self._reads: dict[asyncio.Future[None], StreamRead] = {}
        self._num_missed = self._num_to_skip = 0  # small reads that the loop waited for in vain, in a row

    async def connect(self, descriptor: bytes) -> None:
        try:
            source = msgspec.msgpack.decode(descriptor, type=TcpDescriptor)
        except msgspec.DecodeError as error:
            raise TransportError(f"malformed descriptor: {error}") from error
        if source.is_tls != (self._tls is not None):
            there, here = ("on", "off") if source.is_tls else ("off", "on")
            raise TransportError(f"cluster.tls is {there} at the source and {here} here: set it alike")
        is_here = bool(source.host_id) and source.host_id == host_id()
        await self._open(source, self._num_streams or (1 if is_here else _BETWEEN_HOSTS))

    def _dial(self, source: TcpDescriptor) -> Channel:
        """Raises OSError."""
        until = time.monotonic() + HANDSHAKE_S
        sock = socket.create_connection((source.host, source.port), timeout=HANDSHAKE_S)
        try:
            tune(sock)
            if self._tls is None:
                greet_source(sock, self._secret, until)
                return Channel(sock, receive_s=LOOK_S)
            sock = secured = self._tls.client().wrap_socket(sock)
            greet_source(secured, self._secret, until)
            return TlsChannel(secured, receive_s=LOOK_S)
        except BaseException:
            sock.close()
            raise

    async def _open(self, source: TcpDescriptor, num_streams: int) -> None:
        """Open `num_streams` connections, or as many as the source accepts, at least one. Raises TransportError."""
        self._source_bytes = source.num_bytes
        streams = [Stream(f"kv-tcp-{i}", self._pool, partial(self._dial, source)) for i in range(num_streams)]
        for stream in streams:
            try:
                await open_off_loop(stream.open, lambda _, stream=stream: stream.stop())  # type: ignore[misc]
            except OSError as error:
                if not self._streams:
                    raise TransportError(f"cannot reach the source's data port: {error}") from error
                logger.warning("KV comes over %d of %d streams: %s", len(self._streams), num_streams, error)
                return
            self._streams.append(stream)

    def read(self, copies: CopyList, landed: Landed | None = None) -> "asyncio.Future[None]":
        try:
            pieces = cut_into_pieces(copies, self._source_bytes, len(self._pool))
        except TransportError as error:
            return _ended(error)
        if not pieces:
            if landed is not None:
                landed(0)
            return _ended(None)
        if len(pieces) == 1 and pieces[0].num_bytes <= INLINE_BYTES:
            done = self._read_now(pieces[0], landed)
            if done is not None:
                return done
        read = self._begin(pieces, landed)
        shares = [Share(read, requests_for(mine)) for mine in deal(pieces, len(self._streams))]
        for share, stream in zip(shares, sorted(self._streams, key=lambda s: s.num_waiting), strict=False):
            stream.put(share)
        return read.done

    def _begin(self, pieces: list[Piece], landed: Landed | None) -> StreamRead:
        read = StreamRead(pieces, landed, self._settle_on_loop(asyncio.get_running_loop()))
        self._reads[read.done] = read
        return read

    def _read_now(self, piece: Piece, landed: Landed | None) -> "asyncio.Future[None] | None":
        """A small read done here, or begun here to go on upon the stream's thread. None: neither."""
        if self._num_to_skip:
            self._num_to_skip -= 1
            return None
        request, stream = Request([piece]), self._streams[0]
        try:
            num_landed = stream.read_now(request, INLINE_S)
            if num_landed is None:
                return None
            if num_landed == piece.num_bytes:
                self._num_missed = 0
                if landed is not None:
                    landed(num_landed)
                return _ended(None)
        except TransportError as error:
            return _ended(error)
        except Exception as error:  # the socket's, or a bug in `landed`: the bytes are not there, and none will land
            logger.debug("a read failed", exc_info=True)
            return _ended(TransportError(str(error) or type(error).__name__))
        self._num_missed += 1
        self._num_to_skip = min(1 << self._num_missed, _MAX_SKIPPED)
        read = self._begin([piece], landed)
        if num_landed:
            try:
                read.progress.add(0, num_landed)
            except TransportError as error:
                read.fail(error)
        stream.go_on(Share(read, [request]))
        return read.done

    def _settle_on_loop(self, loop: asyncio.AbstractEventLoop) -> Callable[[StreamRead], None]:
        def settle(read: StreamRead) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._settle, read)

        return settle

    def _settle(self, read: StreamRead) -> None:
        del self._reads[read.done]
        if read.done.cancelled():
            return
        if read.error is None:
            read.done.set_result(None)
        else:
            read.done.set_exception(read.error)

    def abandon(self, read: "asyncio.Future[None]") -> None:
        """Drop the connections under this read."""
        mine = self._reads.get(read)
        if mine is not None:
            mine.fail(TransportError("abandoned"))
            for stream in self._streams:
                stream.cut(mine)

    async def aclose(self) -> None:
        for read in list(self._reads):
            self.abandon(read)
        closing = asyncio.get_running_loop().run_in_executor(None, self._stop_all)
        await asyncio.shield(closing)  # the caller may be cancelled: every connection is closed all the same

    def _stop_all(self) -> None:
        for stream in self._streams:
            stream.stop()


def _ended(error: TransportError | None) -> "asyncio.Future[None]":
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
    return done


def tcp(tls: ClusterTls | None = None, *, num_streams: int = 0) -> Transport:
    """The transport between hosts, and on one host where no memory can be shared: under `tls` if any.

    `num_streams`: connections of a pair; 0: as many as suit it.
    """
    return Transport(
        "tcp", partial(TcpExporter, tls=tls), partial(TcpReader, tls=tls, num_streams=num_streams), why_not_on_host
    )
