"""Virtual time: events in order of time, those of the same time in order of creation. Pure."""

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Any


class Event:
    """A call that will be made, unless it is cancelled."""

    __slots__ = ("args", "call")

    def __init__(self, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.call: Callable[..., object] | None = call
        self.args = args

    def cancel(self) -> None:
        """The call will not be made. Idempotent."""
        self.call, self.args = None, ()


class Clock:
    """Seconds since the simulation's start."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Event]] = []
        self._numbers = itertools.count()
        self._is_stopped = False

    def time(self) -> float:
        """`now_s`, where a clock is a function."""
        return self.now_s

    def at(self, time_s: float, call: Callable[..., object], *args: Any) -> Event:
        """Call `call(*args)` at `time_s`; a time that has passed is now."""
        event = Event(call, args)
        heapq.heappush(self._heap, (max(time_s, self.now_s), next(self._numbers), event))
        return event

    def after(self, delay_s: float, call: Callable[..., object], *args: Any) -> Event:
        """Call `call(*args)` in `delay_s` seconds, which must not be negative."""
        event = Event(call, args)
        heapq.heappush(self._heap, (self.now_s + delay_s, next(self._numbers), event))
        return event

    def run(self, until_s: float = math.inf) -> None:
        """Make all calls up to `until_s`, inclusive; `now_s` is then the last event's time."""
        heap, pop, self._is_stopped = self._heap, heapq.heappop, False
        while heap and heap[0][0] <= until_s and not self._is_stopped:
            self.now_s, _, event = pop(heap)
            if (call := event.call) is not None:
                self.num_events += 1
                call(*event.args)

    def stop(self) -> None:
        """Make no more calls after the present one."""
        self._is_stopped = True
