"""Products with weights that stay quantised, and rows quantised to fp8, in Triton. Import it only where triton is
installed.

A weight's numbers are read as they are stored, turned into the rows'
dtype in registers, and multiplied; sums are float32. One kernel multiplies by one weight, or by experts' weights for
rows that are sorted by expert: each program finds its expert by the ends of their rows, so no size depends on data.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.cuda.stacked_weights import StackedWeights


@triton.jit
def _decoded(stored, KIND: tl.constexpr, HAS_FP8: tl.constexpr):
    """float32 of stored values; of packed ones [rows, n] -> [rows, 2 n]."""
    if KIND == "int8":
        return stored.to(tl.float32)
    elif KIND == "fp8":
        if HAS_FP8:
            return stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:  # its bits as those of a float16, which is 2 ** 8 times smaller; all ones are NaN
            bits = stored.to(tl.int16)
            half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
            return tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
    else:
        codes = tl.interleave(stored & 15, stored >> 4).to(tl.int16)
        if KIND == "int4":
            return codes.to(tl.float32)
        else:  # E2M1's bits as those of a float16, which is 2 ** 14 times smaller
            half = (((codes & 8) << 12) | ((codes & 7) << 9)).to(tl.float16, bitcast=True)
            return half.to(tl.float32) * 16384.0


@triton.jit
def _weights(
    values,
    scales,
    offsets,
    outputs,
    at,
    num_outputs,
    width,
    num_groups,
    unit,
    KIND: tl.constexpr,
    HAS_FP8: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Numbers [BLOCK_N, BLOCK_K] float32 of these outputs and BLOCK_K inputs from `at` on, SHARED of which share a
    scale.
    """
    is_row = (outputs < num_outputs)[:, None]
    PACKED: tl.constexpr = 2 if KIND == "int4" or KIND == "mxfp4" else 1
    bytes_at = at // PACKED + tl.arange(0, BLOCK_K // PACKED)
    row_bytes = width // PACKED
    is_value = is_row & (bytes_at < row_bytes)[None, :]
    stored = tl.load(values + outputs.to(tl.int64)[:, None] * row_bytes + bytes_at[None, :], mask=is_value, other=0)
    groups = (at + tl.arange(0, BLOCK_K // SHARED) * SHARED) // TILE_K
    places, is_group = (outputs // TILE_N)[:, None] * num_groups + groups[None, :], is_row & (groups < num_groups)[None]
    scale = tl.load(scales + places, mask=is_group, other=0.0).to(tl.float32) * unit
    number = tl.reshape(_decoded(stored, KIND, HAS_FP8), (BLOCK_N, BLOCK_K // SHARED, SHARED)) * scale[:, :, None]
    if HAS_OFFSETS:
        number += (tl.load(offsets + places, mask=is_group, other=0.0).to(tl.float32) * unit)[:, :, None]
    return tl.reshape(number, (BLOCK_N, BLOCK_K))


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _multiply(
    rows,
    stride,
    values,
    scales,
    offsets,
    bias,
    ends,
    out,
    num_rows,
    num_inputs,
    num_outputs,
    width,
    num_groups,
    weight_bytes,
    weight_scales,
    num_experts,
    num_tiles,
    unit,
    KIND: tl.constexpr,
    HAS_FP8: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [R, N] = rows [R, K] times the weight transposed. EXPERTS: 0, or a power of two from num_experts on; then
    `ends` has the end of each expert's rows. Programs that share weights are neighbours.
    """
    number = tl.program_id(0)
    tile, begin, last = number % num_tiles, 0, num_rows
    if EXPERTS:
        ids = tl.arange(0, EXPERTS)
        end = tl.load(ends + ids, mask=ids < num_experts, other=num_rows)
        first = tl.load(ends + ids - 1, mask=(ids > 0) & (ids < num_experts), other=0)
        counts = tl.where(ids < num_experts, (end - first + BLOCK_M - 1) // BLOCK_M, 0)
        tiles = tl.cumsum(counts)  # ends of each expert's tiles
        expert = tl.sum((tiles <= tile).to(tl.int32))
        if expert >= num_experts:
            return
        tile -= tl.sum(tl.where(ids == expert, tiles - counts, 0))
        begin, last = tl.sum(tl.where(ids == expert, first, 0)), tl.sum(tl.where(ids == expert, end, 0))
        values += expert.to(tl.int64) * weight_bytes
        scales += expert.to(tl.int64) * weight_scales
        offsets += expert.to(tl.int64) * weight_scales
    row = begin + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = (number // num_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = (row < last)[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for at in range(0, width, BLOCK_K):
        inputs = at + tl.arange(0, BLOCK_K)
        place = rows + row.to(tl.int64)[:, None] * stride + inputs[None, :]
        x = tl.load(place, mask=is_row & (inputs < num_inputs)[None, :], other=0.0)
        weight = _weights(
            values,
            scales,
            offsets,
            outputs,
            at,
            num_outputs,
            width,
            num_groups,
            unit,
            KIND,
            HAS_FP8,
            HAS_OFFSETS,
            TILE_N,
            TILE_K,
            SHARED,
            BLOCK_N,
            BLOCK_K,
        )
        total = tl.dot(x, tl.trans(weight.to(x.dtype)), total, input_precision="ieee")
    is_output = outputs < num_outputs
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    at_out = out + row.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(at_out, total.to(out.dtype.element_ty), mask=is_row & is_output[None, :])


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def _quantize(
    x,
    stride,
    given,
    values,
    scales,
    num_rows,
    width,
    scale_stride,
    HAS_GIVEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """fp8 values [R', K] and scales of each row's groups (GROUP inputs; 0: all). Rows from num_rows on are zero."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, end = 0, width
    if GROUP:
        begin, end = group * GROUP, tl.minimum((group + 1) * GROUP, width)
    last = tl.where(row < num_rows, end, begin)  # nothing is read of a row that is not there
    if HAS_GIVEN:
        scale = tl.load(given)
    else:
        most = tl.zeros((BLOCK,), tl.float32)
        for at in range(begin, end, BLOCK):
            inputs = at + tl.arange(0, BLOCK)
            number = tl.load(x + row * stride + inputs, mask=inputs < last, other=0.0).to(tl.float32)
            most = tl.maximum(most, tl.abs(number))
        scale = tl.max(most) / 448.0
        scale = tl.where(scale > 0.0, scale, 1.0)
    for at in range(begin, end, BLOCK):
        inputs = at + tl.arange(0, BLOCK)
        number = tl.load(x + row * stride + inputs, mask=inputs < last, other=0.0).to(tl.float32) / scale
        # clamping must not hide what is not a number
        number = tl.where(tl.abs(number) < float("inf"), tl.minimum(tl.maximum(number, -448.0), 448.0), float("nan"))
        tl.store(values + row * width + inputs, number.to(tl.float8e4nv), mask=inputs < end)
    tl.store(scales + row + group * scale_stride, scale)


def has_fp8(device: torch.device) -> bool:
    """Whether a GPU converts e4m3 by itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def blocks_of(num_rows: int, *, packed: bool) -> dict[str, int]:
    """Sizes of a program's part of the product, for so many rows of a weight. Unmeasured."""
    if num_rows <= 16:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 256 if packed else 128, "num_warps": 4, "num_stages": 4}
    if num_rows <= 64:
        block = 32 if num_rows <= 32 else 64
        return {"BLOCK_M": block, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}


def multiply(rows: Tensor, weights: StackedWeights, bias: Tensor | None = None, ends: Tensor | None = None) -> Tensor:
    """rows [R, K] times a weight, plus bias [N] -> [R, N] in the rows' dtype.

    ends: [E] int32, where each expert's rows end; None: there is one weight. Does not wait for the device.
    """
    num_rows, (num_experts, num_outputs, row_bytes) = rows.shape[0], weights.values.shape
    out = torch.empty(num_rows, num_outputs, dtype=rows.dtype, device=rows.device)
    if num_rows == 0:
        return out
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    packed = weights.kind in ("int4", "mxfp4")
    sizes = blocks_of(num_rows if ends is None else -(-num_rows // num_experts), packed=packed)
    block_m, tile_n, tile_k = sizes["BLOCK_M"], *weights.tile
    num_tiles = -(-num_rows // block_m)
    if ends is not None:  # each expert's last tile may be partly empty
        num_tiles = num_rows // block_m + min(num_experts, num_rows)
    with torch.cuda.device_of(rows):
        _multiply[(num_tiles * -(-num_outputs // sizes["BLOCK_N"]),)](
            rows,
            rows.stride(0),
            weights.values,
            weights.scales,
            weights.scales if weights.offsets is None else weights.offsets,
            rows if bias is None else bias,
            rows if ends is None else ends,
            out,
            num_rows,
            weights.in_features,
            num_outputs,
            row_bytes * (2 if packed else 1),
            weights.scales.shape[2],
            num_outputs * row_bytes,
            weights.scales[0].numel(),
            num_experts,
            num_tiles,
            weights.unit,
            KIND=weights.kind,
            HAS_FP8=has_fp8(rows.device),
            HAS_OFFSETS=weights.offsets is not None,
            HAS_BIAS=bias is not None,
            EXPERTS=0 if ends is None else triton.next_power_of_2(num_experts),
            TILE_N=tile_n,
            TILE_K=tile_k,
            SHARED=math.gcd(tile_k, sizes["BLOCK_K"]),
            **sizes,
        )
    return out


def quantize_rows(x: Tensor, group: int | None = None, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [R, K] in e4m3 and float32 scales: number = scale * value. R is padded with zeros to a multiple of 4.

    group: inputs that share a scale -> scales [R', K / group] with stride (1, R'); None: a row -> [R', 1]. given: one
    scale for all, [1] float32; larger numbers become the largest of e4m3, infinite ones NaN.
    """
    num_rows, width = x.shape
    x, padded = x if x.stride(1) == 1 else x.contiguous(), -(-num_rows // 4) * 4
    num_groups = 1 if group is None else -(-width // group)
    values = torch.empty(padded, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_groups, padded, dtype=torch.float32, device=x.device)
    if padded:
        block, num_warps = (1024, 8) if group is None else (triton.next_power_of_2(group), 1)
        with torch.cuda.device_of(x):
            _quantize[(padded, num_groups)](
                x,
                x.stride(0),
                scales if given is None else given,
                values,
                scales,
                num_rows,
                width,
                padded,
                HAS_GIVEN=given is not None,
                GROUP=group or 0,
                BLOCK=block,
                num_warps=num_warps,
            )
    return values, scales.T if group is not None else scales.view(padded, 1)
