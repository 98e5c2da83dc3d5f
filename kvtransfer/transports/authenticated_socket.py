"""An abstract Unix socket that answers peers which prove the cluster's secret.

The proof is an HMAC over the socket's name, which travels only over the authenticated connection of both ends; it is
good for this socket alone.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import secrets
import socket
from collections.abc import Callable

from kvrelay.plane.connection import connections

logger = logging.getLogger(__name__)

_PROOF_BYTES = hashlib.sha256().digest_size
_NAME_BYTES = 16
_TIMEOUT_S = 2.0


def _proof(secret: bytes, label: bytes, name: bytes) -> bytes:
    return hmac.digest(secret, label + b"\0" + name, hashlib.sha256)


def _address(name: bytes) -> str:
    return f"\0kvrelay-{name.hex()}"


class AuthenticatedSocket:
    """Listens from start() to aclose(). `admit(peer)` answers one that has proved the secret; OSError is its end.

    `label` keeps proofs of different purposes apart.
    """

    def __init__(self, secret: bytes, label: bytes, admit: Callable[[socket.socket], object]) -> None:
        self._secret, self._label, self._admit = secret, label, admit
        self.name = secrets.token_bytes(_NAME_BYTES)
        self._listener: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises OSError."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.setblocking(False)
            self._listener.bind(_address(self.name))
            self._listener.listen(16)
        except OSError:
            await self.aclose()
            raise
        self._task = asyncio.create_task(self._serve(self._listener), name="kv-authenticated-socket")

    async def _serve(self, listener: socket.socket) -> None:
        async for peer in connections(listener):
            with peer, contextlib.suppress(OSError, TimeoutError):
                await self._answer(peer)

    async def _answer(self, peer: socket.socket) -> None:
        async with asyncio.timeout(_TIMEOUT_S):
            proof = await asyncio.get_running_loop().sock_recv(peer, _PROOF_BYTES)
        if hmac.compare_digest(proof, _proof(self._secret, self._label, self.name)):
            self._admit(peer)
        else:
            logger.warning("a process without the cluster's secret asked for the KV pool")

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def connect_authenticated(name: bytes, secret: bytes, label: bytes) -> socket.socket:
    """Prove the secret to this socket; the connection on which the answer comes, with a timeout. Blocking. Raises
    OSError.
    """
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        peer.settimeout(_TIMEOUT_S)
        peer.connect(_address(name))
        peer.sendall(_proof(secret, label, name))
    except BaseException:
        peer.close()
        raise
    return peer
