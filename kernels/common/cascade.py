"""Cascade attention's schedule for the compiled CPU kernels: which decode rows of a step read which KV together.

Sharing never changes a result: a row's sums run over the same tiles in the same order, with or without other rows
(kernels/cpu/native/attention.c). It only has to pay, which `WORTH` decides. kernels/cpu/native/cascade.c computes the
schedule from the block tables, once per step; this module owns its memory.
"""

from typing import Any

import torch
from torch import Tensor

PART_TOKENS = 512  # PART of cascade.h
WORTH = 256  # fewest tokens of KV saved in a step, summed over rows: bench/results/2026-11-22-scheduling.md
_HEADER_WORDS = 8


class Schedule:
    """Memory for the schedule of up to `max_rows` decode rows of up to `max_context_len` tokens; it never moves."""

    def __init__(self, lib: Any, max_rows: int, max_context_len: int) -> None:
        self._lib = lib
        self.words = torch.zeros(lib.kr_cascade_words(max_rows, _parts(max_context_len)), dtype=torch.int32)

    @property
    def address(self) -> int:
        return self.words.data_ptr()

    def clear(self) -> None:
        """Share nothing."""
        self.words[:_HEADER_WORDS] = 0

    def fill(
        self,
        context_lens: Tensor,
        tables: Tensor,
        num_rows: int,
        max_context_len: int,
        *,
        block_size: int,
        group: int,
        num_kv_heads: int,
        num_threads: int,
        worth: int,
    ) -> int:
        """Compute the schedule of the first `num_rows` sequences, one new token each. Returns the tokens of
        KV that a layer without a window does not read again.

        context_lens: [S] int32. tables: [S, max_blocks] int32, contiguous. group: query heads per KV head. worth:
        fewest tokens that make sharing pay.
        """
        saved: int = self._lib.kr_cascade_plan(
            self.words.data_ptr(),
            tables.data_ptr(),
            context_lens.data_ptr(),
            num_rows,
            tables.shape[1],
            _parts(max_context_len),
            block_size,
            group,
            num_kv_heads,
            num_threads,
            worth,
        )
        return saved


def _parts(context_len: int) -> int:
    return -(-context_len // PART_TOKENS)
