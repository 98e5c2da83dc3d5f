"""Random steps over a paged cache: the grid for attention kernels.

Blocks are shuffled, and slots without a context token are NaN, so that reading them shows. Deterministic: a case and
a seed give the same numbers everywhere. Imports torch, no backend.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, product

import torch
from torch import Tensor

from kvrelay import fp8
from kvrelay.kernels.backend import AttentionBatch, AttentionShape, KvOrder

FP8 = torch.float8_e4m3fn
Sequences = tuple[tuple[int, int], ...]  # (new tokens, context including them) of each; single tokens first


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One step. latent_dim: for latent attention, whose cache has one part and one head. kv_dtype: None is `dtype`. A
    record, hence its size.

    shared_tokens: the first tokens of every sequence that lie in the same blocks, in multiples of 128.
    """

    sequences: Sequences
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    latent_dim: int | None = None
    kv_dtype: torch.dtype | None = None
    kv_layout: KvOrder = "NHD"
    shared_tokens: int = 0

    @property
    def num_parts(self) -> int:
        return 2 if self.latent_dim is None else 1

    @property
    def shape(self) -> AttentionShape:
        sizes = (self.heads, self.kv_heads, self.head_dim, self.block_size)
        return AttentionShape(*sizes, self.dtype, self.kv_layout, self.kv_dtype, self.latent_dim)

    def __str__(self) -> str:
        lengths = [context for _, context in self.sequences]
        what = f"{len(lengths)} sequences of up to {max(lengths, default=0)}"
        heads = f"{self.heads}/{self.kv_heads} heads of {self.head_dim}" + (", latent" if self.latent_dim else "")
        extras = [f"window {self.window}"] if self.window else []
        extras += [f"softcap {self.softcap}"] if self.softcap else []
        extras += ["fp8 KV"] if self.kv_dtype is FP8 else []
        return ", ".join([what, heads, f"blocks of {self.block_size}", self.kv_layout, *extras])


@dataclass(frozen=True, slots=True)
class KernelStep:
    """A cache with every context token, and queries. kv_layer: [blocks, parts, block_size, kv_heads, row]."""

    case: KernelCase
    q: Tensor
    kv_layer: Tensor
    batch: AttentionBatch

    def to(self, device: torch.device | str) -> "KernelStep":
        """The step with queries and cache on a device; metadata stays on the CPU."""
        return replace(self, q=self.q.to(device), kv_layer=laid_out(self.kv_layer.to(device), self.case.kv_layout))


def make_step(case: KernelCase, seed: int = 0) -> KernelStep:
    """The step of a case. Its tokens' values do not depend on the block size or layout."""
    generator = torch.Generator().manual_seed(seed)
    lengths, size = [context for _, context in case.sequences], case.block_size
    held = torch.randn(sum(lengths), case.num_parts, case.kv_heads, case.head_dim, generator=generator)
    q = torch.randn(sum(new for new, _ in case.sequences), case.heads, case.head_dim, generator=generator)
    tables, num_blocks = _tables(case, generator)
    slots = [tables[row, at // size].long() * size + at % size for row, at in enumerate(map(torch.arange, lengths))]
    for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        common = _common(case, length)
        held[start : start + common] = held[:common]
    kv = torch.full((num_blocks * size, *held.shape[1:]), float("nan"))
    kv[torch.cat([torch.zeros(0, dtype=torch.int64), *slots])] = held
    kv = kv.unflatten(0, (num_blocks, size)).transpose(1, 2)
    kv = fp8.encoded(kv) if case.kv_dtype is FP8 else kv.to(case.kv_dtype or case.dtype)
    return KernelStep(case, q.to(case.dtype), laid_out(kv, case.kv_layout), _batch(case, tables))


def laid_out(kv_layer: Tensor, layout: KvOrder) -> Tensor:
    """The same cache as it lies in a pool: one of two layers, its blocks apart; "HND": heads before tokens in memory.
    The other layer's numbers are NaN.
    """
    layer = kv_layer if layout == "NHD" else kv_layer.transpose(2, 3)
    pool = layer.new_full((layer.shape[0], 2, *layer.shape[1:]), float("nan") if layer.is_floating_point() else 0xFF)
    pool[:, 1] = layer
    return pool[:, 1] if layout == "NHD" else pool[:, 1].transpose(2, 3)


def _tables(case: KernelCase, generator: torch.Generator) -> tuple[Tensor, int]:
    """Block tables [S, max_blocks], and the number of blocks: three are unused."""
    needed = [-(-context // case.block_size) for _, context in case.sequences]
    num_blocks = sum(needed) + 3
    free = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    tables = torch.zeros(len(needed), max(needed, default=0), dtype=torch.int32)
    for row, count in enumerate(needed):
        tables[row, :count], free = free[:count], free[count:]
        common = _common(case, case.sequences[row][1]) // case.block_size
        tables[row, :common] = tables[0, :common]
    return tables, num_blocks


def _common(case: KernelCase, context: int) -> int:
    """Number of a context's first tokens that it shares with the first sequence: whole blocks of any size of the
    grid.
    """
    most = BLOCK_SIZES[-1]
    return min(case.shared_tokens, context, case.sequences[0][1]) // most * most


def _batch(case: KernelCase, tables: Tensor) -> AttentionBatch:
    size, none = case.block_size, torch.zeros(0, dtype=torch.int64)
    own = [torch.arange(context - new, context) for new, context in case.sequences]
    slots = [tables[row, at // size].long() * size + at % size for row, at in enumerate(own)]
    return AttentionBatch(
        query_starts=torch.tensor([0, *accumulate(new for new, _ in case.sequences)], dtype=torch.int32),
        context_lens=torch.tensor([context for _, context in case.sequences], dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.cat([none, *slots]),
        positions=torch.cat([none, *own]),
        num_decode=sum(1 for new, _ in case.sequences if new == 1),
        max_query_len=max((new for new, _ in case.sequences), default=0),
        max_context_len=max((context for _, context in case.sequences), default=0),
    )


# ---- the grid

HEADS: dict[str, dict[str, int]] = {  # small sizes for CPUs; those of GPUs are in bench/gpu/kernels.py
    "MHA": {"heads": 3, "kv_heads": 3, "head_dim": 20},
    "GQA": {"heads": 6, "kv_heads": 2, "head_dim": 32},
    "MQA": {"heads": 4, "kv_heads": 1, "head_dim": 32},
    "MLA": {"heads": 3, "kv_heads": 1, "head_dim": 48, "latent_dim": 32},
}
BLOCK_SIZES = (1, 8, 16, 32, 64, 128)
VARIANTS: tuple[dict[str, float], ...] = ({"window": 20}, {"softcap": 5.0}, {"window": 33, "softcap": 20.0})
RAGGED: Sequences = (
    *((1, context) for context in (1, 2, 9, 15, 16, 17, 33, 64, 65, 129, 511, 1025)),
    (5, 5), (17, 49), (40, 300), (2, 2), (30, 530),
)  # fmt: skip
SHARED: Sequences = ((1, 700), (1, 650), (1, 1100), (1, 530), (9, 600))  # with shared_tokens: decode rows read together
EVERY_LENGTH: Sequences = (*((1, context) for context in range(1, 67)), (400, 400))
LONG: Sequences = ((1, 1023), (1, 2048), (1, 4097), (1, 8192), (9, 8192))
LONGEST: Sequences = ((1, 32768), (7, 32768))


def attention_cases(heads: str, dtype: torch.dtype, layouts: tuple[KvOrder, ...]) -> Iterator[KernelCase]:
    """The grid for one kind of heads and one dtype, without long contexts. The first case per block size and KV dtype
    is empty.
    """
    plain = KernelCase((), dtype=dtype, **HEADS[heads])  # type: ignore[arg-type]
    variants = () if heads == "MLA" else VARIANTS  # latent attention has neither windows nor softcaps
    kinds = [*product(BLOCK_SIZES, (None,)), (16, FP8), (1, FP8), (128, FP8)]
    for index, (size, kv_dtype) in enumerate(kinds):
        case = replace(plain, block_size=size, kv_dtype=kv_dtype)
        ragged = replace(case, sequences=RAGGED)
        special = replace(ragged, **variants[index % len(variants)]) if variants else ragged  # type: ignore[arg-type]
        shared = replace(case, sequences=SHARED, shared_tokens=512)
        yield from dict.fromkeys((case, ragged, special, shared))
        for layout in layouts[1:]:
            yield replace(special, kv_layout=layout)
    for variant in variants:
        yield replace(plain, sequences=RAGGED, **variant)  # type: ignore[arg-type]
    yield replace(plain, sequences=EVERY_LENGTH)


def long_cases(heads: str, dtype: torch.dtype) -> Iterator[KernelCase]:
    """Contexts of up to 32k tokens: decode rows, and a prompt's last chunk."""
    plain = KernelCase((), dtype=dtype, **HEADS[heads])  # type: ignore[arg-type]
    for size, kv_dtype in ((16, None), (128, FP8)):
        yield replace(plain, sequences=LONG, block_size=size, kv_dtype=kv_dtype)
    yield replace(plain, sequences=LONGEST, block_size=32)
