"""The interface that every transport has: an Exporter on the source, a Reader on the target.

The target alone writes its pool. A read's future ends only when no byte of it can land any
more; until then its blocks must not be re-used. Nothing here knows tickets or leases.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from kvrelay.kvtransfer.plans.copy_plan import CopyList
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

    @property
    def in_flight(self) -> int:
        """Reads whose bytes may still land."""

    async def aclose(self) -> None:
        """Let go of the source once nothing is in flight; a read that never ends keeps its resources."""


class TransportError(Exception):
    """A path could not be opened, or a read failed. The layer above makes a typed TransferError of it."""


class CorruptRead(TransportError):
    """The bytes are in place, but they are not those that the source had. `region`: the first wrong one's index."""

    def __init__(self, num_regions: int, region: int) -> None:
        super().__init__(num_regions, region)
        self.num_regions, self.region = num_regions, region

    def __str__(self) -> str:
        return f"{self.num_regions} regions did not arrive as they left"


@dataclass(frozen=True, slots=True)
class Transport:
    """One kind of transport: how to make its two sides, and whether it can run here at all."""

    name: str
    make_exporter: Callable[[KvMemory, bytes, str], Exporter]  # memory, secret, host to listen on
    make_reader: Callable[[KvMemory, bytes, str], Reader]
    why_not: Callable[[KvMemory], str | None]  # why this pool cannot use it, or None


async def open_off_loop(open_it: Callable[[], Opened], close_it: Callable[[Opened], object]) -> Opened:
    """`open_it()` on a thread. Where the caller is cancelled meanwhile, what still opens is closed again."""
    opening = asyncio.get_running_loop().run_in_executor(None, open_it)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(lambda done: None if done.exception() else close_it(done.result()))
        raise


def check_bounds(copies: CopyList, source_bytes: int, target_bytes: int) -> None:
    """Raises TransportError unless every copy lies inside both pools (a stray write would corrupt others)."""
    if not len(copies.num_bytes):
        return
    last = copies.repeats - 1
    source_end = int((copies.source_offset + copies.num_bytes).max()) + last * copies.source_stride
    target_end = int((copies.target_offset + copies.num_bytes).max()) + last * copies.target_stride
    lowest = min(int(copies.source_offset.min()), int(copies.target_offset.min()), int(copies.num_bytes.min()))
    if lowest < 0 or source_end > source_bytes or target_end > target_bytes:
        raise TransportError("a copy lies outside the pool")


def host_id() -> str:
    """Equal for processes under one running kernel; "" where that cannot be known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
