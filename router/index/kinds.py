"""Sets of workers by number: a *kind* stands for all blocks that the same workers hold, each in the same tiers.

A block's holders are one small number in its slot, however many workers hold it. Kind 0: nobody. Never imports torch, Ray,
sockets or a clock.
"""


class Kinds:
    """Masks (bits.py) by number, as long as some block is of that kind."""

    __slots__ = ("_counts", "_free", "_numbers", "masks")

    def __init__(self) -> None:
        self.masks = [0]  # by kind; 0 where a number is not in use
        self._counts = [0]  # blocks of each kind
        self._numbers = {0: 0}  # by mask
        self._free: list[int] = []

    def __len__(self) -> int:
        """Kinds of which there are blocks."""
        return len(self._numbers) - 1

    def moved(self, source: int, mask: int, count: int) -> int:
        """So many blocks of kind `source` (0: new ones) are held by `mask` from now on (0: by nobody). Returns its kind."""
        kind = self._numbers.get(mask)
        if kind is None:
            kind = self._new(mask)
        if kind:
            self._counts[kind] += count
        if source:
            self._counts[source] -= count
            if not self._counts[source]:
                del self._numbers[self.masks[source]]
                self.masks[source] = 0
                self._free.append(source)
        return kind

    def _new(self, mask: int) -> int:
        if self._free:
            kind = self._free.pop()
            self.masks[kind] = mask
        else:
            kind = len(self.masks)
            self.masks.append(mask)
            self._counts.append(0)
        self._numbers[mask] = kind
        return kind
