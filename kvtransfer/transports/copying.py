"""Copies between two maps of host memory: what loopback and shm do for a read.

Both ways let go of the interpreter lock while bytes move, so that the engine's thread runs on.
"""

import ctypes

import numpy as np
from numpy.typing import NDArray

from kvrelay.kvtransfer.plans import CopyList

Bytes = NDArray[np.uint8]
INLINE_BYTES = 128 << 10  # less than this is copied faster than a thread is woken


def copy_all(source: Bytes, target: Bytes, copies: CopyList) -> None:
    """Carry out `copies`; bounds have been checked. `source`, `target`: whole pools, [num_bytes]."""
    if copies.repeats > 1 and _is_layered(source, target, copies):
        _copy_layers(source, target, copies)
    else:
        _copy_each(source, target, copies)


def _is_layered(source: Bytes, target: Bytes, copies: CopyList) -> bool:
    return (
        len(source) % max(copies.source_stride, 1) == 0
        and len(target) % max(copies.target_stride, 1) == 0
        and copies.source_stride > 0
        and copies.target_stride > 0
    )


def _copy_layers(source: Bytes, target: Bytes, copies: CopyList) -> None:
    """One strided copy per run of blocks moves that run in every layer."""
    from_layers = source.reshape(-1, copies.source_stride)
    to_layers = target.reshape(-1, copies.target_stride)
    source_layer, source_column = np.divmod(copies.source_offset, copies.source_stride)
    target_layer, target_column = np.divmod(copies.target_offset, copies.target_stride)
    rows = (source_layer, source_column, target_layer, target_column, copies.num_bytes)
    for s_layer, s_column, t_layer, t_column, size in zip(*(row.tolist() for row in rows), strict=True):
        to_layers[t_layer : t_layer + copies.repeats, t_column : t_column + size] = from_layers[
            s_layer : s_layer + copies.repeats, s_column : s_column + size
        ]


def _copy_each(source: Bytes, target: Bytes, copies: CopyList) -> None:
    from_base, to_base = source.ctypes.data, target.ctypes.data
    offsets = copies.expanded()
    move = ctypes.memmove
    for s_offset, t_offset, size in zip(*(row.tolist() for row in offsets), strict=True):
        move(to_base + t_offset, from_base + s_offset, size)
