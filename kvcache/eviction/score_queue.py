"""A priority queue whose items can be invalidated at any time. Pure."""

import heapq
from collections.abc import Callable

from kvrelay.types import BlockHash

_Item = tuple[int, float, int, BlockHash]


class EvictionQueue:
    """Lowest priority first, then lowest score, then first in.

    An item carries a ticket and is valid while `is_valid(digest, ticket)` holds. Invalid items are skipped, and removed
    when they outnumber the valid ones, so the queue holds at most about twice the entries.
    """

    def __init__(self, is_valid: Callable[[BlockHash, int], bool]) -> None:
        self._is_valid = is_valid
        self._items: list[_Item] = []
        self._sweep_at = 64

    def __len__(self) -> int:
        return len(self._items)

    def push(self, priority: int, score: float, ticket: int, digest: BlockHash) -> None:
        heapq.heappush(self._items, (priority, score, ticket, digest))
        if len(self._items) >= self._sweep_at:
            self._items = [item for item in self._items if self._is_valid(item[3], item[2])]
            heapq.heapify(self._items)
            self._sweep_at = max(64, 2 * len(self._items))

    def pop(self) -> BlockHash | None:
        """Remove and return the first valid entry; None when there is none."""
        while self._items:
            _, _, ticket, digest = heapq.heappop(self._items)
            if self._is_valid(digest, ticket):
                return digest
        return None
