"""One connection of a reader and the thread that receives on it.

Only that thread writes the pool, and only inside `Channel.land`: when it has left a read, no byte of that read can land
any more. While one read's answer comes in, the next read's request goes out. A small read on an idle connection is
done at once by the caller where the answer comes soon: waking a thread, and then the loop, takes longer than the read.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrelay.errors import TransportError
from kvrelay.kvtransfer.transports.base import Landed
from kvrelay.kvtransfer.transports.tcp.channels import Channel, rest
from kvrelay.kvtransfer.transports.tcp.protocol import ANSWER, MAX_OUTSTANDING, Piece, Request

logger = logging.getLogger(__name__)


class StreamRead:
    """One read: it ends when every stream that had a share of it has left it."""

    def __init__(self, pieces: Sequence[Piece], landed: Landed | None, on_end: Callable[["StreamRead"], None]) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.progress = ReadProgress([piece.num_bytes for piece in pieces], landed)
        self.error: TransportError | None = None  # the first
        self.num_shares = 0
        self._on_end, self._lock = on_end, threading.Lock()

    def fail(self, error: TransportError) -> None:
        """Streams that still have a share of it leave it soon."""
        with self._lock:
            self.error = self.error or error

    def leave(self) -> None:
        """A thread is done with its share; with the last one the read has ended."""
        with self._lock:
            self.num_shares -= 1
            is_last = not self.num_shares
        if is_last:
            self._on_end(self)


class Share:
    """One stream's part of a read."""

    def __init__(self, read: StreamRead, requests: Sequence[Request]) -> None:
        self.read = read
        self.requests = deque(requests)  # not yet answered in full
        read.num_shares += 1


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request under way."""

    share: Share
    request: Request
    number: int


class Stream:
    """Shares are served in the order in which they came. `dial` opens the connection; it is called again after a loss.
    17 attributes: the socket, its thread, and the shares that wait."""

    def __init__(self, name: str, pool: memoryview, dial: Callable[[], Channel]) -> None:
        self._name, self._pool, self._dial = name, pool, dial
        self._guard = threading.RLock()  # of what follows
        self._changed = threading.Condition(self._guard)
        self._shares: deque[Share] = deque()  # unfinished; the first is being received
        self._unasked: deque[tuple[Share, Request]] = deque()
        self._channel: Channel | None = None
        self._thread: threading.Thread | None = None
        self._is_cut = self._is_stopping = False
        # of the thread while there is a share, of the loop while there is none:
        self._asked: deque[_Asked] = deque()
        self._number = 0  # of the request that was sent last
        self._header = bytearray(ANSWER.size)  # of the answer that is being received
        self._header_left = memoryview(self._header)
        self._left: list[memoryview] = []  # of the piece that is being received
        self._num_left = 0  # bytes in `_left`

    # ---- for the reader, on its loop

    def open(self) -> None:
        """Connect, before the first read. Blocking. Raises OSError."""
        self._channel = self._dial()

    @property
    def num_waiting(self) -> int:
        return len(self._shares)

    def put(self, share: Share) -> None:
        """Serve it on the stream's thread."""
        with self._guard:
            self._shares.append(share)
            self._unasked.extend((share, request) for request in share.requests)
            self._wake()

    def read_now(self, request: Request, within_s: float) -> int | None:
        """Ask here and now, and receive what comes within that time; for one piece.

        Returns: bytes that are in place. When some are missing, `go_on` must follow. None: not begun, the stream is
        busy. Raises OSError; nothing of it can land any more then.
        """
        if self._shares or self._channel is None or not self._channel.can_look:
            return None  # with no share the thread touches nothing, and only this loop brings shares
        until = time.monotonic() + within_s
        try:
            self._number += 1
            self._channel.send(request.encode(self._number))
            self._begin(request.pieces[0])
            while self._num_left:
                left_s = until - time.monotonic()
                if left_s <= 0 or not self._channel.wait(left_s):
                    break
                self._receive(self._channel, self._number, request.num_bytes, may_wait=False)
        except BaseException:
            self._drop()
            raise
        if not self._num_left:
            self._header_left = memoryview(self._header)
        return request.num_bytes - self._num_left

    def go_on(self, share: Share) -> None:
        """Serve the rest of what `read_now` began."""
        with self._guard:
            self._asked.append(_Asked(share, share.requests[0], self._number))
            self._shares.append(share)
            self._wake()

    def cut(self, read: StreamRead) -> None:
        """If it is this read that is being received, shut the connection under it."""
        with self._guard:
            if self._shares and self._shares[0].read is read and self._channel is not None:
                self._channel.shut()
                self._is_cut = True

    def stop(self) -> None:
        """End the thread once it has served what it has, and close. Blocking."""
        with self._guard:
            self._is_stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        self._drop()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._changed.notify()

    # ---- on the thread

    def _run(self) -> None:
        while (share := self._next()) is not None:
            try:
                self._fetch(share)
            except Exception as error:
                self._fail(share, error)
            self._finish(share)
            share.read.leave()

    def _next(self) -> Share | None:
        with self._guard:
            while not self._shares:
                if self._is_stopping:
                    return None
                self._changed.wait()
            return self._shares[0]

    def _fetch(self, share: Share) -> None:
        if self._channel is None:
            channel = self._dial()
            with self._guard:
                self._channel = channel
        while share.requests:
            self._send_requests()
            self._land(self._channel, share)

    def _send_requests(self) -> None:
        """Keep MAX_OUTSTANDING requests under way, later reads' included."""
        assert self._channel is not None
        while len(self._asked) < MAX_OUTSTANDING:
            with self._guard:
                if not self._unasked:
                    return
                share, request = self._unasked.popleft()
            if share.read.error is None:
                self._number += 1
                self._asked.append(_Asked(share, request, self._number))
                self._channel.send(request.encode(self._number))

    def _land(self, channel: Channel, share: Share) -> None:
        """Some more bytes of the share's first request."""
        if share.read.error is not None:
            raise share.read.error
        request = share.requests[0]
        piece = request.pieces[0]
        if not self._num_left:
            self._begin(piece)
        num_bytes = self._receive(channel, self._asked[0].number, request.num_bytes)
        if not self._num_left:
            self._take_piece(share, request)
        if num_bytes:
            share.read.progress.add(piece.index, num_bytes)

    def _begin(self, piece: Piece) -> None:
        self._left, self._num_left = piece.views(self._pool), piece.num_bytes

    def _receive(self, channel: Channel, number: int, answer_bytes: int, *, may_wait: bool = True) -> int:
        """What comes of the answer's header and of the piece; the piece's bytes. Raises OSError."""
        num_header = len(self._header_left)
        left = [self._header_left, *self._left] if num_header else self._left
        num_bytes = channel.land(left, may_wait=may_wait)
        if num_header:
            self._header_left = self._header_left[num_bytes:]
            num_bytes = max(num_bytes - num_header, 0)
            if not self._header_left and ANSWER.unpack(self._header) != (number, answer_bytes):
                raise ConnectionError("the source answered another request")
        self._num_left -= num_bytes
        if self._num_left:
            self._left = rest(self._left, num_bytes)
        return num_bytes

    def _take_piece(self, share: Share, request: Request) -> None:
        """The request's first piece is complete."""
        request.pieces.popleft()
        if not request.pieces:
            self._header_left = memoryview(self._header)
            share.requests.popleft()
            self._asked.popleft()

    def _fail(self, share: Share, error: Exception) -> None:
        """What was asked for this share must not be taken for the next one's: give up the connection if it may come."""
        if not isinstance(error, TransportError | OSError):
            logger.exception("a read failed", exc_info=error)  # ours: the read fails, the worker lives
        if not isinstance(error, TransportError) or any(asked.share is share for asked in self._asked):
            self._drop()
        failed = error if isinstance(error, TransportError) else TransportError(str(error) or type(error).__name__)
        share.read.fail(failed)

    def _drop(self) -> None:
        """Close the connection; what later shares asked over it is asked again over the next."""
        with self._guard:
            self._asked.clear()
            self._header_left, self._num_left = memoryview(self._header), 0
            self._is_cut = False
            self._unasked = deque((share, request) for share in list(self._shares)[1:] for request in share.requests)
            if self._channel is not None:
                self._channel.close()
                self._channel = None

    def _finish(self, share: Share) -> None:
        with self._guard:
            if self._is_cut:  # maybe when its last byte was already here
                self._drop()
            self._shares.popleft()
            self._unasked = deque(item for item in self._unasked if item[0] is not share)


class ReadProgress:
    """Counts bytes of numbered pieces; reports how many of the read's first bytes are there.

    One thread at a time reports; the others go on receiving meanwhile, and it reports what they brought.
    """

    def __init__(self, sizes: Sequence[int], report: Landed | None) -> None:
        self._report, self._lock = report, threading.Lock()
        self._sizes, self._got = sizes, [0] * len(sizes)
        self._first = 0  # piece that is not complete
        self._before = 0  # bytes of the pieces before it
        self._reported = 0
        self._is_reporting = False

    def add(self, piece: int, num_bytes: int) -> None:
        """So many more bytes of this piece are in place. Raises what `report` raises; it is not called again then."""
        with self._lock:
            self._got[piece] += num_bytes
            while self._first < len(self._sizes) and self._got[self._first] == self._sizes[self._first]:
                self._before += self._sizes[self._first]
                self._first += 1
            if self._report is None or self._is_reporting or self._prefix() == self._reported:
                return
            self._is_reporting = True
        self._report_prefix(self._report)

    def _prefix(self) -> int:
        return self._before + (self._got[self._first] if self._first < len(self._sizes) else 0)

    def _report_prefix(self, report: Landed) -> None:
        while True:
            with self._lock:
                prefix = self._prefix()
                if prefix == self._reported:
                    self._is_reporting = False
                    return
                self._reported = prefix
            report(prefix)
