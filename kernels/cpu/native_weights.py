"""Quantised weights of the compiled CPU kernels (kernels/cpu/native/quant*.c), and a layer's experts (experts.c): all
of them in one call.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from kvrelay.kernels.backend import Activation
from kvrelay.kernels.common.expert_choice import ExpertChoice
from kvrelay.kernels.common.quant_scheme import Scheme, WeightError
from kvrelay.kernels.common.quantized import unit_of
from kvrelay.kernels.cpu.native_kernels import SUPPORTED, NativeKernels, NativeLinear, contiguous_rows, rows_for


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
            kernels.pool,
            bits,
            source.dtype == torch.float32,
            source.data_ptr(),
            self._packed.data_ptr(),
            errors.data_ptr(),
            *shape,
            self.unit,
        )
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
            kernels.pool,
            scheme.bits,
            self._dtype == torch.float32,
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            *self._args,
            num_rows,
            self.out_features,
            width,
            scheme.group,
            self.unit,
        )
        return out


def choose_experts(
    kernels: NativeKernels, logits: Tensor, correction: Tensor | None, choice: ExpertChoice
) -> tuple[Tensor, Tensor]:
    """See Backend.choose_experts. Ties go to the lower expert."""
    logits, num_tokens = logits.contiguous(), logits.shape[0]
    weights = kernels.empty((num_tokens, choice.num_chosen), torch.float32)
    chosen = kernels.empty((num_tokens, choice.num_chosen), torch.int64)
    kernels.lib.kr_choose(
        kernels.pool,
        logits.data_ptr(),
        None if correction is None else correction.data_ptr(),
        weights.data_ptr(),
        chosen.data_ptr(),
        num_tokens,
        choice.num_experts,
        choice.num_chosen,
        choice.scoring == "sigmoid",
        choice.num_groups,
        choice.num_chosen_groups,
        choice.normalise,
        choice.scale,
    )
    return weights, chosen


class NativeExperts:
    """Experts with packed weights. A token's result depends on its own row alone, bit for bit.

    Args:
        experts: in order, (gate and up [2 F, H], down [H, F]); each is packed before the next one is read.
        dtype: of x and of the result; one of SUPPORTED.
    """

    def __init__(
        self,
        kernels: NativeKernels,
        experts: Iterable[tuple[Tensor, Tensor]],
        activation: Activation,
        scheme: Scheme | None,
        dtype: torch.dtype,
    ) -> None:
        self._kernels, self._dtype, self._is_gelu = kernels, dtype, activation == "gelu_tanh"
        self._scheme, self._kind, self._packed = scheme, 0 if scheme is None else scheme.bits, []
        for gate_up, down in experts:
            self._ffn, self._hidden = down.shape[1], down.shape[0]
            assert gate_up.shape == (2 * self._ffn, self._hidden)
            self._packed.append((self._pack(gate_up), self._pack(down)))
        self._addresses = torch.tensor([[part.address for part in pair] for pair in self._packed]).T.contiguous()
        self._units: Tensor | None = None
        if scheme is not None:
            units = [[part.unit for part in pair] for pair in self._packed]  # type: ignore[union-attr]
            self._units = torch.tensor(units, dtype=torch.float32).T.contiguous()

    def _pack(self, weight: Tensor) -> NativeLinear | NativeQuantLinear:
        if self._scheme is not None:
            return NativeQuantLinear(self._kernels, weight, None, self._scheme, self._dtype)
        # one packing for both products of all experts
        self._kind = self._kernels.linear_kind(self._dtype, self._hidden | self._ffn)
        return NativeLinear(self._kernels, weight, None, self._kind)

    @property
    def error(self) -> WeightError:
        parts = [part for pair in self._packed for part in pair]
        return sum((part.error for part in parts if isinstance(part, NativeQuantLinear)), WeightError())

    def __call__(
        self, x: Tensor, weights: Tensor, chosen: Tensor, base: Tensor | None = None, base_logits: Tensor | None = None
    ) -> Tensor:
        if x.dtype != self._dtype:
            raise TypeError(f"the experts are for {self._dtype}, x is {x.dtype}")
        x, kernels, (num_tokens, hidden) = contiguous_rows(x), self._kernels, x.shape
        assert hidden == self._hidden and chosen.dtype == torch.int64 and weights.dtype == torch.float32
        weights, chosen = weights.contiguous(), chosen.contiguous()
        base = None if base is None else base.contiguous()
        base_logits = None if base_logits is None else base_logits.contiguous()
        out = kernels.empty((num_tokens, hidden), self._dtype)
        kernels.lib.kr_experts(
            kernels.pool,
            self._kind,
            self._dtype == torch.float32,
            self._is_gelu,
            x.data_ptr(),
            x.stride(0),
            weights.data_ptr(),
            chosen.data_ptr(),
            self._addresses[0].data_ptr(),
            self._addresses[1].data_ptr(),
            _address(self._units),
            _address(base),
            _address(base_logits),
            out.data_ptr(),
            num_tokens,
            chosen.shape[1],
            len(self._packed),
            hidden,
            self._ffn,
            0 if self._scheme is None else self._scheme.group,
        )
        return out


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
