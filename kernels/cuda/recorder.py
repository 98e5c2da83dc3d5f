"""Replacements of the CUDA backend's attention while a forward pass is captured in pieces: see graph_pieces.py.

UNVERIFIED ON A GPU.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvrelay.kernels.backend import AttentionVariant


@dataclass(frozen=True, slots=True)
class Call:
    """One layer's attention: q, k, v as the graph before it leaves them, padding included."""

    q: Tensor
    k: Tensor
    v: Tensor
    kv_layer: Tensor
    variant: AttentionVariant


class Recorder:
    """Takes the calls of a backend's attention while a forward pass is captured.

    out: [size, heads, head_dim], the buffer for the result of every attention call. pool: of the graphs' memory; None:
    a rehearsal captures nothing, to create lazy library handles, which is impossible during capture.
    """

    def __init__(self, out: Tensor, pool: Any) -> None:
        self.out, self._pool = out, pool
        self.graphs: list[Any] = []
        self.calls: list[Call] = []
        self._stored: tuple[Tensor, Tensor] | None = None
        self._capturing: Any = None

    def begin(self) -> None:
        if self._pool is None:
            return
        self._capturing = torch.cuda.CUDAGraph()
        # thread_local: threads that move KV may use the device meanwhile
        self._capturing.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        """End the open graph, if any."""
        if self._capturing is not None:
            graph, self._capturing = self._capturing, None
            graph.capture_end()
            self.graphs.append(graph)

    def store(self, k: Tensor, v: Tensor) -> None:
        self._stored = k, v

    def attend(self, q: Tensor, kv_layer: Tensor, variant: AttentionVariant) -> Tensor:
        q = q.contiguous()
        self.end()
        assert self._stored is not None, "keys are stored before they are attended to"
        (k, v), self._stored = self._stored, None
        self.calls.append(Call(unowned(q), unowned(k), unowned(v), kv_layer, variant))
        self.begin()
        return self.out


def unowned(x: Tensor) -> Tensor:
    """x, on a GPU without owning its memory: later graphs of the pool may reuse it."""
    return alias_of(x) if x.device.type == "cuda" else x


def alias_of(x: Tensor) -> Tensor:
    """A tensor with the same memory, shape and strides that does not own the memory: the caller ensures that it
    stays.
    """
    storage = x.untyped_storage()
    again = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), x.device, storage.nbytes())
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(again, x.storage_offset(), x.shape, x.stride())
