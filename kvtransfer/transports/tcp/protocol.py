"""The stream protocol over TCP: the target asks for regions, the source streams them.

    both       magic, nonce, and proof of the cluster's secret over both nonces
    target →   request: number, rows, bytes in all; then each row's offset in the source's pool and length
    ← source   answer: the request's number and bytes in all; then the bytes of its rows, in order

Requests may follow each other before answers came; what is outstanding is small enough that sending it cannot block
(`MAX_ROWS`, `MAX_OUTSTANDING`). No address of the target's is ever sent; only its own receive call writes its pool. To
stop a read is to shut the connection and leave that call: nothing of it can land later. The source re-uses a block only
once its transfer has ended at its side, and after that nothing confirms the transfer: so even with checksums off no
byte of another sequence is decoded from.
"""

import hashlib
import hmac
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvrelay.errors import TransportError
from kvrelay.kvtransfer.mover.copy_plan import CopyList
from kvrelay.kvtransfer.transports.tcp.channels import Channel

MAX_ROWS = 1000  # of one request: 16 KiB
MAX_OUTSTANDING = 2  # requests sent and not yet answered in full: any socket's buffers hold them
PIECE_BYTES = 512 << 10  # what one receive call brings: still in the second-level cache when it is verified
HANDSHAKE_S = 5.0
ANSWER = struct.Struct("<QQ")  # the request's number, bytes in all

_MAGIC = b"kvrelay-kv2\0"
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_REQUEST = struct.Struct("<QIQ")  # number, rows, bytes in all
_ROW = struct.Struct("<QQ")  # offset in the source's pool, length; what was negative is huge
_REST_S = 5.0  # for the rest of a request that has begun to come


def bytes_of(view: memoryview) -> memoryview:
    """A pool's memory as plain bytes."""
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


# ---- authentication


def _proof(secret: bytes, label: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, b"kvrelay-stream-v2\0" + label + nonces, hashlib.sha256)


def _receive_exactly(sock: socket.socket, size: int, until: float) -> bytes:
    """Raises ConnectionError at end-of-file, TimeoutError at `until`, however slowly bytes dribble in."""
    data = bytearray(size)
    got = 0
    while got < size:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the handshake took too long")
        sock.settimeout(left_s)
        num_bytes = sock.recv_into(memoryview(data)[got:])
        if not num_bytes:
            raise ConnectionError("the peer closed the connection")
        got += num_bytes
    return bytes(data)


def greet_target(sock: socket.socket, secret: bytes, until: float) -> None:
    """The source's side of the handshake. Raises PermissionError for a peer that may not read, OSError."""
    hello = _receive_exactly(sock, len(_MAGIC) + _NONCE_BYTES, until)
    if not hello.startswith(_MAGIC):
        raise PermissionError("it does not speak this protocol")
    nonce = os.urandom(_NONCE_BYTES)
    nonces = nonce + hello[len(_MAGIC) :]
    sock.sendall(nonce + _proof(secret, b"source", nonces))
    if not hmac.compare_digest(_receive_exactly(sock, _PROOF_BYTES, until), _proof(secret, b"target", nonces)):
        raise PermissionError("it does not know this cluster's secret")


def greet_source(sock: socket.socket, secret: bytes, until: float) -> None:
    """The target's side of the handshake. Raises PermissionError, OSError."""
    nonce = os.urandom(_NONCE_BYTES)
    sock.sendall(_MAGIC + nonce)
    answer = _receive_exactly(sock, _NONCE_BYTES + _PROOF_BYTES, until)
    nonces = answer[:_NONCE_BYTES] + nonce
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _proof(secret, b"source", nonces)):
        raise PermissionError("the source does not know this cluster's secret")
    sock.sendall(_proof(secret, b"target", nonces))


# ---- what is asked for


@dataclass(slots=True, eq=False)
class Piece:
    """A contiguous run of a read's bytes: rows of offset at the source, offset at the target, length."""

    index: int
    sources: list[int]
    targets: list[int]
    sizes: list[int]
    num_bytes: int

    def views(self, pool: memoryview) -> list[memoryview]:
        """Where it must land."""
        return [pool[start : start + size] for start, size in zip(self.targets, self.sizes, strict=True)]


def cut_into_pieces(copies: CopyList, source_bytes: int, target_bytes: int) -> list[Piece]:
    """The read in pieces of nearly equal size, PIECE_BYTES or a row more, and of MAX_ROWS rows at most.

    Raises TransportError unless every byte lies inside both pools.
    """
    if len(copies.num_bytes) == 1 and int(copies.num_bytes[0]) <= PIECE_BYTES:
        return [_only_piece(copies, source_bytes, target_bytes)]
    copies.check_bounds(source_bytes, target_bytes)
    source, target, sizes = copies.tiles(PIECE_BYTES)
    if not len(sizes):
        return []
    ends = np.cumsum(sizes)
    num_pieces = -(-int(ends[-1]) // PIECE_BYTES)
    by_bytes = np.searchsorted(ends, np.arange(1, num_pieces) * (int(ends[-1]) / num_pieces)) + 1
    cuts = {0, len(sizes), *by_bytes.tolist(), *range(MAX_ROWS, len(sizes), MAX_ROWS)}
    edges = sorted(cut for cut in cuts if cut <= len(sizes))
    counts = np.diff(ends[np.array(edges[1:]) - 1], prepend=0).tolist()
    sources, targets, lengths = source.tolist(), target.tolist(), sizes.tolist()
    return [
        Piece(i, sources[first:stop], targets[first:stop], lengths[first:stop], count)
        for i, (first, stop, count) in enumerate(zip(edges, edges[1:], counts, strict=False))
    ]


def _only_piece(copies: CopyList, source_bytes: int, target_bytes: int) -> Piece:
    """One region, as most small reads are: a tenth of the general way's time."""
    source, target, size = int(copies.source_offset[0]), int(copies.target_offset[0]), int(copies.num_bytes[0])
    if min(source, target, size) < 0 or source + size > source_bytes or target + size > target_bytes:
        raise TransportError("a copy lies outside the pool")
    return Piece(0, [source], [target], [size], size)


def deal(pieces: Sequence[Piece], num_streams: int) -> list[list[Piece]]:
    """Whose piece is whose: in turns, so that the read fills from its beginning. Equal to a piece; no share is
    empty.
    """
    return [list(pieces[first::num_streams]) for first in range(min(num_streams, len(pieces)))]


class Request:
    """Some pieces asked for at once."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = deque(pieces)  # not yet complete
        self.num_bytes = sum(piece.num_bytes for piece in pieces)

    def encode(self, number: int) -> bytes:
        """As bytes, under a number that the answer will bear."""
        rows = [word for piece in self.pieces for row in zip(piece.sources, piece.sizes, strict=True) for word in row]
        return _REQUEST.pack(number, len(rows) // 2, self.num_bytes) + struct.pack(f"<{len(rows)}Q", *rows)


def requests_for(pieces: Sequence[Piece]) -> list[Request]:
    """As few requests as MAX_ROWS allows."""
    groups: list[list[Piece]] = []
    num_rows = MAX_ROWS
    for piece in pieces:
        num_rows += len(piece.sizes)
        if num_rows > MAX_ROWS:
            groups.append([])
            num_rows = len(piece.sizes)
        groups[-1].append(piece)
    return [Request(group) for group in groups]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request as the source received it."""

    number: int
    num_bytes: int
    rows: list[tuple[int, int]]  # offset in the pool, length

    @property
    def header(self) -> bytes:
        return ANSWER.pack(self.number, self.num_bytes)

    def views(self, pool: memoryview) -> list[memoryview]:
        return [pool[start : start + size] for start, size in self.rows]


class Inbox:
    """The source's side: requests as they come over one channel."""

    def __init__(self, channel: Channel, pool_bytes: int) -> None:
        self._channel, self._pool_bytes = channel, pool_bytes
        self._buffer = bytearray((MAX_OUTSTANDING + 1) * (_REQUEST.size + MAX_ROWS * _ROW.size))
        self._first = self._stop = 0  # what is in the buffer and not yet handed out

    def next(self) -> Wanted:
        """The next request; waits for it as long as none has begun.

        Raises PermissionError for what a good peer never sends, OSError when the peer is gone or falls silent.
        """
        until: float | None = None
        while (size := self._size()) > self._stop - self._first:
            left_s = None
            if self._stop == self._first:
                self._first = self._stop = 0
            else:
                until = until or time.monotonic() + _REST_S
                left_s = max(until - time.monotonic(), 0.0)
            if self._first + size > len(self._buffer):
                self._move_to_front()
            self._stop += self._channel.receive_some(memoryview(self._buffer)[self._stop :], left_s)
        number, _, num_bytes = _REQUEST.unpack_from(self._buffer, self._first)
        rows = list(_ROW.iter_unpack(memoryview(self._buffer)[self._first + _REQUEST.size : self._first + size]))
        self._first += size
        self._check(rows, num_bytes)
        return Wanted(number, num_bytes, rows)

    def _size(self) -> int:
        """Of the request at the front, as far as that is known."""
        if self._stop - self._first < _REQUEST.size:
            return _REQUEST.size
        num_rows = _REQUEST.unpack_from(self._buffer, self._first)[1]
        if not 0 < num_rows <= MAX_ROWS:
            raise PermissionError(f"it asked for {num_rows} regions at once")
        return int(_REQUEST.size + num_rows * _ROW.size)

    def _move_to_front(self) -> None:
        waiting = self._buffer[self._first : self._stop]
        self._buffer[: len(waiting)] = waiting
        self._first, self._stop = 0, len(waiting)

    def _check(self, rows: list[tuple[int, int]], num_bytes: int) -> None:
        total = 0
        for start, size in rows:
            total += size
            if start + size > self._pool_bytes:
                raise PermissionError("it asked for bytes outside the pool")
        if total != num_bytes:
            raise PermissionError("its request does not add up")
