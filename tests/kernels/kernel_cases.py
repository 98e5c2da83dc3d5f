"""Random steps for kernel tests, and attention written out once more, in float64, one query at a time."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay.kernels.backend import AttentionBatch, AttentionShape


@dataclass(frozen=True, slots=True)
class Case:
    """sequences: (new tokens, context with them) each; single-token ones first."""

    sequences: tuple[tuple[int, int], ...]
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    latent_dim: int | None = None  # latent attention: a cache of one part and one head

    @property
    def num_parts(self) -> int:
        return 2 if self.latent_dim is None else 1

    @property
    def shape(self) -> AttentionShape:
        sizes = (self.heads, self.kv_heads, self.head_dim, self.block_size)
        return AttentionShape(*sizes, self.dtype, latent_dim=self.latent_dim)


@dataclass(frozen=True, slots=True)
class Step:
    """A cache that holds every context token, and queries. kv_layer: [blocks, parts, block_size, kv_heads, dim]."""

    case: Case
    q: Tensor
    kv_layer: Tensor
    batch: AttentionBatch


def make_step(case: Case, seed: int = 0) -> Step:
    """Blocks are shuffled; what no context token fills is NaN, so that reading it shows."""
    generator = torch.Generator().manual_seed(seed)
    size = case.block_size
    needed = [-(-context // size) for _, context in case.sequences]
    num_blocks = sum(needed) + 3
    kv = torch.full((num_blocks, case.num_parts, size, case.kv_heads, case.head_dim), float("nan"), dtype=case.dtype)
    free = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    tables = torch.zeros(len(needed), max(needed), dtype=torch.int32)
    starts, slots, positions = [0], [], []
    for s, (new, context) in enumerate(case.sequences):
        tables[s, : needed[s]], free = free[: needed[s]], free[needed[s] :]
        for token in range(context):
            shape = (case.num_parts, case.kv_heads, case.head_dim)
            kv[int(tables[s, token // size]), :, token % size] = torch.randn(shape, generator=generator).to(case.dtype)
        starts.append(starts[-1] + new)
        own = torch.arange(context - new, context)
        positions.append(own)
        slots.append(tables[s, own // size].long() * size + own % size)
    batch = AttentionBatch(
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([context for _, context in case.sequences], dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.cat(slots),
        positions=torch.cat(positions),
        num_decode=sum(1 for new, _ in case.sequences if new == 1),
        max_query_len=max(new for new, _ in case.sequences),
        max_context_len=max(context for _, context in case.sequences),
    )
    q = torch.randn(starts[-1], case.heads, case.head_dim, generator=generator).to(case.dtype)
    return Step(case, q, kv, batch)


def only(step: Step, s: int, tokens: slice = slice(None)) -> Step:
    """Sequence s alone, and of its new tokens only `tokens` (a prefix or suffix of them, or a middle part)."""
    batch, start = step.batch, int(step.batch.query_starts[s])
    new = int(batch.query_starts[s + 1]) - start
    first, end, _ = tokens.indices(new)
    rows = slice(start + first, start + end)
    context = int(batch.context_lens[s]) - new + end
    alone = AttentionBatch(
        query_starts=torch.tensor([0, end - first], dtype=torch.int32),
        context_lens=torch.tensor([context], dtype=torch.int32),
        block_tables=batch.block_tables[s : s + 1].contiguous(),
        slot_mapping=batch.slot_mapping[rows],
        positions=batch.positions[rows],
        num_decode=int(end - first == 1),
        max_query_len=end - first,
        max_context_len=context,
    )
    return Step(step.case, step.q[rows], step.kv_layer, alone)


@functools.cache
def step_and_answer(case: Case, scale: float = 0.125) -> tuple[Step, Tensor]:
    """A step and its attention by definition, once per case."""
    step = make_step(case)
    return step, written_out(step, scale)


def written_out(step: Step, scale: float) -> Tensor:
    """Attention by its definition: for every token and head, a loop-free formula in float64 -> [T, heads, dim]."""
    case, batch = step.case, step.batch
    out = torch.empty((*step.q.shape[:2], case.latent_dim or case.head_dim), dtype=torch.float64)
    for s in range(batch.context_lens.shape[0]):
        context = int(batch.context_lens[s])
        start, end = int(batch.query_starts[s]), int(batch.query_starts[s + 1])
        where = [(int(batch.block_tables[s, t // case.block_size]), t % case.block_size) for t in range(context)]
        keys = torch.stack([step.kv_layer[b, 0, o] for b, o in where]).double()
        values = torch.stack([step.kv_layer[b, -1, o] for b, o in where]).double()[..., : case.latent_dim]
        for row in range(start, end):
            position = context - (end - row)
            low = 0 if case.window is None else max(0, position - case.window + 1)
            for head in range(case.heads):
                kv_head = head // (case.heads // case.kv_heads)
                scores = keys[low : position + 1, kv_head] @ step.q[row, head].double() * scale
                if case.softcap is not None:
                    scores = case.softcap * torch.tanh(scores / case.softcap)
                out[row, head] = scores.softmax(0) @ values[low : position + 1, kv_head]
    return out


def run_attention(backend, step: Step, scale: float = 0.125) -> Tensor:
    case = step.case
    plan = backend.plan(step.batch, case.shape)
    if case.latent_dim is not None:
        return backend.latent_attention(step.q, step.kv_layer, plan, scale=scale, latent_dim=case.latent_dim)
    return backend.attention(step.q, step.kv_layer, plan, scale=scale, window=case.window, softcap=case.softcap)
