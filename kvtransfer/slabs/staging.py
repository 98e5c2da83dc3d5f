"""Room for blocks on their way that cannot lie in the caller's own slab: compressed ones, or any bytes of this process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from kvrelay.kvtransfer.slabs.slabs import StuckRead, allocate_slab, free_slab


class Staging:
    """A small slab, cut into places of equal size. Used on one loop."""

    def __init__(self, place_bytes: int, num_places: int) -> None:
        self.place_bytes = place_bytes
        self.memory = allocate_slab(place_bytes * num_places)
        self._free = [index * place_bytes for index in range(num_places)]
        self._returned = asyncio.Condition()
        self.num_places = num_places

    @property
    def num_free(self) -> int:
        return len(self._free)

    @contextlib.asynccontextmanager
    async def places(self, count: int) -> AsyncIterator[list[int]]:
        """Offsets of so many places (at most `num_places`), waiting for them. After a StuckRead they come back with its end."""
        async with self._returned:
            await self._returned.wait_for(lambda: len(self._free) >= count)
            taken, self._free = self._free[:count], self._free[count:]
        try:
            yield taken
        except StuckRead as error:
            places, taken = taken, []
            error.read.add_done_callback(lambda _: self._free.extend(places))
            raise
        finally:
            async with self._returned:
                self._free.extend(taken)
                self._returned.notify_all()

    def free(self) -> None:
        """When nobody reads or writes it any more."""
        free_slab(self.memory)
