"""Who holds which block, for workers whose blocks cover equally many tokens; and how deep a chain is held, by jumps.

A block has a slot (slots.py), and in it a number that stands for its holders (kinds.py). Jump search: chained hashes are
nested, so that who meets the last name of a row of slots that are known to be a chain has met them all. A lookup finds the
slot of the first hash, compares one name at the end of the chained slots that follow (and bisects where it is another), and goes
from edge to edge of what the same workers hold. It looks up a hash only where the row breaks off, whatever the chain's length. What
is not known to be chained is compared by name once, in order, and known from then on.

Nothing is assumed of workers: a hole in what one holds is a slot of another kind, or none. Blocks that lie scattered (stored one by
one, or out of order) are looked up one by one, and moved next to each other as they are.

Source of the jumps: Dynamo (dynamo-kv-router 1.3.0-dev.1, src/indexer/positional.rs) skips what lies between two positions that
the same workers hold. That what is skipped has been compared before, and that names and holders are kept apart, is ours.

Not for use from several threads. Never imports torch, Ray, sockets or a clock.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvrelay.router.index.bits import Ints
from kvrelay.router.index.hash_rows import Slots
from kvrelay.router.index.kinds import Kinds

CHUNK = 64
"""Scattered blocks that are looked up, and moved, together."""
MAX_GATHERED = 8
"""Chunks that one lookup tries to move, at most, so that none takes much longer than looking them up."""
SHORT = 16
"""Slots in a row; after two rows in a chain that are shorter its blocks are looked up one by one."""
_STRETCH = 1 << 13  # slots that a sweep looks through at a time
_DENSE = 8  # blocks of a scattered chunk to each break of the row, at most, that make it worth moving

Ends = list[tuple[int, int]]
"""(depth, bits that reach just so many leading hashes), ascending."""


class Holders:
    """Who holds which block. Callers pass each hash once in a call, and the bits of one worker."""

    def __init__(self, chunk: int = CHUNK) -> None:
        self._chunk = chunk
        self._slots, self._kinds = Slots(), Kinds()
        self.num_sweeps = 0  # under way

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def native_bytes(self) -> int:
        """Of memory that Python does not count."""
        return self._slots.native_bytes

    @property
    def num_kinds(self) -> int:
        """Different sets of holders."""
        return len(self._kinds)

    # ---- what workers hold

    def put(self, hashes: Sequence[bytes], mine: int, new: int) -> int:
        """The worker with the bits `mine` holds these as `new` says (one of its bits, or both). Returns how many it did not."""
        slots, kinds = self._slots.kinds_of(hashes)
        num_new = kinds.count(0)
        if num_new < len(slots):
            gained = 0
            for kind, some in _grouped(kinds, slots):
                old = self._kinds.masks[kind]
                mask = old & ~mine | new
                if kind and mask != old:
                    gained += 0 if old & mine else len(some)
                    self._slots.paint(some, self._kinds.moved(kind, mask, len(some)))
            hashes = [block_hash for block_hash, slot in zip(hashes, slots, strict=True) if not slot] if num_new else ()
            num_new += gained
        if hashes:
            self._slots.add(hashes, self._kinds.moved(0, new, len(hashes)))
        return num_new

    def drop(self, hashes: Sequence[bytes], mine: int) -> int:
        """The worker with these bits holds none of them any more. Returns how many it held."""
        slots, kinds = self._slots.kinds_of(hashes)
        return self._drop(slots, kinds, mine)

    def mark(self, hashes: Sequence[bytes], marks: bytearray) -> None:
        """Set the marks of these blocks' slots; of all slots there is one."""
        slots, _ = self._slots.kinds_of(hashes)
        self._fit(marks)
        np.frombuffer(marks, np.uint8)[np.array(slots, np.int64)] = 1

    def _fit(self, marks: bytearray) -> None:
        if len(marks) < len(self._slots.kinds):
            marks.extend(bytes(len(self._slots.kinds) - len(marks)))

    def sweep(self, first: int, mine: int, kept: bytearray, most: int) -> tuple[int, int]:
        """Of the blocks from slot `first` on, the worker with these bits holds those marked alone: (where to go on, 0: nowhere; how many went).

        So much of the row is looked through at a time that at most `most` of its blocks are found there.
        """
        end = len(self._slots.kinds)
        stop = min(first + _STRETCH, end)
        found, kinds = self._found(lambda mask: mask & mine != 0, first, 1, stop)
        if len(found) > most:
            found, kinds, stop = found[:most], kinds[:most], int(found[most])
        if kept:
            self._fit(kept)
            is_gone = np.frombuffer(kept, np.uint8)[found] == 0
            found, kinds = found[is_gone], kinds[is_gone]
        return (stop if stop < end else 0), self._drop(found.tolist(), kinds.tolist(), mine)

    def _drop(self, slots: list[int], kinds: list[int], mine: int) -> int:
        num_dropped = 0
        for kind, some in _grouped(kinds, slots):
            old = self._kinds.masks[kind]
            if not old & mine:
                continue
            num_dropped += len(some)
            target = self._kinds.moved(kind, old & ~mine, len(some))
            if target:
                self._slots.paint(some, target)
            else:
                self._slots.remove(some)
        return num_dropped

    def known(self, hashes: Iterable[bytes], mine: int) -> list[bytes]:
        """Of these, what the worker with these bits holds."""
        return [block_hash for block_hash in hashes if self.mask(block_hash) & mine]

    def mask(self, block_hash: bytes) -> int:
        """The bits of everybody who holds it."""
        return self._kinds.masks[self._slots.kind(block_hash)]

    def _found(
        self, wanted: Callable[[int], bool], first: int, step: int, stop: int | None = None
    ) -> tuple[Ints, NDArray[np.intc]]:
        """Every `step`-th slot from `first` to before `stop` whose block's holders are wanted, and their kinds."""
        kinds = np.frombuffer(self._slots.kinds, np.intc)[first:stop:step]
        masks, is_there = self._kinds.masks, np.zeros(len(self._kinds.masks), np.bool_)
        for kind in np.flatnonzero(np.bincount(kinds, minlength=1)).tolist():
            is_there[kind] = kind != 0 and wanted(masks[kind])
        places = np.flatnonzero(is_there[kinds])
        found: Ints = first + step * places
        return found, kinds[places]

    # ---- where blocks are

    def begin_sweep(self) -> None:
        """Until `end_sweep` blocks stay where they are, so that none is passed over."""
        self.num_sweeps += 1
        self._slots.give_up_closing()

    def end_sweep(self) -> None:
        self.num_sweeps -= 1

    @property
    def _may_move(self) -> bool:
        return not self.num_sweeps and not self._slots.is_closing

    def begin_closing(self) -> bool:
        """Whether the row is much longer than it need be, and may be made shorter now, by `close_up`."""
        if not self._slots.is_sparse or not self._may_move:
            return False
        self._slots.begin_closing()
        return True

    def close_up(self, most: int) -> bool:
        """Move some blocks, at most so many, unless that was given up. Whether there is more to do."""
        return self._slots.is_closing and self._slots.close_up(most)

    # ---- samples

    def sample(self, wanted: Callable[[int], bool], total: int, count: int, numbers: Iterator[int]) -> list[bytes]:
        """Some `count` hashes whose holders' mask is wanted, spread over the `total` that there are; drawn by `numbers`."""
        step = max(1, total // (4 * max(count, 1)))
        slots, _ = self._found(wanted, next(numbers) % step, step)
        if len(slots) > count:
            slots = slots[[next(numbers) % len(slots) for _ in range(count)]]
        return self._slots.names(slots.tolist())

    def share(self, wanted: Callable[[int], bool], mine: int, total: int, count: int) -> float | None:
        """Of the `total` blocks of the worker with these bits, by some `count`, those whose mask is wanted; None: it has none."""
        _, kinds = self._found(lambda mask: mask & mine != 0, 0, max(1, total // count))
        masks = self._kinds.masks
        good = sum(wanted(masks[kind]) for kind in kinds.tolist())
        return good / len(kinds) if len(kinds) else None

    # ---- how deep a chain is held

    def walk(self, hashes: Sequence[bytes], alive: int) -> Ends:
        """(depth, bits of `alive` that reach just so many leading hashes), ascending; those that reach none are left out."""
        ends: Ends = []
        slots, depth, num_short, to_gather = self._slots, 0, 0, MAX_GATHERED
        while depth < len(hashes):
            slot = slots.slot(hashes[depth])
            if not slot:
                break
            count = slots.follow(hashes, depth, slot)
            num_short = num_short + 1 if count < SHORT else 0
            if num_short < 2:
                depth, alive = self._along(slot, slot + count, depth, alive, ends)
            else:
                num_short = 1
                depth, alive, is_scattered = self._each(hashes, depth, alive, ends, to_gather > 0)
                to_gather -= is_scattered
            if not alive:
                return ends
        if depth and alive:
            ends.append((depth, alive))
        return ends

    def _along(self, slot: int, stop: int, depth: int, alive: int, ends: Ends) -> tuple[int, int]:
        """From edge to edge of slots whose names have been met; up to one that is free, whose block may have another. (depth, who is left)."""
        kinds, masks = self._slots.kinds, self._kinds.masks
        while kind := kinds[slot]:
            alive = _step(depth, masks[kind], alive, ends)
            edge = self._slots.edge(slot, stop - 1)
            if edge < 0 or not alive:
                return depth + stop - slot, alive
            depth, slot = depth + edge + 1 - slot, edge + 1
        return depth, alive

    def _each(
        self, hashes: Sequence[bytes], depth: int, alive: int, ends: Ends, may_gather: bool
    ) -> tuple[int, int, bool]:
        """A chunk, block by block: (depth, who is left, whether its blocks were scattered and are to be moved, if there is room)."""
        chunk, masks, seen = hashes[depth : depth + self._chunk], self._kinds.masks, -1
        slots, kinds = self._slots.kinds_of(chunk)
        for place, kind in enumerate(kinds, depth):
            if kind != seen:
                seen, alive = kind, _step(place, masks[kind], alive, ends)
                if not alive:
                    return place, 0, False
        num_breaks = sum(slot + 1 != after for slot, after in pairwise(slots))
        is_scattered = may_gather and self._may_move and _DENSE * num_breaks >= len(chunk)
        if is_scattered:
            self._slots.gather(chunk, slots)
        return depth + len(chunk), alive, is_scattered


def _step(depth: int, mask: int, alive: int, ends: Ends) -> int:
    """Who of `alive` has the block at this depth; the others end here."""
    kept = alive & mask
    if kept != alive and depth:
        ends.append((depth, alive ^ kept))
    return kept


def _grouped(kinds: list[int], slots: list[int]) -> Iterable[tuple[int, list[int]]]:
    """(kind, its slots); those of kind 0, of blocks that have no slot, are one group, too."""
    if not kinds or kinds.count(kinds[0]) == len(kinds):
        return [(kinds[0], slots)] if kinds else ()
    groups: dict[int, list[int]] = {}
    for kind, slot in zip(kinds, slots, strict=True):
        groups.setdefault(kind, []).append(slot)
    return groups.items()
