"""The codecs' arithmetic: fp8 codes are e4m3 as torch has it, and what is compiled gives the same bytes as numpy."""

import numpy as np
import pytest
import torch

from kvrelay.errors import BackendUnavailable
from kvrelay.kvcache.stores import codecs
from kvrelay.kvcache.stores.codecs import make_codec
from kvrelay.native.build import load_native
from kvrelay.types import KvLayout


def test_every_code_means_what_it_means_in_torch():
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    is_number = ~np.isnan(expected)  # 0x7F and 0xFF, which no encoder makes
    assert is_number.sum() == 254
    into = np.zeros(256 * 4, np.uint8)
    codecs.dequantise(np.full(4, 0x3F80, np.uint16), codes, "float32", 64, "fp8", into)
    assert (into.view(np.float32)[is_number] == expected[is_number]).all()


def test_numbers_are_rounded_as_torch_rounds_them():
    numbers = np.concatenate(
        [np.linspace(-448, 448, 40_001), np.geomspace(1e-6, 448, 20_000), np.arange(-64, 65) / 1024.0, [0.0, -0.0] * 8]
    ).astype(np.float32)
    numbers = np.concatenate([numbers, np.zeros(-len(numbers) % 64, np.float32)]).reshape(-1, 64)
    numbers[:, 0] = 448  # every scale is then 1
    made = codecs.quantise(numbers.reshape(-1).view(np.uint8), "float32", 64, "fp8")
    assert made is not None
    scales, codes = made
    assert (scales == 0x3F80).all()
    expected = torch.from_numpy(numbers).reshape(-1).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert (codes == expected).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["lossless", "int8", "fp8"])
def test_with_and_without_a_compiler_the_bytes_are_the_same(dtype, name, monkeypatch):
    """What one worker stored another may load."""
    if codecs.native_codecs() is None:
        pytest.skip("there is no compiler here")
    draw = torch.Generator().manual_seed(3)
    sizes = torch.logspace(-40, 4, 600).unsqueeze(1)  # float16's smallest numbers and below are among them
    numbers = (torch.randn(600, 64, generator=draw) * sizes).to(getattr(torch, dtype))
    numbers = numbers.nan_to_num(posinf=60000.0, neginf=-60000.0)
    block = memoryview(numbers.view(torch.uint8).numpy().tobytes())
    codec, compiled, plain = make_codec(name, KvLayout(1, 1, 600, 1, 64, dtype, is_latent=True)), *_two(len(block))
    encoded = bytes(codec.encode(block))
    codec.decode(memoryview(encoded), compiled)
    monkeypatch.setattr(codecs, "native_codecs", lambda: None)
    assert bytes(codec.encode(block)) == encoded
    codec.decode(memoryview(encoded), plain)
    assert compiled == plain


def _two(num_bytes):
    return memoryview(bytearray(num_bytes)), memoryview(bytearray(num_bytes))


def test_a_machine_without_a_compiler_is_served_by_numpy(monkeypatch):
    monkeypatch.setenv("KVRELAY_NATIVE", "0")
    with pytest.raises(BackendUnavailable):
        load_native("anything", [])
    codecs.native_codecs.cache_clear()
    assert codecs.native_codecs() is None
    codecs.native_codecs.cache_clear()
