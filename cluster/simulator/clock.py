"""Virtual time: what happens next, in order of time; what happens at the same time, in order of its making. Pure."""

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Any


class Event:
    """Something that will happen, unless it is cancelled."""

    __slots__ = ("args", "call")

    def __init__(self, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.call: Callable[..., object] | None = call
        self.args = args

    def cancel(self) -> None:
        """It will not happen. Idempotent."""
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
        """`now_s`, for whoever takes a clock as a function."""
        return self.now_s

    def at(self, time_s: float, call: Callable[..., object], *args: Any) -> Event:
        """Have `call(*args)` happen then; a time that has passed is now."""
        event = Event(call, args)
        heapq.heappush(self._heap, (max(time_s, self.now_s), next(self._numbers), event))
        return event

    def after(self, delay_s: float, call: Callable[..., object], *args: Any) -> Event:
        return self.at(self.now_s + delay_s, call, *args)

    def run(self, until_s: float = math.inf) -> None:
        """Let happen what happens up to then, inclusive; `now_s` is the last event's time."""
        heap, self._is_stopped = self._heap, False
        while heap and heap[0][0] <= until_s and not self._is_stopped:
            self.now_s, _, event = heapq.heappop(heap)
            if event.call is not None:
                self.num_events += 1
                event.call(*event.args)

    def stop(self) -> None:
        """Nothing more happens when what happens now has."""
        self._is_stopped = True
