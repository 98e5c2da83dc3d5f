"""Quantised weights of the compiled CPU kernels (kernels/cpu/native/quant*.c)."""

import torch
from torch import Tensor

from kvrelay.kernels.common.quant_scheme import Scheme, WeightError
from kvrelay.kernels.common.quantized import unit_of
from kvrelay.kernels.cpu.native_kernels import SUPPORTED, NativeKernels, rows_for


class NativeQuantLinear:
    """A quantised weight in panels. Every row's sums run in one order, whatever the batch.

    Args:
        weight: [N, K] of any floating type, quantised from its own values, not rounded to `dtype` first.
        dtype: of x and y; one of SUPPORTED.
    """

    def __init__(
        self, kernels: NativeKernels, weight: Tensor, bias: Tensor | None, scheme: Scheme, dtype: torch.dtype
    ) -> None:
        assert dtype in SUPPORTED
        self.out_features, self.in_features = weight.shape
        self._kernels, self._scheme, self._dtype = kernels, scheme, dtype
        source = (weight if weight.dtype in SUPPORTED else weight.float()).contiguous()
        lib, bits, shape = kernels.lib, scheme.bits, (self.out_features, self.in_features, scheme.group)
        self.unit = unit_of(source)
        self._packed = torch.empty(lib.kr_quantized_bytes(bits, *shape), dtype=torch.uint8)
        errors = torch.empty(-(-self.out_features // kernels.panel_width), 2, dtype=torch.float64)
        lib.kr_quantize(
            kernels.pool, bits, source.dtype == torch.float32, source.data_ptr(), self._packed.data_ptr(),
            errors.data_ptr(), *shape, self.unit,
        )  # fmt: skip
        error, squares = (errors.sum(0) * self.unit**2).tolist()
        self.error = WeightError(error, squares, weight.numel(), self._packed.numel())
        self._bias = None if bias is None else bias.float().contiguous()
        self._args = (self._packed.data_ptr(), None if self._bias is None else self._bias.data_ptr())

    @property
    def address(self) -> int:
        """Address of the packed weight."""
        return self._packed.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        x = rows_for(x, self._dtype, self.in_features)
        num_rows, width = x.shape
        kernels, scheme = self._kernels, self._scheme
        out = kernels.empty((num_rows, self.out_features), self._dtype)
        kernels.lib.kr_quant_linear(
            kernels.pool, scheme.bits, self._dtype == torch.float32, x.data_ptr(), x.stride(0), out.data_ptr(),
            *self._args, num_rows, self.out_features, width, scheme.group, self.unit,
        )  # fmt: skip
        return out
