"""Quantised weights of checkpoints: restored as their formats define, by formulas of this file's own."""

import pytest
import torch

from kvrelay.kernels.common import stored_weights
from kvrelay.kernels.common.quant_scheme import Scheme
from kvrelay.kernels.common.stored_weights import (
    Fp8Weight,
    Mxfp4Weight,
    QuantizedWeight,
    dequantised,
    error_against,
    pieces,
    plain_weight,
    shape_of,
    stacked,
)
from kvrelay.kernels.cpu.native_kernels import NativeExperts, NativeQuantLinear
from kvrelay.kernels.oracle.reference import ReferenceBackend
from kvrelay.kernels.select import select_backend

F32 = torch.float32


@pytest.fixture(scope="module")
def cpu():
    return select_backend("cpu", "cpu", 1)


@pytest.fixture
def compiled(cpu):
    if cpu.compiled_kernels is None:
        pytest.skip("no compiled kernels here")
    return cpu


def fp8(n, k, tile, seed=0, input_scale=None):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-n // tile[0]), -(-k // tile[1]), generator=generator) + 0.5
    return Fp8Weight(values, scales, tile, input_scale)


def integers(n, k, group, bits=4, seed=0, *, zeros=True, scale_dtype=torch.float16):
    generator = torch.Generator().manual_seed(seed)
    groups = -(-k // group)
    low, high = (0, 16) if bits == 4 else (-128, 128)
    q = torch.randint(low, high, (n, groups, group), generator=generator).to(torch.int8)
    scales = (torch.rand(n, groups, generator=generator) / 20 + 0.01).to(scale_dtype).float()
    zero = torch.randint(0, 16, (n, groups), generator=generator) if zeros else torch.full((n, groups), 8)
    return QuantizedWeight(q, scales, -scales * zero if bits == 4 else torch.zeros_like(scales), k, bits)


def mxfp4(n, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k // 2), generator=generator).to(torch.uint8)
    return Mxfp4Weight(codes, torch.randint(118, 124, (n, k // 32), generator=generator).to(torch.uint8))


@pytest.mark.parametrize(("n", "k", "tile"), [(5, 7, (5, 7)), (5, 7, (1, 7)), (9, 10, (4, 4)), (8, 8, (4, 4))])
def test_fp8_is_values_times_the_scale_of_their_tile(n, k, tile):
    weight = fp8(n, k, tile)
    for row in range(n):
        for column in range(k):
            expected = float(weight.values[row, column]) * float(weight.scales[row // tile[0], column // tile[1]])
            assert float(weight.restored()[row, column]) == pytest.approx(expected, rel=1e-6)
    assert shape_of(weight) == (n, k) and weight.num_bytes == n * k + 4 * weight.scales.numel()


def test_mxfp4_is_e2m1_times_a_power_of_two_the_low_bits_first():
    weight, numbers = mxfp4(3, 64), [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for row in range(3):
        for column in range(64):
            code = int(weight.codes[row, column // 2]) >> 4 * (column % 2) & 15
            size = numbers[code % 8] * 2.0 ** (int(weight.scales[row, column // 32]) - 127)
            assert float(weight.restored()[row, column]) == (-size if code > 7 else size)


PARTS = {
    "whole": [fp8(6, 8, (6, 8), 1), fp8(4, 8, (4, 8), 2)],
    "outputs": [fp8(6, 8, (1, 8), 1), fp8(4, 8, (1, 8), 2)],
    "whole and outputs": [fp8(6, 8, (6, 8), 1), fp8(4, 8, (1, 8), 2)],
    "blocks": [fp8(8, 8, (4, 4), 1), fp8(4, 8, (4, 4), 2), fp8(3, 8, (4, 4), 3)],
    "blocks that do not fit": [fp8(6, 8, (4, 4), 1), fp8(5, 8, (4, 4), 2)],
    "integers": [integers(6, 64, 32, seed=1), integers(4, 64, 32, seed=2)],
    "mxfp4": [mxfp4(6, 64, 1), mxfp4(4, 64, 2)],
}


@pytest.mark.parametrize("name", PARTS)
def test_stacked_parts_keep_their_numbers_and_their_kind(name):
    parts = PARTS[name]
    whole = stacked(parts, torch.bfloat16)
    assert type(whole) is type(parts[0])
    assert torch.equal(whole.restored(), torch.cat([part.restored() for part in parts]))
    tiles = {"whole": (1, 8), "outputs": (1, 8), "whole and outputs": (1, 8), "blocks": (4, 4)}
    assert not isinstance(whole, Fp8Weight) or whole.tile == tiles.get(name, (2, 4))
    assert not torch.equal(whole.restored(), torch.cat([part.restored() for part in parts[::-1]])), "the control"


def test_the_largest_static_input_scale_is_taken_and_unlike_parts_are_restored():
    parts = [fp8(4, 8, (4, 8), 1, 0.5), fp8(4, 8, (4, 8), 2, 0.75)]
    assert stacked(parts, F32).input_scale == 0.75
    assert stacked([parts[0], fp8(4, 8, (4, 8))], F32).input_scale is None
    plain = torch.randn(2, 8).to(torch.bfloat16)
    mixed = stacked([parts[0], plain], torch.bfloat16)
    assert torch.equal(mixed, torch.cat([parts[0].restored().to(torch.bfloat16), plain]))
    assert stacked([plain], F32) is plain


@pytest.mark.parametrize(
    ("weight", "stays"),
    [
        (fp8(8, 8, (8, 8)), True),
        (fp8(8, 8, (1, 8)), True),
        (fp8(8, 8, (4, 4)), False),
        (fp8(8, 8, (2, 4)), True),
        (integers(8, 64, 32), True),
        (mxfp4(8, 64), True),
    ],
)
def test_rows_are_taken_where_no_tile_mixes_rows_of_several(weight, stays):
    index = torch.tensor([5, 4, 1, 0, 6, 7])
    taken = weight.rows(index)
    assert (taken is not None) == stays
    if taken is not None:
        assert torch.equal(taken.restored(), weight.restored()[index]) and taken.out_features == 6


@pytest.mark.parametrize(
    "weight",
    [
        *(fp8(11, 10, tile) for tile in ((11, 10), (1, 10), (4, 4), (8, 1), (1 << 20, 1 << 20))),
        integers(11, 70, 32),
        mxfp4(11, 64),
        fp8(0, 8, (4, 4)),
    ],
)
def test_weights_are_restored_in_pieces(weight, monkeypatch):
    whole = weight.restored()
    due = error_against(None, weight, 7), dequantised(weight, torch.bfloat16)
    monkeypatch.setattr(stored_weights, "_PIECE_VALUES", 30)
    found = list(pieces(weight))
    assert all(torch.equal(whole[rows], numbers) for rows, numbers in found)
    assert torch.equal(torch.cat([numbers for _, numbers in found]), whole)
    most = 8 if isinstance(weight, Fp8Weight) else 1  # rows that share a scale stay together
    assert all(len(numbers) <= max(most, 30 // whole.shape[1]) for _, numbers in found)
    held, error = dequantised(weight, torch.bfloat16)
    assert torch.equal(held, whole.to(torch.bfloat16)) and torch.equal(held, due[1][0])
    for ours, theirs in ((error, due[1][1]), (error_against(None, weight, 7), due[0])):
        assert (ours.num_weights, ours.num_bytes) == (theirs.num_weights, theirs.num_bytes)
        assert ours.relative == pytest.approx(theirs.relative, rel=1e-4)
        assert ours.squares == pytest.approx(theirs.squares, rel=1e-4)
    off = error_against(whole + 1, weight, 7)
    assert off.squared_error == pytest.approx(whole.numel(), rel=1e-4), "the control"


# ---- the compiled kernels' layout


@pytest.mark.parametrize(
    ("bits", "k", "group"),
    [(4, 128, 32), (4, 384, 96), (4, 256, 128), (4, 512, 256), (4, 70, 70), (8, 64, 64), (8, 200, 200)],
)
@pytest.mark.parametrize("n", [40, 64])
def test_integers_of_a_checkpoint_are_kept_by_the_compiled_kernels(compiled, bits, k, group, n):
    weight = integers(n, k, group, bits, zeros=False)
    linear, error = compiled.pack_stored(weight, torch.arange(float(n)), F32)
    assert isinstance(linear, NativeQuantLinear)
    assert error.squared_error == 0.0 and error.num_weights == n * k and error.num_bytes < n * k * bits / 8 * 2.6
    found = linear(torch.eye(k)).T - torch.arange(float(n))[:, None]
    torch.testing.assert_close(found, weight.restored(), atol=2e-5, rtol=1e-5)
    other = integers(n, k, group, bits, zeros=False, seed=1)
    assert not torch.allclose(found, other.restored(), atol=1e-2), "the control"


def test_zero_points_lose_what_a_half_float_loses_and_it_is_told(compiled):
    weight = integers(48, 256, 128)
    linear, error = compiled.pack_stored(weight, None, F32)
    off = linear(torch.eye(256)).T - weight.restored()
    assert 1e-6 < error.relative < 1e-3
    assert float(off.norm() / weight.restored().norm()) == pytest.approx(error.relative, rel=0.05)


def test_what_the_kernels_have_no_form_for_is_restored(compiled):
    odd = [integers(8, 48, 16), fp8(8, 32, (8, 32)), mxfp4(8, 64)]
    biased = integers(8, 64, 32, 8)
    odd.append(QuantizedWeight(biased.integers, biased.scales, biased.scales * 3, 64, 8))
    for weight in odd:
        linear, error = compiled.pack_stored(weight, None, F32)
        assert not isinstance(linear, NativeQuantLinear) and error.squared_error == 0.0
        torch.testing.assert_close(linear(torch.eye(weight.in_features)).T, weight.restored())
        rounded, error = dequantised(weight, torch.bfloat16)
        assert torch.equal(rounded, weight.restored().to(torch.bfloat16)) and error.num_bytes == 2 * rounded.numel()


EXPERTS = {
    "int4": lambda seed: (integers(64, 32, 32, seed=seed, zeros=False), integers(32, 32, 32, seed=seed, zeros=False)),
    "int8 and unlike groups": lambda seed: (integers(64, 32, 32, 8, seed), integers(32, 32, 16, 8, seed + 9)),
    "fp8": lambda seed: (fp8(64, 32, (16, 16), seed), fp8(32, 32, (16, 16), seed + 9)),
    "mxfp4": lambda seed: (mxfp4(64, 32, seed), mxfp4(32, 32, seed + 9)),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_of_stored_weights_are_those_of_the_restored_ones(cpu, name):
    pairs = [EXPERTS[name](seed) for seed in range(3)]
    plain = [tuple(plain_weight(weight) for weight in pair) for pair in pairs]
    x, shares = torch.randn(7, 32, generator=torch.Generator().manual_seed(3)), torch.full((7, 2), 0.5)
    chosen = torch.tensor([[i % 3, (i + 1) % 3] for i in range(7)])
    expected = ReferenceBackend("cpu").pack_experts(iter(plain), "silu", F32)(x, shares, chosen)
    for backend in (cpu, ReferenceBackend("cpu")):
        packed = backend.pack_experts(iter(pairs), "silu", F32)
        assert packed.error.relative < 1e-3 and packed.error.num_weights == 3 * 3 * 32 * 32
        torch.testing.assert_close(packed(x, shares, chosen), expected, atol=2e-3, rtol=2e-3)
    if cpu.compiled_kernels is not None and name == "int4":
        native = cpu.pack_experts(iter(pairs), "silu", F32)
        assert isinstance(native, NativeExperts)
        assert native.error.num_bytes < 3 * 3 * 32 * 32
    swapped = backend.pack_experts(iter(pairs[1:] + pairs[:1]), "silu", F32)
    assert not torch.allclose(swapped(x, shares, chosen), expected, atol=1e-2), "the control"


def test_a_scheme_of_the_settings_is_taken_whatever_is_stored(cpu):
    pairs = [(fp8(64, 32, (64, 32), seed), fp8(32, 32, (32, 32), seed)) for seed in range(2)]
    packed = cpu.pack_experts(iter(pairs), "silu", F32, Scheme(8))
    assert 1e-4 < packed.error.relative < 0.02
