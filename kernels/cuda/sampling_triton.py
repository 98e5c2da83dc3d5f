"""`sampling_search` as Triton kernels; programs share each row in chunks. Import it only where triton is installed.

The largest logit of each chunk comes first. Then each token gets an integer weight, zero where the mask or top-k
removes it, and top-p and min-p set others to zero. Last, one program per row finds the chunk, and the token in it. What
top-k and top-p keep is found four bits at a time: in one launch for each digit, a chunk's program adds up its values at
or above each of 16 bounds, and all programs of the next launch read the row's sums. A chunk with no value left between
two bounds is not read again. Integers make sums independent of their order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.common.sampling_search import SamplingSettings, scale_bits
from kvrelay.kernels.common.token_masks import TokenMasks

_CHUNK = 4096
_SMALL = 256  # values that are compared with 16 bounds at a time
_NUM_WARPS = 8
_CHUNKS = 128  # at most, or Triton compiles anew
_PLACE_DIGITS = 8  # of 4 bits


@triton.jit
def _places(x):
    """int64 in [0, 2 ** 32) in the order of x (float32); -0.0 equals 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _read(logits, stride, masks, mask_rows, number, ids, vocab, IS_MASKED: tl.constexpr):
    """The row's logits at these ids, -inf for NaN and for what may not be drawn, and whether each may."""
    is_allowed = ids < vocab
    if IS_MASKED:
        own = tl.load(mask_rows + number).to(tl.int64)
        covered = tl.where(own >= 0, vocab, 0)
        word = tl.load(masks + own * ((vocab + 31) // 32) + (ids >> 5), mask=ids < covered, other=-1)
        is_allowed = is_allowed & (((word >> (ids & 31)) & 1) != 0)
    x = tl.load(logits + number * stride + ids, mask=is_allowed, other=float("-inf"))
    return tl.where(x == x, x, float("-inf")), is_allowed


@triton.jit
def _of_row(chunked, number, num_chunks, other, CHUNKS: tl.constexpr):
    """A value for each of the row's chunks, from [R, num_chunks]."""
    chunks = tl.arange(0, CHUNKS)
    return tl.load(chunked + number * num_chunks + chunks, mask=chunks < num_chunks, other=other)


@triton.jit
def _need(limits, temperatures, totals, number, vocab, num_chunks, COUNTS: tl.constexpr, CHUNKS: tl.constexpr):
    """What the kept values of a row must reach: a count for top-k, weights for top-p; 0 for rows without."""
    limit = tl.load(limits + number)
    if COUNTS:
        need = tl.where((limit > 0) & (limit < vocab), limit, 0)
    else:
        total = tl.sum(_of_row(totals, number, num_chunks, 0, CHUNKS))
        need = tl.minimum(tl.ceil(limit.to(tl.float64) * total.to(tl.float64)).to(tl.int64), total)
        need = tl.where(limit < 1, tl.maximum(need, 1), 0)
    return tl.where(tl.load(temperatures + number) > 0, need, 0)


@triton.jit
def _resolved(tallies, above, founds, number, need, shift, num_chunks, CHUNKS: tl.constexpr):
    """The digits so far, of which a launch's tallies [R, num_chunks, 16] give the one at `shift`; and for each chunk
    the sum of its values from there on, and above the values that share all these digits.
    """
    chunks, steps = tl.arange(0, CHUNKS)[:, None], tl.arange(0, 16)[None, :]
    each = tl.load(tallies + (number * num_chunks + chunks) * 16 + steps, mask=chunks < num_chunks, other=0)
    digit = tl.maximum(tl.sum((tl.sum(each, axis=0) >= need).to(tl.int32)) - 1, 0)
    higher = tl.sum(tl.where(steps == digit + 1, each, 0), axis=1)
    above = tl.where(digit < 15, higher, _of_row(above, number, num_chunks, 0, CHUNKS))
    found = tl.load(founds + number) + (digit.to(tl.int64) << shift)
    return found, tl.sum(tl.where(steps == digit, each, 0), axis=1), above


@triton.jit(do_not_specialize=["num_chunks"])
def _peak(
    logits, stride, masks, mask_rows, peaks, firsts, vocab, num_chunks, IS_MASKED: tl.constexpr, CHUNK: tl.constexpr
):
    """Each chunk's largest logit, and the first id that has it and may be drawn (`vocab` where none may)."""
    number, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x, is_allowed = _read(logits, stride, masks, mask_rows, number, ids, vocab, IS_MASKED)
    peak = tl.max(x)
    tl.store(peaks + number * num_chunks + chunk, peak)
    tl.store(firsts + number * num_chunks + chunk, tl.min(tl.where(is_allowed & (x == peak), ids, vocab)))


@triton.jit(do_not_specialize=["index", "shift", "num_chunks"])
def _tally(
    logits,
    stride,
    masks,
    mask_rows,
    temperatures,
    limits,
    weights,
    totals,
    before,
    after,
    above,
    found_before,
    found_after,
    index,
    shift,
    vocab,
    num_chunks,
    COUNTS: tl.constexpr,
    IS_MASKED: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    SMALL: tl.constexpr,
):
    """Launch `index` of a search: `after` [R, num_chunks, 16], the chunk's values from each bound on, and the digits so
    far, [R], which `before` and its digits give.
    """
    number, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    need = _need(limits, temperatures, totals, number, vocab, num_chunks, COUNTS, CHUNKS)
    if need > 0:
        steps = tl.arange(0, 16).to(tl.int64)
        cell = number * num_chunks + chunk
        found, own_above, is_decided = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64), False
        if index > 0:
            found, at, over = _resolved(before, above, found_before, number, need, shift + 4, num_chunks, CHUNKS)
            is_own = tl.arange(0, CHUNKS) == chunk
            own_above = tl.sum(tl.where(is_own, over, 0))
            is_decided = tl.sum(tl.where(is_own, at, 0)) == own_above
        tl.store(above + cell, own_above)
        tl.store(found_after + number, found)  # the same from all of the row's programs
        sums = tl.zeros((16,), tl.int64) + own_above
        if not is_decided:
            bounds = found + (steps << shift)
            parts = tl.zeros((16, SMALL), tl.int64)
            for start in range(0, CHUNK, SMALL):
                ids = chunk * CHUNK + start + tl.arange(0, SMALL)
                if COUNTS:
                    x, is_allowed = _read(logits, stride, masks, mask_rows, number, ids, vocab, IS_MASKED)
                    value = tl.where(is_allowed, _places(x), -1)
                    parts += (value[None, :] >= bounds[:, None]).to(tl.int64)
                else:
                    value = tl.load(weights + number * num_chunks * CHUNK + ids)
                    parts += tl.where(value[None, :] >= bounds[:, None], value[None, :], 0)
            sums = tl.sum(parts, axis=1)
        tl.store(after + cell * 16 + tl.arange(0, 16), sums)


@triton.jit
def _whole(x, is_kept, largest, temperature, scale):
    """Weights exp((x - largest) / temperature) as integers, the largest's being `scale`; 0 for what is not kept."""
    difference = tl.where(x == largest, 0.0, x.to(tl.float64) - largest.to(tl.float64))
    share = tl.where(is_kept, tl.exp(difference / temperature.to(tl.float64)), 0.0)
    return (share * scale + 0.5).to(tl.int64)


@triton.jit(do_not_specialize=["num_chunks", "is_stored"])
def _weigh(
    logits,
    stride,
    masks,
    mask_rows,
    temperatures,
    top_ks,
    peaks,
    tallies,
    above,
    founds,
    weights,
    totals,
    vocab,
    num_chunks,
    scale,
    is_stored,
    IS_MASKED: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The chunks' total weights, for rows that sample; where it is_stored, each token's weight, too."""
    number, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + number)
    if temperature > 0:
        largest = tl.max(_of_row(peaks, number, num_chunks, float("-inf"), CHUNKS))
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x, is_kept = _read(logits, stride, masks, mask_rows, number, ids, vocab, IS_MASKED)
        need = _need(top_ks, temperatures, totals, number, vocab, num_chunks, True, CHUNKS)
        if need > 0:
            found, _, _ = _resolved(tallies, above, founds, number, need, 0, num_chunks, CHUNKS)
            is_kept = is_kept & (_places(x) >= found)
        whole = _whole(x, is_kept, largest, temperature, scale)
        tl.store(totals + number * num_chunks + chunk, tl.sum(whole))
        if is_stored:
            tl.store(weights + number * num_chunks * CHUNK + ids, whole)


@triton.jit(do_not_specialize=["num_chunks"])
def _filter(
    weights,
    temperatures,
    top_ps,
    min_ps,
    totals,
    tallies,
    above,
    founds,
    kept_totals,
    vocab,
    num_chunks,
    scale,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Weights become zero where top-p (of equal ones, the lowest ids stay) or min-p removes the token."""
    number, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(temperatures + number) > 0:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        place = weights + number * num_chunks * CHUNK + ids
        w = tl.load(place)
        kept = tl.where(w >= (tl.load(min_ps + number).to(tl.float64) * scale + 0.5).to(tl.int64), w, 0)
        need = _need(top_ps, temperatures, totals, number, vocab, num_chunks, False, CHUNKS)
        if need > 0:
            least, at, over = _resolved(tallies, above, founds, number, need, 0, num_chunks, CHUNKS)
            num_equal = (need - tl.sum(over) + least - 1) // tl.maximum(least, 1)
            earlier = tl.sum(tl.where(tl.arange(0, CHUNKS) < chunk, at - over, 0)) // tl.maximum(least, 1)
            is_least = w == least
            rank = earlier + tl.cumsum(is_least.to(tl.int32))
            kept = tl.where((w > least) | (is_least & (rank <= num_equal)), kept, 0)
        tl.store(kept_totals + number * num_chunks + chunk, tl.sum(kept))
        tl.store(place, kept)


@triton.jit(do_not_specialize=["num_chunks", "is_stored"])
def _choose(
    logits,
    stride,
    masks,
    mask_rows,
    temperatures,
    uniforms,
    peaks,
    firsts,
    weights,
    totals,
    tokens,
    vocab,
    num_chunks,
    scale,
    is_stored,
    IS_MASKED: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The first id whose cumulative weight exceeds uniform * total; for greedy rows the first with the largest logit.
    Where no logit is above -inf, the lowest id that may be drawn.
    """
    number = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + number)
    peak = _of_row(peaks, number, num_chunks, float("-inf"), CHUNKS)
    largest = tl.max(peak)
    if (temperature > 0) & (largest > float("-inf")):
        each = _of_row(totals, number, num_chunks, 0, CHUNKS)
        total = tl.sum(each)
        target = (tl.load(uniforms + number) * total.to(tl.float64)).to(tl.int64)
        target = tl.minimum(target, total - 1)
        chunk = tl.sum((tl.cumsum(each) <= target).to(tl.int32))
        before = tl.sum(tl.where(tl.arange(0, CHUNKS) < chunk, each, 0))
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        if is_stored:
            w = tl.load(weights + number * num_chunks * CHUNK + ids)
        else:
            x, is_kept = _read(logits, stride, masks, mask_rows, number, ids, vocab, IS_MASKED)
            w = _whole(x, is_kept, largest, temperature, scale)
        token = tl.min(tl.where(tl.cumsum(w) + before > target, ids, vocab))
    else:
        token = tl.min(tl.where(peak == largest, _of_row(firsts, number, num_chunks, vocab, CHUNKS), vocab))
    tl.store(tokens + number, tl.minimum(token, vocab - 1).to(tl.int64))


def draw(logits: Tensor, settings: SamplingSettings, uniform: Tensor, masks: TokenMasks | None = None) -> Tensor:
    """See `sampling_search.draw`. masks: on the logits' device."""
    if not settings.draws and masks is None:
        return logits.argmax(dim=1)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    (rows, vocab), device = logits.shape, logits.device
    chunks, bits = -(-vocab // _CHUNK), scale_bits(vocab)
    scale, digits = float(1 << bits), bits // 4 + 1

    def new(dtype: torch.dtype, *sizes: int) -> Tensor:
        return torch.empty(*sizes, dtype=dtype, device=device)

    tokens, firsts = new(torch.int64, rows), new(torch.int32, rows, chunks)
    peaks, totals = new(torch.float32, rows, chunks), new(torch.int64, rows, chunks)
    is_filtered = settings.draws and (settings.has_top_p or settings.has_min_p)
    is_stored = settings.draws and (is_filtered or settings.has_top_k)
    weights = new(torch.int64, rows, chunks * _CHUNK) if is_stored else totals
    heat, grid, nothing = settings.temperature, (rows, chunks), (totals, totals, totals)
    row = (logits, logits.stride(0), *((totals, totals) if masks is None else (masks.words, masks.rows)))
    masked, sizes = {"IS_MASKED": masks is not None}, {"CHUNK": _CHUNK, "num_warps": _NUM_WARPS}
    wide = sizes | {"CHUNKS": max(_CHUNKS, triton.next_power_of_2(chunks))}

    def search(limits: Tensor, num_digits: int, *, counts: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The last launch's tallies, what is above in each chunk, and the digits before the last."""
        above, is_masked = new(torch.int64, rows, chunks), masks is not None and counts
        before, after = ((new(torch.int64, rows, chunks, 16), new(torch.int64, rows)) for _ in range(2))
        for index in range(num_digits):
            values = heat, limits, weights, totals, before[0], after[0], above, before[1], after[1]
            at, how = (index, 4 * (num_digits - 1 - index), vocab, chunks), {"COUNTS": counts, "IS_MASKED": is_masked}
            _tally[grid](*row, *values, *at, SMALL=_SMALL, **how, **wide)
            before, after = after, before
        return before[0], above, before[1]

    with torch.cuda.device_of(logits):
        _peak[grid](*row, peaks, firsts, vocab, chunks, **masked, **sizes)
        if settings.draws:
            found = search(settings.top_k, _PLACE_DIGITS, counts=True) if settings.has_top_k else nothing
            given = (heat, settings.top_k, peaks, *found, weights, totals, vocab, chunks, scale, int(is_stored))
            _weigh[grid](*row, *given, **masked, **wide)
        if is_filtered:
            found = search(settings.top_p, digits, counts=False) if settings.has_top_p else nothing
            limits, kept = (settings.top_p, settings.min_p), torch.empty_like(totals)
            _filter[grid](weights, heat, *limits, totals, *found, kept, vocab, chunks, scale, **wide)
            totals = kept
        ends = (heat, uniform, peaks, firsts, weights, totals, tokens, vocab, chunks, scale, int(is_stored))
        _choose[(rows,)](*row, *ends, **masked, **wide)
    return tokens
