"""An abstract Unix socket beside a TCP port: a small frame costs less than half the CPU of loopback TCP.

Linux only; a client elsewhere, or of another user, finds none and takes TCP. Imports nothing of ours.
"""

import logging
import os
import socket
import struct
import sys

logger = logging.getLogger(__name__)


def local_name(host: str, port: int) -> str:
    """The abstract Unix socket beside host:port. Like loopback's ports, such names are the network namespace's own."""
    return f"\0kvrelay-plane-{host}:{port}"


def local_socket(host: str, port: int) -> socket.socket | None:
    """Connected to the server's Unix socket, if this user has one there; else None. Does not wait."""
    if not sys.platform.startswith("linux"):
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(local_name(host, port))
        if peer_uid(sock) == os.getuid():
            return sock
    except OSError:  # elsewhere, not listening, or too busy to take it at once: TCP will do
        pass
    sock.close()
    return None


def peer_uid(sock: socket.socket) -> int:
    """Of whoever made the other end. Linux only."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


def local_listener(host: str, port: int, backlog: int) -> socket.socket | None:
    if not sys.platform.startswith("linux"):
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(local_name(host, port))
        listener.listen(backlog)
    except OSError as error:  # a stranger has the name: clients see that it is not ours
        logger.warning("no Unix socket beside %s:%d: %s", host, port, error)
        listener.close()
        return None
    return listener
