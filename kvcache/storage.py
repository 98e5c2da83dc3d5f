"""The memory behind a pool: one allocation, never moved, shareable between processes on CPU."""

import mmap
import os

import torch
from torch import Tensor

from kvrelay.types import KvLayout, KvMemory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KvStorage:
    """One worker's KV tensors.

    `layers[i]`: [num_blocks, 2, block_size, num_kv_heads, head_dim], views of one buffer whose
    layout is `memory.layout` (with order "HND" they are not contiguous). On CPU the buffer is an anonymous shared file (memfd), which the
    kernel frees with its last user, so that kill -9 leaves nothing behind.
    """

    def __init__(self, layout: KvLayout, device: torch.device) -> None:
        dtype = DTYPES[layout.dtype]
        inner = (
            (layout.block_size, layout.num_kv_heads)
            if layout.order == "NHD"
            else (layout.num_kv_heads, layout.block_size)
        )
        shape = (layout.num_layers, layout.num_blocks, layout.num_parts, *inner, layout.head_dim)
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
        self.layers: list[Tensor] = list((tensor if layout.order == "NHD" else tensor.transpose(3, 4)).unbind(0))
        name = "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"
        self.memory = KvMemory(layout, tensor.data_ptr(), name, memfd, view, tensor)
