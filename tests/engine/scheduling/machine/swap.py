"""Stands in for the swap area's memory and its thread: content is kept token by token, and comes as early or as late as
it may.
"""

import random

from kvrelay.engine.scheduling.preempt import MeasuredSpeeds
from kvrelay.kvcache.memory.swap import SwapArea
from tests.engine.scheduling.machine.setup import Setup

Content = list[list[int]]  # of each block, each token's


class Slab:
    """Slots that hold what was in the pool's blocks when they were saved."""

    num_layers, block_bytes = 2, 64

    def __init__(self, num_rows: int, pool: Content) -> None:
        self.num_rows, self.pool = num_rows, pool
        self.content: Content = [[] for _ in range(num_rows)]
        self.is_late = False  # the last layer comes when it is waited for, not before
        self._coming: list[tuple[int, list[int]]] = []

    def save(self, blocks, slots):
        for block, slot in zip(blocks, slots, strict=True):
            self.content[slot] = list(self.pool[block])
        return self.checksums(slots)

    def checksums(self, slots):
        return [hash(tuple(self.content[slot])) for slot in slots]

    def load(self, slots, blocks, layers):
        if layers.stop == self.num_layers:
            self._coming += [(block, list(self.content[slot])) for slot, block in zip(slots, blocks, strict=True)]
            if not self.is_late:
                self.flush()

    def flush(self) -> None:
        for block, content in self._coming:
            self.pool[block] = content
        self._coming.clear()

    def rot(self, slot: int) -> None:
        self.content[slot] = [token + 1 for token in self.content[slot]]

    def row(self, row):
        return memoryview(b"")


class ByHand:
    """A thread that works when it is told to."""

    def __init__(self, name, num_threads, queue, wake) -> None:
        self.jobs, self.ended = [], []

    def start(self) -> None: ...

    def put(self, job) -> bool:
        self.jobs.append(job)
        return True

    def run(self) -> None:
        self.ended += [(job, job.work()) for job in self.jobs]
        self.jobs.clear()

    def finished(self):
        ended, self.ended = self.ended, []
        return ended

    @property
    def is_idle(self) -> bool:
        return not self.jobs and not self.ended

    def close(self) -> None:
        self.run()


class Swaps:
    """A scheduler's swap area, if it is to have one, and the speeds by which it chooses."""

    def __init__(self, setup: Setup, content: Content, rng: random.Random) -> None:
        self.area: SwapArea | None = None
        self._rng, self._threads = rng, ByHand("", 1, None, None)

        def speed() -> float:
            return rng.choice((0.0, 10.0, 1e3, 1e5))

        self.speeds = MeasuredSpeeds(speed(), speed())
        if setup.num_rows is None:
            return
        self.slab = Slab(setup.num_rows, content)
        self.area = SwapArea(
            self.slab,
            is_checked=setup.is_checked,
            wake=lambda: None,
            clock=lambda: 0.0,
            make_threads=lambda *args: self._threads,
        )
        self.area.save_bytes_per_s, self.area.load_bytes_per_s = speed(), speed()

    def begin_step(self) -> None:
        if self.area is not None:
            self.area.poll()
            self.slab.is_late = self._rng.random() < 0.5

    def verify(self) -> None:
        """The step waits until what comes back was looked at."""
        self._threads.run()

    def arrive(self) -> None:
        """The step waits for the last layer."""
        if self.area is not None:
            self.slab.flush()

    def nothing_is_left(self) -> None:
        if self.area is not None:
            self.area.poll()
            self.area.check([])
            assert self.area.num_free == self.slab.num_rows and not self.area.held and self.area.is_idle
