"""How tokens choose experts (MoE routing), as data. Pure: imports no torch."""

from dataclasses import dataclass
from typing import Literal


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
