"""What waits to be moved between tiers, by urgency and with a bound on the bytes under way; and the threads that move it.

`JobQueue` is pure. `IoThreads` runs its jobs; what a job brought about is told to the owner when it asks (`finished`).
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


class Urgency(enum.IntEnum):
    """Who goes first."""

    LOAD = 0  # into the pool: a step waits for it
    FETCH = 1  # from a store: a request in line waits for it
    SAVE = 2  # out of the pool: holds blocks meanwhile
    SINK = 3  # down to a store


@dataclass(frozen=True, slots=True)
class IoJob:
    """`work` runs on some I/O thread; `then` gets its result, or its error, on the owner's thread."""

    urgency: Urgency
    num_bytes: int
    work: Callable[[], object]
    then: Callable[[object], None]


class JobQueue:
    """At most `max_jobs` in line, and `max_bytes` under way: a larger job goes alone. First come, first served per urgency.

    The most urgent job waits until it fits; nothing overtakes it, so that large ones are not starved.
    """

    def __init__(self, *, max_jobs: int, max_bytes: int) -> None:
        self._max_jobs, self._max_bytes = max_jobs, max_bytes
        self._heap: list[tuple[Urgency, int, IoJob]] = []
        self._count = 0
        self.bytes_under_way = 0
        self.num_under_way = 0

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, job: IoJob) -> bool:
        """False, and nothing is queued, when the line is full. A LOAD always finds room: its sequence is admitted already.

        SINKs find half of the line full: a slow store's blocks do not keep those out that a request waits for.
        """
        room = self._max_jobs // 2 if job.urgency is Urgency.SINK else self._max_jobs
        if len(self._heap) >= room and job.urgency is not Urgency.LOAD:
            return False
        self._count += 1
        heapq.heappush(self._heap, (job.urgency, self._count, job))
        return True

    def take(self) -> IoJob | None:
        """The next job, under way from now on; None when there is none that may start."""
        if not self._heap:
            return None
        job = self._heap[0][2]
        if self.num_under_way and self.bytes_under_way + job.num_bytes > self._max_bytes:
            return None
        heapq.heappop(self._heap)
        self.bytes_under_way += job.num_bytes
        self.num_under_way += 1
        return job

    def done(self, job: IoJob) -> None:
        """It is under way no more."""
        self.bytes_under_way -= job.num_bytes
        self.num_under_way -= 1

    def drop_all(self) -> list[IoJob]:
        """Empty the line; what was in it."""
        dropped = [job for _, _, job in self._heap]
        self._heap.clear()
        return dropped


class Threads(Protocol):
    """What moves bytes: IoThreads, or a test's or the simulator's own."""

    def start(self) -> None: ...

    def put(self, job: IoJob) -> bool: ...

    def finished(self) -> list[tuple[IoJob, object]]: ...

    @property
    def is_idle(self) -> bool: ...

    def close(self) -> None: ...


def run(job: IoJob) -> object:
    """Do it on this thread; returns its result, or the error, which was logged."""
    try:
        return job.work()
    except Exception as error:  # a thread's edge: the job's owner is told
        logger.exception("moving KV between tiers failed")
        return error


class IoThreads:
    """Some threads on one queue. `wake` is called from them whenever something has finished."""

    def __init__(self, name: str, num_threads: int, queue: JobQueue, wake: Callable[[], None]) -> None:
        self._name, self._num_threads, self._queue, self._wake = name, num_threads, queue, wake
        self._changed = threading.Condition()
        self._finished: deque[tuple[IoJob, object]] = deque()
        self._threads: list[threading.Thread] = []
        self._is_stopping = False

    def start(self) -> None:
        for index in range(self._num_threads):
            thread = threading.Thread(target=self._run, name=f"{self._name}-{index}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def put(self, job: IoJob) -> bool:
        """False when there is no room in line."""
        with self._changed:
            is_in = not self._is_stopping and self._queue.put(job)
            self._changed.notify()
        return is_in

    def finished(self) -> list[tuple[IoJob, object]]:
        """Jobs that ended since the last call, with their results or errors."""
        ended: list[tuple[IoJob, object]] = []
        while self._finished:
            ended.append(self._finished.popleft())
        return ended

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def is_idle(self) -> bool:
        """Nothing in line, under way, or finished and not asked for."""
        with self._changed:
            return not (len(self._queue) or self._queue.num_under_way or self._finished)

    def close(self) -> None:
        """Drop what waits and end after what is under way. Blocking."""
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
                self._queue.done(job)
                self._finished.append((job, result))
                self._changed.notify_all()
            self._wake()

    def _next(self) -> IoJob | None:
        with self._changed:
            while (job := self._queue.take()) is None:
                if self._is_stopping:
                    return None
                self._changed.wait()
            return job
