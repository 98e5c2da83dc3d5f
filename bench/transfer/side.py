"""What bench/transfer/transfer.py asks of one end of a contender."""

import time
from typing import Any

from bench.transfer.blocks import Pool, Shape

Row = dict[str, Any]  # one row of the table: {"name": ..., "settings": {...}}


class End:
    """One end, with what most ends do. The acting end (`move`) is the source in kvrelay, the target elsewhere.

    Args:
        pools: by end: "source", "target"; both where one process is both.
    """

    def __init__(self, pools: dict[str, Pool]) -> None:
        self.pools = pools

    async def start(self) -> dict[str, Any]:
        """What the other end needs to connect. Raises ImportError when something is not installed."""
        return {}

    async def connect(self, peer: dict[str, Any]) -> None:
        """`peer`: what the other end's start() gave."""

    async def begin(self, row: Row, shape: Shape) -> dict[str, Any]:
        """Get ready for one visit; what the acting end needs to know for it."""
        return {}

    async def move(self, row: Row, shape: Shape, order: dict[str, Any]) -> None:
        """On the acting end: the shape's transfers, one after the other."""
        raise NotImplementedError

    async def end(self) -> dict[str, list[float]]:
        """Seconds of each transfer of the visit. "read": first read to last byte (verified); "whole": the protocol
        too.
        """
        return {}

    async def aclose(self) -> None:
        """Let go of everything."""

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far, all threads, by end ("both" where one process is both)."""
        return {next(iter(self.pools)) if len(self.pools) == 1 else "both": time.process_time()}

    def clear(self, shape: Shape) -> None:
        """Zero the target's blocks, so that what arrives differs from what was there."""
        self.pools["target"].clear(shape)

    def digest(self, shape: Shape, end: str) -> str:
        """Of one end's blocks: equal once they have arrived."""
        return self.pools[end].digest(shape, end)
