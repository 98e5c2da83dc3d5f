"""Which workers hold which block, for workers of one block size; and how deep each holds a chain, by jump search.

A block has a position in a HashArray, and there the number of its holder set. Jumps: docs/design/routing.md. Nothing
is assumed of workers: a hole in what one holds is a position with another holder set, or none.

Source of the jumps: Dynamo (dynamo-kv-router 1.3.0-dev.1, src/indexer/positional.rs) skips what lies between two
positions with the same holders. That what is skipped was compared before is ours. Not thread-safe. Pure.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvrelay.router.index.hash_array import HashArray, Ints


class HolderSets:
    """Masks (see hash_array.py) by set id, as long as a block has that set."""

    __slots__ = ("_counts", "_free", "_numbers", "masks")

    def __init__(self) -> None:
        self.masks = [0]  # by set id; 0: the id is free
        self._counts = [0]  # blocks per set
        self._numbers = {0: 0}  # by mask
        self._free: list[int] = []

    def moved(self, source: int, mask: int, count: int) -> int:
        """`count` blocks of set `source` (0: new ones) are held by `mask` from now on (0: by no worker).

        Returns its set id.
        """
        set_id = self._numbers.get(mask)
        if set_id is None:
            set_id = self._new(mask)
        if set_id:
            self._counts[set_id] += count
        if source:
            self._counts[source] -= count
            if not self._counts[source]:
                del self._numbers[self.masks[source]]
                self.masks[source] = 0
                self._free.append(source)
        return set_id

    def _new(self, mask: int) -> int:
        if self._free:
            self.masks[set_id := self._free.pop()] = mask
        else:
            set_id = len(self.masks)
            self.masks.append(mask)
            self._counts.append(0)
        self._numbers[mask] = set_id
        return set_id


CHUNK = 64
"""Scattered blocks that are looked up, and moved, together."""
MAX_MOVED_CHUNKS = 8
"""Chunks that one lookup moves, at most, to bound its time."""
SHORT = 16
"""Contiguous positions; after two shorter runs the blocks of a chain are looked up in chunks."""
_STRETCH = 1 << 13  # positions that a sweep reads at a time
_DENSE = 8  # blocks of a scattered chunk per break, at most, that make it worth moving

Ends = list[tuple[int, int]]
"""[(depth, bits of workers that hold exactly so many leading hashes)], ascending."""


class HolderIndex:
    """Which workers hold which block. A call has each hash once, and the bits of one worker."""

    def __init__(self, chunk: int = CHUNK) -> None:
        self._chunk = chunk
        self.array, self.sets = HashArray(), HolderSets()
        self.num_sweeps = 0  # in progress; meanwhile blocks stay where they are, so that none is passed over

    def __len__(self) -> int:
        return len(self.array)

    # ---- what workers hold

    def put(self, hashes: Sequence[bytes], own_bits: int, new: int) -> int:
        """The worker with the bits `own_bits` holds these as `new` (one of its bits, or both).

        Returns how many are new to it.
        """
        positions, set_ids = self.array.find(hashes)
        num_new = set_ids.count(0)
        if num_new < len(positions):
            gained = 0
            for set_id, some in _grouped(set_ids, positions):
                old = self.sets.masks[set_id]
                mask = old & ~own_bits | new
                if set_id and mask != old:
                    gained += 0 if old & own_bits else len(some)
                    self.array.set_positions(some, self.sets.moved(set_id, mask, len(some)))
            hashes = (
                [block_hash for block_hash, position in zip(hashes, positions, strict=True) if not position]
                if num_new
                else ()
            )
            num_new += gained
        if hashes:
            self.array.add(hashes, self.sets.moved(0, new, len(hashes)))
        return num_new

    def drop(self, hashes: Sequence[bytes], own_bits: int) -> int:
        """The worker with these bits holds none of them any more. Returns how many it held."""
        positions, set_ids = self.array.find(hashes)
        return self._drop(positions, set_ids, own_bits)

    def mark(self, hashes: Sequence[bytes], marks: bytearray) -> None:
        """Mark the positions of these blocks; `marks` has one byte per position."""
        positions, _ = self.array.find(hashes)
        self._fit(marks)
        np.frombuffer(marks, np.uint8)[np.array(positions, np.int64)] = 1

    def _fit(self, marks: bytearray) -> None:
        if len(marks) < len(self.array.set_ids):
            marks.extend(bytes(len(self.array.set_ids) - len(marks)))

    def sweep(self, first: int, own_bits: int, kept: bytearray, most: int) -> tuple[int, int]:
        """Drop unmarked blocks of the worker with these bits, from `first` on. Returns (next position, 0: done; number
        dropped).

        At most `most` of its blocks are read per call.
        """
        end = len(self.array.set_ids)
        stop = min(first + _STRETCH, end)
        found, set_ids = self._found(lambda mask: mask & own_bits != 0, first, 1, stop)
        if len(found) > most:
            found, set_ids, stop = found[:most], set_ids[:most], int(found[most])
        if kept:
            self._fit(kept)
            is_gone = np.frombuffer(kept, np.uint8)[found] == 0
            found, set_ids = found[is_gone], set_ids[is_gone]
        return (stop if stop < end else 0), self._drop(found.tolist(), set_ids.tolist(), own_bits)

    def _drop(self, positions: list[int], set_ids: list[int], own_bits: int) -> int:
        num_dropped = 0
        for set_id, some in _grouped(set_ids, positions):
            old = self.sets.masks[set_id]
            if not old & own_bits:
                continue
            num_dropped += len(some)
            target = self.sets.moved(set_id, old & ~own_bits, len(some))
            if target:
                self.array.set_positions(some, target)
            else:
                self.array.remove(some)
        return num_dropped

    def known(self, hashes: Iterable[bytes], own_bits: int) -> list[bytes]:
        """Those of the hashes that the worker with these bits holds."""
        return [block_hash for block_hash in hashes if self.mask(block_hash) & own_bits]

    def mask(self, block_hash: bytes) -> int:
        """The bits of all workers that hold it."""
        return self.sets.masks[self.array.set_id(block_hash)]

    def _found(
        self, matches: Callable[[int], bool], first: int, step: int, stop: int | None = None
    ) -> tuple[Ints, NDArray[np.intc]]:
        """Every `step`-th position from `first` to before `stop` whose holders match, and their holder sets."""
        set_ids = np.frombuffer(self.array.set_ids, np.intc)[first:stop:step]
        masks, is_there = self.sets.masks, np.zeros(len(self.sets.masks), np.bool_)
        for set_id in np.flatnonzero(np.bincount(set_ids, minlength=1)).tolist():
            is_there[set_id] = set_id != 0 and matches(masks[set_id])
        places = np.flatnonzero(is_there[set_ids])
        found: Ints = first + step * places
        return found, set_ids[places]

    # ---- samples

    def sample(self, matches: Callable[[int], bool], total: int, count: int, rng: np.random.Generator) -> list[bytes]:
        """Some `count` hashes whose holders match, spread over the `total` that there are; drawn by `rng`."""
        step = max(1, total // (4 * max(count, 1)))
        positions, _ = self._found(matches, int(rng.integers(step)), step)
        if len(positions) > count:
            positions = positions[rng.integers(len(positions), size=count)]
        return self.array.names(positions.tolist())

    def share(self, matches: Callable[[int], bool], own_bits: int, total: int, count: int) -> float | None:
        """Share of the blocks of the worker with these bits whose holders match, from a sample of `count`; None: it has
        none.
        """
        _, set_ids = self._found(lambda mask: mask & own_bits != 0, 0, max(1, total // count))
        masks = self.sets.masks
        good = sum(matches(masks[set_id]) for set_id in set_ids.tolist())
        return good / len(set_ids) if len(set_ids) else None

    # ---- depth of a chain

    def walk(self, hashes: Sequence[bytes], alive: int) -> Ends:
        """[(depth, bits of `alive` that hold exactly so many leading hashes)], ascending; workers that hold none are
        left out.
        """
        ends: Ends = []
        positions, depth, num_short, num_movable = self.array, 0, 0, MAX_MOVED_CHUNKS
        while depth < len(hashes):
            position = positions.position(hashes[depth])
            if not position:
                break
            count = positions.follow(hashes, depth, position)
            num_short = num_short + 1 if count < SHORT else 0
            if num_short < 2:
                depth, alive = self._walk_run(position, position + count, depth, alive, ends)
            else:
                num_short = 1
                depth, alive, is_scattered = self._walk_chunk(hashes, depth, alive, ends, num_movable > 0)
                num_movable -= is_scattered
            if not alive:
                return ends
        if depth and alive:
            ends.append((depth, alive))
        return ends

    def _walk_run(self, position: int, stop: int, depth: int, alive: int, ends: Ends) -> tuple[int, int]:
        """From edge to edge of positions whose hashes match, up to a free one. Returns (depth, workers left)."""
        set_ids, masks = self.array.set_ids, self.sets.masks
        while set_id := set_ids[position]:
            alive = _narrowed(depth, masks[set_id], alive, ends)
            edge = self.array.edge(position, stop - 1)
            if edge < 0 or not alive:
                return depth + stop - position, alive
            depth, position = depth + edge + 1 - position, edge + 1
        return depth, alive

    def _walk_chunk(
        self, hashes: Sequence[bytes], depth: int, alive: int, ends: Ends, may_move_chunk: bool
    ) -> tuple[int, int, bool]:
        """A chunk, block by block.

        Returns (depth, workers left, whether its blocks were scattered and have been moved if there is room).
        """
        chunk, masks, seen = hashes[depth : depth + self._chunk], self.sets.masks, -1
        positions, set_ids = self.array.find(chunk)
        for place, set_id in enumerate(set_ids, depth):
            if set_id != seen:
                seen, alive = set_id, _narrowed(place, masks[set_id], alive, ends)
                if not alive:
                    return place, 0, False
        num_breaks = sum(position + 1 != after for position, after in pairwise(positions))
        is_scattered = may_move_chunk and not self.num_sweeps and _DENSE * num_breaks >= len(chunk)
        if is_scattered:
            self.array.move_together(chunk, positions)
        return depth + len(chunk), alive, is_scattered


def _narrowed(depth: int, mask: int, alive: int, ends: Ends) -> int:
    """The workers of `alive` that hold the block at this depth; the others end here."""
    kept = alive & mask
    if kept != alive and depth:
        ends.append((depth, alive ^ kept))
    return kept


def _grouped(set_ids: list[int], positions: list[int]) -> Iterable[tuple[int, list[int]]]:
    """(holder set, its positions); blocks without a position are one group, of set 0."""
    if not set_ids or set_ids.count(set_ids[0]) == len(set_ids):
        return [(set_ids[0], positions)] if set_ids else ()
    groups: dict[int, list[int]] = {}
    for set_id, position in zip(set_ids, positions, strict=True):
        groups.setdefault(set_id, []).append(position)
    return groups.items()
