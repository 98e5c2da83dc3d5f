"""Plans: from block lists to a short list of contiguous copies. Pure; numpy only.

A plan is data: offsets into the source's pool, offsets into the target's, lengths, and how
often the whole pattern repeats (once per layer, a fixed stride apart). Other layouts (unequal
heads, block sizes) become other plans; transports only see copies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvrelay.types import KvLayout

Offsets = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CopyList:
    """Copy `num_bytes[i]` from `source_offset[i] + k * source_stride` to `target_offset[i] + k * target_stride`.

    For every i and every k in range(repeats). Offsets are bytes from the pools' bases.
    """

    source_offset: Offsets
    target_offset: Offsets
    num_bytes: Offsets
    repeats: int = 1
    source_stride: int = 0
    target_stride: int = 0

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum()) * self.repeats

    @property
    def num_copies(self) -> int:
        return len(self.num_bytes) * self.repeats

    def expanded(self) -> tuple[Offsets, Offsets, Offsets]:
        """Every single copy, repeats after each other: (source_offset, target_offset, num_bytes)."""
        steps = np.arange(self.repeats, dtype=np.int64)[:, None]
        source = (self.source_offset + steps * self.source_stride).ravel()
        target = (self.target_offset + steps * self.target_stride).ravel()
        return source, target, np.tile(self.num_bytes, self.repeats)


def plan_copies(
    source: KvLayout, target: KvLayout, source_blocks: Sequence[int], target_blocks: Sequence[int], layers: range
) -> CopyList:
    """Copies that bring `source_blocks[i]` to `target_blocks[i]` in every layer of `layers`.

    Neighbours on both sides become one copy; sorted by source there are fewest. The layouts have equal regions (same fingerprint);
    their numbers of blocks may differ. Raises ValueError if they do not match.
    """
    if source.region_bytes != target.region_bytes or len(source_blocks) != len(target_blocks):
        raise ValueError("plans between unequal regions or block lists of unequal length")
    from_blocks = np.asarray(source_blocks, dtype=np.int64)
    to_blocks = np.asarray(target_blocks, dtype=np.int64)
    breaks = np.flatnonzero((np.diff(from_blocks) != 1) | (np.diff(to_blocks) != 1)) + 1
    starts = np.concatenate((np.zeros(min(len(from_blocks), 1), dtype=np.int64), breaks))
    runs = np.diff(np.append(starts, len(from_blocks)))
    first = layers.start
    return CopyList(
        source_offset=from_blocks[starts] * source.region_bytes + first * source.layer_bytes,
        target_offset=to_blocks[starts] * target.region_bytes + first * target.layer_bytes,
        num_bytes=runs * source.region_bytes,
        repeats=len(layers),
        source_stride=source.layer_bytes,
        target_stride=target.layer_bytes,
    )


def region_offsets(layout: KvLayout, blocks: Sequence[int], layers: range) -> Offsets:
    """Byte offset of every (layer, block) region, layer-major."""
    of_layers = np.arange(layers.start, layers.stop, dtype=np.int64) * layout.layer_bytes
    of_blocks = np.asarray(blocks, dtype=np.int64) * layout.region_bytes
    return np.add.outer(of_layers, of_blocks).ravel()


def cut(num_blocks: int, layers: range, region_bytes: int, limit_bytes: int) -> Iterator[tuple[slice, range]]:
    """Cut blocks x layers into pieces of at most `limit_bytes` (but at least one region).

    Whole layers stay together when one fits; so a long request yields its turn now and then.
    """
    per_layer = num_blocks * region_bytes
    if per_layer > limit_bytes:
        step = max(limit_bytes // region_bytes, 1)
        for layer in layers:
            for start in range(0, num_blocks, step):
                yield slice(start, min(start + step, num_blocks)), range(layer, layer + 1)
        return
    group = max(limit_bytes // max(per_layer, 1), 1)
    for first in range(layers.start, layers.stop, group):
        yield slice(0, num_blocks), range(first, min(first + group, layers.stop))
