"""Rate-limited calls: soon after a request, but not too often. Knows no clock of its own."""

import math
from collections.abc import Callable


class Paced:
    """`call()` once after every `request()`, at the owner's next turn, and at most once in `period_s`."""

    def __init__(
        self,
        call: Callable[[], object],
        period_s: float,
        *,
        now: Callable[[], float],
        after: Callable[[float, Callable[[], None]], object],
    ) -> None:
        """now: seconds on any clock. after(delay_s, call): calls it then, as an event loop's call_later does."""
        self._call, self._period_s, self._now, self._after = call, period_s, now, after
        self._is_scheduled = False
        self._called_s = -math.inf

    def request(self) -> None:
        """Schedule a call; further requests before it runs change nothing."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._after(max(0.0, self._called_s + self._period_s - self._now()), self._fire)

    def _fire(self) -> None:
        self._is_scheduled = False
        self._called_s = self._now()
        self._call()
