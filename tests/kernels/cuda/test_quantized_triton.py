"""The Triton products with quantised weights in Triton's interpreter. Skipped where triton is not installed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# In a process of its own: triton decides at its import whether to interpret.
PROGRAM = """
import sys
import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from kvrelay.kernels.cuda import quantized, quantized_triton
from kvrelay.kernels.oracle import exact

def cast(data, source, target, rounding, real=interpreter._convert_float):
    # the interpreter truncates where the device rounds
    if target != tl.float8e4nv:
        return real(data, source, target, rounding)
    numbers = torch.from_numpy(np.ascontiguousarray(data)).to(torch.float8_e4m3fn)
    return numbers.view(torch.uint8).numpy()

interpreter._convert_float = cast
CPU = torch.device("cpu")
"""


def interpreted(program):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM + program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()


pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


# bfloat16 has no products in the interpreter
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8", "mxfp4"])
def test_the_product_equals_that_with_the_restored_weight(kind):
    """As at the start on a GPU: of one weight and of experts, few rows and many."""
    program = f"""
blocks_of, taken = quantized_triton.blocks_of, set()
def seen(num_rows, **more):
    taken.add(blocks_of(num_rows, **more)["BLOCK_M"])
    return blocks_of(num_rows, **more)
quantized_triton.blocks_of = seen
for dtype in (torch.float32, torch.float16):
    quantized.check("{kind}", CPU, dtype)
    assert taken == {{16, 32, 64, 128}}
    print("right")
real = quantized.stack
def spoiled(weights):
    values = real(weights).values.clone()
    values[:, 7, 100] ^= 8
    return quantized.replace(real(weights), values=values)
quantized.stack = spoiled
try:
    quantized.check("{kind}", CPU, torch.float32)
except RuntimeError as error:
    print("control:", error)
"""
    found = interpreted(program)
    assert found[:2] == ["right", "right"] and found[2].startswith("control: products of 1 rows are")


def test_weights_of_any_size_and_group():
    program = """
from kvrelay.kernels.common.quant_scheme import Scheme
from kvrelay.kernels.common.quantized import quantize
from kvrelay.kernels.common.stored_weights import Fp8Weight
from kvrelay.kernels.oracle import exact
products = quantized.Products(CPU)
products._works = lambda product, dtype: not product.startswith("scaled")
generator = torch.Generator().manual_seed(0)
for n, k in ((1, 1), (17, 33), (150, 70), (40, 300)):
    weight, bias = (torch.randn(*of, generator=generator) for of in ((n, k), (n,)))
    for_tiles = [(tile, (-(-n // tile[0]), -(-k // tile[1]))) for tile in ((n, k), (1, k), (128, 128))]
    values = weight.to(torch.float8_e4m3fn)
    fp8 = [Fp8Weight(values, torch.rand(shape, generator=generator) + 0.5, tile) for tile, shape in for_tiles]
    for held in [quantize(weight, scheme) for scheme in (Scheme(4), Scheme(8), Scheme(4, 96), Scheme(8, 128))] + fp8:
        linear, error = products.linear(held, bias, torch.float32)
        assert error.squared_error == 0 and error.squares > 0, error
        for rows in (0, 1, 20, 70):
            x = torch.randn(rows, 2 * k, generator=generator)[:, k:]  # a view
            found = linear(x)
            assert exact.linear(x, held.restored(), bias, held=held.restored().abs()).ratio(found) <= 1, (n, k, held)
print("right")
"""
    assert interpreted(program) == ["right"]


@pytest.mark.parametrize("group", [None, 128])
def test_rows_are_rounded_to_the_nearest_fp8(group):
    program = f"""
generator = torch.Generator().manual_seed(0)
for rows, width in ((1, 256), (5, 384), (3, 2176), (4, 100)):
    x = torch.randn(rows, width, generator=generator)
    x[0, :9] = 0
    values, scales = quantized_triton.quantize_rows(x, {group})
    padded = -(-rows // 4) * 4
    assert scales.stride() == ((1, 1) if {group} is None else (1, padded))
    assert values.shape == (padded, width) and not values[rows:].float().any()
    wide = scales.repeat_interleave({group} or width, 1)[:rows, :width]
    due = (x / wide).to(torch.float8_e4m3fn)
    assert torch.equal(values[:rows].float(), due.float())
    lost = exact.lost_as_fp8(x, {group} or width)
    assert ((values[:rows].float() * wide - x).abs() <= lost * (1 + 1e-5)).all()
x = torch.zeros(2, 256)
values, scales = quantized_triton.quantize_rows(x, {group})
assert not values.float().any() and (scales == 1).all()
"""
    assert interpreted(program) == []


def test_what_is_no_number_stays_visible():
    program = """
x = torch.tensor([[1.0, float("inf"), 2, 3], [1, float("nan"), 2, 3]])
values, scales = quantized_triton.quantize_rows(x)
products = (values.float() * scales)[:2]
assert not products[:, 1].isfinite().any() and (products[1, 2:] - x[1, 2:]).abs().max() < 0.2
values, scales = quantized_triton.quantize_rows(x, given=torch.tensor([0.005]))
assert values[:2, 1].isnan().all() and (values[:2, 3].float() * 0.005 == 2.24).all() and (scales == 0.005).all()
"""
    assert interpreted(program) == []
