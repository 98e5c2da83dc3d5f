"""Copies between tiers: a queue by urgency, the threads that run it, and loads from a slab into the pool.

`JobQueue` is pure. `IoThreads` runs its jobs; the owner collects results with `finished`. A sequence's first step may
compute while its blocks arrive: the rows are verified first, then the layers arrive one by one.
"""

import enum
import heapq
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrelay.types import BlockHash, BlockId

logger = logging.getLogger(__name__)

MAX_JOBS = 1024  # queued at once
_BATCH_BYTES = 8 << 20  # of one job: a more urgent job waits no longer than these take


@dataclass(slots=True)
class CopyStats:
    """Totals since the start, of copies out of the pool and back. Counts are blocks."""

    saved: int = 0
    unsaved: int = 0  # no room
    loaded: int = 0
    corrupt: int = 0  # failed their checksums
    save_s: float = 0.0
    load_s: float = 0.0


def batch_blocks(block_bytes: int) -> int:
    """How many blocks of this size one job copies at most."""
    return max(1, _BATCH_BYTES // block_bytes)


class Urgency(enum.IntEnum):
    """The lowest runs first."""

    LOAD = 0  # into the pool: a step waits for it
    FETCH = 1  # from a store: a queued request waits for it
    SAVE = 2  # out of the pool: holds blocks meanwhile
    OFFLOAD = 3  # down to a store


@dataclass(frozen=True, slots=True)
class IoJob:
    """`work` runs on an I/O thread; `then` gets its result, or its exception, on the owner's thread."""

    urgency: Urgency
    num_bytes: int
    work: Callable[[], object]
    then: Callable[[object], None]


class JobQueue:
    """At most `max_jobs` queued jobs. FIFO within an urgency."""

    def __init__(self, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._heap: list[tuple[Urgency, int, IoJob]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, job: IoJob) -> bool:
        """Queue a job. False: the queue is full. A LOAD is always queued: its sequence is admitted already.

        OFFLOAD jobs may fill half of the queue, so a slow store does not block what requests wait for.
        """
        room = self._max_jobs // 2 if job.urgency is Urgency.OFFLOAD else self._max_jobs
        if len(self._heap) >= room and job.urgency is not Urgency.LOAD:
            return False
        self._count += 1
        heapq.heappush(self._heap, (job.urgency, self._count, job))
        return True

    def take(self) -> IoJob | None:
        """The next job; None when there is none."""
        return heapq.heappop(self._heap)[2] if self._heap else None

    def drop_all(self) -> list[IoJob]:
        """Empty the queue; returns the dropped jobs."""
        dropped = [job for _, _, job in self._heap]
        self._heap.clear()
        return dropped


class Threads(Protocol):
    """What runs jobs: IoThreads, or the simulator's event queue."""

    def start(self) -> None: ...

    def put(self, job: IoJob) -> bool: ...

    def finished(self) -> list[tuple[IoJob, object]]: ...

    @property
    def is_idle(self) -> bool: ...

    def close(self) -> None: ...


MakeThreads = Callable[[str, int, JobQueue, Callable[[], None]], Threads]
"""(name, number of threads, queue, wake): see IoThreads."""


def run(job: IoJob) -> object:
    """Run a job on this thread; returns its result, or its exception after logging it."""
    try:
        return job.work()
    except Exception as error:  # a thread's edge: the owner gets the error
        logger.exception("copying KV between tiers failed")
        return error


class IoThreads:
    """Threads that serve one queue. They call `wake` whenever a job has finished."""

    def __init__(self, name: str, num_threads: int, queue: JobQueue, wake: Callable[[], None]) -> None:
        self._name, self._num_threads, self._queue, self._wake = name, num_threads, queue, wake
        self._changed = threading.Condition()
        self._finished: deque[tuple[IoJob, object]] = deque()
        self._threads: list[threading.Thread] = []
        self._num_running = 0
        self._is_stopping = False

    def start(self) -> None:
        for index in range(self._num_threads):
            thread = threading.Thread(target=self._run, name=f"{self._name}-{index}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def put(self, job: IoJob) -> bool:
        """Queue a job. False: the queue is full, or the threads are stopping."""
        with self._changed:
            is_queued = not self._is_stopping and self._queue.put(job)
            self._changed.notify()
        return is_queued

    def finished(self) -> list[tuple[IoJob, object]]:
        """Jobs that ended since the last call, with their results or exceptions."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    @property
    def is_idle(self) -> bool:
        """Nothing is queued, under way, or finished and not yet collected."""
        with self._changed:
            return not (len(self._queue) or self._num_running or self._finished)

    def close(self) -> None:
        """Drop queued jobs and wait for those under way. Blocking."""
        with self._changed:
            self._is_stopping = True
            for job in self._queue.drop_all():
                self._finished.append((job, RuntimeError("the worker is shutting down")))
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            result = run(job)
            with self._changed:
                self._num_running -= 1
                self._finished.append((job, result))
                self._changed.notify_all()
            self._wake()

    def _next(self) -> IoJob | None:
        with self._changed:
            while (job := self._queue.take()) is None:
                if self._is_stopping:
                    return None
                self._changed.wait()
            self._num_running += 1
            return job


class BlockSlab(Protocol):
    """A slab beside a pool, and the copies between the two (host.py, and the simulator's).

    Methods block; any thread.
    """

    num_layers: int
    num_rows: int
    block_bytes: int

    def row(self, row: int) -> memoryview:
        """One row's bytes, writable: [block_bytes], layer after layer."""

    def checksum(self, row: int) -> int:
        """XXH3-64 of the row's current bytes."""

    def checksums(self, rows: Sequence[int]) -> list[int]:
        """XXH3-64 of each row's current bytes."""

    def save(self, blocks: Sequence[int], rows: Sequence[int]) -> list[int]:
        """Copy blocks of the pool into rows; returns the rows' checksums."""

    def load(self, rows: Sequence[int], blocks: Sequence[int], layers: range) -> None:
        """Copy some layers of rows into blocks of the pool."""


class Load:
    """Written by an I/O thread (`run`), awaited by the engine's."""

    def __init__(self, hashes: Sequence[BlockHash], rows: Sequence[int], blocks: Sequence[BlockId]) -> None:
        self.hashes, self.rows, self.blocks = tuple(hashes), tuple(rows), tuple(blocks)
        self.corrupt: tuple[BlockHash, ...] = ()  # blocks whose bytes do not match their checksums
        self._changed = threading.Condition()
        self._num_layers = 0
        self._is_verified = self._is_over = False

    def run(self, slab: BlockSlab, expected: Sequence[int], *, is_checked: bool, clock: Callable[[], float]) -> float:
        """Verify the rows by the `expected` checksums, then copy them layer by layer; returns the seconds.

        If any row is corrupt, nothing is copied.
        """
        began_s = clock()
        try:
            found = slab.checksums(self.rows) if is_checked and self.rows else expected
            pairs = zip(self.hashes, found, expected, strict=True)
            with self._changed:
                self.corrupt = tuple(digest for digest, now, then in pairs if now != then)
                self._is_verified = True
                self._changed.notify_all()
            for layer in range(0 if self.corrupt else slab.num_layers):
                if self.rows:
                    slab.load(self.rows, self.blocks, range(layer, layer + 1))
                with self._changed:
                    self._num_layers = layer + 1
                    self._changed.notify_all()
        finally:
            self.over()
        return clock() - began_s

    def over(self) -> None:
        """Nothing more will be written into its blocks."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    @property
    def is_over(self) -> bool:
        return self._is_over

    def has_layer(self, layer: int) -> bool:
        """Whether this layer is in place already."""
        return self._num_layers > layer

    def wait_verified(self) -> bool:
        """Wait until the rows are verified. False: some are corrupt, or the copy failed before it began."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_verified or self._is_over)
            return self._is_verified and not self.corrupt

    def wait_layer(self, layer: int) -> bool:
        """Wait until this layer is in place. False: it never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_layers > layer or self._is_over)
            return self._num_layers > layer

    def wait_over(self) -> None:
        """Wait until its blocks may be used for something else."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over)
