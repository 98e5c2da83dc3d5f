"""The sums of device_checksums.py as one Triton kernel, one program per chunk. Import it where triton is installed."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # words of one pass


@triton.jit
def _sum(halves, begins, out, each, piece_halves, mix, BLOCK: tl.constexpr):
    chunk = tl.program_id(0)
    num_words = each * piece_halves // 2
    total = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, num_words, BLOCK):
        word = first + tl.arange(0, BLOCK)
        inside = word < num_words
        low, high = 2 * word, 2 * word + 1  # a word may lie across two pieces
        low_at = tl.load(begins + chunk * each + low // piece_halves, mask=inside, other=0) + low % piece_halves
        high_at = tl.load(begins + chunk * each + high // piece_halves, mask=inside, other=0) + high % piece_halves
        bits = tl.load(halves + low_at, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
        bits |= tl.load(halves + high_at, mask=inside, other=0).to(tl.int64) << 32
        total += tl.where(inside, (bits ^ mix) * (2 * word.to(tl.int64) + 1), 0)
    tl.store(out + chunk, tl.sum(total))


def sums(halves: Tensor, begins: Tensor, piece_halves: int, mix: int) -> Tensor:
    """[num_chunks] int64. halves: [n] int32; begins: [num_chunks, pieces_per_chunk] int64. mix: of each word."""
    num_chunks, each = begins.shape
    out = torch.empty(num_chunks, dtype=torch.int64, device=halves.device)
    if num_chunks:
        _sum[(num_chunks,)](halves, begins, out, each, piece_halves, mix, BLOCK=_BLOCK)
    return out
