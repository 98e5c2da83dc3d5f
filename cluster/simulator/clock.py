"""Virtual time: events in order of time, those of the same time in order of creation. Pure."""

import heapq
import itertools
import math
from collections import deque
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
        self.numbers = itertools.count()
        self._timers: dict[float, Timer] = {}
        self._is_stopped = False

    def time(self) -> float:
        """`now_s`, where a clock is a function."""
        return self.now_s

    def at(self, time_s: float, call: Callable[..., object], *args: Any) -> Event:
        """Call `call(*args)` at `time_s`; a time that has passed is now."""
        event = Event(call, args)
        heapq.heappush(self._heap, (max(time_s, self.now_s), next(self.numbers), event))
        return event

    def after(self, delay_s: float, call: Callable[..., object], *args: Any) -> Event:
        """Call `call(*args)` in `delay_s` seconds, which must not be negative."""
        event = Event(call, args)
        heapq.heappush(self._heap, (self.now_s + delay_s, next(self.numbers), event))
        return event

    def timer(self, delay_s: float) -> "Timer":
        if delay_s not in self._timers:
            self._timers[delay_s] = Timer(self, delay_s)
        return self._timers[delay_s]

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

    def insert(self, time_s: float, number: int, event: Event) -> None:
        """For timers: add an event with a number that was drawn earlier."""
        heapq.heappush(self._heap, (time_s, number, event))


class Timer:
    """Time limits of one length, most of which are cancelled long before they expire.

    They expire in the order in which they begin, so one entry in the clock's heap serves all. Each expires as if it had
    been put in the heap itself.
    """

    def __init__(self, clock: Clock, delay_s: float) -> None:
        self._clock, self._delay_s = clock, delay_s
        self._queue: deque[tuple[float, int, Event]] = deque()
        self._is_set = False

    def begin(self, call: Callable[..., object], *args: Any) -> Event:
        clock, queue = self._clock, self._queue
        while queue and queue[0][2].call is None:
            queue.popleft()
        event = Event(call, args)
        queue.append((clock.now_s + self._delay_s, next(clock.numbers), event))
        if not self._is_set:
            self._set()
        return event

    def _set(self) -> None:
        """Put the first pending time limit in the clock's heap."""
        queue = self._queue
        while queue and queue[0][2].call is None:
            queue.popleft()
        self._is_set = bool(queue)
        if queue:
            time_s, number, _ = queue[0]
            self._clock.insert(time_s, number, Event(self._look, (number,)))

    def _look(self, number: int) -> None:
        if self._queue and self._queue[0][1] == number:
            event = self._queue.popleft()[2]
            if event.call is not None:
                event.call(*event.args)
        self._set()
