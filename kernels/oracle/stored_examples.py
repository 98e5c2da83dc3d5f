"""Quantised weights [256, 384] whose scales differ from tile to tile, for the grid and for what a backend tries out."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvrelay.kernels.common.stored_weights import MXFP4_GROUP, Fp8Weight, Mxfp4Weight, QuantizedWeight, StoredWeight

_N, _K, _GROUP = 256, 384, 32


def _scales(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Between 1/256 and 1/64, exact in half floats."""
    return ((torch.rand(rows, columns, generator=generator) * 0.75 + 0.25) / 64).half().float()


def _integers(bits: int) -> Callable[[int], StoredWeight]:
    def make(seed: int) -> StoredWeight:
        generator = torch.Generator().manual_seed(seed)
        shape, (low, high) = (_N, _K // _GROUP, _GROUP), (-127, 128) if bits == 8 else (0, 16)
        integers = torch.randint(low, high, shape, generator=generator).to(torch.int8)
        scales = _scales(_N, _K // _GROUP, generator)
        return QuantizedWeight(integers, scales, scales * (0 if bits == 8 else -8), _K, bits)

    return make


def _fp8(rows: int, columns: int) -> Callable[[int], StoredWeight]:
    def make(seed: int) -> StoredWeight:
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(_N, _K, generator=generator).to(torch.float8_e4m3fn)
        return Fp8Weight(values, _scales(_N // rows, _K // columns, generator), (rows, columns))

    return make


def _mxfp4(seed: int) -> StoredWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (_N, _K // 2), generator=generator)
    exponents = torch.randint(116, 124, (_N, _K // MXFP4_GROUP), generator=generator)
    return Mxfp4Weight(codes.to(torch.uint8), exponents.to(torch.uint8))


EXAMPLES: dict[str, Callable[[int], StoredWeight]] = {  # by kind; of a seed
    "int8": _integers(8),
    "int4": _integers(4),
    "mxfp4": _mxfp4,
    "fp8 per tensor": _fp8(_N, _K),
    "fp8 per output": _fp8(1, _K),
    "fp8 in blocks": _fp8(128, 128),
}
