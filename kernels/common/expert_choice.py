"""How tokens choose experts, as data. Pure: imports no torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """Each token takes the `num_chosen` best of `num_experts`, by softmax or sigmoid of the router's logits.

    num_groups, num_chosen_groups: experts are chosen from the best groups; (1, 1): from all. A group counts as its best
    member (softmax), or as its two best together (sigmoid).
    normalise: the chosen ones' weights are made to add up to 1; then all are multiplied by `scale`.
    """

    num_experts: int
    num_chosen: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    num_chosen_groups: int = 1
    normalise: bool = False
    scale: float = 1.0
