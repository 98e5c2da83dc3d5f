"""Copies between host and device without waiting: metadata to the device, tokens back.

A copy from pageable memory waits for the device; one from pinned memory does not, but the memory must not be written
before it is done. `put` and `fill` copy from torch's pinned allocator, which reuses memory after the copy's event.
FlashInfer's wrappers keep one pinned buffer each: `planning` waits, before a wrapper is planned again, until the copies
of its last plan are done. They run at the start of a step, and the one before the last has been collected: mostly there
is no wait. Device memory needs no care: all work is on one stream, in order.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvrelay.kernels.backend import TokenFeed


class DeviceStaging:
    """For one device. Call it from the engine thread only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # events by wrapper id; that of an earlier wrapper with the same id is long over
        self._planned: dict[int, Any] = {}

    def put(self, x: Tensor) -> Tensor:
        """A copy of CPU tensor `x` on the device, ordered before later work."""
        return x.pin_memory().to(self._device, non_blocking=True)

    def fill(self, target: Tensor, x: Tensor) -> None:
        """Overwrite a device tensor, in order with earlier and later work. x: a CPU tensor of its dtype."""
        target.copy_(x.pin_memory(), non_blocking=True)

    @contextmanager
    def planning(self, wrapper: object) -> Iterator[None]:
        """Context in which a FlashInfer wrapper is planned."""
        event = self._planned.setdefault(id(wrapper), torch.cuda.Event())
        if not event.query():
            event.synchronize()
        yield
        event.record()

    def place(self, token_ids: Tensor, feed: TokenFeed | None) -> Tensor:
        """See AsyncDevice.place. Mostly a step continues the very rows of the one before."""
        if feed is not None and np.array_equal(feed.sources.numpy(), np.arange(feed.tokens.shape[0])):
            return feed.tokens
        placed = self.put(token_ids)
        if feed is None:
            return placed
        sources = self.put(feed.sources)
        return torch.where(sources >= 0, feed.tokens[sources.clamp(min=0)], placed)


class PinnedTokens:
    """See PendingTokens. packed: still on the device."""

    def __init__(self, tokens: Tensor, packed: Tensor | None) -> None:
        self.tokens = tokens
        self._arrived = _on_its_way(tokens)
        self.packed = None if packed is None else _on_its_way(packed)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> list[int]:
        self._event.synchronize()
        found: list[int] = self._arrived.tolist()
        return found


def _on_its_way(x: Tensor) -> Tensor:
    """Pinned memory that a device tensor is being copied to."""
    arrived = torch.empty(x.shape, dtype=x.dtype).pin_memory()
    arrived.copy_(x, non_blocking=True)
    return arrived
