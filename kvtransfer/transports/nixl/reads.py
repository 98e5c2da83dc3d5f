"""The reads that one NIXL agent has in flight: what is posted when, and when a read is over. No threads here.

A read that was posted cannot be taken back: releasing its handle lets it go on and overwrite re-used blocks. So a piece
of it ends in two ways only: NIXL says DONE, or NIXL raises because the connection broke. In the second case the read is
over only after a fence, a while in which the agent made progress: a read may use two rails, and the other one learns
from the first one's failure then. That NIXL does not know the peer (any more) is no end: the bytes still come.

A read goes in pieces, so that what has come is verified while the next one comes, and an abandoned one ends soon.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvrelay.errors import TransportError

logger = logging.getLogger(__name__)

FENCE_S = 50e-3
_MAX_POSTED = 2  # pieces of one read in flight
_DISCONNECTED, _FORGOTTEN = "nixlRemoteDisconnectError", "nixlNotFoundError"  # of the peer


class NixlOwner(Protocol):
    """The source that a read reads: reads know nothing of connections and of the agent."""

    is_lost: bool  # set when its connection broke: NIXL has forgotten it

    def post(self, api: Any, piece: Any, *, is_quiet: bool) -> Any:
        """The handle of a transfer that does `piece`. `is_quiet`: nothing of this peer is in flight."""


@dataclass(slots=True)
class Posted:
    """One piece in flight. `handle` is None as soon as it was released (a released one must not be used)."""

    handle: Any
    num_bytes: int
    has_begun: bool = False
    has_ended: bool = False  # well or badly

    def release(self) -> None:
        handle, self.handle = self.handle, None
        with contextlib.suppress(Exception):  # NIXL's own classes; it has ended, what is left is only its memory
            handle.release()


@dataclass(slots=True, eq=False)
class NixlRead:
    """`landed` is called with the number of bytes that are in place, in order, on some thread."""

    peer: NixlOwner
    num_bytes: int
    pieces: deque[tuple[Any, int]]  # not yet posted: what, and how many bytes
    landed: Callable[[int], None] | None
    done: "asyncio.Future[None]"
    loop: asyncio.AbstractEventLoop
    thread_id: int = field(default_factory=threading.get_ident)  # the loop's
    posted: deque[Posted] = field(default_factory=deque)  # in flight, in order
    num_landed: int = 0  # bytes, in order
    num_reported: int = 0  # of those, bytes that have been handed over
    error: Exception | None = None
    fence: float = 0.0  # of a failed one: the time before which it is not over
    is_abandoned: bool = False
    is_light: bool = False  # to verify: so quickly done that no other thread is woken for it

    @property
    def is_over(self) -> bool:
        """Nothing of it is in flight or will be."""
        return not self.posted and not self.pieces

    @property
    def has_room(self) -> bool:
        """A piece could be posted now."""
        return bool(self.pieces) and len(self.posted) < _MAX_POSTED


class Reads:
    """All reads, for the holder of the agent's lock.

    `hand_over(read, num_landed, is_last)` is called, in order for each read, with what is in place
    and has not been handed over; after the last time no byte of the read can land any more.
    """

    def __init__(self, hand_over: Callable[[NixlRead, int, bool], None], clock: Callable[[], float]) -> None:
        self._hand_over, self._clock = hand_over, clock
        self._reads: list[NixlRead] = []

    def begin(self, api: Any, read: NixlRead) -> None:
        """Post its first piece."""
        self._reads.append(read)
        self._post_next(api, read)

    def poll(self, api: Any) -> None:
        """Ask NIXL about every piece; post one more, of the reads in turn."""
        for read in list(self._reads):
            for posted in [posted for posted in read.posted if not posted.has_ended]:
                self._advance(read, posted, api.check_xfer_state)
            self._collect(read)
            if read.error is not None:
                read.pieces.clear()
        with_room = next((read for read in self._reads if read.has_room), None)
        if with_room is not None:
            self._reads.remove(with_room)
            self._reads.append(with_room)
            self._post_next(api, with_room)

    def abandon(self, done: "asyncio.Future[None]") -> None:
        """Post no more of this read. What was posted goes on: nothing can stop it."""
        for read in self._reads:
            if read.done is done:
                read.is_abandoned = True
                read.pieces.clear()

    def hand_over(self) -> None:
        """What has come since the last time."""
        for read in [read for read in self._reads if read.num_reported < read.num_landed or read.is_over]:
            if read.is_over:
                self._reads.remove(read)
            read.num_reported = read.num_landed
            self._hand_over(read, read.num_landed, read.is_over)

    # ---- what the thread must know to choose its pause

    @property
    def has_room(self) -> bool:
        """Some read could post a piece now."""
        return any(read.has_room for read in self._reads)

    @property
    def is_awaited(self) -> bool:
        """Whether a read has a waiter."""
        return any(not read.is_abandoned for read in self._reads)

    @property
    def is_fenced(self) -> bool:
        """A failed one needs the agent's progress."""
        return any(read.fence for read in self._reads)

    def __len__(self) -> int:
        return len(self._reads)

    # ---- inside

    def _post_next(self, api: Any, read: NixlRead) -> None:
        if not read.pieces:
            return
        is_quiet = not any(other.posted for other in self._reads if other.peer is read.peer)
        piece, num_bytes = read.pieces.popleft()
        try:
            posted = Posted(read.peer.post(api, piece, is_quiet=is_quiet), num_bytes)
        except Exception as error:  # NIXL's own classes; this piece was not posted
            self._fail(read, error)
            return
        read.posted.append(posted)
        self.hand_over()  # of what came before: its waiters get on while this piece is copied
        self._advance(read, posted, api.transfer)

    def _advance(self, read: NixlRead, posted: Posted, step: Callable[[Any], str]) -> None:
        try:
            state = step(posted.handle)
            if state not in ("DONE", "PROC"):
                raise TransportError(f"nixl: a transfer ended as {state}")
        except Exception as error:  # NIXL's own classes: the way in which it reports failed transfers
            if not (posted.has_begun and self._is_only_forgotten(read, error)):
                posted.has_ended = True
                self._fail(read, error)
            return
        posted.has_begun = True
        if state == "DONE":
            posted.has_ended = True
            self._collect(read)

    def _is_only_forgotten(self, read: NixlRead, error: Exception) -> bool:
        """NIXL does not know the peer (any more). Unless the connection broke, the piece still lands."""
        if type(error).__name__ != _FORGOTTEN or read.peer.is_lost:
            return False
        if not read.is_abandoned:
            logger.error("nixl forgot a peer that is being read; the read's blocks stay in quarantine")
            read.is_abandoned = True
            read.pieces.clear()
        return True

    def _fail(self, read: NixlRead, error: Exception) -> None:
        read.pieces.clear()
        read.peer.is_lost = read.peer.is_lost or type(error).__name__ == _DISCONNECTED
        read.error, read.fence = as_transport_error(error), self._clock() + FENCE_S

    def _collect(self, read: NixlRead) -> None:
        """Count what is in place, in order. Pieces of a failed read are held until nothing of it can land."""
        if read.fence and not (all(posted.has_ended for posted in read.posted) and self._clock() >= read.fence):
            return
        while read.posted and read.posted[0].has_ended:
            posted = read.posted.popleft()
            posted.release()
            read.num_landed += 0 if read.fence else posted.num_bytes


def as_transport_error(error: Exception) -> TransportError:
    """NIXL's own classes cross no boundary of ours."""
    return error if isinstance(error, TransportError) else TransportError(f"nixl: {type(error).__name__}: {error}")
