"""The codecs' arithmetic: C where there is a compiler, else numpy. Both give the same bytes.

Dtypes are keys of `types.ITEM_BYTES`.
"""

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrelay.errors import BackendUnavailable
from kvrelay.native.build import load_native
from kvrelay.types import ITEM_BYTES

logger = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]
Scales = NDArray[np.uint16]

_KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}
_MOST_GROUP = 1024
_LARGEST = {"int8": np.float32(127), "fp8": np.float32(448)}


@functools.cache
def _native() -> ctypes.CDLL | None:
    try:
        return load_native("kvrelay_codecs", [Path(__file__).parent / "native" / "codecs.c"])
    except BackendUnavailable as error:
        logger.info("no C compiler: KV codecs run in numpy, several times slower: %s", error)
        return None


def quantise(block: Bytes, dtype: str, group: int, target: str) -> tuple[Scales, Bytes] | None:
    """Quantise to one byte per number, with a scale per `group` of adjacent numbers.

    Args:
        block: contiguous, a multiple of `group` numbers of `dtype`.
        target: "int8", or "fp8" for e4m3.

    Returns:
        ([groups] upper halves of float32 scales, [numbers] codes); None when a number is not finite.
    """
    count = block.nbytes // ITEM_BYTES[dtype]
    library = _native()
    if library is None or group > _MOST_GROUP:
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
    library = _native()
    if library is None or group > _MOST_GROUP:
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
    library = _native()
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
    library = _native()
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
