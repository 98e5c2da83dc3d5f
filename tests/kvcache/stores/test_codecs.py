"""Codecs: exact where they say so, near enough where not, and the same with and without a compiler."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.kvcache.stores import codecs
from kvrelay.kvcache.stores.codecs import CodecError, make_codec
from kvrelay.types import ITEM_BYTES, KvLayout

pytestmark = pytest.mark.pure


DTYPES = ["float32", "bfloat16", "float16"]


@pytest.fixture(params=["compiled", "numpy"], autouse=True)
def kernels(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setenv("KVRELAY_NATIVE", "0")
    codecs.native_codecs.cache_clear()
    yield request.param
    codecs.native_codecs.cache_clear()


def layout(dtype, head_dim=64, *, is_latent=False):
    return KvLayout(2, 1, 4, 1 if is_latent else 3, head_dim, dtype, is_latent=is_latent)


def as_dtype(numbers, dtype):
    """These float32 numbers as the bytes of `dtype`."""
    if dtype == "bfloat16":
        return ((numbers.view(np.uint32) + 0x8000) >> 16).astype(np.uint16).view(np.uint8)
    return numbers.astype(dtype).view(np.uint8)


def as_floats(data, dtype):
    data = np.frombuffer(data, np.uint8)
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(dtype).astype(np.float32)


def kv_like(shape, seed=0):
    """Numbers whose channels have unlike sizes, as keys do."""
    draw = np.random.default_rng(seed)
    channels = np.exp(draw.normal(0, 2, shape.head_dim))
    count = shape.num_layers * shape.num_parts * shape.block_size * shape.num_kv_heads
    return (draw.normal(0, 1, (count, shape.head_dim)) * channels).astype(np.float32).reshape(-1)


def round_trip(codec, block):
    encoded = codec.encode(memoryview(block))
    into = memoryview(bytearray(len(block)))
    codec.decode(memoryview(bytes(encoded)), into)
    return encoded, bytes(into)


@pytest.mark.parametrize("name", ["none", "lossless"])
@pytest.mark.parametrize("dtype", [*DTYPES, "fp8_e4m3"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_an_exact_codec_gives_back_every_bit(name, dtype, data):
    """NaNs with payloads, infinities, minus zero: any bits at all."""
    codec = make_codec(name, layout(dtype))
    block = data.draw(st.binary(min_size=1, max_size=60)) * ITEM_BYTES[dtype]
    encoded, decoded = round_trip(codec, block)
    assert decoded == block
    assert encoded.nbytes <= codec.most_bytes(len(block))


@pytest.mark.parametrize("dtype", DTYPES)
def test_lossless_blocks_are_smaller_where_exponents_repeat_and_bounded_where_nothing_does(dtype):
    shape = layout(dtype)
    codec, noise = make_codec("lossless", shape), np.random.default_rng(1).bytes(1 << 16)
    encoded, _ = round_trip(codec, as_dtype(kv_like(shape), dtype).tobytes())
    assert encoded.nbytes < 0.97 * kv_like(shape).size * shape.itemsize
    assert round_trip(codec, noise)[0].nbytes <= codec.most_bytes(len(noise))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "largest_error"), [("int8", 0.5 / 127 * 1.01), ("fp8", 2**-4 * 1.01)])
def test_quantised_numbers_are_within_half_a_step_of_their_groups_largest(dtype, name, largest_error):
    shape = layout(dtype)
    block = as_dtype(kv_like(shape), dtype).tobytes()
    codec = make_codec(name, shape)
    encoded, decoded = round_trip(codec, block)
    was, now = (as_floats(data, dtype).reshape(-1, 64) for data in (block, decoded))
    relative = 2**-8 if dtype == "bfloat16" else 2**-11  # rounding of the result itself
    largest = np.abs(was).max(axis=1, keepdims=True)
    bound = largest * largest_error if name == "int8" else np.abs(was) * largest_error + largest * 2**-9 / 448
    assert (np.abs(now - was) <= bound + np.abs(was) * relative + 1e-6 * largest).all()
    assert encoded.nbytes == codec.most_bytes(len(block)) == was.size * (1 + 2 / 64)
    assert decoded != block


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_zeros_stay_zeros_and_the_smallest_numbers_do_no_harm(name):
    codec = make_codec(name, layout("float32"))
    for block in (bytes(64 * 4), np.full(64, 1e-42, np.float32).tobytes(), np.full(64, 3e38, np.float32).tobytes()):
        _, decoded = round_trip(codec, block)
        assert np.allclose(np.frombuffer(decoded, np.float32), np.frombuffer(block, np.float32), rtol=0.02, atol=2e-36)


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_block_with_numbers_that_are_not_finite_is_refused(name, bad):
    for dtype in DTYPES:
        shape = layout(dtype)
        numbers = kv_like(shape)
        numbers[77] = bad
        data = numbers.astype(dtype).tobytes() if dtype != "bfloat16" else (numbers.view(np.uint32) >> 16).astype("u2")
        with pytest.raises(CodecError, match="not finite"):
            make_codec(name, shape).encode(memoryview(bytes(data)))


@pytest.mark.parametrize("name", ["none", "lossless", "int8", "fp8"])
def test_bytes_that_are_no_encoded_block_are_refused(name):
    shape = layout("bfloat16")
    codec, block = make_codec(name, shape), as_dtype(kv_like(shape), "bfloat16").tobytes()
    encoded = bytes(codec.encode(memoryview(block)))
    into = memoryview(bytearray(len(block)))
    for wrong in (b"", encoded[:-1], encoded + b"\0", encoded[: len(encoded) // 2]):
        with pytest.raises(CodecError):
            codec.decode(memoryview(wrong), into)
    if name == "lossless":
        for position in range(40):
            torn = bytearray(encoded)
            torn[position] ^= 0xFF
            try:
                codec.decode(memoryview(torn), into)
            except CodecError:
                continue


def test_latent_blocks_share_no_scale_between_the_latent_and_the_rotated_part():
    shape = layout("bfloat16", 576, is_latent=True)
    numbers = kv_like(shape).reshape(-1, 576)
    numbers[:, 512:] *= 1000
    block = as_dtype(np.ascontiguousarray(numbers.reshape(-1)), "bfloat16").tobytes()
    _, decoded = round_trip(make_codec("int8", shape), block)
    was, now = (as_floats(data, "bfloat16").reshape(-1, 576)[:, :512] for data in (block, decoded))
    error = np.linalg.norm(now - was) / np.linalg.norm(was)
    assert error < 0.02


def test_what_has_one_byte_already_is_not_quantised_again():
    assert make_codec("int8", layout("fp8_e4m3")).name == "none"
    with pytest.raises(ValueError, match="'gzip'"):
        make_codec("gzip", layout("float32"))
