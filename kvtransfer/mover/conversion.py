"""Conversion: chunks that arrived in a staging pool of another dtype, cast into the pool that they are for.

The target casts: the wire carries the source's dtype. torch is imported when something is converted. Rounding is to
nearest, ties to even; widening is exact. fp8 gets a new scale for each vector.
"""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from kvrelay.kvtransfer.plans.copy_plan import Offsets, Overlap, overlap
from kvrelay.types import ITEM_BYTES, SCALE_BYTES, KvMemory

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = {"float16": 65504.0}  # of dtypes with a smaller range than the others
_WORDS = {4: "int32", 2: "int16", 1: "uint8"}


def convert(
    source: KvMemory,
    source_chunks: Offsets,
    target: KvMemory,
    target_chunks: Offsets,
    layers: range,
    *,
    chunk_tokens: int | None = None,
) -> None:
    """Cast every source chunk into the target chunk beside it, in `layers`: the heads that both pools hold, in any
    order.

    Args:
        source_chunks, target_chunks: [n] numbers, as of plans.End.numbers.
        layers: the model's numbers.
        chunk_tokens: what the numbers count in, where that is smaller than the smaller block.

    Values beyond the target's range become its largest; NaN stays NaN. Raises LayoutMismatch.
    """
    both = overlap(source.layout, target.layout)
    if chunk_tokens is not None:
        both = dataclasses.replace(both, chunk_tokens=chunk_tokens)
    taken, put = _chunks_of(source, both), _chunks_of(target, both)
    from_block, from_place = (index.to(taken.device) for index in _places(source_chunks, taken))
    to_block, to_place = (index.to(put.device) for index in _places(target_chunks, put))
    for layer in layers:
        words = taken[layer - source.layout.first_layer, from_block, :, from_place]
        words = _cast(words, source.layout.dtype, target.layout.dtype)
        put[layer - target.layout.first_layer, to_block, :, to_place] = words


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


def _chunks_of(memory: KvMemory, both: Overlap) -> "Tensor":
    """[layers, blocks, parts, chunks per block, chunk_tokens, heads, head_dim] view of a pool, its heads in common.

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
    first = both.heads.start - layout.first_kv_head
    chunks: Tensor = blocks.unflatten(3, (-1, both.chunk_tokens))
    return chunks[..., first : first + len(both.heads), :]
