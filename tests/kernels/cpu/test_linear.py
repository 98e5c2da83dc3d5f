"""Packed linear layers on the CPU: right for every number of rows, and no row sees its neighbours."""

import pytest
import torch

from kvrelay.kernels.cpu.linear import OneDnnLinear, choose_linear
from kvrelay.kernels.cpu.native_kernels import KIND_BF16, KIND_DOT, NativeLinear

BF16 = torch.bfloat16
ROWS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 16, 17, 32, 33, 61, 200)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize(
    ("out_features", "in_features"), [(16, 8), (1, 1), (17, 33), (150, 70), (576, 1536), (100, 2000)]
)
def test_linear_equals_the_matrix_product(cpu, dtype, out_features, in_features):
    weight = random(out_features, in_features, dtype=dtype) / in_features**0.5
    bias = random(out_features, dtype=dtype, seed=1)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for b in (None, bias):
        linear = cpu.pack_linear(weight, b)
        assert linear.out_features == out_features
        for rows in ROWS:
            x = random(rows, in_features, dtype=dtype, seed=rows)
            expected = x.double() @ weight.double().T + (0 if b is None else b.double())
            found = linear(x)
            assert found.dtype == dtype
            torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("in_features", [300, 320])  # AMX tiles take multiples of 32
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_row_alone_equals_itself_in_any_batch_bit_for_bit(compiled, compiled_2_threads, dtype, in_features):
    weight = random(150, in_features, dtype=dtype)
    for backend in (compiled, compiled_2_threads):
        kind = backend.compiled_kernels.linear_kind(dtype, in_features)
        linear = NativeLinear(backend.compiled_kernels, weight, None, kind)
        x = random(200, in_features, dtype=dtype)
        alone = torch.cat([linear(x[i : i + 1]) for i in range(200)])
        for rows in ROWS:
            assert torch.equal(linear(x[:rows]), alone[:rows])


@pytest.mark.parametrize("in_features", [1536, 1537, 1600, 4864, 5001])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_totals_over_blocks_of_inputs_are_the_same_bits_as_in_one_go(compiled, dtype, in_features):
    """One row goes in one go, several tiles of rows go block by block from 1537 inputs on."""
    native = compiled.compiled_kernels
    kinds = {native.linear_kind(dtype, in_features)} | ({KIND_BF16} if dtype == BF16 else set())
    kinds |= {KIND_DOT} if dtype == BF16 and native.has_dot and in_features % 2 == 0 else set()
    weight, x = random(70, in_features, dtype=dtype), random(45, in_features, dtype=dtype)
    for kind in kinds:
        linear = NativeLinear(native, weight, random(70), kind)
        together = linear(x)
        assert torch.equal(together, torch.cat([linear(x[i : i + 1]) for i in range(45)]))
        expected = x.double() @ weight.double().T + random(70).double()
        torch.testing.assert_close(together.double(), expected, atol=1e-2, rtol=1e-2 if dtype == BF16 else 1e-4)


@pytest.mark.parametrize("rows", [256, 300, 511])
def test_more_outputs_than_meet_a_block_of_inputs_and_rows_for_each_thread(compiled, compiled_2_threads, rows):
    weight, x = random(650, 1600, dtype=BF16), random(rows, 1600, dtype=BF16)
    for backend in (compiled, compiled_2_threads):
        native = backend.compiled_kernels
        linear = NativeLinear(native, weight, None, native.linear_kind(BF16, 1600))
        together = linear(x)
        for i in (0, 31, 32, 127, 128, 255, rows - 1):
            assert torch.equal(together[i : i + 1], linear(x[i : i + 1]))
        expected = x.double() @ weight.double().T
        torch.testing.assert_close(together.double(), expected, atol=1e-2, rtol=1e-2)


def test_rows_may_be_strided_and_zero_rows_are_fine(cpu):
    linear = cpu.pack_linear(random(40, 24))
    x = random(5, 48)
    torch.testing.assert_close(linear(x[:, 24:]), linear(x[:, 24:].contiguous()))
    assert linear(x[:0, :24]).shape == (0, 40)


@pytest.mark.parametrize("kind", [KIND_BF16, KIND_DOT])
def test_the_simpler_bf16_kernels_are_right_even_where_others_are_used(compiled, kind):
    if kind == KIND_DOT and not compiled.compiled_kernels.has_dot:
        pytest.skip("this processor has no products of bf16 pairs")
    weight, x = random(50, 64, dtype=BF16) / 8, random(9, 64, dtype=BF16)
    linear = NativeLinear(compiled.compiled_kernels, weight, None, kind)
    torch.testing.assert_close(linear(x).float(), x.float() @ weight.float().T, atol=2e-2, rtol=2e-2)


def test_a_packed_weight_refuses_other_types(compiled):
    linear = compiled.pack_linear(random(8, 8))
    with pytest.raises(TypeError, match="bfloat16"):
        linear(random(1, 8, dtype=BF16))


def test_onednns_packing_where_it_exists(torch_only):
    try:
        linear = OneDnnLinear(random(40, 24), random(40, seed=1))
        found = linear(random(5, 24, seed=2))
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        pytest.skip(f"torch's private oneDNN operators: {error}")
    expected = random(5, 24, seed=2) @ random(40, 24).T + random(40, seed=1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_bf16_takes_the_compiled_kernels_without_measuring_where_they_use_tiles(compiled, monkeypatch):
    native = compiled.compiled_kernels
    monkeypatch.setattr("kvrelay.kernels.cpu.linear._measure", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(native, "has_tiles", True)
    assert choose_linear(native, BF16, 1, "another key")[0] == "native"


def test_the_choice_is_measured_once_and_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    first, _ = choose_linear(None, torch.float32, 1, "key")
    (written,) = (tmp_path / "native").glob("linear-key-float32-1.txt")
    written.write_text("torch")
    assert first in ("torch", "onednn")
    assert choose_linear(None, torch.float32, 1, "key")[0] == "torch"
    written.write_text("half a fi")
    assert choose_linear(None, torch.float32, 1, "key")[0] in ("torch", "onednn")
