"""Codecs that compress blocks for disk and remote stores. Pure.

A codec is bound to one pool's layout. `none` and `lossless` are exact; `int8` and `fp8` are not: each group of
adjacent numbers of one token and head shares a scale, so an outlier affects only its own group.
"""

import struct
import zlib
from typing import Protocol

import numpy as np

from kvrelay.errors import KvrelayError
from kvrelay.kvcache.stores.codec_kernels import dequantise, merge_planes, quantise, split_planes
from kvrelay.types import ITEM_BYTES, KvLayout

_MOST_GROUP = 64
_LENGTH = struct.Struct("<I")


class CodecError(KvrelayError):
    """A block cannot be encoded (it has non-finite numbers), or bytes are not an encoded block."""


class Codec(Protocol):
    """Blocks to bytes and back. Thread-safe."""

    name: str  # in settings and namespaces
    is_exact: bool

    def encoded_bytes(self, block_bytes: int) -> int | None:
        """The encoded size of a block of `block_bytes`; None: it depends on the content."""

    def most_bytes(self, block_bytes: int) -> int:
        """The largest encoded size of a block of `block_bytes`."""

    def encode(self, block: memoryview) -> memoryview:
        """Encode a block; may return `block` itself. Raises CodecError."""

    def decode(self, data: memoryview, into: memoryview) -> None:
        """Decode one block into `into`. Raises CodecError; then the content of `into` is undefined."""


class NoCodec:
    """Blocks as they are."""

    name = "none"
    is_exact = True

    def encoded_bytes(self, block_bytes: int) -> int | None:
        return block_bytes

    def most_bytes(self, block_bytes: int) -> int:
        return block_bytes

    def encode(self, block: memoryview) -> memoryview:
        return block

    def decode(self, data: memoryview, into: memoryview) -> None:
        if data.nbytes != into.nbytes:
            raise CodecError(f"{data.nbytes} bytes are no block of {into.nbytes}")
        into[:] = data


class LosslessCodec:
    """Exponents are Huffman-coded, one byte of each number; signs and mantissas, which are noise, stay as they are.

    Nothing repeats in KV that a search for matches would find: plain Huffman codes are smaller, and faster to make,
    than what zstd or LZ4 make of the same bytes (bench/results/2026-11-22-kv-cache.md).
    """

    name = "lossless"
    is_exact = True

    def __init__(self, dtype: str) -> None:
        self._width = ITEM_BYTES[dtype]

    def encoded_bytes(self, block_bytes: int) -> int | None:
        return None

    def most_bytes(self, block_bytes: int) -> int:
        plane = block_bytes // self._width
        return _LENGTH.size + block_bytes + plane // 1000 + 64  # deflate stores incompressible data, with some overhead

    def encode(self, block: memoryview) -> memoryview:
        top, rest = split_planes(np.frombuffer(block, np.uint8), self._width)
        coder = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
        coded = coder.compress(top.data) + coder.flush()
        return memoryview(b"".join((_LENGTH.pack(len(coded)), coded, rest.data)))

    def decode(self, data: memoryview, into: memoryview) -> None:
        plane = into.nbytes // self._width
        end = _LENGTH.size + (_LENGTH.unpack_from(data)[0] if data.nbytes >= _LENGTH.size else 0)
        if data.nbytes != end + into.nbytes - plane:
            raise CodecError(f"{data.nbytes} bytes are no block of {into.nbytes}, losslessly coded")
        try:
            top = zlib.decompress(data[_LENGTH.size : end], -15, plane)
        except zlib.error as error:
            raise CodecError(f"exponents cannot be decoded: {error}") from error
        if len(top) != plane:
            raise CodecError(f"{len(top)} exponents, not {plane}")
        merge_planes(np.frombuffer(top, np.uint8), np.frombuffer(data[end:], np.uint8), self._width, _array(into))


class QuantisingCodec:
    """One byte per number and a 16-bit scale per group."""

    is_exact = False

    def __init__(self, name: str, dtype: str, head_dim: int) -> None:
        """`name`: "int8" or "fp8" (e4m3)."""
        self.name, self._dtype = name, dtype
        self._group = _group_of(head_dim)

    def encoded_bytes(self, block_bytes: int) -> int | None:
        count = block_bytes // ITEM_BYTES[self._dtype]
        return count + 2 * (count // self._group)

    def most_bytes(self, block_bytes: int) -> int:
        size = self.encoded_bytes(block_bytes)
        assert size is not None
        return size

    def encode(self, block: memoryview) -> memoryview:
        made = quantise(np.frombuffer(block, np.uint8), self._dtype, self._group, self.name)
        if made is None:
            raise CodecError(f"a block with numbers that are not finite has no {self.name} form")
        scales, codes = made
        return np.concatenate((scales.view(np.uint8), codes)).data

    def decode(self, data: memoryview, into: memoryview) -> None:
        if data.nbytes != self.encoded_bytes(into.nbytes):
            raise CodecError(f"{data.nbytes} bytes are no block of {into.nbytes} in {self.name}")
        count = into.nbytes // ITEM_BYTES[self._dtype]
        cut = 2 * (count // self._group)
        encoded = np.frombuffer(data, np.uint8)
        scales = encoded[:cut].view("<u2")
        dequantise(scales, encoded[cut:], self._dtype, self._group, self.name, _array(into))


def _array(view: memoryview) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    return np.frombuffer(view, np.uint8)


def _group_of(head_dim: int) -> int:
    """The largest divisor of head_dim within the limit of a group."""
    return max(size for size in range(1, _MOST_GROUP + 1) if head_dim % size == 0)


def make_codec(name: str, layout: KvLayout) -> Codec:
    """The codec for `cache.compression` and a pool's layout; one-byte dtypes are not quantised again.

    Raises ValueError.
    """
    if name == "lossless":
        return LosslessCodec(layout.dtype)
    if name in ("int8", "fp8") and layout.itemsize > 1:
        return QuantisingCodec(name, layout.dtype, layout.head_dim)
    if name in ("none", "int8", "fp8"):
        return NoCodec()
    raise ValueError(f"no codec is called {name!r}")
