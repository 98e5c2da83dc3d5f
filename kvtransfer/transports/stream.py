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

from kvrelay.kvtransfer.transports.base import Landed, TransportError
from kvrelay.kvtransfer.transports.channels import Channel, rest
from kvrelay.kvtransfer.transports.landing import Landing
from kvrelay.kvtransfer.transports.streams import ANSWER, MAX_OUTSTANDING, Piece, Request, requests_for

logger = logging.getLogger(__name__)


class Read:
    """One read: it ends when every stream that had a share of it has left it."""

    def __init__(self, pieces: Sequence[Piece], landed: Landed | None, on_end: Callable[["Read"], None]) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.landing = Landing([piece.num_bytes for piece in pieces], landed)
        self.error: TransportError | None = None  # the first
        self.num_shares = 0
        self._on_end, self._lock = on_end, threading.Lock()

    def fail(self, error: TransportError) -> None:
        """Whoever still has a share of it leaves it soon."""
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

    def __init__(self, read: Read, pieces: Sequence[Piece]) -> None:
        self.read = read
        self.requests = deque(requests_for(pieces))  # not yet answered in full


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request under way."""

    share: Share
    request: Request
    number: int


class Stream:
    """Shares are served in the order in which they came. `dial` opens the connection; it is called again after a loss."""

    def __init__(self, name: str, pool: memoryview, dial: Callable[[], Channel]) -> None:
        self._name, self._pool, self._dial = name, pool, dial
        self._changed = threading.Condition()  # guards what follows
        self._shares: deque[Share] = deque()  # unfinished; the first is being received
        self._unasked: deque[tuple[Share, Request]] = deque()
        self._channel: Channel | None = None
        self._thread: threading.Thread | None = None
        self._is_lent = False  # to `read_now`
        self._is_cut = self._is_stopping = False
        # of whoever serves the first share:
        self._asked: deque[_Asked] = deque()
        self._number = 0  # of the request that was sent last
        self._header = bytearray(ANSWER.size)  # of the answer that is being received
        self._header_left = memoryview(self._header)
        self._left: list[memoryview] = []  # of the piece that is being received

    # ---- for the reader, on its loop

    def open(self) -> None:
        """Connect, before the first read. Blocking. Raises OSError."""
        self._channel = self._dial()

    @property
    def num_waiting(self) -> int:
        return len(self._shares)

    def put(self, share: Share) -> None:
        """Serve it on the stream's thread."""
        with self._changed:
            self._append(share)
            self._wake()

    def read_now(self, share: Share, within_s: float) -> bool | None:
        """Serve it here and now, waiting for `within_s` at most.

        Returns: whether it has ended (well or not); else it goes on upon the thread. None: not begun, the stream is busy.
        """
        with self._changed:
            if self._shares or self._channel is None or not self._channel.can_look:
                return None
            self._append(share)
            self._is_lent = True
        is_done = True
        try:
            is_done = self._fetch_within(share, time.monotonic() + within_s)
        except Exception as error:
            self._fail(share, error)
        with self._changed:
            self._is_lent = False
            if is_done:
                self._finish(share)
            else:
                self._wake()
        return is_done

    def cut(self, read: Read) -> None:
        """If it is this read that is being received, shut the connection under it."""
        with self._changed:
            if self._shares and self._shares[0].read is read and self._channel is not None:
                self._channel.shut()
                self._is_cut = True

    def stop(self) -> None:
        """End the thread once it has served what it has, and close. Blocking."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        self._drop()

    def _append(self, share: Share) -> None:
        self._shares.append(share)
        self._unasked.extend((share, request) for request in share.requests)

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
        with self._changed:
            while self._is_lent or not self._shares:
                if self._is_stopping:
                    return None
                self._changed.wait()
            return self._shares[0]

    def _fetch(self, share: Share) -> None:
        if self._channel is None:
            channel = self._dial()
            with self._changed:
                self._channel = channel
        while share.requests:
            self._ask()
            self._land(share, may_wait=True)

    def _fetch_within(self, share: Share, until: float) -> bool:
        assert self._channel is not None
        self._ask()
        while share.requests:
            left_s = until - time.monotonic()
            if left_s <= 0 or not self._channel.wait(left_s):
                return False
            self._land(share, may_wait=False)
        return True

    def _ask(self) -> None:
        """Keep MAX_OUTSTANDING requests under way, later reads' included."""
        assert self._channel is not None
        while len(self._asked) < MAX_OUTSTANDING:
            with self._changed:
                if not self._unasked:
                    return
                share, request = self._unasked.popleft()
            if share.read.error is None:
                self._number += 1
                self._asked.append(_Asked(share, request, self._number))
                self._channel.send(request.encode(self._number))

    def _land(self, share: Share, *, may_wait: bool) -> None:
        """Some more bytes of the share's first request."""
        if share.read.error is not None:
            raise share.read.error
        assert self._channel is not None
        request = share.requests[0]
        piece = request.pieces[0]
        left = self._left or piece.views(self._pool)
        num_header = len(self._header_left)
        num_bytes = self._channel.land([self._header_left, *left] if num_header else left, may_wait=may_wait)
        if num_header:
            self._take_header(min(num_bytes, num_header))
            num_bytes -= min(num_bytes, num_header)
        self._left = rest(left, num_bytes)
        if not self._left:
            self._take_piece(share, request)
        if num_bytes:
            share.read.landing.add(piece.index, num_bytes)

    def _take_header(self, num_bytes: int) -> None:
        """So much of the answer's header came. Raises ConnectionError."""
        self._header_left = self._header_left[num_bytes:]
        asked = self._asked[0]
        if not self._header_left and ANSWER.unpack(self._header) != (asked.number, asked.request.num_bytes):
            raise ConnectionError("the source answered another request")

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
        with self._changed:
            self._asked.clear()
            self._header_left, self._left = memoryview(self._header), []
            self._is_cut = False
            self._unasked = deque((share, request) for share in list(self._shares)[1:] for request in share.requests)
            if self._channel is not None:
                self._channel.close()
                self._channel = None

    def _finish(self, share: Share) -> None:
        with self._changed:
            if self._is_cut:  # maybe when its last byte was already here
                self._drop()
            self._shares.popleft()
            self._unasked = deque(item for item in self._unasked if item[0] is not share)
