"""Cascade attention's schedule for the compiled CPU kernels: which decode rows of a step read which KV together.

Sharing never changes a result: a row's sums run over the same tiles in the same order, with or without other rows
(kernels/cpu/native/attention.c). It only has to pay, which `WORTH` decides. kernels/cpu/native/cascade.c computes the
schedule from the block tables, once per step; this module owns its memory and a readable view.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

PART_TOKENS, TILE_TOKENS = 512, 64  # PART and TILE of cascade.h
WORTH = 256  # fewest tokens of KV saved in a step, summed over rows: bench/results/2026-11-22-scheduling.md
_HEADER_WORDS = 8
_UNITS, _MEMBERS, _ROWS, _PARTS, _SAVED = range(5)  # indices into the header


@dataclass(frozen=True, slots=True)
class CascadeUnit:
    """Rows that read a partition's first tiles together.

    rows: decode rows. common: number of tiles that each shares with the row before it, 0 for the first.
    """

    part: int
    rows: tuple[int, ...]
    common: tuple[int, ...]


class Schedule:
    """Memory for the schedule of up to `max_rows` decode rows of up to `max_context_len` tokens; it never moves."""

    def __init__(self, lib: Any, max_rows: int, max_context_len: int) -> None:
        self._lib = lib
        self.words = torch.zeros(lib.kr_cascade_words(max_rows, _parts(max_context_len)), dtype=torch.int32)

    @property
    def address(self) -> int:
        return self.words.data_ptr()

    @property
    def saved_tokens(self) -> int:
        """Tokens of KV that a layer without a window does not read again."""
        return int(self.words[_SAVED])

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
        """Compute the schedule of the first `num_rows` sequences, one new token each. Returns `saved_tokens`.

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

    def units(self) -> list[CascadeUnit]:
        """The schedule in execution order."""
        header = self.words[:_HEADER_WORDS].tolist()
        num_units, num_members, most = header[_UNITS], header[_MEMBERS], header[_ROWS] * header[_PARTS]
        at = _HEADER_WORDS
        first = self.words[at : at + num_units + 1].tolist()
        parts = self.words[at + most // 2 + 1 :][:num_units].tolist()
        at += most // 2 + 1 + most // 2
        rows, common = (self.words[start : start + num_members].tolist() for start in (at, at + most))
        return [
            CascadeUnit(parts[unit], tuple(rows[begin:end]), tuple(common[begin:end]))
            for unit, (begin, end) in enumerate(pairwise(first))
        ]


def _parts(context_len: int) -> int:
    return -(-context_len // PART_TOKENS)
