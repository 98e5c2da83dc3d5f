"""Cascade attention on CUDA: which decode rows read a shared prefix together, and FlashInfer's kernels for it.

`find_groups` and `make_levels` are pure. A group's rows attend to their shared blocks as one
sequence and each row to its own blocks; the two results are merged by their log-sum-exps (FlashInfer's own
MultiLevelCascadeAttentionWrapper offers no choice of kernels). A window would count from the end of a level, not of the
sequence: layers with a window do not use it. Results differ from the plain wrapper's by rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvrelay.kernels.backend import AttentionShape, AttentionVariant
from kvrelay.kernels.cuda.plan import PagedIndex, paged_index, plan_prefill
from kvrelay.kernels.cuda.staging import DeviceStaging

FEWEST_TOKENS = 256  # of a shared prefix: vLLM's threshold, not measured here
WORTH = 7 * FEWEST_TOKENS  # tokens saved in a step: eight rows (vLLM's minimum) with the shortest prefix
# of KV saved in all layers, from which a step runs with cascade attention rather than a graph; not measured
EAGER_WORTH_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Decode rows whose first `num_blocks` blocks are the same and full. Each has at least one more block."""

    rows: tuple[int, ...]
    num_blocks: int

    @property
    def spared_blocks(self) -> int:
        return (len(self.rows) - 1) * self.num_blocks


@dataclass(frozen=True, slots=True)
class Levels:
    """A step's decode rows: `rows`, in groups, in two levels; `alone`, the others. Row numbers are int64 on the CPU."""

    rows: Tensor
    shared: PagedIndex
    unique: PagedIndex
    alone: Tensor
    alone_level: PagedIndex
    spared_tokens: int


def may_spare(context_lens: np.ndarray, block_tables: np.ndarray, block_size: int, tokens: int) -> bool:
    """False: no groups of these rows spare so many tokens. Far quicker than the search.

    They would need a prefix of at least tokens / (rows - 1), so that two rows have the block at its end in common.
    """
    depth = -(-max(FEWEST_TOKENS, -(-tokens // max(1, len(context_lens) - 1))) // block_size)
    if depth > block_tables.shape[1]:
        return False
    ends = block_tables[context_lens > depth * block_size, depth - 1]
    return len(set(ends.tolist())) < len(ends)


def find_groups(
    context_lens: np.ndarray, block_tables: np.ndarray, block_size: int, worth: int | None = None
) -> tuple[PrefixGroup, ...]:
    """The disjoint groups that save most, each with a prefix of at least FEWEST_TOKENS; none if all together save less
    tokens than `worth` (None: WORTH).

    context_lens: [R]. block_tables: [R, max_blocks] int32, one new token each.
    """
    worth = WORTH if worth is None else worth
    if len(context_lens) < 2 or not may_spare(context_lens, block_tables, block_size, worth):
        return ()
    most = (context_lens - 1) // block_size  # one token stays for the unique level
    keys = np.ascontiguousarray(block_tables, dtype=np.int32)
    order = sorted(range(len(keys)), key=lambda row: keys[row].tobytes())
    unlike = keys[order[1:]] != keys[order[:-1]]
    same = np.where(unlike.any(axis=1), unlike.argmax(axis=1), keys.shape[1])
    same = np.minimum(same, np.minimum(most[order[1:]], most[order[:-1]]))
    groups = _best(order, same.tolist(), -(-FEWEST_TOKENS // block_size))
    return groups if sum(group.spared_blocks for group in groups) * block_size >= worth else ()


def _best(order: list[int], same: list[int], fewest: int) -> tuple[PrefixGroup, ...]:
    """For sorted rows with same[i] common blocks between rows i and i + 1: the groups that save most, which are either
    one group of all, or the best on either side of the shortest common prefix.
    """
    best: tuple[PrefixGroup, ...] = ()
    stack: list[list[int]] = [[]]
    for index in range(len(order)):  # runs in which neighbours share enough
        stack[-1].append(index)
        if index < len(same) and same[index] < fewest:
            stack.append([])
    for run in stack:
        best += _best_of_run(order, same, run[0], run[-1] + 1) if len(run) > 1 else ()
    return best


def _best_of_run(order: list[int], same: list[int], begin: int, end: int) -> tuple[PrefixGroup, ...]:
    """`_best` of the rows begin .. end - 1, which all share enough. Recursion depth: levels of the prefix tree."""
    shortest = min(same[begin : end - 1])
    whole = (PrefixGroup(tuple(order[begin:end]), shortest),)
    parts: tuple[PrefixGroup, ...] = ()
    cut = begin
    for index in range(begin, end):
        if index == end - 1 or same[index] == shortest:
            if index > cut:
                parts += _best_of_run(order, same, cut, index + 1)
            cut = index + 1
    return max(whole, parts, key=lambda groups: sum(group.spared_blocks for group in groups))


def make_levels(context_lens: Tensor, block_tables: Tensor, block_size: int) -> Levels | None:
    """The prefixes that these decode rows share, as input for FlashInfer; None where sharing does not pay."""
    groups = find_groups(context_lens.numpy(), block_tables.numpy(), block_size)
    if not groups:
        return None
    rows = [row for group in groups for row in group.rows]
    skipped = torch.tensor([group.num_blocks for group in groups for _ in group.rows])
    alone = sorted(set(range(context_lens.shape[0])) - set(rows))
    order, others = torch.tensor(rows, dtype=torch.int64), torch.tensor(alone, dtype=torch.int64)
    return Levels(
        rows=order,
        shared=_shared_level(groups, block_tables, block_size),
        unique=_own_level(context_lens[order], block_tables[order], skipped, block_size),
        alone=others,
        alone_level=_own_level(context_lens[others], block_tables[others], None, block_size),
        spared_tokens=sum(group.spared_blocks for group in groups) * block_size,
    )


def _shared_level(groups: Sequence[PrefixGroup], block_tables: Tensor, block_size: int) -> PagedIndex:
    """Each group is one sequence, all of whose blocks are full."""
    tokens = torch.tensor([group.num_blocks * block_size for group in groups], dtype=torch.int32)
    queries = torch.tensor([0, *np.cumsum([len(group.rows) for group in groups])], dtype=torch.int32)
    return paged_index(tokens, block_tables[[group.rows[0] for group in groups]], block_size, queries)


def _own_level(context_lens: Tensor, block_tables: Tensor, skipped: Tensor | None, block_size: int) -> PagedIndex:
    """One query per row, over its blocks from number skipped[row] on."""
    return paged_index(context_lens, block_tables, block_size, None, skipped)


class CascadeDecode:
    """The wrappers of one variant: planned for every step, then run like the plain decode wrapper."""

    def __init__(self, flashinfer: Any, workspace: Tensor, kv_layout: str, kernels: str) -> None:
        self._merge = flashinfer.merge_state_in_place
        make = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._shared, self._unique, self._alone = (make(workspace, kv_layout, backend=kernels) for _ in range(3))
        self._rows = self._others = torch.empty(0, dtype=torch.int64)

    def plan(self, levels: Levels, shape: AttentionShape, staging: DeviceStaging, variant: AttentionVariant) -> None:
        """variant: without a window."""
        self._rows, self._others = staging.put(levels.rows), staging.put(levels.alone)
        plans = [(self._shared, levels.shared), (self._unique, levels.unique)]
        if levels.alone.shape[0]:
            plans.append((self._alone, levels.alone_level))
        for wrapper, level in plans:
            plan_prefill(wrapper, level.staged(staging), shape, variant, causal=False)

    def run(self, q: Tensor, kv_cache: Tensor, out: Tensor) -> None:
        """q, out: [R, heads, head_dim], in the batch's order."""
        rows = q[self._rows]
        merged, lse = self._unique.run(rows, kv_cache, return_lse=True)
        self._merge(merged, lse, *self._shared.run(rows, kv_cache, return_lse=True))
        out[self._rows] = merged
        if self._others.shape[0]:
            out[self._others] = self._alone.run(q[self._others], kv_cache)
