"""A layer's experts on a GPU: rows sorted by expert, one grouped product for all experts, without waiting for the
device.

torch's grouped product is one kernel, which can be captured, for bfloat16 on sm_90 and sm_100. On
other devices and in other dtypes torch loops over the experts after copying their sizes to the host. There a few rows
use a batched product over copies of the weights that they need, and more rows use ExpertLoop. Quantised weights stay as
they are stored, and one Triton kernel multiplies by those of all experts.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from kvrelay.kernels.common.experts import ExpertLoop, Gate, with_base
from kvrelay.kernels.common.quant_scheme import Scheme, WeightError
from kvrelay.kernels.common.quantized import quantize
from kvrelay.kernels.common.stored_weights import AnyWeight, dequantised, error_against, plain_weight
from kvrelay.kernels.cuda.quantized import Products, multiply_by_experts, on_device
from kvrelay.kernels.cuda.stacked_weights import StackedWeights
from kvrelay.kernels.oracle.reference import ReferenceLinear

_GROUPED_ON = ((9, 0), (10, 0))  # compute capabilities
_GROUPED_ALIGNMENT = 8  # bf16 numbers: rows must be a multiple of 16 bytes
FEW_ROWS = 32  # up to here copying weights is faster than waiting for the device
# (rows [R, K] sorted by expert, weights [E, N, K], end of each expert's rows [E] int32) -> [R, N]
Weights = TypeVar("Weights", Tensor, StackedWeights)
Product = Callable[[Tensor, Weights, Tensor], Tensor]


def has_grouped_products(device: torch.device, dtype: torch.dtype, *sizes: int) -> bool:
    """Whether torch multiplies rows by experts' weights in one kernel. sizes: inputs and outputs."""
    if device.type != "cuda" or dtype != torch.bfloat16 or any(size % _GROUPED_ALIGNMENT for size in sizes):
        return False
    return hasattr(torch, "_grouped_mm") and torch.cuda.get_device_capability(device) in _GROUPED_ON


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    out: Tensor = torch._grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    return out


def sum_sorted(
    x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Weights, down: Weights, gate: Gate, product: Product[Weights]
) -> Tensor:
    """The weighted sum [T, H], by `product` over rows sorted by expert. No shape depends on data."""
    (num_tokens, k), num_experts = chosen.shape, gate_up.shape[0]
    by_row = chosen.flatten()
    order = by_row.argsort(stable=True)
    numbers = torch.arange(num_experts, device=x.device, dtype=by_row.dtype)
    ends = torch.searchsorted(by_row[order], numbers, right=True, out_int32=True)
    made = product(gate(product(x[order // k], gate_up, ends)), down, ends)
    made = torch.empty_like(made).index_copy_(0, order, made)
    return _weighted(made, weights, num_tokens, k)


def sum_gathered(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, gate: Gate) -> Tensor:
    """The same by batched products over a copy of the weights for each row."""
    (num_tokens, k), by_row = chosen.shape, chosen.flatten()
    rows = x.repeat_interleave(k, dim=0).unsqueeze(2)
    acted = gate(torch.bmm(gate_up[by_row], rows).squeeze(2))
    return _weighted(torch.bmm(down[by_row], acted.unsqueeze(2)).squeeze(2), weights, num_tokens, k)


def _weighted(made: Tensor, weights: Tensor, num_tokens: int, k: int) -> Tensor:
    """Sums of k rows each [T, H]. Weights are rounded to the rows' dtype, as in Hugging Face's models."""
    return torch.bmm(weights.to(made.dtype).unsqueeze(1), made.view(num_tokens, k, made.shape[1])).squeeze(1)


class CudaExperts:
    """Experts on one device, their weights stacked.

    Args:
        experts: in order, (gate and up [2 F, H], down [H, F]).
        error: of weights that were quantised.
    """

    def __init__(
        self,
        experts: Iterable[tuple[Tensor, Tensor]],
        gate: Gate,
        device: torch.device,
        error: WeightError | None = None,
    ) -> None:
        self.error = error or WeightError()
        gate_ups, downs = zip(*((gate_up.to(device), down.to(device)) for gate_up, down in experts), strict=True)
        self._gate_up, self._down, self._gate = torch.stack(gate_ups), torch.stack(downs), gate
        _, hidden, ffn = self._down.shape
        self.is_grouped = has_grouped_products(device, self._down.dtype, hidden, ffn)
        linears = (
            (ReferenceLinear(up, None), ReferenceLinear(down, None))
            for up, down in zip(self._gate_up, self._down, strict=True)
        )
        self._loop = ExpertLoop(linears, gate)

    def __call__(
        self, x: Tensor, weights: Tensor, chosen: Tensor, base: Tensor | None = None, base_logits: Tensor | None = None
    ) -> Tensor:
        if not self.is_grouped and chosen.numel() > FEW_ROWS:
            return self._loop(x, weights, chosen, base, base_logits)
        if self.is_grouped:
            total = sum_sorted(x, weights, chosen, self._gate_up, self._down, self._gate, grouped_product)
        else:
            total = sum_gathered(x, weights, chosen, self._gate_up, self._down, self._gate)
        return total if base is None else with_base(total.float(), base, base_logits).to(x.dtype)


class StoredExperts:
    """Experts on one device, their quantised weights stacked as they are stored.

    Args:
        gate_up, down: [E, 2 F, H] and [E, H, F].
        error: of all of them.
    """

    is_grouped = True

    def __init__(self, gate_up: StackedWeights, down: StackedWeights, gate: Gate, error: WeightError) -> None:
        self._gate_up, self._down, self._gate, self.error = gate_up, down, gate, error

    def __call__(
        self, x: Tensor, weights: Tensor, chosen: Tensor, base: Tensor | None = None, base_logits: Tensor | None = None
    ) -> Tensor:
        total = sum_sorted(x, weights, chosen, self._gate_up, self._down, self._gate, multiply_by_experts)
        return total if base is None else with_base(total.float(), base, base_logits).to(x.dtype)


def pack_experts(
    experts: Iterable[tuple[AnyWeight, AnyWeight]],
    products: Products,
    gate: Gate,
    dtype: torch.dtype,
    scheme: Scheme | None = None,
) -> CudaExperts | StoredExperts:
    """Experts in order, as Backend.pack_experts takes them: quantised weights as they are stored where a product takes
    all of them, else restored to `dtype`.
    """
    pairs: list[list[AnyWeight]] = []
    lost = WeightError()  # by quantising
    for pair in experts:
        held = [weight if isinstance(weight, Tensor) else on_device(weight, products.device) for weight in pair]
        if scheme is not None:
            wide = [plain_weight(weight).to(products.device) for weight in held]
            integers = [quantize(weight, scheme) for weight in wide]
            for quantized, weight in zip(integers, wide, strict=True):
                lost += error_against(weight, quantized, quantized.num_bytes)
            held = [*integers]
        pairs.append(held)
    gate_up, down = (products.stacked(column, dtype) for column in zip(*pairs, strict=True))
    if gate_up is not None and down is not None:
        error = lost if scheme is not None else gate_up[1] + down[1]
        num_bytes = gate_up[0].num_bytes + down[0].num_bytes
        return StoredExperts(gate_up[0], down[0], gate, replace(error, num_bytes=num_bytes))
    plain: list[tuple[Tensor, Tensor]] = []
    for held in pairs:
        restored = [(x, WeightError()) if isinstance(x, Tensor) else dequantised(x, dtype) for x in held]
        plain.append((restored[0][0], restored[1][0]))
        if scheme is None:
            lost += restored[0][1] + restored[1][1]
        held.clear()
    return CudaExperts(plain, gate, products.device, lost)
