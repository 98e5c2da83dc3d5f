"""Sets of workers by number: all blocks that the same workers hold, in the same tiers, share one set id.

So a block's holders are one small number at its position, however many workers hold it. Set 0 is empty. The lowest free
id is used first and trailing free ids are dropped, so that ids stay dense. Never imports torch, Ray, sockets or a
clock.
"""

from heapq import heappop, heappush

_FEW = 64


class HolderSets:
    """Masks (bits.py) by set id, as long as a block has that set."""

    __slots__ = ("_counts", "_free", "_numbers", "masks")

    def __init__(self) -> None:
        self.masks = [0]  # by set id; 0: the id is free
        self._counts = [0]  # blocks per set
        self._numbers = {0: 0}  # by mask
        self._free: list[int] = []  # a heap; it may list ids that were dropped or are in use again

    def __len__(self) -> int:
        """Sets that have blocks."""
        return len(self._numbers) - 1

    def moved(self, source: int, mask: int, count: int) -> int:
        """`count` blocks of set `source` (0: new ones) are held by `mask` from now on (0: by no worker).

        Returns its set id.
        """
        set_id = self._numbers.get(mask)
        if set_id is None:
            set_id = self._new(mask)
        if set_id:
            self._counts[set_id] += count
        if source:
            self._counts[source] -= count
            if not self._counts[source]:
                self._forget(source)
        return set_id

    def _forget(self, set_id: int) -> None:
        """No block has this set any more."""
        masks = self.masks
        del self._numbers[masks[set_id]]
        masks[set_id] = 0
        heappush(self._free, set_id)
        while len(masks) > 1 and not masks[-1]:
            masks.pop()
            self._counts.pop()
        if len(self._free) > 2 * len(masks) + _FEW:
            self._free = [number for number, mask in enumerate(masks) if number and not mask]

    def _new(self, mask: int) -> int:
        set_id = 0
        while not set_id and self._free:
            set_id = heappop(self._free)
            if set_id >= len(self.masks) or self.masks[set_id]:
                set_id = 0
        if set_id:
            self.masks[set_id] = mask
        else:
            set_id = len(self.masks)
            self.masks.append(mask)
            self._counts.append(0)
        self._numbers[mask] = set_id
        return set_id
