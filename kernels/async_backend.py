"""What a backend offers beyond `Backend` when its calls return before the device has finished.

The engine then launches a step before it has the previous step's tokens: see engine/execution/runner.py.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class PendingTokens(Protocol):
    """Sampled tokens that the device may still be computing.

    tokens: [R] int64 on the device, for work that is launched later; the host does not read it.
    """

    tokens: Tensor

    def wait(self) -> list[int]:
        """Block until the device has sampled the tokens; all work launched before them is done then, too."""
        ...


@dataclass(frozen=True, slots=True)
class TokenFeed:
    """Input tokens of a step that the host does not have yet.

    sources: [T] int64 on the CPU, the index into `tokens` of each of the step's tokens; -1: the host has the token.
    tokens: [R] int64 on the device.
    """

    sources: Tensor
    tokens: Tensor


class AsyncDevice(Protocol):
    """A device that runs work in launch order while the host continues."""

    def pending(self, tokens: Tensor) -> PendingTokens:
        """Start copying the tokens of `sample_on_device` to the host."""
        ...

    def place(self, token_ids: Tensor, feed: TokenFeed | None) -> Tensor:
        """A step's token ids [T] int64 on the device, with placeholders replaced from `feed`. Does not wait."""
        ...
