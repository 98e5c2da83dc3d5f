"""Quantisation schemes and their error, and how tokens choose experts (MoE), as data. Pure: imports no torch."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Scheme:
    """Bits per weight, and inputs that share a scale (a multiple of 32, up to 128)."""

    bits: int
    group: int = 32

    def __str__(self) -> str:
        return f"int{self.bits} in groups of {self.group}"


def scheme_of(quantization: str) -> Scheme | None:
    """The scheme that a setting (none, int8, int4) names."""
    return {"int8": Scheme(8), "int4": Scheme(4)}.get(quantization)


@dataclass(frozen=True, slots=True)
class WeightError:
    """Error of one or more weights: sums of squared errors and of squares, and sizes before and after."""

    squared_error: float = 0.0
    squares: float = 0.0
    num_weights: int = 0
    num_bytes: int = 0

    def __add__(self, other: "WeightError") -> "WeightError":
        return WeightError(
            self.squared_error + other.squared_error,
            self.squares + other.squares,
            self.num_weights + other.num_weights,
            self.num_bytes + other.num_bytes,
        )

    @property
    def relative(self) -> float:
        """Relative RMS error; 0 without weights."""
        return math.sqrt(self.squared_error / self.squares) if self.squares else 0.0


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """Each token takes the top `num_chosen` of `num_experts`, by softmax or sigmoid of the router's logits.

    num_groups, num_chosen_groups: experts are chosen from the best groups; (1, 1): from all. A group's score is its
    best member's (softmax), or the sum of its best two (sigmoid).
    normalise: the chosen weights are normalised to sum to 1. Then all are multiplied by `scale`.
    """

    num_experts: int
    num_chosen: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    num_chosen_groups: int = 1
    normalise: bool = False
    scale: float = 1.0
