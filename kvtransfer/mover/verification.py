"""What a read brings, where that lands (cast, where the pools' dtypes differ), and checksums that prove it.

Host memory: xxh3-64 (mover.py). CUDA memory: a position-weighted 64-bit sum computed on the device, so that no KV
crosses PCIe for it (device_checksums.py). Both ends must use the same kind; the kind follows from where the
pool lies and is compared when they connect. A chunk may lie in several pieces: both ends hash the same bytes in the
same order.
"""

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvrelay.errors import CorruptRead
from kvrelay.kvtransfer.mover.copy_plan import TURN_BYTES, CopyList, Offsets, cut, pair
from kvrelay.kvtransfer.mover.mover import INLINE_BYTES, MoverThread, NativeMove, Receipt, hash_in_place, xxh3_chunks
from kvrelay.types import ITEM_BYTES, SCALE_BYTES, KvLayout, KvMemory

if TYPE_CHECKING:
    from torch import Tensor

Checksums = NDArray[np.uint64]
Chosen = NDArray[np.bool_]
SAMPLED_SHARE = 0.1  # of the regions that `transfer.checks: sampled` verifies; equal at both ends
_STAGING_BYTES = 8 << 20  # at least a block
_LARGEST = {"float16": 65504.0}  # of dtypes with a smaller range than the others
_WORDS = {4: "int32", 2: "int16", 1: "uint8"}


# ---- checksums


def kind_of(memory: KvMemory, checks: str) -> str:
    """Which checksums this pool makes under `settings.checks`: "xxh3", "sum64" or "off"."""
    if checks == "off":
        return "off"
    return "sum64" if memory.view is None else "xxh3"


def unpack(data: bytes) -> Checksums:
    """Little-endian u64 of a message. Raises ValueError when `data` is no whole number of them."""
    return np.frombuffer(data, dtype="<u8")


def checksums_of(memory: KvMemory, pieces: Offsets, piece_bytes: int) -> Checksums:
    """One checksum per chunk.

    Args:
        pieces: [num_chunks, pieces_per_chunk] where each piece begins, bytes from the pool's base.
    """
    if memory.view is not None:
        return xxh3_chunks(memory.view, pieces, piece_bytes)
    from kvrelay.kvtransfer.mover.device_checksums import device_checksums  # torch, where it is loaded anyway

    return device_checksums(memory.owner, pieces, piece_bytes)


class PoolChecksums:
    """Checksums of one pool, off the loop where they take long. Used on one loop."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory, self._mover = memory, MoverThread()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-checksums")  # where there is no mover
        self.seconds = 0.0  # spent so far

    async def packed(self, pieces: Offsets, piece_bytes: int) -> bytes:
        """Of chunks whose pieces begin at `pieces`, [num_chunks, pieces_per_chunk]; as `unpack` reads them."""
        began = time.perf_counter()
        if pieces.size * piece_bytes <= INLINE_BYTES and self._memory.view is not None:
            values = checksums_of(self._memory, pieces, piece_bytes)
        else:
            values = await self._on_thread(pieces, piece_bytes)
        self.seconds += time.perf_counter() - began
        return values.astype("<u8", copy=False).tobytes()

    async def _on_thread(self, pieces: Offsets, piece_bytes: int) -> Checksums:
        loop = asyncio.get_running_loop()
        if self._memory.view is None:
            return await loop.run_in_executor(self._thread, checksums_of, self._memory, pieces, piece_bytes)
        receipt = Receipt(pieces, piece_bytes)
        hashing = hash_in_place(self._memory.view, receipt)
        if isinstance(hashing, NativeMove) and MoverThread.can_be():
            await self._mover.submit(hashing)
        else:
            await loop.run_in_executor(self._thread, hashing.run)
        return receipt.found

    async def aclose(self) -> None:
        await self._mover.aclose()
        self._thread.shutdown(wait=False)


def chosen_regions(nonce: bytes, num_blocks: int, num_layers: int) -> Chosen:
    """[num_blocks, num_layers]: about SAMPLED_SHARE of all regions, and at least one in every block.

    Drawn from the ticket's nonce, so that no region is the one that is never looked at.
    """
    num_regions = num_blocks * num_layers
    drawn = hashlib.shake_128(nonce).digest(num_regions + 2 * num_blocks)
    chosen = np.frombuffer(drawn, np.uint8, num_regions).reshape(num_blocks, num_layers) < round(256 * SAMPLED_SHARE)
    chosen[np.arange(num_blocks), np.frombuffer(drawn, "<u2", offset=num_regions) % num_layers] = True
    return chosen


# ---- where a source's chunks land


class ReceivePlan:
    """How one source's chunks come into `pool`. Made once for each connection. Raises LayoutMismatch.

    Equal dtypes: reads go straight into the pool. Unequal ones: into a staging buffer, a few blocks like the pool's but
    of the source's dtype, and are cast from there once they have been verified.
    """

    def __init__(self, source: KvLayout, pool: KvMemory) -> None:
        self.source, self.pool = source, pool
        self.pairing = pair(source, pool.layout)
        self.staging: KvMemory | None = None
        self.max_chunks = 0  # that the staging buffer holds
        self.turn_bytes = TURN_BYTES  # about what one read brings; the transport's own, once that is known
        # the source never casts: it would need a staging pool of its own, which every transport exports
        if source.dtype != pool.layout.dtype:
            like_pool = self.pairing.target.layout
            num_blocks = max(_STAGING_BYTES // like_pool.block_bytes, 1)
            self.staging = _staging_memory(pool, dataclasses.replace(like_pool, num_blocks=num_blocks))
            self.max_chunks = num_blocks * self.pairing.target.chunks_per_block

    @property
    def layers(self) -> range:
        """The model's layers."""
        return self.pairing.layers

    @property
    def memory(self) -> KvMemory:
        """What reads write: the pool, or the staging buffer."""
        return self.pool if self.staging is None else self.staging

    def units(self, num_chunks: int, layers: range) -> Iterator[tuple[slice, range]]:
        """Chunks x layers in pieces for one read each."""
        size = self.pairing.chunk_bytes
        limit = self.turn_bytes if self.staging is None else self.max_chunks * len(layers) * size
        return cut(num_chunks, layers, size, limit)

    def read(self, source_chunks: Offsets, target_chunks: Offsets, layers: range) -> tuple[CopyList, Offsets]:
        """The read that brings these chunks, by their numbers: into their places, or into the staging buffer's first.

        Returns the copies, and [num_chunks * layers, pieces_per_chunk] where each piece lands, in the order of the
        copies.
        """
        pairing = self.pairing
        if self.staging is not None:
            target_chunks = np.arange(len(source_chunks), dtype=np.int64)
        begins, lands = pairing.source.offsets(source_chunks), pairing.target.offsets(target_chunks)
        pieces = pairing.target.pieces_of(lands, layers).reshape(-1, pairing.pieces_per_chunk)
        return pairing.copies(begins, lands, layers), pieces

    def settle(self, target_chunks: Offsets, layers: range) -> None:
        """Cast what lies in the staging buffer into its places. On a thread."""
        assert self.staging is not None
        staged, tokens = np.arange(len(target_chunks), dtype=np.int64), self.pairing.chunk_tokens
        convert(self.staging, staged, self.pool, target_chunks, layers, chunk_tokens=tokens)


def _staging_memory(pool: KvMemory, layout: KvLayout) -> KvMemory:
    """Room for `layout` on the pool's device."""
    import torch

    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=pool.device)
    view = None if pool.view is None else buffer.numpy().data
    return KvMemory(layout, buffer.data_ptr(), pool.device, None, view, buffer)


# ---- what arrives


class ArrivingRead:
    """Verifies a read on the thread that reads, while the bytes are in its caches: call it with the bytes that are in
    place so far, or let a mover fill in its receipt and settle that.

    Chunks are in the order in which the read copies them.

    Args:
        memory: what the read writes.
        pieces: [num_chunks, pieces_per_chunk] where each piece lands, bytes from the memory's base.
        expected: [num_chunks] what they must hash to; None: nothing is verified.
        is_checked: [num_chunks] which of them to verify; None: all.
    """

    def __init__(
        self,
        memory: KvMemory,
        pieces: Offsets,
        piece_bytes: int,
        expected: Checksums | None,
        is_checked: NDArray[np.bool_] | None = None,
    ) -> None:
        self.memory, self.pieces, self.piece_bytes = memory, pieces, piece_bytes
        self._expected, self._is_checked = expected, is_checked
        self._num_done = self._num_landed = 0
        self._check_s = 0.0
        self._receipt: Receipt | None = None

    @property
    def chunk_bytes(self) -> int:
        return int(self.pieces.shape[1]) * self.piece_bytes

    @property
    def num_landed(self) -> int:
        """Bytes so far: a slow read makes progress, a stuck one does not."""
        return self._num_landed if self._receipt is None else self._receipt.num_landed

    @property
    def check_s(self) -> float:
        """Seconds spent verifying, but for what is hashed in the pass that copies it."""
        return self._check_s if self._receipt is None else self._receipt.hash_s

    def receipt(self) -> Receipt | None:
        """What a mover is to fill in; None where it must be called instead: the memory is a GPU's."""
        if self.memory.view is None:
            return None
        if self._expected is None:
            self._receipt = Receipt()
        else:
            self._receipt = Receipt(self.pieces, self.piece_bytes, self._is_checked)
        return self._receipt

    def settle(self, receipt: Receipt) -> None:
        """The read that filled in `receipt` is over. Raises CorruptRead, naming the first wrong chunk."""
        if self._expected is None or bytes(receipt.hashes) == self._expected.tobytes():
            return
        is_wrong = receipt.found != self._expected
        if self._is_checked is not None:
            is_wrong &= self._is_checked
        self.refuse(np.flatnonzero(is_wrong))

    def __call__(self, num_bytes: int) -> None:
        """Raises CorruptRead, naming the first wrong chunk by its index."""
        first, stop = self._num_done, num_bytes // self.chunk_bytes
        self._num_landed, self._num_done = num_bytes, stop
        if self._expected is None or stop <= first:
            return
        began = time.perf_counter()
        index = np.arange(first, stop)
        if self._is_checked is not None:
            index = index[self._is_checked[index]]
        self.refuse(index[checksums_of(self.memory, self.pieces[index], self.piece_bytes) != self._expected[index]])
        self._check_s += time.perf_counter() - began

    def refuse(self, wrong: NDArray[np.intp]) -> None:
        """These chunks have other checksums than expected. Raises CorruptRead when there are any."""
        if len(wrong):
            raise CorruptRead(len(wrong), int(wrong[0]))


# ---- conversion: the wire carries the source's dtype, and the target casts


def convert(
    source: KvMemory,
    source_chunks: Offsets,
    target: KvMemory,
    target_chunks: Offsets,
    layers: range,
    *,
    chunk_tokens: int,
) -> None:
    """Cast every chunk of a source into the chunk beside it of a target, in these layers.

    Args:
        source_chunks, target_chunks: [n] numbers, as of copy_plan.End.numbers.

    Rounds to nearest, ties to even; fp8 gets a new scale for each vector. Values beyond the target's range become its
    largest; NaN stays NaN.
    """
    taken, put = _chunks_of(source, chunk_tokens), _chunks_of(target, chunk_tokens)
    from_block, from_place = (index.to(taken.device) for index in _places(source_chunks, taken))
    to_block, to_place = (index.to(put.device) for index in _places(target_chunks, put))
    some = slice(layers.start, layers.stop)
    words = taken[from_block, some, :, from_place]
    put[to_block, some, :, to_place] = _cast(words, source.layout.dtype, target.layout.dtype)


def _cast(words: "Tensor", source: str, target: str) -> "Tensor":
    """The same numbers in another dtype, bit patterns in and out. [..., row_bytes / itemsize] each."""
    import torch

    from kvrelay import fp8

    if source == target:
        return words
    values = fp8.decoded(words) if source in SCALE_BYTES else words.view(getattr(torch, source)).float()  # exact
    if target in SCALE_BYTES:
        return fp8.encoded(values)
    if target in _LARGEST:
        values = values.clamp(-_LARGEST[target], _LARGEST[target])
    cast: Tensor = values.to(getattr(torch, target)).view(getattr(torch, _WORDS[ITEM_BYTES[target]]))
    return cast


def _places(chunks: Offsets, view: "Tensor") -> "tuple[Tensor, Tensor]":
    import torch

    block, place = np.divmod(np.asarray(chunks, dtype=np.int64), view.shape[3])
    return torch.from_numpy(block), torch.from_numpy(place)


def _chunks_of(memory: KvMemory, chunk_tokens: int) -> "Tensor":
    """[blocks, layers, parts, chunks per block, chunk_tokens, heads, head_dim] view of a pool.

    As integers of the dtype's width, since torch cannot index every dtype; scales stand behind the numbers.
    """
    import torch

    layout = memory.layout
    whole = memory.owner if isinstance(memory.owner, torch.Tensor) else torch.frombuffer(memory.view, dtype=torch.uint8)
    words: Tensor = whole.view(torch.uint8).reshape(-1).view(getattr(torch, _WORDS[layout.itemsize]))
    inner = (layout.block_size, layout.num_kv_heads)
    sizes = inner if layout.order == "NHD" else inner[::-1]
    blocks: Tensor = words.view(layout.num_blocks, layout.num_layers, layout.num_parts, *sizes, -1)
    blocks = blocks if layout.order == "NHD" else blocks.transpose(3, 4)
    chunks: Tensor = blocks.unflatten(3, (-1, chunk_tokens))
    return chunks
