"""Between host and device without waiting: metadata to the device, tokens back. UNVERIFIED ON A GPU.

A copy from pageable memory waits for whatever the device is doing. From pinned memory it does not, but then the memory may
not be written before the copy has been made. Two kinds of such memory are used here, each safe for a reason of its own:

- What is copied by `put` and `fill` lies in memory of torch's pinned allocator. It notes an event with every copy that does
  not block, and hands that memory out again when the event has passed.
- FlashInfer's wrappers keep one pinned buffer each, which `plan` writes and copies from. `planning` waits, before a wrapper
  is planned again, until the copies of its last plan have been made. They stand at the beginning of a step's work, and before a
  step is planned the one before the last has been collected: by then the device has reached them, and the wait is short. It
  is asked for first, so that most often there is none.

Device memory needs no care: all work is on one stream, in order.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvrelay.kernels.async_backend import TokenFeed


class DeviceStaging:
    """One device's. Call it from the engine thread only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._planned: dict[
            int, Any
        ] = {}  # an event by the wrapper's id; one of another that had this id has long passed

    def put(self, x: Tensor) -> Tensor:
        """A copy of CPU tensor `x` on the device, in order with later work."""
        return x.pin_memory().to(self._device, non_blocking=True)

    def fill(self, target: Tensor, x: Tensor) -> None:
        """New content for a device tensor, in order with earlier and later work. x: a CPU tensor of its dtype."""
        target.copy_(x.pin_memory(), non_blocking=True)

    @contextmanager
    def planning(self, wrapper: object) -> Iterator[None]:
        """Plan a FlashInfer wrapper in here."""
        event = self._planned.setdefault(id(wrapper), torch.cuda.Event())
        if not event.query():
            event.synchronize()
        yield
        event.record()

    def place(self, token_ids: Tensor, feed: TokenFeed | None) -> Tensor:
        """See AsyncBackend.place."""
        placed = self.put(token_ids)
        if feed is None:
            return placed
        sources = self.put(feed.sources)
        return torch.where(sources >= 0, feed.tokens[sources.clamp(min=0)], placed)


class PinnedTokens:
    """See PendingTokens."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens
        self._arrived = torch.empty(tokens.shape, dtype=tokens.dtype).pin_memory()
        self._arrived.copy_(tokens, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> list[int]:
        self._event.synchronize()
        found: list[int] = self._arrived.tolist()
        return found
