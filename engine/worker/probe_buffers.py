"""Blocks taken to the KV plane, so that it can measure its paths with the pool's own memory.

Whatever happens to the borrower, what it was taken comes back. Imports no transport.
"""

import asyncio
from collections.abc import Sequence

from kvrelay.engine.worker.thread import EngineThread
from kvrelay.types import BlockId

PATIENCE_S = 2.0  # for the engine to finish its step; a busy one gives none


class EngineProbeBuffers:
    """A worker's pool, as kvtransfer's ProbeBuffers sees it. Lives on the worker's loop."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread

    async def take(self, count: int) -> list[int]:
        """Up to `count` blocks that nothing else holds, filled with noise; none while the pool is in demand."""
        if not self._thread.is_alive:
            return []
        taken = self._thread.call(lambda engine: engine.take_probe_blocks(count))
        try:
            async with asyncio.timeout(PATIENCE_S):
                return list(await asyncio.shield(taken))
        except TimeoutError:
            taken.add_done_callback(self._undo)
            return []
        except asyncio.CancelledError:
            taken.add_done_callback(self._undo)
            raise

    def put_back(self, blocks: Sequence[int]) -> None:
        """These may be re-used."""
        if blocks:
            self._thread.post(lambda engine: engine.return_probe_blocks(map(BlockId, blocks)))

    def _undo(self, taken: "asyncio.Future[list[BlockId]]") -> None:
        """The borrower has left before it was served."""
        if not taken.cancelled() and taken.exception() is None:
            self.put_back(taken.result())
