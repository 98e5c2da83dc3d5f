"""Casting chunks between pools: torch's own rounding, value by value, wherever the chunks lie."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay import fp8
from kvrelay.kvtransfer.mover.verification import convert
from kvrelay.types import KvLayout, KvMemory

LAYOUT = KvLayout(num_layers=3, num_blocks=6, block_size=4, num_kv_heads=2, head_dim=3, dtype="float32")
DTYPES = ["float32", "bfloat16", "float16", "fp8_e4m3"]


def pool(layout, seed=None):
    """A pool in host memory; random finite values of every size, or zeros."""
    memory = bytearray(layout.num_bytes)
    if seed is not None:
        rng = np.random.default_rng(seed)
        shape = layout.num_bytes // layout.row_bytes, layout.head_dim
        values = torch.from_numpy(rng.normal(size=shape) * 10.0 ** rng.integers(-6, 5, size=shape)).float()
        if layout.dtype == "fp8_e4m3":
            values = fp8.encoded(values)
        else:
            largest = torch.finfo(getattr(torch, layout.dtype)).max
            values = values.clamp(-largest, largest).to(getattr(torch, layout.dtype))
        memory[:] = values.view(torch.uint8).numpy().tobytes()
    return KvMemory(layout, 0, "cpu", None, memoryview(memory), memory)


def rows(memory):
    """[layers, blocks, parts, tokens, heads, head_dim] of a pool, as its own dtype; a float32 copy from fp8."""
    layout = memory.layout
    shape = [layout.num_blocks, layout.num_layers, layout.num_parts, layout.block_size, layout.num_kv_heads]
    shape = shape if layout.order == "NHD" else [*shape[:3], shape[4], shape[3]]
    values = torch.frombuffer(memory.view, dtype=torch.uint8)
    if layout.dtype == "fp8_e4m3":
        values = fp8.decoded(values.view(*shape, layout.row_bytes))
    else:
        values = values.view(getattr(torch, layout.dtype)).view(*shape, layout.head_dim)
    return (values if layout.order == "NHD" else values.transpose(3, 4)).transpose(0, 1)


def nearest(values, name):
    """The oracle: through float64, beyond the range the largest. fp8: every vector as test_fp8.py has it."""
    if name == "fp8_e4m3":
        return fp8.decoded(fp8.encoded(values.float()))
    largest = torch.finfo(getattr(torch, name)).max
    return values.double().clamp(-largest, largest).float().to(getattr(torch, name))


@settings(deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.sampled_from(["NHD", "HND"]),
    st.sampled_from(["NHD", "HND"]),
    st.sampled_from([(4, 4), (2, 4), (4, 2)]),
    st.permutations(range(6)),
)
def test_each_value_is_cast_into_the_token_and_head_that_it_is_for(source, target, one, other, sizes, where):
    begins = pool(dataclasses.replace(LAYOUT, dtype=source, order=one, block_size=sizes[0]), seed=1)
    lands = pool(dataclasses.replace(LAYOUT, dtype=target, order=other, block_size=sizes[1]))
    from_chunks, to_chunks = np.array(where[:4]), np.array(where[2:])
    tokens = min(sizes)
    convert(begins, from_chunks, lands, to_chunks, range(1, 3), chunk_tokens=tokens)
    expected = torch.zeros_like(rows(lands), dtype=torch.float32)
    for come, go in zip(from_chunks, to_chunks, strict=True):
        block, first = divmod(come * tokens, sizes[0])
        values = rows(begins)[1:, block, :, first : first + tokens]
        block, first = divmod(go * tokens, sizes[1])
        expected[1:, block, :, first : first + tokens] = nearest(values, target).float()
    assert torch.equal(rows(lands).float(), expected)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_narrowing_rounds_to_the_nearest_and_ties_to_even(name):
    layout = dataclasses.replace(LAYOUT, num_layers=1, num_blocks=2, num_kv_heads=1, head_dim=1, block_size=2)
    step = torch.finfo(getattr(torch, name)).eps
    values = torch.tensor([1 + step / 2, 1 + 1.5 * step, 1 + 0.49 * step, 1 - step / 4] * 2, dtype=torch.float32)
    begins = pool(layout)
    rows(begins).view(-1)[:] = values
    lands = pool(dataclasses.replace(layout, dtype=name))
    convert(begins, np.arange(2), lands, np.arange(2), range(1), chunk_tokens=2)
    assert rows(lands).reshape(-1).float().tolist() == [1.0, 1 + 2 * step, 1.0, 1.0] * 2


@pytest.mark.parametrize(("name", "largest"), [("float16", 65504.0)])
@pytest.mark.parametrize("wide", ["float32", "bfloat16"])
def test_what_is_beyond_the_range_becomes_the_largest_and_nan_stays(name, largest, wide):
    layout = dataclasses.replace(LAYOUT, num_layers=1, num_blocks=1, num_kv_heads=1, head_dim=1, dtype=wide)
    begins, lands = pool(layout), pool(dataclasses.replace(layout, dtype=name))
    values = [1e6, -1e6, float("inf"), float("nan"), 0.0, 1.0, -1.0, -float("inf")]
    rows(begins).view(-1)[:] = torch.tensor(values, dtype=rows(begins).dtype)
    convert(begins, np.arange(1), lands, np.arange(1), range(1), chunk_tokens=4)
    got = rows(lands).reshape(-1).float()
    assert got[3].isnan()
    assert got[[0, 1, 2, 4, 5, 6, 7]].tolist() == [largest, -largest, largest, 0.0, 1.0, -1.0, -largest]


def test_equal_dtypes_keep_every_bit():
    begins = pool(dataclasses.replace(LAYOUT, dtype="bfloat16"))
    begins.view[:] = np.random.default_rng(2).integers(0, 256, len(begins.view), dtype=np.uint8).tobytes()
    lands = pool(dataclasses.replace(begins.layout, order="HND"))
    convert(begins, np.arange(6), lands, np.arange(6), range(3), chunk_tokens=4)
    assert torch.equal(rows(lands).contiguous().view(torch.int16), rows(begins).contiguous().view(torch.int16))
