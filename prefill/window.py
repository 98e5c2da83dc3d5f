"""A window: how many bytes may be announced ahead of the reader. Waiters are served in the order in which they came."""

import asyncio
from collections import deque


class Window:
    """A weighted semaphore that is fair. Lives on one event loop."""

    def __init__(self, num_bytes: int) -> None:
        self._size = self._free = num_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, num_bytes: int) -> int:
        """Wait for room; returns what was taken and must be given back (at most the whole window)."""
        wanted = min(num_bytes, self._size)
        if not self._waiting and wanted <= self._free:
            self._free -= wanted
            return wanted
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(wanted)  # it was our turn in the very moment in which we left
            else:
                self._waiting.remove((wanted, turn))
                self._serve()
            raise
        return wanted

    def give(self, num_bytes: int) -> None:
        """Room again."""
        self._free += num_bytes
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            wanted, turn = self._waiting.popleft()
            self._free -= wanted
            turn.set_result(None)

    @property
    def num_taken(self) -> int:
        """Bytes announced and not yet read."""
        return self._size - self._free
