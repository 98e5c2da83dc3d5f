"""`sampling_search` as two Triton kernels, one program per row. Import it only where triton is installed.

The first kernel reads the row's mask, finds the largest logit and the
smallest that top-k keeps, and writes weights: zero for masked tokens. The second finds the smallest weight that top-p
keeps, applies min-p, and samples. Thresholds are found four bits at a time: a pass over the row sums the values at or
above each of 16 bounds. Weights are integers, so that sums do not depend on their order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.common.sampling_search import SamplingSettings, scale_bits
from kvrelay.kernels.common.token_masks import TokenMasks

_BLOCK = 2048
_SMALL = 512  # block in which each value is compared with 16 bounds
_NUM_WARPS = 8


@triton.jit
def _places(x):
    """int64 in [0, 2 ** 32) in the order of x (float32); -0.0 equals 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _allowed(words, covered, ids, vocab, IS_MASKED: tl.constexpr):
    """Whether these ids may be drawn by a row whose mask, at `words`, covers ids below `covered`; others all may."""
    is_allowed = ids < vocab
    if IS_MASKED:
        word = tl.load(words + (ids >> 5), mask=ids < covered, other=-1)
        is_allowed = is_allowed & (((word >> (ids & 31)) & 1) != 0)
    return is_allowed


@triton.jit
def _kth_place(row, words, covered, k, vocab, IS_MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """The place of the k-th largest of the row's allowed logits; 0 where there are fewer."""
    steps = tl.arange(0, 16).to(tl.int64)
    found = tl.full((), 0, tl.int64)
    for index in range(8):
        shift = 28 - 4 * index
        bounds = found + (steps << shift)
        counts = tl.zeros((16,), tl.int32)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            is_allowed = _allowed(words, covered, ids, vocab, IS_MASKED)
            places = tl.where(is_allowed, _places(tl.load(row + ids, mask=is_allowed, other=0.0)), -1)
            counts += tl.sum((places[None, :] >= bounds[:, None]).to(tl.int32), axis=1)
        digit = tl.maximum(tl.sum((counts >= k).to(tl.int32)) - 1, 0)
        found += digit.to(tl.int64) << shift
    return found


@triton.jit
def _weigh(
    logits,
    stride,
    temperatures,
    top_ks,
    weights,
    totals,
    tokens,
    masks,
    mask_rows,
    vocab,
    scale,
    IS_MASKED: tl.constexpr,
    SMALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write weights [R, V], 0 for what the mask and top-k remove, and their totals; for greedy rows only the token."""
    number = tl.program_id(0).to(tl.int64)
    row, weight = logits + number * stride, weights + number * vocab
    words, covered = masks, vocab
    if IS_MASKED:
        own = tl.load(mask_rows + number).to(tl.int64)
        words, covered = masks + own * ((vocab + 31) // 32), tl.where(own >= 0, vocab, 0)
    temperature = tl.load(temperatures + number)
    largest, lowest_id = tl.full((), float("-inf"), tl.float32), vocab
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        is_allowed = _allowed(words, covered, ids, vocab, IS_MASKED)
        largest = tl.maximum(largest, tl.max(tl.load(row + ids, mask=is_allowed, other=float("-inf"))))
        lowest_id = tl.minimum(lowest_id, tl.min(tl.where(is_allowed, ids, vocab)))
    has_number = largest > float("-inf")
    if temperature > 0:
        least = tl.full((), 0, tl.int64)
        k = tl.load(top_ks + number)
        if (k > 0) & (k < vocab):
            least = _kth_place(row, words, covered, k, vocab, IS_MASKED, SMALL)
        total = tl.full((), 0, tl.int64)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            is_allowed = _allowed(words, covered, ids, vocab, IS_MASKED)
            x = tl.load(row + ids, mask=is_allowed, other=float("-inf"))
            difference = tl.where(x == largest, 0.0, x.to(tl.float64) - largest.to(tl.float64))
            share = tl.where(has_number, tl.exp(difference / temperature.to(tl.float64)), 1.0)
            is_kept = is_allowed & (share == share) & (_places(x) >= least)
            is_kept = tl.where(has_number, is_kept, ids == lowest_id)
            whole = (tl.where(is_kept, share, 0.0) * scale + 0.5).to(tl.int64)
            total += tl.sum(whole)
            tl.store(weight + ids, whole, mask=ids < vocab)
        tl.store(totals + number, total)
    else:
        first = vocab
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            is_allowed = _allowed(words, covered, ids, vocab, IS_MASKED)
            x = tl.load(row + ids, mask=is_allowed, other=float("-inf"))
            first = tl.minimum(first, tl.min(tl.where((x == largest) & is_allowed, ids, vocab)))
        first = tl.where(has_number, first, lowest_id)
        tl.store(tokens + number, tl.minimum(first, vocab - 1).to(tl.int64))


@triton.jit
def _least_weight(row, need, vocab, num_digits, BLOCK: tl.constexpr):
    """The largest weight such that all weights from it on reach `need`, and the total weight above it."""
    steps = tl.arange(0, 16).to(tl.int64)
    found, above = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for index in range(num_digits):
        shift = (4 * (num_digits - 1 - index)).to(tl.int64)
        bounds = found + (steps << shift)
        totals = tl.zeros((16,), tl.int64)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            w = tl.load(row + ids, mask=ids < vocab, other=0)
            totals += tl.sum(tl.where(w[None, :] >= bounds[:, None], w[None, :], 0), axis=1)
        digit = tl.maximum(tl.sum((totals >= need).to(tl.int32)) - 1, 0)
        if digit < 15:
            above = tl.sum(tl.where(steps == digit + 1, totals, 0))
        found += digit.to(tl.int64) << shift
    return found, above


@triton.jit
def _kept(w, least, num_equal, floor, num_before):
    """These weights with zeros for what is removed. num_before: how many earlier ones equal `least`."""
    is_least = (w == least).to(tl.int32)
    rank = tl.cumsum(is_least) + num_before
    is_kept = (w > least) | ((w == least) & (rank <= num_equal))
    return tl.where(is_kept & (w >= floor), w, 0), num_before + tl.sum(is_least)


@triton.jit
def _choose(
    weights,
    totals,
    temperatures,
    top_ps,
    min_ps,
    uniforms,
    tokens,
    vocab,
    scale,
    num_digits,
    SMALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first id whose cumulative kept weight exceeds uniform * total, for rows that sample."""
    number = tl.program_id(0).to(tl.int64)
    row = weights + number * vocab
    if tl.load(temperatures + number) > 0:
        total = tl.load(totals + number)
        least, num_equal = tl.full((), 0, tl.int64), vocab.to(tl.int64)
        top_p, min_p = tl.load(top_ps + number).to(tl.float64), tl.load(min_ps + number).to(tl.float64)
        if top_p < 1:
            need = tl.minimum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), total)
            need = tl.maximum(need, 1)
            least, above = _least_weight(row, need, vocab, num_digits, SMALL)
            num_equal = (need - above + least - 1) // tl.maximum(least, 1)
        floor = (min_p * scale + 0.5).to(tl.int64)
        if (top_p < 1) | (min_p > 0):
            total = tl.full((), 0, tl.int64)
            num_before = tl.full((), 0, tl.int32)
            for start in range(0, vocab, BLOCK):
                ids = start + tl.arange(0, BLOCK)
                w = tl.load(row + ids, mask=ids < vocab, other=-1)
                kept, num_before = _kept(w, least, num_equal, floor, num_before)
                total += tl.sum(kept)
        target = (tl.load(uniforms + number) * total.to(tl.float64)).to(tl.int64)
        target = tl.minimum(target, total - 1)
        token, so_far = vocab, tl.full((), 0, tl.int64)
        num_before = tl.full((), 0, tl.int32)
        for start in range(0, vocab, BLOCK):
            if so_far <= target:
                ids = start + tl.arange(0, BLOCK)
                w = tl.load(row + ids, mask=ids < vocab, other=-1)
                kept, num_before = _kept(w, least, num_equal, floor, num_before)
                exceeds = tl.cumsum(kept) + so_far > target
                token = tl.minimum(token, tl.min(tl.where(exceeds & (ids < vocab), ids, vocab)))
                so_far += tl.sum(kept)
        tl.store(tokens + number, tl.where(token < vocab, token, 0).to(tl.int64))


def draw(logits: Tensor, settings: SamplingSettings, uniform: Tensor, masks: TokenMasks | None = None) -> Tensor:
    """See `sampling_search.draw`. masks: on the logits' device."""
    if not settings.draws and masks is None:
        return logits.argmax(dim=1)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    totals, tokens = (torch.empty(rows, dtype=torch.int64, device=logits.device) for _ in range(2))
    weights = torch.empty(rows, vocab, dtype=torch.int64, device=logits.device) if settings.draws else totals
    masked = (totals, totals, vocab) if masks is None else (masks.words, masks.rows, vocab)
    bits = scale_bits(vocab)
    scale = float(1 << bits)
    sizes = {"SMALL": _SMALL, "BLOCK": _BLOCK, "num_warps": _NUM_WARPS}
    heat, top_k, is_masked = settings.temperature, settings.top_k, {"IS_MASKED": masks is not None}
    filters = settings.top_p, settings.min_p, uniform
    with torch.cuda.device_of(logits):
        weigh, choose = _weigh[(rows,)], _choose[(rows,)]
        weigh(logits, logits.stride(0), heat, top_k, weights, totals, tokens, *masked, scale, **is_masked, **sizes)
        if settings.draws:
            choose(weights, totals, heat, *filters, tokens, vocab, scale, bits // 4 + 1, **sizes)
    return tokens
