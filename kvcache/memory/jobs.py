"""Copies between tiers: a queue by urgency, and the threads that run it.

`JobQueue` is pure. `IoThreads` runs its jobs; the owner collects results with `finished`.
"""

import enum
import heapq
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

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
