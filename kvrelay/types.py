"""Ids and small frozen records that all parts share. No behaviour beyond arithmetic."""

import enum
from dataclasses import dataclass
from typing import NamedTuple, NewType

BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)  # 16 bytes, chained: see hashing.py
MAX_WAITING = 256  # sequences that queue at a worker; more are refused, which clients see as 429
ITL_SHARE = 0.7  # of the tightest TPOT target at a worker: what a step with prompts takes there at most


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """What a store may need of a block besides its bytes."""

    parent: BlockHash | None  # the previous block of its chain; None: it is the first
    end_tokens: int  # tokens from the prompt's beginning to its end
    priority: int = 0  # higher stays longer
    tenant: str = ""  # for quotas: a digest of the tenant's salt, never the salt
    pin_s: float = 0.0  # seconds for which a client pins it: stored at its first offer
    checksum: int | None = None  # XXH3-64 of its bytes when they left the pool; None: unknown
    root: BlockHash | None = None  # of its chain; secret where a tenant has a namespace: stores never see it


class IndexedBlock(NamedTuple):
    """A full block of the pool, with its hash."""

    digest: BlockHash
    block: BlockId
    meta: BlockMeta


class Role(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


BOTH = "both"  # a worker that computes prompts for others, and decodes
WORKER_ROLES = (Role.PREFILL, Role.DECODE, BOTH)  # what the role of a worker may be


def sides(role: str) -> tuple[Role, ...]:
    """Whose requests a worker of this role takes; none of a role that is not one of WORKER_ROLES."""
    return tuple(Role) if role == BOTH else tuple(side for side in Role if side == role)


class FinishReason(enum.StrEnum):
    STOP = "stop"  # eos, a stop id, or a stop string
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "uint8": 1}  # uint8: a slab of whole blocks
SCALE_BYTES = {"fp8_e4m3": 4}  # behind every vector of these dtypes: its scale, see fp8.py


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How a pool's KV lies in memory: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim].

    A block is one run over all layers, and so are some layers of it that follow each other. A *region* is one layer's
    part of one block, K then V. With order "HND" the heads stand before the tokens of a block. Latent KV (MLA) is one
    vector of `head_dim` per token: no K and V, one head. With dtype "fp8_e4m3" each token's vector of each head is
    followed by its scale, so that scales go wherever the elements go: `row_bytes` counts both.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # a key of ITEM_BYTES
    order: str = "NHD"  # or "HND"
    is_latent: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for what no pool can be: layouts also come from peers."""
        if self.dtype not in ITEM_BYTES or self.order not in ("NHD", "HND"):
            raise ValueError(f"no KV layout has dtype {self.dtype!r} and order {self.order!r}")
        if min(self.num_layers, self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim) < 1:
            raise ValueError("every size of a KV layout is at least 1")
        if self.is_latent and self.num_kv_heads != 1:
            raise ValueError("latent KV has one head")

    @property
    def num_parts(self) -> int:
        """Keys and values, or the one latent vector."""
        return 1 if self.is_latent else 2

    @property
    def itemsize(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's vector of one head, with its scale where the dtype has one."""
        return self.head_dim * self.itemsize + SCALE_BYTES.get(self.dtype, 0)

    @property
    def region_bytes(self) -> int:
        return self.num_parts * self.block_size * self.num_kv_heads * self.row_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.num_layers * self.region_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class KvMemory:
    """One worker's KV pool as memory, for code that copies blocks. Allocated once and mapped for the worker's lifetime.

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
class Difference:
    """A field whose values make two workers incompatible, and the remedy."""

    field: str
    ours: object
    theirs: object
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: {self.ours!r} != {self.theirs!r}"


KV_VERSION = 1  # raised by a release whose KV differs from its predecessor's: in rounding, layout or positions


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What two workers compare before KV may travel between them.

    Most fields must be equal. `block_size` and `order` may differ within the limits of kvtransfer/mover/copy_plan.py;
    `dtype` (of the KV) and `compute_dtype` (in which it was computed) may differ where the settings allow conversion.
    `versions` names KV_VERSION, and torch up to its minor version, because its kernels' rounding is part of the KV; CPU
    and GPU builds may work together, and so may releases of kvrelay, one of which replaces the other.
    """

    protocol: int
    model: str  # digest of config and weights
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hash_seed: str
    order: str = "NHD"
    versions: str = ""
    compute_dtype: str = ""
    num_parts: int = 2  # 1: latent KV (MLA), num_kv_heads is 1 and head_dim its width
    quantization: str = "none"  # of the weights that computed the KV

    def first_difference(self, other: "Fingerprint") -> str | None:
        """The first field that differs at all as "field: ours != theirs", or None."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine!r} != {theirs!r}"
        return None

    def incompatibility(self, other: "Fingerprint", *, convert_dtype: bool) -> Difference | None:
        """The first field that forbids KV transfer between the two workers, or None."""
        for name, remedy in _MUST_BE_EQUAL.items():
            if getattr(self, name) != getattr(other, name):
                return Difference(name, getattr(self, name), getattr(other, name), remedy)
        for name in ("dtype", "compute_dtype"):
            if getattr(self, name) != getattr(other, name) and not convert_dtype:
                return Difference(name, getattr(self, name), getattr(other, name), _SAME_DTYPES)
        if max(self.block_size, other.block_size) % min(self.block_size, other.block_size):
            return Difference("block_size", self.block_size, other.block_size, "make one a multiple of the other")
        return None


_SAME_MODEL = "let every worker serve the same model.source, prepared from the same files"
_SAME_DTYPES = "set dtype and kv_dtype of prefill and decode workers alike, or transfer.convert_dtype to true"
_SAME_VERSIONS = "install the same versions of kvrelay and torch for every worker"
_MUST_BE_EQUAL = {
    "protocol": _SAME_VERSIONS,
    "versions": _SAME_VERSIONS,
    "hash_seed": _SAME_VERSIONS,
    "model": _SAME_MODEL,
    "num_layers": _SAME_MODEL,
    "num_kv_heads": _SAME_MODEL,
    "head_dim": _SAME_MODEL,
    "num_parts": _SAME_MODEL,
    "quantization": "set model.quantization alike for every worker",
}
