"""A layer's MLP: one gated product, or experts (MoE). All arithmetic is the backend's."""

from collections.abc import Callable

from torch import Tensor

from kvrelay.kernels.backend import Activation, Backend, Experts, Linear
from kvrelay.kernels.common.expert_choice import ExpertChoice

Mlp = Callable[[Tensor], Tensor]  # [T, hidden] -> [T, hidden]


class GatedMlp:
    """down(act(gate) * up), gate and up stacked in one weight."""

    def __init__(self, backend: Backend, activation: Activation, gate_up: Linear, down: Linear) -> None:
        self._backend, self._activation, self._gate_up, self._down = backend, activation, gate_up, down

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._backend.gated_activation(self._gate_up(x), self._activation))


class ExpertMlp:
    """The weighted sum of the experts that each token chooses, and the shared expert where there is one.

    Args:
        router: [T, hidden] float32 -> [T, num_experts].
        correction: [num_experts] float32, added to the scores for the choice only; None: there is none.
        shared_gate: [T, hidden] float32 -> [T, 1], whose sigmoid multiplies the shared expert's output.
    """

    def __init__(
        self,
        backend: Backend,
        choice: ExpertChoice,
        router: Linear,
        correction: Tensor | None,
        experts: Experts,
        shared: Mlp | None,
        shared_gate: Linear | None,
    ) -> None:
        self._backend, self._choice, self._router, self._correction = backend, choice, router, correction
        self._experts, self._shared, self._shared_gate = experts, shared, shared_gate

    def __call__(self, x: Tensor) -> Tensor:
        wide = self._backend.widened(x)
        weights, chosen = self._backend.choose_experts(self._router(wide), self._correction, self._choice)
        base = None if self._shared is None else self._shared(x)
        return self._experts(x, weights, chosen, base, None if self._shared_gate is None else self._shared_gate(wide))
