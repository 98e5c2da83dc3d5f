"""Pinned blocks: which, until when, and how many of each tenant. Pure.

A pin is one reference held by this ledger, however often a block is pinned; the block pool counts it.
"""

import heapq
from array import array
from collections.abc import Iterable, Iterator

from kvrelay.types import BlockHash


class PinLedger:
    """Pins by block; at most `quota` blocks per tenant, which is identified by its root hash."""

    def __init__(self, quota: int) -> None:
        self.quota = quota
        self._until_s: dict[int, tuple[float, BlockHash]] = {}
        self._num_of: dict[BlockHash, int] = {}
        self._ends: list[tuple[float, int, array[int]]] = []
        self._order = 0
        self._num_ends = 0  # blocks in `_ends`, including those pinned again later

    def __len__(self) -> int:
        return len(self._until_s)

    def __iter__(self) -> Iterator[int]:
        return iter(self._until_s)

    def __contains__(self, block: int) -> bool:
        return block in self._until_s

    def num_of(self, tenant: BlockHash) -> int:
        return self._num_of.get(tenant, 0)

    def add(self, tenant: BlockHash, blocks: Iterable[int], until_s: float) -> tuple["array[int]", int]:
        """Pin blocks from the first on, within the quota: (newly pinned ones, number of these blocks pinned now).

        A pinned block keeps the later of the two times.
        """
        fresh, all_of = array("i"), array("i")
        left = self.quota - self.num_of(tenant)
        for block in blocks:
            known = self._until_s.get(block)
            if known is None:
                if not left:
                    break
                left -= 1
                fresh.append(block)
            all_of.append(block)
            if known is None or known[0] < until_s:
                self._until_s[block] = (until_s, tenant)
        if fresh:
            self._num_of[tenant] = self.num_of(tenant) + len(fresh)
        if all_of:
            self._order += 1
            heapq.heappush(self._ends, (until_s, self._order, all_of))
            self._num_ends += len(all_of)
            if self._num_ends > 64 + 4 * len(self):
                self._rebuild()
        return fresh, len(all_of)

    def remove(self, blocks: Iterable[int]) -> "array[int]":
        """End the pins of these blocks; returns those that had one."""
        ended = array("i")
        for block in blocks:
            known = self._until_s.pop(block, None)
            if known is not None:
                self._uncount(known[1])
                ended.append(block)
        return ended

    def expired(self, now_s: float) -> "array[int]":
        """End and return the pins whose time has come."""
        ended = array("i")
        while self._ends and self._ends[0][0] <= now_s:
            ended.extend(self._end(self._ends[0][0]))
        return ended

    def next_to_expire(self) -> "array[int]":
        """End and return the pins that expire next, to make room. Empty: there are none."""
        ended = array("i")
        while self._ends and not ended:
            ended.extend(self._end(self._ends[0][0]))
        return ended

    def _rebuild(self) -> None:
        """Drop the stale ends of blocks that were pinned again."""
        groups: dict[float, array[int]] = {}
        for block, (until_s, _) in self._until_s.items():
            groups.setdefault(until_s, array("i")).append(block)
        self._ends = [(until_s, order, blocks) for order, (until_s, blocks) in enumerate(groups.items())]
        heapq.heapify(self._ends)
        self._order, self._num_ends = len(groups), len(self)

    def _end(self, now_s: float) -> Iterator[int]:
        blocks = heapq.heappop(self._ends)[2]
        self._num_ends -= len(blocks)
        for block in blocks:
            known = self._until_s.get(block)
            if known is not None and known[0] <= now_s:
                del self._until_s[block]
                self._uncount(known[1])
                yield block

    def _uncount(self, tenant: BlockHash) -> None:
        self._num_of[tenant] -= 1
        if not self._num_of[tenant]:
            del self._num_of[tenant]
