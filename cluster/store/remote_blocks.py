"""A caller's blocks on their way to and from the cluster's store: their buffers, and their encoding in transit."""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kvrelay.kvcache.stores.codecs import Codec, CodecError
from kvrelay.kvcache.stores.store import BlockMeta
from kvrelay.kvtransfer.mover.mover import xxh3_regions
from kvrelay.kvtransfer.slabs.messages import BlockOffer
from kvrelay.types import KvMemory

logger = logging.getLogger(__name__)

STAGED, IN_PLACE = 0, 1  # a client's slabs: its own staging, and the caller's


@dataclass(frozen=True, slots=True)
class BlockBuffer:
    """One block of a call: its key in the store and its local bytes."""

    key: bytes
    view: memoryview
    offset: int | None  # in the caller's slab; None: it is staged
    meta: BlockMeta | None = None
    parent: bytes = b""  # the key of the block before it


def offset_in(memory: KvMemory, view: memoryview) -> int | None:
    """Byte offset of the view in this memory; None when it is not entirely inside."""
    address = np.frombuffer(view, dtype=np.uint8).ctypes.data
    offset = int(address - memory.address)
    return offset if offset >= 0 and offset + view.nbytes <= memory.layout.num_bytes else None


def cut_in_batches(buffers: Sequence[BlockBuffer], max_bytes: int, max_staged: int) -> Iterator[list[int]]:
    """Batches of indices, in order: each at most `max_bytes` (or one block) and `max_staged` staged blocks."""
    batch: list[int] = []
    num_bytes = num_staged = 0
    for index, buffer in enumerate(buffers):
        is_staged = buffer.offset is None
        if batch and (num_bytes + buffer.view.nbytes > max_bytes or num_staged + is_staged > max_staged):
            yield batch
            batch, num_bytes, num_staged = [], 0, 0
        batch.append(index)
        num_bytes += buffer.view.nbytes
        num_staged += is_staged
    if batch:
        yield batch


class BlockStager:
    """Encodes and checksums blocks for others to read, and decodes received ones. Methods block."""

    def __init__(self, staging: KvMemory, memory: KvMemory | None, codec: Codec) -> None:
        assert staging.view is not None
        self._staging, self._memory, self._codec = staging.view, memory, codec
        self._keeps_checksums = codec.name == "none"

    def offers(self, buffers: Sequence[BlockBuffer], cells: Mapping[int, int]) -> list[BlockOffer | None]:
        """Offers of these blocks, checksums included; None: cannot be encoded. `cells`: staging offsets, by index."""
        bare = [self._offer(buffer, cells.get(i, 0)) for i, buffer in enumerate(buffers)]
        groups: defaultdict[tuple[bool, int], list[int]] = defaultdict(list)
        for i, offer in enumerate(bare):
            if offer is not None and not offer.checksum:
                groups[buffers[i].offset is None, offer.num_bytes].append(i)
        for (is_staged, num_bytes), chosen in groups.items():
            view = self._staging if is_staged or self._memory is None else self._memory.view
            assert view is not None
            offsets = np.array([offer.offset for i in chosen if (offer := bare[i])], dtype=np.int64)
            for i, found in zip(chosen, xxh3_regions(view, offsets, num_bytes).tolist(), strict=True):
                if (offer := bare[i]) is not None:
                    bare[i] = msgspec.structs.replace(offer, checksum=found)
        return bare

    def _offer(self, buffer: BlockBuffer, cell: int) -> BlockOffer | None:
        offset, num_bytes, meta = cell, buffer.view.nbytes, buffer.meta or BlockMeta(None, 0)
        checksum = meta.checksum if self._keeps_checksums else None
        if buffer.offset is not None:
            offset = buffer.offset
        else:
            try:
                data = self._codec.encode(buffer.view.cast("B"))
            except CodecError as error:
                logger.warning("a block is not stored in the cluster: %s", error)
                return None
            num_bytes = data.nbytes
            self._staging[cell : cell + num_bytes] = data
        return BlockOffer(
            key=buffer.key,
            offset=offset,
            num_bytes=num_bytes,
            checksum=checksum or 0,
            parent=buffer.parent,
            end_tokens=meta.end_tokens,
            priority=meta.priority,
            tenant=meta.tenant,
        )

    def arrived(self, buffer: BlockBuffer, cell: int, num_bytes: int) -> bool:
        """Decode a staged block into the caller's buffer."""
        try:
            self._codec.decode(self._staging[cell : cell + num_bytes], buffer.view.cast("B"))
        except CodecError as error:
            logger.warning("a block of the cluster's store cannot be decoded: %s", error)
            return False
        return True
