"""Block hash -> who holds it, for workers whose blocks cover equally many tokens; and how deep a chain is held, by jumps.

One dict from hash to a mask of workers (bits.py). A mask is an integer that all blocks with the same holders share, so a block
costs its key and its place in the dict, however many workers hold it. The garbage collector walks none of it.

Jump search. Chained hashes are nested: who meets the last hash of a chunk has met all CHUNK of them. Where a lookup has seen
that all blocks of a chunk have the same holders, it points them to an integer object of the chunk's own and notes it under the
chunk's last hash; from then on a lookup reads one entry for the CHUNK blocks. Whatever re-points one of its blocks takes the
note away. Nothing is assumed of workers: a hole in what one holds is a difference of masks within a chunk, which then has no note
and is walked block by block. A block has one object, so of two chunks that part after it only one is noted at a time.

Runs. CHUNK hashes that nobody held before, stored by one event in this order, get an object of their own and their names are kept,
packed. A lookup that meets the first of them compares names (a few bytes for each block, in order) where it would look up
each block in a table larger than any cache. A run that is a whole chunk becomes its note.

Source of the jumps: Dynamo (dynamo-kv-router 1.3.0-dev.1, src/indexer/positional.rs) skips what lies between two positions that
the same workers hold. That a jump is taken only over what a walk has verified, and its note dropped by events, is ours.

Not for use from several threads. Never imports torch, Ray, sockets or a clock.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

from kvrelay.hashing import HASH_BYTES

CHUNK = 64
"""Blocks that one jump passes."""
MAX_NOTED = 8
"""Chunks of which one lookup moves the blocks to a note, at most, so that none takes much longer than the walk itself."""
MAX_SHARED = 32768
"""Masks of several workers that are kept for sharing; past it they are begun anew, which costs memory alone."""


Run = tuple[bytes, int]
"""Packed hashes, and the mask that their blocks point to."""
_NO_RUN: Run = (b"", 0)


class Holders:
    """Who holds which block. Callers pass each hash once in a call, and the bits of one worker."""

    def __init__(self, chunk: int = CHUNK) -> None:
        self._chunk = chunk
        self._masks: dict[bytes, int] = {}
        self._chunks: dict[bytes, int] = {}  # a chunk's last hash -> the object that all of its blocks point to
        self._chunk_of: dict[int, bytes] = {}  # that object's id -> the chunk's last hash
        self._runs: dict[bytes, bytes] = {}  # a run's first hash -> all of its hashes, packed
        self._run_masks: dict[bytes, int] = {}  # the object that all of its blocks point to
        self._run_of: dict[int, bytes] = {}  # that object's id -> the run's first hash
        self._shared: dict[int, int] = {}  # every mask of several workers by its value

    def __len__(self) -> int:
        return len(self._masks)

    @property
    def num_chunks(self) -> int:
        """Chunks that lookups pass in one step now."""
        return len(self._chunks)

    # ---- what workers hold

    def put(self, hashes: Sequence[bytes], mine: int, new: int) -> Sequence[bytes]:
        """The worker with the bits `mine` holds these as `new` says (one of its bits, or both). Returns those it did not."""
        masks = self._masks
        olds = list(map(masks.get, hashes, repeat(0)))
        if not any(olds):  # as nearly always: nobody has any of them
            self._put_runs(hashes, new)
            return hashes
        kinds = dict(zip(map(id, olds), olds, strict=True))
        moved = {mark: self._shared_mask(old & ~mine | new) for mark, old in kinds.items() if old & mine != new}
        self._break(moved)
        if not moved:
            return ()
        if len(moved) == len(kinds) and len(set(map(id, moved.values()))) == 1:
            masks.update(dict.fromkeys(hashes, next(iter(moved.values()))))
            if not any(old & mine for old in kinds.values()):
                return hashes
            return [block_hash for block_hash, old in zip(hashes, olds, strict=True) if not old & mine]
        pairs = list(zip(hashes, map(id, olds), strict=True))
        masks.update((block_hash, moved[mark]) for block_hash, mark in pairs if mark in moved)
        gained = {mark for mark in moved if not kinds[mark] & mine}
        return [block_hash for block_hash, mark in pairs if mark in gained]

    def drop(self, hashes: Sequence[bytes], mine: int) -> int:
        """The worker with these bits holds none of them any more. Returns how many it held."""
        masks = self._masks
        olds = list(map(masks.get, hashes, repeat(0)))
        kinds = dict(zip(map(id, olds), olds, strict=True))
        moved = {mark: self._shared_mask(old & ~mine) for mark, old in kinds.items() if old & mine}
        self._break(moved)
        if len(moved) == len(kinds) and not any(moved.values()):  # as nearly always: it alone had them
            deque(map(masks.pop, hashes), maxlen=0)
            return len(hashes)
        pairs = [(block_hash, mark) for block_hash, mark in zip(hashes, map(id, olds), strict=True) if mark in moved]
        masks.update((block_hash, moved[mark]) for block_hash, mark in pairs)
        for block_hash, mark in pairs:
            if not moved[mark]:
                del masks[block_hash]
        return len(pairs)

    def held(self, hashes: Iterable[bytes], mine: int) -> Iterator[bytes]:
        """Of these, what the worker with these bits holds."""
        get = self._masks.get
        return (block_hash for block_hash in hashes if get(block_hash, 0) & mine)

    def mask(self, block_hash: bytes) -> int:
        """The bits of everybody who holds it."""
        return self._masks.get(block_hash, 0)

    # ---- how deep a chain is held

    def walk(self, hashes: Sequence[bytes], alive: int) -> list[tuple[int, int]]:
        """(depth, bits of `alive` that reach just so many leading hashes), ascending; those that reach none are left out."""
        ends: list[tuple[int, int]] = []
        to_note, size, rest = MAX_NOTED, self._chunk, _NO_RUN
        for start in range(0, len(hashes), size):
            stop = start + size
            whole = self._chunks.get(hashes[stop - 1]) if stop <= len(hashes) else None
            if whole is None and not rest[0] and hashes[start] in self._runs:
                whole = self._note_run(hashes[start:stop])
            if whole is not None:
                rest = _NO_RUN
                kept = alive & whole
                if kept != alive:
                    if start:
                        ends.append((start, alive ^ kept))
                    alive = kept
            else:
                chunk = hashes[start:stop]
                masks, rest = self._masks_of(chunk, rest)
                is_uniform = masks.count(masks[0]) == len(masks)
                alive = self._step(masks[:1] if is_uniform else masks, start, alive, ends)
                if is_uniform and alive and to_note and len(chunk) == size:
                    to_note -= 1
                    self._note(chunk, masks)
            if not alive:
                return ends
        if hashes:
            ends.append((len(hashes), alive))
        return ends

    def _step(self, masks: Sequence[int], start: int, alive: int, ends: list[tuple[int, int]]) -> int:
        """Block by block, from depth `start`; who is left."""
        seen = -1
        for depth, mask in enumerate(masks, start):
            if mask is seen:
                continue
            seen, kept = mask, alive & mask
            if kept != alive:
                if depth:
                    ends.append((depth, alive ^ kept))
                alive = kept
                if not alive:
                    break
        return alive

    def _masks_of(self, chunk: Sequence[bytes], rest: Run) -> tuple[list[int], Run]:
        """The masks of these blocks; `rest`: what has not been compared yet of a run that began before, and after, them."""
        found: list[int] = []
        packed = b""
        while len(found) < len(chunk):
            if not rest[0]:
                first = chunk[len(found)]
                if first not in self._runs:
                    break
                rest = self._runs[first], self._run_masks[first]
            packed = packed or b"".join(chunk)
            same = _num_common(rest[0], packed[HASH_BYTES * len(found) :])
            found += [rest[1]] * same
            rest = (rest[0][HASH_BYTES * same :], rest[1]) if same and len(found) == len(chunk) else _NO_RUN
        if len(found) < len(chunk):
            found += map(self._masks.get, chunk[len(found) :], repeat(0))
        return found, rest

    # ---- notes

    def _put_runs(self, hashes: Sequence[bytes], new: int) -> None:
        """Nobody has held any of these. Whether they follow each other in a chain, a lookup will see."""
        num_whole = len(hashes) - len(hashes) % self._chunk
        for start in range(0, num_whole, self._chunk):
            run = hashes[start : start + self._chunk]
            own = (new ^ 1) ^ 1  # an object of its own; bit 0 is nobody's
            self._masks.update(dict.fromkeys(run, own))
            self._runs[run[0]], self._run_masks[run[0]] = b"".join(run), own
            self._run_of[id(own)] = run[0]
        self._masks.update(dict.fromkeys(hashes[num_whole:], new))

    def _note_run(self, chunk: Sequence[bytes]) -> int | None:
        """Where the chunk is a run, the run becomes its note."""
        first = chunk[0]
        if b"".join(chunk) != self._runs[first]:
            return None
        own = self._run_masks.pop(first)
        del self._runs[first], self._run_of[id(own)]
        self._chunks[chunk[-1]] = own
        self._chunk_of[id(own)] = chunk[-1]
        return own

    def _note(self, chunk: Sequence[bytes], masks: Sequence[int]) -> None:
        """All of the chunk's masks are equal. Chains may part within a chunk: a block is in one that is noted, at most."""
        self._break(set(map(id, masks)))
        own = (masks[0] ^ 1) ^ 1  # an object of its own; bit 0 is nobody's
        self._masks.update(dict.fromkeys(chunk, own))
        self._chunks[chunk[-1]] = own
        self._chunk_of[id(own)] = chunk[-1]

    def _break(self, marks: Iterable[int]) -> None:
        """The objects with these ids are about to lose blocks: no chunk and no run is whole by them any more."""
        for mark in marks:
            if mark in self._chunk_of:
                del self._chunks[self._chunk_of.pop(mark)]
            elif mark in self._run_of:
                first = self._run_of.pop(mark)
                del self._runs[first], self._run_masks[first]

    def _shared_mask(self, mask: int) -> int:
        """The one object for this value."""
        known = self._shared.get(mask)
        if known is not None:
            return known
        if len(self._shared) >= MAX_SHARED:
            self._shared.clear()
        if mask:
            self._shared[mask] = mask
        return mask


def _num_common(run: bytes, packed: bytes) -> int:
    """Leading hashes that the two have in common."""
    low, high = 0, min(len(run), len(packed)) // HASH_BYTES
    if run[: HASH_BYTES * high] == packed[: HASH_BYTES * high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if run[HASH_BYTES * low : HASH_BYTES * middle] == packed[HASH_BYTES * low : HASH_BYTES * middle]:
            low = middle
        else:
            high = middle - 1
    return low
