"""What the index has put off, done on the ingress's loop a little at a time, so that nobody's stream waits for it. Imports no HTTP."""

import asyncio
import time
from collections.abc import Callable

from kvrelay.router.index.prefix_index import PrefixIndex

TURN_S = 0.001
"""Of work between two looks at the sockets, and a slice."""


class Intake:
    """Takes snapshots in, and workers that left out. Nothing runs while there is nothing to do."""

    def __init__(self, index: PrefixIndex, clock: Callable[[], float] = time.perf_counter) -> None:
        self._index, self._clock = index, clock
        index.defer(self._wake)

    def _wake(self) -> None:
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        until_s, has_more = self._clock() + TURN_S, True
        try:
            while (has_more := self._index.work()) and self._clock() < until_s:
                continue
        finally:
            if has_more:
                self._wake()
