"""A receive plan: how one source's chunks come into this pool. Made once for each connection.

Equal dtypes: reads go straight into the pool. Unequal ones: into a staging buffer of the source's dtype, one layer
at a time, and are cast from there once they have been verified.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvrelay.kvtransfer.plans.copy_plan import CopyList, Offsets, Pairing, cut, pair, wire_layout
from kvrelay.kvtransfer.reads.conversion import convert, where_to_convert
from kvrelay.types import KvLayout, KvMemory

MAX_UNIT_BYTES = 8 << 20  # one turn of a transfer on the wire
_STAGING_BYTES = 2 << 20


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
        """The read that brings these chunks, by their numbers: into their places, or into the staging buffer's first."""
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
