"""Sets of workers by number: a *kind* stands for all blocks that the same workers hold, each in the same tiers.

A block's holders are one small number in its slot, however many workers hold it. Kind 0: nobody. The lowest number that is free
is given first, and the last ones are forgotten when they are free, so that there are no more than are in use, or soon. Never
imports torch, Ray, sockets or a clock.
"""

from heapq import heappop, heappush

_FEW = 64


class HolderSets:
    """Masks (bits.py) by number, as long as some block is of that kind."""

    __slots__ = ("_counts", "_free", "_numbers", "masks")

    def __init__(self) -> None:
        self.masks = [0]  # by kind; 0 where a number is not in use
        self._counts = [0]  # blocks of each kind
        self._numbers = {0: 0}  # by mask
        self._free: list[int] = []  # a heap; some in it are forgotten, or in use again

    def __len__(self) -> int:
        """Kinds of which there are blocks."""
        return len(self._numbers) - 1

    def moved(self, source: int, mask: int, count: int) -> int:
        """So many blocks of kind `source` (0: new ones) are held by `mask` from now on (0: by nobody). Returns its kind."""
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
        """There are no blocks of this kind any more."""
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
