"""One sequence's blocks on their way from a slab into the pool, while its first step already computes.

The rows are verified first; then the layers arrive one by one, and a step may compute layer i as soon as it is in
place.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from kvrelay.types import BlockHash, BlockId


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


class Load:
    """Written by an I/O thread (`run`), awaited by the engine's."""

    def __init__(self, hashes: Sequence[BlockHash], rows: Sequence[int], blocks: Sequence[BlockId]) -> None:
        self.hashes, self.rows, self.blocks = tuple(hashes), tuple(rows), tuple(blocks)
        self.corrupt: tuple[BlockHash, ...] = ()  # blocks whose bytes do not match their checksums
        self._changed = threading.Condition()
        self._num_layers = 0
        self._is_verified = self._is_over = False

    def run(self, slab: BlockSlab, expected: Sequence[int], *, is_checked: bool, clock: Callable[[], float]) -> float:
        """Verify the rows by the `expected` checksums, then copy them layer by layer; returns the seconds.

        If any row is corrupt, nothing is copied.
        """
        began_s = clock()
        try:
            found = slab.checksums(self.rows) if is_checked and self.rows else expected
            pairs = zip(self.hashes, found, expected, strict=True)
            with self._changed:
                self.corrupt = tuple(digest for digest, now, then in pairs if now != then)
                self._is_verified = True
                self._changed.notify_all()
            for layer in range(0 if self.corrupt else slab.num_layers):
                if self.rows:
                    slab.load(self.rows, self.blocks, range(layer, layer + 1))
                with self._changed:
                    self._num_layers = layer + 1
                    self._changed.notify_all()
        finally:
            self.over()
        return clock() - began_s

    def over(self) -> None:
        """Nothing more will be written into its blocks."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    @property
    def is_over(self) -> bool:
        return self._is_over

    def has_layer(self, layer: int) -> bool:
        """Whether this layer is in place already."""
        return self._num_layers > layer

    def wait_verified(self) -> bool:
        """Wait until the rows are verified. False: some are corrupt, or the copy failed before it began."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_verified or self._is_over)
            return self._is_verified and not self.corrupt

    def wait_layer(self, layer: int) -> bool:
        """Wait until this layer is in place. False: it never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_layers > layer or self._is_over)
            return self._num_layers > layer

    def wait_over(self) -> None:
        """Wait until its blocks may be used for something else."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over)
