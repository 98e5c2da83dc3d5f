"""Virtual time: what happens next, in order of time; what happens at the same time, in order of its making. Pure."""

import heapq
import itertools
import math
from collections import deque
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
        self.numbers = itertools.count()
        self._timers: dict[float, Timer] = {}
        self._is_stopped = False

    def time(self) -> float:
        """`now_s`, for whoever takes a clock as a function."""
        return self.now_s

    def at(self, time_s: float, call: Callable[..., object], *args: Any) -> Event:
        """Have `call(*args)` happen then; a time that has passed is now."""
        event = Event(call, args)
        heapq.heappush(self._heap, (max(time_s, self.now_s), next(self.numbers), event))
        return event

    def after(self, delay_s: float, call: Callable[..., object], *args: Any) -> Event:
        """The same, so many seconds from now, at least none."""
        event = Event(call, args)
        heapq.heappush(self._heap, (self.now_s + delay_s, next(self.numbers), event))
        return event

    def timer(self, delay_s: float) -> "Timer":
        """The one for this delay."""
        if delay_s not in self._timers:
            self._timers[delay_s] = Timer(self, delay_s)
        return self._timers[delay_s]

    def run(self, until_s: float = math.inf) -> None:
        """Let happen what happens up to then, inclusive; `now_s` is the last event's time."""
        heap, pop, self._is_stopped = self._heap, heapq.heappop, False
        while heap and heap[0][0] <= until_s and not self._is_stopped:
            self.now_s, _, event = pop(heap)
            if (call := event.call) is not None:
                self.num_events += 1
                call(*event.args)

    def stop(self) -> None:
        """Nothing more happens when what happens now has."""
        self._is_stopped = True

    def insert(self, time_s: float, number: int, event: Event) -> None:
        """For timers: an event with a number that was drawn before."""
        heapq.heappush(self._heap, (time_s, number, event))


class Timer:
    """Time limits of one length: most are cancelled long before they are over.

    They are over in the order in which they begin, so that one entry in the clock's heap does for all, and what was
    cancelled is forgotten as soon as nothing older is left. When each is over is as if it had been put in the heap by itself.
    """

    def __init__(self, clock: Clock, delay_s: float) -> None:
        self._clock, self._delay_s = clock, delay_s
        self._line: deque[tuple[float, int, Event]] = deque()
        self._is_set = False

    def begin(self, call: Callable[..., object], *args: Any) -> Event:
        """Have `call(*args)` happen when the time is over."""
        clock, line = self._clock, self._line
        while line and line[0][2].call is None:
            line.popleft()
        event = Event(call, args)
        line.append((clock.now_s + self._delay_s, next(clock.numbers), event))
        if not self._is_set:
            self._set()
        return event

    def _set(self) -> None:
        """Look again when the time of the first in line is over: it may be another's by then."""
        line = self._line
        while line and line[0][2].call is None:
            line.popleft()
        self._is_set = bool(line)
        if line:
            time_s, number, _ = line[0]
            self._clock.insert(time_s, number, Event(self._look, (number,)))

    def _look(self, number: int) -> None:
        if self._line and self._line[0][1] == number:
            event = self._line.popleft()[2]
            if event.call is not None:
                event.call(*event.args)
        self._set()
