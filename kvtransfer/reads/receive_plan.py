"""A receive plan: how one source's chunks come into this pool. Made once for each connection.

Equal dtypes: reads go straight into the pool. Unequal ones: into a staging buffer of the source's dtype, one layer
at a time, and are cast from there once they have been verified. What arrives is verified on the reading thread,
while it is still in its caches.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvrelay.kvtransfer.mover.mover import Receipt
from kvrelay.kvtransfer.plans.copy_plan import CopyList, Offsets, Pairing, cut, pair, wire_layout
from kvrelay.kvtransfer.protocol.checksums import Checksums, checksums_of
from kvrelay.kvtransfer.reads.conversion import convert, where_to_convert
from kvrelay.kvtransfer.transports.base import CorruptRead
from kvrelay.types import KvLayout, KvMemory

MAX_UNIT_BYTES = 8 << 20  # one turn of a transfer on the wire
_STAGING_BYTES = 2 << 20
Tamper = Callable[[KvMemory, int, int], None]


def staging_memory(pool: KvMemory, layout: KvLayout) -> KvMemory:
    """Room for `layout` on the pool's device."""
    import torch

    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=pool.device)
    view = None if pool.view is None else buffer.numpy().data
    return KvMemory(layout, buffer.data_ptr(), pool.device, None, view, buffer)


@dataclass(frozen=True, slots=True)
class PlannedRead:
    """What one read does. `pieces`: [num_chunks, pieces_per_chunk], where each lands, in the order of the copies."""

    copies: CopyList
    pieces: Offsets


class ReceivePlan:
    """Plans reads of `source` into the pool, or into `staging` where the dtypes differ. Raises LayoutMismatch."""

    def __init__(self, source: KvLayout, pool: KvMemory) -> None:
        self.source, self.pool = source, pool
        self._wire = wire_layout(pool.layout, source.dtype)
        self.pairing: Pairing = pair(source, self._wire)
        self.staging: KvMemory | None = None
        # no source casts yet: it would need a staging pool of its own, which every transport exports
        if where_to_convert(source.dtype, pool.layout.dtype, can_source_convert=False) is not None:
            self.staging = staging_memory(pool, self._staged(self.layers.start))

    @property
    def layers(self) -> range:
        """The model's layers that both pools hold."""
        return self.pairing.overlap.layers

    @property
    def memory(self) -> KvMemory:
        """What reads write: the pool, or the staging buffer."""
        return self.pool if self.staging is None else self.staging

    @property
    def max_chunks(self) -> int:
        """Chunks of one layer that the staging buffer holds."""
        return max(_STAGING_BYTES // self.pairing.chunk_bytes, 1)

    def _staged(self, layer: int) -> KvLayout:
        """The staging buffer as the pool of this one layer."""
        num_blocks = -(-self.max_chunks // self.pairing.target.chunks_per_block)
        return dataclasses.replace(
            self._wire, num_blocks=num_blocks, num_layers=1, first_layer=layer, total_layers=self._wire.model_layers
        )

    def units(self, num_chunks: int, layers: range) -> Iterator[tuple[slice, range]]:
        """Chunks x layers in pieces for one read each."""
        if self.staging is None:
            yield from cut(num_chunks, layers, self.pairing.chunk_bytes, MAX_UNIT_BYTES)
            return
        for layer in layers:
            limit = self.max_chunks * self.pairing.chunk_bytes
            yield from cut(num_chunks, range(layer, layer + 1), self.pairing.chunk_bytes, limit)

    def read(self, source_chunks: Offsets, target_chunks: Offsets, layers: range) -> PlannedRead:
        """The read that brings these chunks, by their numbers: into their places, or into the staging buffer's
        first.
        """
        pairing = self.pairing
        if self.staging is not None:
            assert len(layers) == 1
            pairing = pair(self.source, self._staged(layers.start))
            target_chunks = np.arange(len(source_chunks), dtype=np.int64)
        begins, lands = pairing.source.offsets(source_chunks), pairing.target.offsets(target_chunks)
        pieces = pairing.target.pieces_of(lands, layers).reshape(-1, pairing.pieces_per_chunk)
        return PlannedRead(pairing.copies(begins, lands, layers), pieces)

    def settle(self, target_chunks: Offsets, layers: range) -> None:
        """Cast what lies in the staging buffer into its places. On a thread."""
        assert self.staging is not None
        staging = dataclasses.replace(self.staging, layout=self._staged(layers.start))
        staged, chunk_tokens = np.arange(len(target_chunks), dtype=np.int64), self.pairing.overlap.chunk_tokens
        convert(staging, staged, self.pool, target_chunks, layers, chunk_tokens=chunk_tokens)


class ArrivingRead:
    """Call it with the bytes that are in place so far, or let a mover fill in its receipt and settle that.

    Chunks are in the order in which the read copies them.

    Args:
        memory: what the read writes.
        pieces: [num_chunks, pieces_per_chunk] where each piece lands, bytes from the memory's base.
        expected: [num_chunks] what they must hash to; None: nothing is verified.
        is_checked: [num_chunks] which of them to verify; None: all.
        tamper: fault injection, called with (memory, offset, num_bytes) for every piece before it is verified.
    """

    def __init__(
        self,
        memory: KvMemory,
        pieces: Offsets,
        piece_bytes: int,
        expected: Checksums | None,
        is_checked: NDArray[np.bool_] | None = None,
        tamper: Tamper | None = None,
    ) -> None:
        self._memory, self._pieces, self._piece_bytes = memory, pieces, piece_bytes
        self._expected, self._is_checked, self._tamper = expected, is_checked, tamper
        self._chunk_bytes = pieces.shape[1] * piece_bytes
        self._num_done = self._num_landed = 0
        self._check_s = 0.0
        self._receipt: Receipt | None = None

    @property
    def num_landed(self) -> int:
        """Bytes so far: a slow read makes progress, a stuck one does not."""
        return self._num_landed if self._receipt is None else self._receipt.num_landed

    @property
    def check_s(self) -> float:
        """Seconds spent verifying."""
        return self._check_s if self._receipt is None else self._receipt.hash_s

    def receipt(self) -> Receipt | None:
        """What a mover is to fill in; None where chunks must be looked at one by one: a fault is injected, or
        the memory is a GPU's."""
        if self._tamper is not None or self._memory.view is None:
            return None
        if self._expected is None:
            self._receipt = Receipt()
        else:
            self._receipt = Receipt(self._pieces, self._piece_bytes, self._is_checked)
        return self._receipt

    def settle(self, receipt: Receipt) -> None:
        """The read that filled in `receipt` is over. Raises CorruptRead, naming the first wrong chunk."""
        if self._expected is None or bytes(receipt.hashes) == self._expected.tobytes():
            return
        is_wrong = receipt.found != self._expected
        if self._is_checked is not None:
            is_wrong &= self._is_checked
        _refuse(np.flatnonzero(is_wrong))

    def __call__(self, num_bytes: int) -> None:
        """Raises CorruptRead, naming the first wrong chunk by its index."""
        first, stop = self._num_done, num_bytes // self._chunk_bytes
        self._num_landed, self._num_done = num_bytes, stop
        pieces = self._pieces[first:stop]
        if self._tamper is not None:
            for offset in pieces.ravel().tolist():
                self._tamper(self._memory, offset, self._piece_bytes)
        if self._expected is None or not len(pieces):
            return
        began = time.perf_counter()
        self._verify(first, pieces, self._expected[first:stop])
        self._check_s += time.perf_counter() - began

    def _verify(self, first: int, pieces: Offsets, expected: Checksums) -> None:
        index = np.arange(first, first + len(pieces))
        if self._is_checked is not None:
            chosen = self._is_checked[index]
            index, pieces, expected = index[chosen], pieces[chosen], expected[chosen]
        _refuse(index[checksums_of(self._memory, pieces, self._piece_bytes) != expected])


def _refuse(wrong: NDArray[np.intp]) -> None:
    """Raises CorruptRead when any index is given."""
    if len(wrong):
        raise CorruptRead(len(wrong), int(wrong[0]))
