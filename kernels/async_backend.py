"""What a backend offers beyond `Backend` when its calls return before the device has computed.

The step loop then launches a step before it has seen the tokens of the one before: see engine/step/in_flight.py.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from kvrelay.kernels.backend import Backend


class PendingTokens(Protocol):
    """Drawn tokens that the device may still be computing.

    tokens: [R] int64 on the device. To be read by work that is launched later, not by the host.
    """

    tokens: Tensor

    def wait(self) -> list[int]:
        """The tokens, once the device has come so far: whatever was launched before them is then done, too."""
        ...


@dataclass(frozen=True, slots=True)
class TokenFeed:
    """Tokens of a step that are not known on the host yet.

    sources: [T] int64 on the CPU, the place in `tokens` of each of the step's tokens, or -1: the host knows it.
    tokens: [R] int64 on the device.
    """

    sources: Tensor
    tokens: Tensor


@runtime_checkable
class AsyncBackend(Backend, Protocol):
    """A backend whose work is done in the order in which it was launched, while the host goes on."""

    def pending(self, tokens: Tensor) -> PendingTokens:
        """`sample_on_device`'s tokens, on their way to the host from now on."""
        ...

    def place(self, token_ids: Tensor, feed: TokenFeed | None) -> Tensor:
        """A step's token ids [T] int64 on the device, those that the host does not know filled in there. Does not wait."""
        ...
