"""When a worker's steps end: the one in progress, what slows it, and what is left of it after a freeze."""

import math
import random
from collections.abc import Callable, Sequence

from kvrelay.cluster.simulator.clock import Clock, Event
from kvrelay.cluster.simulator.engine import SimulatedEngine, StepEvents, Stride


class Machine:
    """Notifies the workers that compute when their number changes."""

    def __init__(self) -> None:
        self._computing: dict[WorkerSteps, None] = {}

    def crowd_with(self, worker: "WorkerSteps") -> int:
        """How many compute when this one does."""
        return len(self._computing) + (worker not in self._computing)

    def begins(self, worker: "WorkerSteps") -> None:
        """Idempotent, as `ends` is."""
        if worker not in self._computing:
            self._change(1)
            self._computing[worker] = None

    def ends(self, worker: "WorkerSteps") -> None:
        if worker in self._computing:
            del self._computing[worker]
            self._change(-1)

    def _change(self, by: int) -> None:
        """Notify all others; each counts itself and the one that changed."""
        others = len(self._computing)
        before, now = (others, others + 1) if by > 0 else (others + 1, others)
        for other in list(self._computing):
            other.crowd_changed(before, now)


def slowed(slowdown: Sequence[float], crowd: int) -> float:
    """The factor on a step's time while `crowd` workers compute; beyond what was measured, that of the most."""
    return slowdown[min(crowd, len(slowdown)) - 1] if slowdown else 1.0


class WorkerSteps:
    """The steps of one worker's engine, one stride at a time.

    Args:
        machine: of all workers that compute beside this one.
        slowdown: factor on a step's time while 1, 2, ... workers of the machine compute.
        noise, draw: sigma of the logarithm of each step's factor, and what draws it; 0: none.
        on_end: called with what a stride brought, when it has ended.
    """

    def __init__(
        self,
        engine: SimulatedEngine,
        clock: Clock,
        machine: Machine,
        slowdown: tuple[float, ...],
        *,
        noise: float,
        draw: random.Random,
        on_end: Callable[[StepEvents], object],
    ) -> None:
        self._engine, self._clock, self._slowdown = engine, clock, slowdown
        self._machine = machine if slowdown else None  # they do not slow each other
        self._noise, self._draw, self._on_end = noise, draw, on_end
        self.stride: Stride | None = None
        self.slowness = 1.0  # a fault's factor on the time of steps that begin from now on
        self._end: Event | None = None

    def plan(self) -> Stride | None:
        """Have the engine begin a stride now. None: there is nothing to compute."""
        factor = self.slowness
        if self._noise:
            factor *= math.exp(self._draw.gauss(0, self._noise))
        if self._machine is not None:
            factor *= slowed(self._slowdown, self._machine.crowd_with(self))
        self.stride = self._engine.begin(self._clock.now_s, factor)
        return self.stride

    def start(self) -> None:
        stride = self.stride
        assert stride is not None
        self._end = self._clock.at(self._clock.now_s + stride.seconds(stride.count), self._ended)
        if self._machine is not None:
            self._machine.begins(self)

    def _ended(self) -> None:
        stride, events = self.stride, StepEvents()
        assert stride is not None
        self.stride = self._end = None
        self._engine.end(stride, stride.count, events)
        self._on_end(events)

    def rest(self) -> None:
        """Nothing is computed, as far as other workers of the machine are concerned. Idempotent."""
        if self._machine is not None:
            self._machine.ends(self)

    def cut_short(self) -> None:
        """Of several steps, end the stride after the one in progress."""
        stride = self.stride
        assert stride is not None
        count = stride.steps_until(self._clock.now_s)
        if count < stride.count and self._end is not None:
            self._end.cancel()
            stride.count = count
            self._end = self._clock.at(stride.began_s + stride.seconds(count), self._ended)

    def crowd_changed(self, before: int, now: int) -> None:
        """Another number of workers computes.

        The rest of the step in progress is rescaled, later ones are planned anew.
        """
        ratio = slowed(self._slowdown, now) / slowed(self._slowdown, before)
        stride = self.stride
        if ratio == 1.0 or stride is None or self._end is None:
            return
        self.settle()
        stride.count = 1
        stride.first_s += (ratio - 1) * max(0.0, stride.began_s + stride.first_s - self._clock.now_s)
        self._end.cancel()
        self._end = self._clock.at(stride.began_s + stride.first_s, self._ended)

    def settle(self) -> None:
        stride = self.stride
        if stride is None or stride.count == 1:
            return
        done = stride.steps_until(self._clock.now_s) - 1
        if done:
            self._engine.end(stride, done, StepEvents())
            stride.drop(done)

    # ---- faults

    def recover_speed(self) -> None:
        self.slowness = 1.0

    def freeze(self) -> None:
        """The step in progress does not end."""
        self.settle()
        if self._end is not None:
            self._end.cancel()
            self._end = None
        self.rest()

    def resume(self) -> None:
        stride = self.stride
        assert stride is not None
        stride.began_s = self._clock.now_s
        if self._machine is not None:
            self._machine.begins(self)
        self._end = self._clock.after(stride.seconds(stride.count), self._ended)

    def drop(self) -> None:
        if self._end is not None:
            self._end.cancel()
        self.stride = self._end = None
