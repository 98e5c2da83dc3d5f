"""A landing: how one source's atoms come into this pool. Made once for each connection.

Equal dtypes: reads go straight into the pool. Unequal ones: into a staging buffer of the source's dtype, one layer
at a time, and are cast from there once they have been verified.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvrelay.kvtransfer.plans.copy_plan import CopyList, Offsets, Pairing, cut, pair
from kvrelay.kvtransfer.reads.conversion import convert, where_to_convert
from kvrelay.types import KvLayout, KvMemory

MAX_UNIT_BYTES = 8 << 20  # one turn of a transfer on the wire
_STAGING_BYTES = 2 << 20


def wire_layout(target: KvLayout, source_dtype: str) -> KvLayout:
    """The target's layout with the dtype that travels: the source's."""
    return target if target.dtype == source_dtype else dataclasses.replace(target, dtype=source_dtype)


def staging_memory(pool: KvMemory, layout: KvLayout) -> KvMemory:
    """Room for `layout` on the pool's device."""
    import torch

    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=pool.device)
    view = None if pool.view is None else buffer.numpy().data
    return KvMemory(layout, buffer.data_ptr(), pool.device, None, view, buffer)


@dataclass(frozen=True, slots=True)
class Read:
    """What one read does. `pieces`: [num_atoms, pieces_per_atom], where each lands, in the order of the copies."""

    copies: CopyList
    pieces: Offsets


class Landing:
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
    def max_atoms(self) -> int:
        """Atoms of one layer that the staging buffer holds."""
        return max(_STAGING_BYTES // self.pairing.atom_bytes, 1)

    def _staged(self, layer: int) -> KvLayout:
        """The staging buffer as the pool of this one layer."""
        num_blocks = -(-self.max_atoms // self.pairing.target.atoms_per_block)
        return dataclasses.replace(
            self._wire, num_blocks=num_blocks, num_layers=1, first_layer=layer, total_layers=self._wire.model_layers
        )

    def units(self, num_atoms: int, layers: range) -> Iterator[tuple[slice, range]]:
        """Atoms x layers in pieces for one read each."""
        if self.staging is None:
            yield from cut(num_atoms, layers, self.pairing.atom_bytes, MAX_UNIT_BYTES)
            return
        for layer in layers:
            limit = self.max_atoms * self.pairing.atom_bytes
            yield from cut(num_atoms, range(layer, layer + 1), self.pairing.atom_bytes, limit)

    def plan(self, source_atoms: Offsets, target_atoms: Offsets, layers: range) -> Read:
        """The read that brings these atoms, by their numbers: into their places, or into the staging buffer's first."""
        pairing = self.pairing
        if self.staging is not None:
            assert len(layers) == 1
            pairing = pair(self.source, self._staged(layers.start))
            target_atoms = np.arange(len(source_atoms), dtype=np.int64)
        begins, lands = pairing.source.offsets(source_atoms), pairing.target.offsets(target_atoms)
        pieces = pairing.target.pieces_of(lands, layers).reshape(-1, pairing.pieces_per_atom)
        return Read(pairing.copies(begins, lands, layers), pieces)

    def settle(self, target_atoms: Offsets, layers: range) -> None:
        """Cast what lies in the staging buffer into its places. On a thread."""
        assert self.staging is not None
        staging = dataclasses.replace(self.staging, layout=self._staged(layers.start))
        staged, atom_tokens = np.arange(len(target_atoms), dtype=np.int64), self.pairing.overlap.atom_tokens
        convert(staging, staged, self.pool, target_atoms, layers, atom_tokens=atom_tokens)
