"""Plans: from two layouts and two block lists to a short list of contiguous copies. Pure; numpy only.

What travels is counted in *chunks*: the tokens of the smaller of the two block sizes, in one layer. Every chunk of a
pair of layouts is the same number of *pieces* of equal length, the longest runs that are contiguous in both pools,
in one order that both ends agree on: K before V, then token, head, dim (with "HND" pools on both sides: head, token,
dim). Hence a copy list is the source's pieces beside the target's, neighbours merged; and a chunk's checksum is that
of its pieces in this order, which each end computes from its own memory.

A plan is data: transports only see copies. Dtypes are no matter of copies: see conversion.py.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvrelay.errors import LayoutMismatch, TransportError
from kvrelay.types import KvLayout

Offsets = NDArray[np.int64]

TURN_BYTES = 8 << 20  # one turn of a transfer: one read
# Where a turn costs 0.25 to 0.44 ms beside its copy, however small (NIXL; between GPUs, where 8 MiB take 0.02 ms).
LARGE_TURN_BYTES = 64 << 20
_ONE = np.ones(1, dtype=np.bool_)
_MANY_PIECES = 16
"""A chunk of more pieces is not searched for neighbours: at most two of its pieces have one (where V follows K,
where the next chunk follows), and the search would cost more than planning.
"""


@dataclass(frozen=True, slots=True)
class CopyList:
    """Copy `num_bytes[i]` from `source_offset[i]` to `target_offset[i]`, for every i, in this order.

    Offsets are bytes from the pools' bases.
    """

    source_offset: Offsets
    target_offset: Offsets
    num_bytes: Offsets

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())

    def rows(self) -> tuple[list[int], list[int], list[int]]:
        """(source_offset, target_offset, num_bytes) as lists."""
        return self.source_offset.tolist(), self.target_offset.tolist(), self.num_bytes.tolist()

    def tiles(self, tile_bytes: int) -> tuple[Offsets, Offsets, Offsets]:
        """The same copies, each in pieces of at most so many bytes; none is empty."""
        counts = -(-self.num_bytes // tile_bytes)
        row = np.repeat(np.arange(len(counts)), counts)
        place = (np.arange(len(row)) - (np.cumsum(counts) - counts)[row]) * tile_bytes
        sizes = np.minimum(self.num_bytes[row] - place, tile_bytes)
        return self.source_offset[row] + place, self.target_offset[row] + place, sizes

    def check_bounds(self, source_bytes: int, target_bytes: int) -> None:
        """Raises TransportError unless every copy lies inside both pools (a stray write would corrupt others)."""
        if not len(self.num_bytes):
            return
        source_end = int((self.source_offset + self.num_bytes).max())
        target_end = int((self.target_offset + self.num_bytes).max())
        lowest = min(int(self.source_offset.min()), int(self.target_offset.min()), int(self.num_bytes.min()))
        if lowest < 0 or source_end > source_bytes or target_end > target_bytes:
            raise TransportError("a copy lies outside the pool")


@dataclass(frozen=True, slots=True, eq=False)
class End:
    """Where a pair's chunks lie at one end. Offsets and strides are bytes.

    `pieces`: of a chunk's pieces, from where the chunk begins.
    """

    layout: KvLayout
    chunks_per_block: int
    chunk_stride: int  # to the next chunk of a block
    pieces: Offsets
    region_bytes: int  # to the next layer of a block
    block_bytes: int  # to the next block

    def numbers(self, blocks: Sequence[int] | Offsets, first_chunk: int = 0, num_chunks: int | None = None) -> Offsets:
        """Which chunks of the pool hold `num_chunks` (None: all) of a sequence: block * chunks_per_block + place in
        it.

        Args:
            blocks: of one sequence, in its order; `first_chunk` counts from the first token of blocks[0].

        Raises ValueError when these blocks do not reach so far.
        """
        ids, each = np.asarray(blocks, dtype=np.int64), self.chunks_per_block
        room = len(ids) * each
        stop = room if num_chunks is None else first_chunk + num_chunks
        if not 0 <= first_chunk <= stop <= room:
            raise ValueError(f"chunks {first_chunk}..{stop} of {len(ids)} blocks with {each} each")
        if each == 1:
            return ids[first_chunk:stop]
        index, place = np.divmod(np.arange(first_chunk, stop, dtype=np.int64), each)
        return ids[index] * each + place

    def offsets(self, numbers: Offsets) -> Offsets:
        """Where these chunks begin in the first layer of their blocks."""
        if self.chunks_per_block == 1:
            return numbers * self.block_bytes
        block, place = np.divmod(numbers, self.chunks_per_block)
        begins: Offsets = block * self.block_bytes + place * self.chunk_stride
        return begins

    def chunks(self, blocks: Sequence[int] | Offsets, first_chunk: int = 0, num_chunks: int | None = None) -> Offsets:
        """Where the chunks begin that hold part of a sequence: see `numbers` and `offsets`."""
        return self.offsets(self.numbers(blocks, first_chunk, num_chunks))

    def pieces_of(self, chunks: Offsets, layers: range) -> Offsets:
        """[chunks, layers, pieces] where every piece of these chunks begins in every layer."""
        of_all = chunks[:, None] + np.arange(layers.start, layers.stop, dtype=np.int64) * self.region_bytes
        return of_all[..., None] if len(self.pieces) == 1 else np.add.outer(of_all, self.pieces)


@dataclass(frozen=True, slots=True, eq=False)
class Pairing:
    """Two layouts between which blocks can travel as plain copies. Made by `pair`."""

    source: End
    target: End
    chunk_tokens: int
    piece_bytes: int

    @property
    def layers(self) -> range:
        """The model's layers, which both pools hold."""
        return range(self.source.layout.num_layers)

    @property
    def pieces_per_chunk(self) -> int:
        return len(self.source.pieces)

    @property
    def chunk_bytes(self) -> int:
        return self.pieces_per_chunk * self.piece_bytes

    def num_chunks(self, num_tokens: int) -> int:
        """Chunks that hold so many tokens: the last one may be partly empty."""
        return -(-num_tokens // self.chunk_tokens)

    def wanted(self, first_block: int, num_tokens: int) -> tuple[int, int]:
        """(how many chunks of so many tokens must travel, the first of them): the target lacks blocks from
        `first_block` on.
        """
        first = first_block * self.target.chunks_per_block
        return max(self.num_chunks(num_tokens) - first, 0), first

    def copies(self, source_chunks: Offsets, target_chunks: Offsets, layers: range) -> CopyList:
        """Copies that bring each source chunk to the target chunk beside it, in every layer of `layers`.

        Bytes land chunk by chunk in the order given, of each layer after layer. Sorted by source there are fewest
        copies: then no two could be merged (but see _MANY_PIECES). Raises ValueError on unequal lists or layers
        that do not exist.
        """
        if len(source_chunks) != len(target_chunks):
            raise ValueError(f"{len(source_chunks)} chunks cannot go to {len(target_chunks)}")
        if layers and not (layers[0] in self.layers and layers[-1] in self.layers):
            raise ValueError(f"layers {layers} are not among {self.layers}")
        source = self.source.pieces_of(source_chunks, layers).ravel()
        target = self.target.pieces_of(target_chunks, layers).ravel()
        if self.pieces_per_chunk > _MANY_PIECES:
            return CopyList(source, target, np.full(len(source), self.piece_bytes))
        return CopyList(*self._merged(source, target))

    def _merged(self, source: Offsets, target: Offsets) -> tuple[Offsets, Offsets, Offsets]:
        """Neighbours at both ends become one copy."""
        size = self.piece_bytes
        joins = (source[1:] - source[:-1] == size) & (target[1:] - target[:-1] == size)
        if not joins.any():
            return source, target, np.full(len(source), size, dtype=np.int64)
        starts = np.flatnonzero(np.concatenate((_ONE, ~joins)))
        return source[starts], target[starts], np.diff(starts, append=len(source)) * size


@functools.lru_cache(maxsize=1024)
def pair(source: KvLayout, target: KvLayout) -> Pairing:
    """How blocks of `source` lie in `target`, in the source's dtype, which is what travels.

    Raises LayoutMismatch naming the field that forbids plain copies.
    """
    for field in ("is_latent", "head_dim", "num_kv_heads", "num_layers"):
        ours, theirs = getattr(source, field), getattr(target, field)
        if ours != theirs:
            raise LayoutMismatch(field, f"{ours} at the source, {theirs} at the target: not the same model")
    large, small = sorted((source.block_size, target.block_size), reverse=True)
    if large % small:
        raise LayoutMismatch("block_size", f"{small} tokens do not divide {large}")
    target = dataclasses.replace(target, dtype=source.dtype)
    heads_first = source.order == target.order == "HND"
    dims = [_dims(layout, small, heads_first=heads_first) for layout in (source, target)]
    length, left = source.row_bytes, len(dims[0])
    while left and _goes_on([sides[left - 1] for sides in dims], length):
        left -= 1
        length *= dims[0][left][0]
    begins, lands = (_end(layout, small, outer[:left]) for layout, outer in zip((source, target), dims, strict=True))
    return Pairing(begins, lands, small, length)


def _goes_on(dim: list[tuple[int, int]], length: int) -> bool:
    """Whether a run of `length` bytes at both ends goes on through this dimension, (count, stride) at each."""
    return dim[0][0] == 1 or all(stride == length for _, stride in dim)


def _strides(layout: KvLayout) -> tuple[int, int, int]:
    """Bytes from one part (K, V), token and head to the next."""
    row = layout.row_bytes
    part = layout.block_size * layout.num_kv_heads * row
    return (part, layout.num_kv_heads * row, row) if layout.order == "NHD" else (part, row, layout.block_size * row)


def _dims(layout: KvLayout, chunk_tokens: int, *, heads_first: bool) -> list[tuple[int, int]]:
    """(count, stride) of a chunk's dimensions outside of a head's vector, outermost first, in the order of its
    pieces.
    """
    part, token, head = _strides(layout)
    tokens, heads = (chunk_tokens, token), (layout.num_kv_heads, head)
    return [(layout.num_parts, part), heads, tokens] if heads_first else [(layout.num_parts, part), tokens, heads]


def _end(layout: KvLayout, chunk_tokens: int, outer: list[tuple[int, int]]) -> End:
    pieces = np.zeros(1, dtype=np.int64)
    for count, stride in outer:
        pieces = np.add.outer(pieces, np.arange(count, dtype=np.int64) * stride).ravel()
    pieces.setflags(write=False)  # shared by all users of this pair
    stride, each = chunk_tokens * _strides(layout)[1], layout.block_size // chunk_tokens
    return End(layout, each, stride, pieces, layout.region_bytes, layout.block_bytes)


def cut(num_blocks: int, layers: range, region_bytes: int, limit_bytes: int) -> Iterator[tuple[slice, range]]:
    """Cut blocks x layers into pieces of at most `limit_bytes` (but at least one region).

    The layers of a block, which are one run, stay together where they fit; a long request yields its turn now and then.
    """
    group = max(limit_bytes // region_bytes, 1)
    for first in range(layers.start, layers.stop, group):
        some = range(first, min(first + group, layers.stop))
        step = max(limit_bytes // (region_bytes * len(some)), 1)
        for start in range(0, num_blocks, step):
            yield slice(start, min(start + step, num_blocks)), some
