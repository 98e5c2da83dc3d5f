"""Codecs that compress blocks for disk and remote stores. Pure. (sealing.py encrypts what they make.)

A codec is bound to one pool's layout. `none` and `lossless` are exact; `int8` and `fp8` are not: each group of
adjacent numbers of one token and head shares a scale, so an outlier affects only its own group.
"""

import ctypes
import functools
import struct
import zlib
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kvrelay.errors import KvrelayError
from kvrelay.native.build import NativeLibrary
from kvrelay.types import ITEM_BYTES, BlockMeta, KvLayout

Bytes = NDArray[np.uint8]
Scales = NDArray[np.uint16]

LIBRARY = NativeLibrary("kvrelay_codecs", [Path(__file__).parent / "native" / "codecs.c"])
_KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}
_LARGEST = {"int8": np.float32(127), "fp8": np.float32(448)}
_MOST_GROUP = 64  # numbers that share a scale; the C code takes up to 1,024
_LENGTH = struct.Struct("<I")


class CodecError(KvrelayError):
    """A block cannot be encoded (it has non-finite numbers), or bytes are not an encoded block."""


class BlockCoder(Protocol):
    """One block to bytes and back."""

    def encode(self, block: memoryview) -> memoryview:
        """Encode a block; may return `block` itself. Raises CodecError."""

    def decode(self, data: memoryview, into: memoryview) -> None:
        """Decode one block into `into`. Raises CodecError; then the content of `into` is undefined."""


class Codec(Protocol):
    """How blocks are stored. Thread-safe."""

    name: str  # in namespaces
    is_fixed: bool  # every block of one size has the same encoded size
    is_sealed: bool  # decoding verifies every bit, so that a store needs no checksum
    keeps_bytes: bool  # what is encoded is, but for a seal, the block as it is

    def most_bytes(self, block_bytes: int) -> int:
        """The largest encoded size of a block of `block_bytes`."""

    def of(self, digest: bytes, meta: BlockMeta) -> BlockCoder:
        """The coder of one block. `digest`: what it is stored under."""


class _Unsealed:
    """A codec that encodes all blocks alike."""

    is_sealed = keeps_bytes = False

    def of(self, digest: bytes, meta: BlockMeta) -> Self:
        return self


class NoCodec(_Unsealed):
    """Blocks as they are."""

    name, is_fixed, keeps_bytes = "none", True, True

    def most_bytes(self, block_bytes: int) -> int:
        return block_bytes

    def encode(self, block: memoryview) -> memoryview:
        return block

    def decode(self, data: memoryview, into: memoryview) -> None:
        if data.nbytes != into.nbytes:
            raise CodecError(f"{data.nbytes} bytes are no block of {into.nbytes}")
        into[:] = data


class LosslessCodec(_Unsealed):
    """Exponents are Huffman-coded, one byte of each number; signs and mantissas, which are noise, stay as they are.

    Nothing repeats in KV that a search for matches would find: plain Huffman codes are smaller, and faster to make,
    than what zstd or LZ4 make of the same bytes (bench/results/2026-11-22-kv-cache.md).
    """

    name, is_fixed = "lossless", False

    def __init__(self, dtype: str) -> None:
        self._width = ITEM_BYTES[dtype]

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


class QuantisingCodec(_Unsealed):
    """One byte per number and a 16-bit scale per group."""

    is_fixed = True

    def __init__(self, name: str, dtype: str, head_dim: int) -> None:
        """`name`: "int8" or "fp8" (e4m3)."""
        self.name, self._dtype = name, dtype
        self._group = _group_of(head_dim)

    def most_bytes(self, block_bytes: int) -> int:
        count = block_bytes // ITEM_BYTES[self._dtype]
        return count + 2 * (count // self._group)

    def encode(self, block: memoryview) -> memoryview:
        made = quantise(np.frombuffer(block, np.uint8), self._dtype, self._group, self.name)
        if made is None:
            raise CodecError(f"a block with numbers that are not finite has no {self.name} form")
        scales, codes = made
        return np.concatenate((scales.view(np.uint8), codes)).data

    def decode(self, data: memoryview, into: memoryview) -> None:
        if data.nbytes != self.most_bytes(into.nbytes):
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


# ---- the arithmetic: C where there is a compiler, else numpy; both give the same bytes


@functools.cache
def native_codecs() -> ctypes.CDLL | None:
    return LIBRARY.load_or_none(instead="KV codecs run in numpy, several times slower")


def quantise(block: Bytes, dtype: str, group: int, target: str) -> tuple[Scales, Bytes] | None:
    """Quantise to one byte per number, with a scale per `group` of adjacent numbers.

    Args:
        block: contiguous, a multiple of `group` numbers of `dtype`.
        target: "int8", or "fp8" for e4m3.

    Returns:
        ([groups] upper halves of float32 scales, [numbers] codes); None when a number is not finite.
    """
    count = block.nbytes // ITEM_BYTES[dtype]
    library = native_codecs()
    if library is None:
        return _quantise_numpy(block, dtype, group, target)
    scales, codes = np.empty(count // group, np.uint16), np.empty(count, np.uint8)
    failed = library.kvrelay_quantise(
        _at(block),
        _KINDS[dtype],
        int(target == "fp8"),
        ctypes.c_long(len(scales)),
        ctypes.c_long(group),
        _at(scales),
        _at(codes),
    )
    return None if failed else (scales, codes)


def dequantise(scales: Scales, codes: Bytes, dtype: str, group: int, source: str, into: Bytes) -> None:
    """Approximately invert `quantise`, as `dtype` into `into`."""
    library = native_codecs()
    if library is None:
        _dequantise_numpy(scales, codes, dtype, group, source, into)
        return
    library.kvrelay_dequantise(
        _at(scales),
        _at(codes),
        int(source == "fp8"),
        ctypes.c_long(len(scales)),
        ctypes.c_long(group),
        _at(into),
        _KINDS[dtype],
    )


def split_planes(block: Bytes, width: int) -> tuple[Bytes, Bytes]:
    """Split numbers of `width` bytes: ([numbers] bytes with the upper 8 bits of exponents, the other bytes)."""
    if width == 1:
        return block, block[:0]
    count = block.nbytes // width
    library = native_codecs()
    top, rest = np.empty(count, np.uint8), np.empty(count * (width - 1), np.uint8)
    if library is not None:
        library.kvrelay_split(_at(block), ctypes.c_long(width), ctypes.c_long(count), _at(top), _at(rest))
        return top, rest
    numbers: NDArray[Any] = block.view(f"<u{width}")
    turned = (numbers << 1 | numbers >> (8 * width - 1)).view(np.uint8).reshape(count, width)
    top[:] = turned[:, width - 1]
    rest.reshape(count, width - 1)[:] = turned[:, : width - 1]
    return top, rest


def merge_planes(top: Bytes, rest: Bytes, width: int, into: Bytes) -> None:
    """Invert `split_planes`, into `into`."""
    if width == 1:
        into[:] = top
        return
    library = native_codecs()
    if library is not None:
        library.kvrelay_merge(_at(top), _at(rest), ctypes.c_long(width), ctypes.c_long(len(top)), _at(into))
        return
    turned = np.empty((len(top), width), np.uint8)
    turned[:, width - 1] = top
    turned[:, : width - 1] = rest.reshape(len(top), width - 1)
    numbers: NDArray[Any] = turned.reshape(-1).view(f"<u{width}")
    into.view(f"<u{width}")[:] = numbers >> 1 | numbers << (8 * width - 1)


def _at(array: NDArray[Any]) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


# ---- the same in numpy


def _quantise_numpy(block: Bytes, dtype: str, group: int, target: str) -> tuple[Scales, Bytes] | None:
    numbers = _widened(block, dtype).reshape(-1, group)
    if not np.isfinite(numbers).all():
        return None
    largest = np.abs(numbers).max(axis=1) / _LARGEST[target]
    scales = ((largest.view(np.uint32) + np.uint32(0xFFFF)) >> 16).astype(np.uint16)
    scales[scales < 0x80] = 0  # their inverse overflows
    values = _scale_values(scales)
    inverse = np.divide(np.float32(1), values, out=np.zeros_like(values), where=values > 0)
    scaled = numbers * inverse[:, None]
    codes = _to_e4m3(scaled) if target == "fp8" else np.clip(np.rint(scaled), -127, 127).astype(np.int8).view(np.uint8)
    return scales, codes.reshape(-1)


def _dequantise_numpy(scales: Scales, codes: Bytes, dtype: str, group: int, source: str, into: Bytes) -> None:
    numbers = _E4M3[codes] if source == "fp8" else codes.view(np.int8).astype(np.float32)
    numbers = (numbers.reshape(-1, group) * _scale_values(scales)[:, None]).reshape(-1)
    if dtype == "float32":
        into.view(np.float32)[:] = numbers
    elif dtype == "float16":
        with np.errstate(over="ignore"):
            into.view(np.float16)[:] = numbers
    else:
        bits = numbers.view(np.uint32)
        into.view(np.uint16)[:] = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16


def _widened(block: Bytes, dtype: str) -> NDArray[np.float32]:
    numbers: NDArray[np.float32]
    if dtype == "bfloat16":
        numbers = (block.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return numbers
    numbers = np.asarray(block.view(dtype), np.float32)
    return numbers


def _scale_values(scales: Scales) -> NDArray[np.float32]:
    values: NDArray[np.float32] = (scales.astype(np.uint32) << 16).view(np.float32)
    return values


def _to_e4m3(numbers: NDArray[np.float32]) -> Bytes:
    """Round to nearest, ties to even; saturates at 448."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    sign, size = (bits >> 31) << 7, bits & np.uint32(0x7FFFFFFF)
    normal = ((size + np.uint32(0x7FFFF) + ((size >> 20) & 1)) >> 20) - np.uint32(120 << 3)
    is_small = size < np.uint32(121 << 23)  # subnormal: below 2**-6 the step is 2**-9
    small = np.rint(np.where(is_small, size.view(np.float32), 0) * np.float32(512)).astype(np.uint32)
    code = np.minimum(np.where(is_small, small, normal), np.uint32(0x7E))
    return (sign | code).astype(np.uint8)


def _e4m3_values() -> NDArray[np.float32]:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent > 0, np.ldexp(8 + mantissa, exponent - 10), np.ldexp(mantissa, -9))
    return np.asarray(np.where(codes & 128, -size, size), np.float32)


_E4M3 = _e4m3_values()
