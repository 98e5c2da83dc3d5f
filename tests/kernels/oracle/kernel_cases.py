"""Parts of random steps for kernel tests, and attention written out once more, in float64, one query at a time."""

import functools

import torch
from torch import Tensor

from kvrelay import fp8
from kvrelay.kernels.backend import AttentionBatch
from kvrelay.kernels.oracle.grid import attend
from kvrelay.kernels.oracle.grid_steps import KernelCase, KernelStep, make_step

__all__ = ["KernelCase", "KernelStep", "make_step", "only", "run_attention", "step_and_answer", "written_out"]


def only(step: KernelStep, s: int, tokens: slice = slice(None)) -> KernelStep:
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
    return KernelStep(step.case, step.q[rows], step.kv_layer, alone)


@functools.cache
def step_and_answer(case: KernelCase, scale: float = 0.125) -> tuple[KernelStep, Tensor]:
    """A step and its attention by definition, once per case."""
    step = make_step(case)
    return step, written_out(step, scale)


def written_out(step: KernelStep, scale: float) -> Tensor:
    """Attention by its definition: for every token and head, a loop-free formula in float64 -> [T, heads, dim]."""
    case, batch, cache = step.case, step.batch, fp8.loaded(step.kv_layer)
    out = torch.empty((*step.q.shape[:2], case.latent_dim or case.head_dim), dtype=torch.float64)
    for s in range(batch.context_lens.shape[0]):
        context = int(batch.context_lens[s])
        start, end = int(batch.query_starts[s]), int(batch.query_starts[s + 1])
        where = [(int(batch.block_tables[s, t // case.block_size]), t % case.block_size) for t in range(context)]
        keys = torch.stack([cache[b, 0, o] for b, o in where]).double()
        values = torch.stack([cache[b, -1, o] for b, o in where]).double()[..., : case.latent_dim]
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


def run_attention(backend, step: KernelStep, scale: float = 0.125) -> Tensor:
    return attend(backend, step, scale)
