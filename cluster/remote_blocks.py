"""Where a caller's blocks lie, and how many of them go into one request. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvrelay.kvcache.store import BlockMeta
from kvrelay.types import KvMemory


@dataclass(frozen=True, slots=True)
class Spot:
    """One block of a call: its key in the store and its bytes here."""

    key: bytes
    view: memoryview
    offset: int | None  # in the caller's slab; None: it lies elsewhere
    meta: BlockMeta | None = None


def offset_in(memory: KvMemory, view: memoryview) -> int | None:
    """How far into this memory the view begins; None when it is not all inside."""
    address = np.frombuffer(view, dtype=np.uint8).ctypes.data
    offset = int(address - memory.address)
    return offset if offset >= 0 and offset + view.nbytes <= memory.layout.num_bytes else None


def cut_in_batches(spots: Sequence[Spot], max_bytes: int, max_staged: int) -> Iterator[list[int]]:
    """Indices, in order: at most so many bytes together (but at least one block), and so many that must be staged."""
    batch: list[int] = []
    num_bytes = num_staged = 0
    for index, spot in enumerate(spots):
        is_staged = spot.offset is None
        if batch and (num_bytes + spot.view.nbytes > max_bytes or num_staged + is_staged > max_staged):
            yield batch
            batch, num_bytes, num_staged = [], 0, 0
        batch.append(index)
        num_bytes += spot.view.nbytes
        num_staged += is_staged
    if batch:
        yield batch
