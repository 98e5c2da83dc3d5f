"""The interface that every transport has: an Exporter on the source, a Reader on the target.

The target alone writes its pool. A read's future ends only when no byte of it can land any
more; until then its blocks must not be re-used. Nothing here knows tickets or leases.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from kvrelay.kvtransfer.mover.copy_plan import TURN_BYTES, CopyList
from kvrelay.types import KvMemory

Opened = TypeVar("Opened")
Landed = Callable[[int], None]  # the first n bytes of a read, in the order of its copies, are in place: verify them


class Exporter(Protocol):
    """The source's side: makes its pool readable."""

    async def start(self) -> None:
        """Open what readers connect to. Raises BackendUnavailable when that cannot be here."""

    def describe(self) -> bytes:
        """What a Reader needs to connect; opaque to everyone else. After start()."""

    def set_busy(self, num_open: int) -> None:
        """Called with the number of open transfers when it changes; progress may be needed above 0."""

    async def aclose(self) -> None:
        """Undo start(). Readers may still hold maps of the pool: its memory must outlive them."""


class Reader(Protocol):
    """The target's side: reads one source's pool into the target's own."""

    max_in_flight: int  # reads that may usefully run at once

    async def connect(self, descriptor: bytes) -> None:
        """Raises TransportError when this path cannot be used between these two."""

    def read(self, copies: CopyList, landed: Landed | None = None) -> "asyncio.Future[None]":
        """Begin to copy. The future ends when the bytes are in place, or with TransportError.

        `landed` is called on the reading thread, at least once at the end, while what has just come
        is still in the caches; what it raises (CorruptRead) ends the read. Never cancel the future:
        wait with a timeout through `asyncio.wait`, which leaves it running.
        """

    def abandon(self, read: "asyncio.Future[None]") -> None:
        """This read is not needed any more: end it soon where that is possible. Its future still ends."""

    async def aclose(self) -> None:
        """Let go of the source once nothing is in flight; a read that never ends keeps its resources."""


NAMESPACES: dict[str, tuple[str, ...]] = {  # that both processes must share, beside the kernel
    "shm": ("net",),  # an abstract Unix socket
    "cuda_ipc": ("ipc", "pid"),
    "nixl": ("ipc", "net", "pid"),  # UCX within a host
    "tcp": ("net",),  # for loopback
}


@dataclass(frozen=True, slots=True)
class Transport:
    """One kind of transport: how to make its two sides, and whether it can run here at all."""

    name: str
    make_exporter: Callable[[KvMemory, bytes, str], Exporter]  # memory, secret, host to listen on
    make_reader: Callable[[KvMemory, bytes, str], Reader]
    why_not: Callable[[KvMemory], str | None]  # why this pool cannot use it, or None
    turn_bytes: int = TURN_BYTES  # about what one read of a transfer brings before the next one's turn


async def open_off_loop(open_it: Callable[[], Opened], close_it: Callable[[Opened], object]) -> Opened:
    """`open_it()` on a thread. Where the caller is cancelled meanwhile, what still opens is closed again."""
    opening = asyncio.get_running_loop().run_in_executor(None, open_it)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(lambda done: None if done.exception() else close_it(done.result()))
        raise


def host_id(*namespaces: str) -> str:
    """Equal for processes under one running kernel that share these namespaces ("net", "ipc", "pid"); "" where that
    cannot be known. Containers, and hosts made of namespaces, share a kernel without sharing them.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{name}") for name in namespaces)])
    except OSError:
        return ""


def why_not_on_host(memory: KvMemory) -> str | None:
    """Why a transport of host memory cannot serve this pool; None: it can."""
    return None if memory.view is not None else "the pool is not in host memory"
