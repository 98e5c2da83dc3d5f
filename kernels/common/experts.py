"""A mixture of experts in plain torch: the choice, and a loop over experts that faster forms are compared with."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kvrelay.kernels.backend import Linear
from kvrelay.kernels.common.quant_scheme import ExpertChoice, WeightError

Gate = Callable[[Tensor], Tensor]  # [rows, 2 F] gate then up -> [rows, F]


def choose_experts(logits: Tensor, correction: Tensor | None, choice: ExpertChoice) -> tuple[Tensor, Tensor]:
    """See Backend.choose_experts.

    Source: DeepSeek-V2 (2024), section 2.2 (softmax, groups by their best); DeepSeek-V3 (2024), section 2.1.2 (sigmoid,
    corrected scores, groups by the sum of their two best).
    """
    scores = logits.softmax(dim=-1) if choice.scoring == "softmax" else logits.sigmoid()
    ranks = scores if correction is None else scores + correction
    if choice.num_groups > 1:
        groups = ranks.unflatten(-1, (choice.num_groups, -1))
        of_groups = groups.topk(1 if choice.scoring == "softmax" else 2, dim=-1).values.sum(dim=-1)
        best = of_groups.topk(choice.num_chosen_groups, dim=-1).indices
        is_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(-1, best, value=False)
        ranks = groups.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(-2)
    chosen = ranks.topk(choice.num_chosen, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if choice.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * choice.scale, chosen


def with_base(total: Tensor, base: Tensor | None, base_logits: Tensor | None) -> Tensor:
    """total [T, H] float32, plus base [T, H] times the sigmoid of base_logits [T, 1], if given."""
    if base is None:
        return total
    return total + (base.float() if base_logits is None else base.float() * base_logits.sigmoid())


class ExpertLoop:
    """One expert after another, each over the tokens that chose it. On a GPU it waits for the device once per call."""

    def __init__(self, experts: Iterable[tuple[Linear, Linear]], gate: Gate, error: WeightError | None = None) -> None:
        self._experts, self._gate, self.error = tuple(experts), gate, error or WeightError()

    def __call__(
        self, x: Tensor, weights: Tensor, chosen: Tensor, base: Tensor | None = None, base_logits: Tensor | None = None
    ) -> Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for index in torch.unique(chosen).tolist():
            gate_up, down = self._experts[index]
            rows, places = torch.where(chosen == index)
            made = down(self._gate(gate_up(x[rows])))
            total.index_add_(0, rows, made.float() * weights[rows, places, None])
        return with_base(total, base, base_logits).to(x.dtype)
