"""Linear layers over quantised weights on a GPU: fp8 by torch's scaled product, all kinds by Triton kernels that read
the weights as they are stored.

Each kind of product is tried out on a small weight before it is used. A kind that does not work
there, or a weight that no product takes, is restored to plain numbers when it is loaded, and the log says so.
"""

import logging
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvrelay.kernels.common.quant_scheme import Scheme, WeightError
from kvrelay.kernels.common.quantized import quantize
from kvrelay.kernels.common.stored_weights import AnyWeight, Fp8Weight, StoredWeight, error_against
from kvrelay.kernels.cuda.plan import HALF
from kvrelay.kernels.cuda.stacked_weights import StackedWeights, as_stored, stack
from kvrelay.kernels.oracle import exact
from kvrelay.kernels.oracle.stored_examples import EXAMPLES

logger = logging.getLogger(__name__)

FP8_BLOCK = 128  # inputs, and outputs, that share a scale in block-scaled checkpoints
_SCALED_ALIGNMENT = 16  # torch._scaled_mm: multiples of inputs and outputs
_EXAMPLE_OF = {"fp8": "fp8 in blocks", "scaled by rows": "fp8 per output", "scaled in blocks": "fp8 in blocks"}


def multiply_by_experts(rows: Tensor, weights: StackedWeights, ends: Tensor) -> Tensor:
    """[R, N] of rows [R, K] sorted by expert. ends: of each expert's rows, [E] int32. Raises ImportError without
    triton.
    """
    from kvrelay.kernels.cuda.quantized_triton import multiply

    out: Tensor = multiply(rows, weights, ends=ends)
    return out


class StoredLinear:
    """A weight that stays as it is stored. Raises ImportError without triton."""

    def __init__(self, weights: StackedWeights, bias: Tensor | None, error: WeightError) -> None:
        from kvrelay.kernels.cuda.quantized_triton import multiply

        self.error = error
        self.out_features, self._weights, self._bias, self._multiply = weights.shape[1], weights, bias, multiply

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._multiply(x, self._weights, self._bias)
        return out


class Fp8Linear:
    """An fp8 weight times inputs that become fp8, by torch's scaled product: from compute capability 8.9 on, with
    scales of blocks on 9.0 alone.

    The inputs' scale is of a token, with blocks of 128 of its numbers, or the checkpoint's own for all. Raises
    ImportError without triton.
    """

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, error: WeightError) -> None:
        from kvrelay.kernels.cuda.quantized_triton import quantize_rows

        self.error = error
        self.out_features, self._bias, self._quantize = weight.out_features, bias, quantize_rows
        self._values, device = weight.values.contiguous(), weight.values.device
        self._group = FP8_BLOCK if is_in_blocks(weight) else None
        self.input_group = self._group or weight.in_features  # inputs that share a scale
        static = weight.input_scale if self._group is None else None
        self._given = None if static is None else torch.full((1,), static, device=device)
        recipes = F.ScalingType
        if self._group is None:
            self._recipes = recipes.RowWise, recipes.RowWise
            self._scales = weight.in_tiles_of(1).scales.reshape(1, -1).contiguous()
        else:  # [K / 128 padded to a multiple of 4, N / 128], column by column in memory
            self._recipes = recipes.BlockWise1x128, recipes.BlockWise128x128
            self._scales = F.pad(weight.scales, (0, -weight.scales.shape[1] % 4)).contiguous().T

    def __call__(self, x: Tensor) -> Tensor:
        values, scales = self._quantize(x, self._group, self._given)
        (ours, theirs), dtype = self._recipes, x.dtype
        out = F.scaled_mm(values, self._values.T, scales, ours, self._scales, theirs, output_dtype=dtype)
        out = out[: x.shape[0]]
        return out if self._bias is None else out.add_(self._bias)


def is_in_blocks(weight: Fp8Weight) -> bool:
    return weight.tile[1] < weight.in_features


def takes_scaled(weight: Fp8Weight) -> bool:
    """Whether torch's scaled product has a form for the weight's shape and scales."""
    sizes = (weight.out_features, weight.in_features)
    if is_in_blocks(weight):
        return weight.tile == (FP8_BLOCK, FP8_BLOCK) and not any(size % FP8_BLOCK for size in sizes)
    return not any(size % _SCALED_ALIGNMENT for size in sizes)


def on_device(weight: StoredWeight, device: torch.device) -> StoredWeight:
    parts = {field.name: getattr(weight, field.name) for field in fields(weight)}
    moved: Any = {name: x.to(device) for name, x in parts.items() if isinstance(x, Tensor)}
    return replace(weight, **moved)


class Products:
    """The products with quantised weights that work on a device, each tried out once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._works = lru_cache(maxsize=None)(self._tried_out)

    def linear(
        self, weight: StoredWeight, bias: Tensor | None, dtype: torch.dtype
    ) -> tuple[Fp8Linear | StoredLinear, WeightError] | None:
        """The weight as it is stored, on the device, and its error; None: no product takes it."""
        weight, bias = on_device(weight, self.device), None if bias is None else bias.to(self.device)
        if isinstance(weight, Fp8Weight) and self._is_scaled(weight, dtype):
            error = error_against(None, weight, weight.num_bytes)
            return Fp8Linear(weight, bias, error), error
        stacked = self.stacked([weight], dtype)
        return None if stacked is None else (StoredLinear(stacked[0], bias, stacked[1]), stacked[1])

    def _is_scaled(self, weight: Fp8Weight, dtype: torch.dtype) -> bool:
        product = "scaled in blocks" if is_in_blocks(weight) else "scaled by rows"
        return dtype in HALF and takes_scaled(weight) and self._works(product, dtype)

    def quantized(self, weight: Tensor, bias: Tensor | None, scheme: Scheme, dtype: torch.dtype) -> StoredLinear | None:
        """The weight [N, K] quantised, both on the device; None: no product takes it."""
        integers = quantize(weight, scheme)
        stacked = self.stacked([integers], dtype)
        if stacked is None:
            return None
        error = error_against(weight, integers, stacked[0].num_bytes)
        return StoredLinear(stacked[0], bias, error)

    def stacked(self, weights: Sequence[AnyWeight], dtype: torch.dtype) -> tuple[StackedWeights, WeightError] | None:
        """The weights, on the device, for `multiply` with rows of `dtype`, and their error; None: it does not take
        them.
        """
        stored = [weight for weight in weights if not isinstance(weight, Tensor)]
        forms = [form for form in map(as_stored, stored) if form is not None]
        if not forms or len(forms) < len(weights) or not self._works(forms[0].kind, dtype):
            return None
        packed = stack(forms)
        if packed is None:
            return None
        errors = (error_against(None, weight, 0, dtype) for weight in stored)  # the kernel rounds to `dtype`, too
        return packed, replace(sum(errors, WeightError()), num_bytes=packed.num_bytes)

    def _tried_out(self, product: str, dtype: torch.dtype) -> bool:
        try:
            check(product, self.device, dtype)
        except Exception as error:  # triton is missing, or an error of a compiler, of torch or of the driver
            what = f"fp8 products {product}" if product.startswith("scaled") else f"products with {product} weights"
            instead = (
                "their inputs stay as they are" if product.startswith("scaled") else "they are restored, and larger"
            )
            logger.warning("%s in %s do not work here: %s (%s)", what, dtype, instead, error)
            return False
        return True


def check(product: str, device: torch.device, dtype: torch.dtype) -> None:
    """One product on small weights, of one weight and of experts, for as many rows as each size of block is for.

    Raises RuntimeError: it is not the product with the restored weight, within the bound that rounding explains. And
    the errors of compilers, torch and the driver.
    """
    weights = [on_device(EXAMPLES[_EXAMPLE_OF.get(product, product)](seed), device) for seed in range(3)]
    restored = [weight.restored() for weight in weights]
    generator = torch.Generator().manual_seed(3)
    for num_rows in (1, 24, 60, 400):
        x = torch.randn(num_rows, restored[0].shape[1], generator=generator).to(device=device, dtype=dtype)
        if isinstance(weights[0], Fp8Weight) and product.startswith("scaled"):
            linear = Fp8Linear(weights[0], None, WeightError())
            _compare(linear(x), x, restored[0], exact.lost_as_fp8(x, linear.input_group))
            continue
        _compare(StoredLinear(_stacked(weights[:1]), None, WeightError())(x), x, restored[0])
        cut = num_rows // 3  # the second expert has no rows
        ends = torch.tensor([cut, cut, num_rows], dtype=torch.int32, device=device)
        found = multiply_by_experts(x, _stacked(weights), ends)
        for rows, expert in ((slice(0, cut), 0), (slice(cut, None), 2)):
            _compare(found[rows], x[rows], restored[expert])


def _stacked(weights: list[StoredWeight]) -> StackedWeights:
    packed = stack([form for form in map(as_stored, weights) if form is not None])
    assert packed is not None
    return packed


def _compare(found: Tensor, x: Tensor, restored: Tensor, lost: Tensor | None = None) -> None:
    share = exact.linear(x, restored, None, held=3 * restored.abs(), lost=lost).ratio(found)
    if share > 1:
        raise RuntimeError(f"products of {x.shape[0]} rows are {share:.3g} times as far off as rounding explains")
