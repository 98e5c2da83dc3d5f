"""The source's side of the stream protocol: a listener, and a thread for each connection that is read over.

A peer has HANDSHAKE_S to prove the cluster's secret; who says nonsense is cut off. Connections, and those among them
that have proved nothing yet, are bounded: strangers can neither keep readers out nor pile up threads.
"""

import asyncio
import logging
import socket
import threading
import time
from dataclasses import dataclass, field

from kvrelay.errors import BackendUnavailable
from kvrelay.kvtransfer.transports.sockets.channels import Channel, PlainChannel, shut, tune
from kvrelay.kvtransfer.transports.sockets.protocol import HANDSHAKE_S, Inbox, bytes_of, greet_target
from kvrelay.kvtransfer.transports.sockets.splice import why_not_splice
from kvrelay.plane.connection import connections
from kvrelay.types import KvMemory

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 512
_MAX_STRANGERS = 32  # in the middle of their handshake; one more and the oldest has to go
_JOIN_S = 2.0
_COPIED_BYTES = 64 << 10  # an answer up to this is sent with one call; not copying it pays above


@dataclass(slots=True, eq=False)
class Peer:
    sock: socket.socket
    is_proven: bool = False
    thread: threading.Thread | None = None
    since: float = field(default_factory=time.monotonic)


class StreamExporter:
    """Base of the socket transports' exporters: they listen, and may have more to ask of a peer (`_admit`)."""

    name: str

    def __init__(self, memory: KvMemory, secret: bytes, host: str) -> None:
        assert memory.view is not None
        self._memory, self._pool = memory, bytes_of(memory.view).toreadonly()
        self._secret, self._host = secret, host
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._peers: dict[int, Peer] = {}  # by their number; a thread takes itself out
        self._num_accepted = 0
        self._is_closing = False
        self._can_splice = False

    # ---- what a kind of socket adds

    def _listen(self) -> socket.socket:
        """Raises OSError."""
        raise NotImplementedError

    def _admit(self, peer: Peer, until: float) -> Channel:
        """The channel to a peer that has proved itself. Raises PermissionError, OSError."""
        greet_target(peer.sock, self._secret, until)
        return PlainChannel(peer.sock, receive_s=None, can_splice=self._can_splice)

    def describe(self) -> bytes:
        raise NotImplementedError

    # ---- the life of the listener

    async def start(self) -> None:
        try:
            self._listener = self._listen()
        except OSError as error:
            raise BackendUnavailable(self.name, f"cannot listen: {error}") from error
        why_not = why_not_splice()
        if why_not is not None:
            logger.info("KV is copied on its way out over %s: %s", self.name, why_not)
        self._can_splice = why_not is None
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._listener), name=f"kv-{self.name}-accept")

    async def _accept(self, listener: socket.socket) -> None:
        async for sock in connections(listener):
            if len(self._peers) >= _MAX_CONNECTIONS:
                logger.warning("refused a reader of the KV pool: there are %d already", len(self._peers))
                sock.close()
                continue
            self._make_room()
            self._num_accepted += 1
            self._begin(self._num_accepted, Peer(sock))

    def _begin(self, number: int, peer: Peer) -> None:
        self._peers[number] = peer
        peer.thread = threading.Thread(
            target=self._serve, args=(number, peer), name=f"kv-{self.name}-serve", daemon=True
        )
        try:
            peer.thread.start()
        except RuntimeError as error:  # no more threads
            logger.warning("cannot serve a reader of the KV pool: %s", error)
            del self._peers[number]
            peer.sock.close()

    def _make_room(self) -> None:
        strangers = [peer for peer in list(self._peers.values()) if not peer.is_proven]
        if len(strangers) >= _MAX_STRANGERS:
            shut(min(strangers, key=lambda peer: peer.since).sock)

    def set_busy(self, num_open: int) -> None:
        """Needs no progress."""

    async def aclose(self) -> None:
        self._is_closing = True
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
            self._accepting = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        peers = list(self._peers.values())
        for peer in peers:
            shut(peer.sock)
        for peer in peers:
            if peer.thread is not None:
                await asyncio.to_thread(peer.thread.join, _JOIN_S)

    # ---- on a peer's thread

    def _serve(self, number: int, peer: Peer) -> None:
        channel: Channel | None = None
        try:
            tune(peer.sock)
            channel = self._admit(peer, time.monotonic() + HANDSHAKE_S)
            peer.is_proven = True
            self._answer_all(channel)
        except PermissionError as error:
            logger.warning("refused a reader of the KV pool: %s", error)
        except OSError as error:
            logger.debug("a reader of the KV pool is gone: %s", error)
        except Exception:  # a thread's edge: this connection ends, the worker lives
            logger.exception("serving a reader of the KV pool failed")
        finally:
            (channel or peer.sock).close()
            self._peers.pop(number, None)

    def _answer_all(self, channel: Channel) -> None:
        inbox = Inbox(channel, len(self._pool))
        while not self._is_closing:
            wanted = inbox.next()
            if wanted.num_bytes <= _COPIED_BYTES or not channel.send_pages(
                wanted.header, wanted.iovecs(self._memory.address)
            ):
                channel.send_answer(wanted.header, wanted.views(self._pool), wanted.num_bytes)
