"""Conversion: chunks that arrived in a staging pool of another dtype, cast into the pool that they are for.

The target casts: the wire carries the source's dtype. torch is imported when something is converted. Rounding is to
nearest, ties to even; widening is exact. fp8 gets a new scale for each vector.
"""

from typing import TYPE_CHECKING

import numpy as np

from kvrelay.kvtransfer.mover.copy_plan import Offsets
from kvrelay.types import ITEM_BYTES, SCALE_BYTES, KvMemory

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = {"float16": 65504.0}  # of dtypes with a smaller range than the others
_WORDS = {4: "int32", 2: "int16", 1: "uint8"}


def convert(
    source: KvMemory,
    source_chunks: Offsets,
    source_layer: int,
    target: KvMemory,
    target_chunks: Offsets,
    target_layer: int,
    *,
    chunk_tokens: int,
) -> None:
    """Cast every chunk of a source's layer into the chunk beside it of a target's layer.

    Args:
        source_chunks, target_chunks: [n] numbers, as of copy_plan.End.numbers.

    Values beyond the target's range become its largest; NaN stays NaN.
    """
    taken, put = _chunks_of(source, chunk_tokens), _chunks_of(target, chunk_tokens)
    from_block, from_place = (index.to(taken.device) for index in _places(source_chunks, taken))
    to_block, to_place = (index.to(put.device) for index in _places(target_chunks, put))
    words = taken[source_layer, from_block, :, from_place]
    put[target_layer, to_block, :, to_place] = _cast(words, source.layout.dtype, target.layout.dtype)


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
    """[layers, blocks, parts, chunks per block, chunk_tokens, heads, head_dim] view of a pool.

    As integers of the dtype's width, since torch cannot index every dtype; scales stand behind the numbers.
    """
    import torch

    layout = memory.layout
    whole = memory.owner if isinstance(memory.owner, torch.Tensor) else torch.frombuffer(memory.view, dtype=torch.uint8)
    words: Tensor = whole.view(torch.uint8).reshape(-1).view(getattr(torch, _WORDS[layout.itemsize]))
    inner = (layout.block_size, layout.num_kv_heads)
    sizes = inner if layout.order == "NHD" else inner[::-1]
    blocks: Tensor = words.view(layout.num_layers, layout.num_blocks, layout.num_parts, *sizes, -1)
    blocks = blocks if layout.order == "NHD" else blocks.transpose(3, 4)
    chunks: Tensor = blocks.unflatten(3, (-1, chunk_tokens))
    return chunks
