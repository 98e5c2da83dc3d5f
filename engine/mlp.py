"""A layer's MLP: one gated product, or a choice among experts for each token (DeepSeek's MoE).

All arithmetic but the choice goes through the backend. Experts are computed in order of their numbers, each for the
tokens that chose it, so that a token's result depends on its own choice alone.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvrelay.engine.spec_mla import ExpertSpec
from kvrelay.kernels.backend import Activation, Backend, Linear

Mlp = Callable[[Tensor], Tensor]  # [T, hidden] -> [T, hidden]


class GatedMlp:
    """down(act(gate) * up), gate and up stacked in one weight."""

    def __init__(self, backend: Backend, activation: Activation, gate_up: Linear, down: Linear) -> None:
        self._backend, self._activation, self._gate_up, self._down = backend, activation, gate_up, down

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._backend.gated_activation(self._gate_up(x), self._activation))


class ExpertMlp:
    """The weighted sum of the experts that each token chooses, and the shared expert.

    Args:
        router: [T, hidden] float32 -> [T, num_experts].
        correction: [num_experts] float32, added to scores for the choice alone; None: there is none.
    """

    def __init__(
        self, spec: ExpertSpec, router: Linear, correction: Tensor | None, experts: Sequence[Mlp], shared: Mlp
    ) -> None:
        self._spec, self._router, self._correction = spec, router, correction
        self._experts, self._shared = tuple(experts), shared

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = choose_experts(self._router(x.float()), self._correction, self._spec)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in torch.unique(chosen).tolist():
            rows, places = torch.where(chosen == expert)
            out.index_add_(0, rows, self._experts[expert](x[rows]).float() * weights[rows, places, None])
        return out.to(x.dtype) + self._shared(x)


def choose_experts(logits: Tensor, correction: Tensor | None, spec: ExpertSpec) -> tuple[Tensor, Tensor]:
    """(weights [T, num_chosen] float32, experts [T, num_chosen] int64) from the router's logits [T, num_experts].

    Source: DeepSeek-V2 (2024), section 2.2 (softmax, groups by their best); DeepSeek-V3 (2024), section 2.1.2 (sigmoid,
    corrected scores, groups by the sum of their two best).
    """
    scores = logits.softmax(dim=-1) if spec.scoring == "softmax" else logits.sigmoid()
    ranks = scores if correction is None else scores + correction
    if spec.num_groups > 1:
        groups = ranks.unflatten(-1, (spec.num_groups, -1))
        of_groups = groups.topk(1 if spec.scoring == "softmax" else 2, dim=-1).values.sum(dim=-1)
        best = of_groups.topk(spec.num_chosen_groups, dim=-1).indices
        is_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(-1, best, value=False)
        ranks = groups.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(-2)
    chosen = ranks.topk(spec.num_chosen, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if spec.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * spec.scale, chosen
