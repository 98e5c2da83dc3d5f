"""The interface of a slab: memory with one row for each block. Keeps the bookkeeping of tiers free of torch."""

from collections.abc import Sequence
from typing import Protocol


class BlockSlab(Protocol):
    """A slab beside a pool, and the copies between the two (host.py, and the simulator's).

    Methods block; any thread.
    """

    num_layers: int
    num_rows: int
    block_bytes: int

    def row(self, row: int) -> memoryview:
        """One row's bytes, writable: [block_bytes], layer after layer."""

    def checksum(self, row: int) -> int:
        """XXH3-64 of the row's current bytes."""

    def checksums(self, rows: Sequence[int]) -> list[int]:
        """XXH3-64 of each row's current bytes."""

    def save(self, blocks: Sequence[int], rows: Sequence[int]) -> list[int]:
        """Copy blocks of the pool into rows; returns the rows' checksums."""

    def load(self, rows: Sequence[int], blocks: Sequence[int], layers: range) -> None:
        """Copy some layers of rows into blocks of the pool."""
