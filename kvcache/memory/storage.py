"""The memory behind a pool: one allocation, never moved, shareable between processes on CPU."""

import mmap
import os
from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from kvrelay import fp8
from kvrelay.types import BlockId, KvLayout, KvMemory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = DTYPES | {"fp8_e4m3": torch.float8_e4m3fn}


class KvStorage:
    """One worker's KV tensors.

    `layers[i]`: [num_blocks, 2, block_size, num_kv_heads, head_dim], views of one buffer with layout `memory.layout`:
    a layer's blocks lie a whole block apart, and with order "HND" heads before tokens. Latent KV has one part instead
    of two. With dtype "fp8_e4m3" they are bytes, and the last dimension is head_dim + 4: see fp8.py. On CPU the buffer
    is an anonymous shared file (memfd), which the kernel frees with its last user, so kill -9 leaves nothing behind.
    """

    def __init__(self, layout: KvLayout, device: torch.device) -> None:
        dtype = DTYPES.get(layout.dtype, torch.uint8)
        inner = (
            (layout.block_size, layout.num_kv_heads)
            if layout.order == "NHD"
            else (layout.num_kv_heads, layout.block_size)
        )
        shape = (layout.num_blocks, layout.num_layers, layout.num_parts, *inner, layout.row_bytes // layout.itemsize)
        view: memoryview | None = None
        memfd: int | None = None
        if device.type == "cpu":
            memfd = os.memfd_create("kvrelay-pool", os.MFD_CLOEXEC)
            os.ftruncate(memfd, layout.num_bytes)
            mapping = mmap.mmap(memfd, layout.num_bytes)
            view = memoryview(mapping)
            tensor = torch.frombuffer(mapping, dtype=dtype).view(shape)
        else:
            tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.tensor = tensor
        self.layers: list[Tensor] = list((tensor if layout.order == "NHD" else tensor.transpose(3, 4)).unbind(1))
        name = "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"
        self.memory = KvMemory(layout, tensor.data_ptr(), name, memfd, view, tensor)

    def copy_blocks(self, copies: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy whole blocks, all layers: pairs of (source, target), in order. On CUDA: on the current stream."""
        for source, target in copies:
            self.tensor[target] = self.tensor[source]

    def sums(self, blocks: Sequence[int]) -> list[int]:
        """Checksums of whole blocks, all layers, in host memory."""
        view, size = self.memory.view, self.memory.layout.block_bytes
        assert view is not None
        return [xxhash.xxh3_64_intdigest(view[block * size : (block + 1) * size]) for block in blocks]

    def fill_with_noise(self, blocks: Sequence[BlockId]) -> None:
        """Random numbers in every layer of these blocks, since untouched pages copy faster than real ones.

        Finite, since attention multiplies masked values by zero. No two regions are equal. Done on return.
        """
        if not blocks:
            return
        layout, row = self.memory.layout, self.tensor.shape[-1]
        layers, region = layout.num_layers, self.tensor[0, 0].numel()
        generator = torch.Generator(self.tensor.device)
        generator.seed()
        noise = torch.empty(region // row + layers * len(blocks), layout.head_dim, device=self.tensor.device)
        noise = fp8.stored(noise.uniform_(-1.0, 1.0, generator=generator), self.tensor.dtype).flatten()
        windows = noise.unfold(0, region, row)  # each region starts one row later: random numbers are expensive
        for index, block in enumerate(blocks):
            some = windows[index * layers : (index + 1) * layers]
            self.tensor[block] = some.unflatten(1, self.tensor.shape[2:])
        if self.tensor.device.type == "cuda":
            torch.cuda.synchronize(self.tensor.device)
