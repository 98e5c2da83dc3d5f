"""Ids and small frozen records that every part shares. No behaviour beyond arithmetic."""

import enum
from dataclasses import dataclass
from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)  # 16 bytes, chained: see hashing.py


class Role(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(enum.StrEnum):
    STOP = "stop"  # eos, a stop id, or a stop string
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How a pool's KV lies in memory: [num_layers, num_blocks, 2, block_size, num_kv_heads, head_dim].

    A *region* is one layer's part of one block: contiguous, K then V, `region_bytes` long.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # "float32" | "bfloat16" | "float16"

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def region_bytes(self) -> int:
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def layer_bytes(self) -> int:
        return self.num_blocks * self.region_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.num_layers * self.region_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    def region_offset(self, layer: int, block: int) -> int:
        return layer * self.layer_bytes + block * self.region_bytes


@dataclass(frozen=True, slots=True)
class KvMemory:
    """One worker's KV pool as memory, for whoever moves blocks. Allocated once, never unmapped while it lives.

    `address` is the base pointer (device pointer on CUDA). `memfd` is the descriptor of the
    shared mapping, or None when the memory cannot be mapped by another process.
    `view` is a writable memoryview over host memory, None on CUDA. `owner` keeps it alive.
    """

    layout: KvLayout
    address: int
    device: str  # "cpu" | "cuda:<n>"
    memfd: int | None
    view: memoryview | None
    owner: object


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What must be equal on both ends before one block may travel. Compared field by field."""

    protocol: int
    model: str  # digest of config and weights
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hash_seed: str

    def first_difference(self, other: "Fingerprint") -> str | None:
        """The first field that differs as "field: ours != theirs", or None."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine!r} != {theirs!r}"
        return None
