"""Space for blocks in transit that cannot lie in the caller's own slab: compressed ones, or bytes of any other
memory.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from kvrelay.kvtransfer.slabs.slabs import StuckRead, allocate_slab, free_slab


class StagingSlab:
    """A small slab of equal cells, one for each block in transit. Used on one loop."""

    def __init__(self, cell_bytes: int, num_cells: int) -> None:
        self.cell_bytes = cell_bytes
        self.memory = allocate_slab(cell_bytes * num_cells)
        self._free = [index * cell_bytes for index in range(num_cells)]
        self._returned = asyncio.Condition()
        self.num_cells = num_cells

    @property
    def num_free(self) -> int:
        return len(self._free)

    @contextlib.asynccontextmanager
    async def reserve(self, count: int) -> AsyncIterator[list[int]]:
        """Reserve `count` cells, waiting for them; yields their byte offsets.

        After a StuckRead they return when it ends.
        """
        async with self._returned:
            await self._returned.wait_for(lambda: len(self._free) >= count)
            taken, self._free = self._free[:count], self._free[count:]
        try:
            yield taken
        except StuckRead as error:
            stuck, taken = taken, []
            error.read.add_done_callback(lambda _: self._free.extend(stuck))
            raise
        finally:
            async with self._returned:
                self._free.extend(taken)
                self._returned.notify_all()

    def free(self) -> None:
        """Free the memory, which nothing may read or write any more."""
        free_slab(self.memory)
