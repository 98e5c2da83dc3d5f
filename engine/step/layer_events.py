"""Tells, layer by layer, which blocks of held sequences are final: a transfer may begin while later layers are computed."""

from collections.abc import Callable
from typing import Protocol

from kvrelay.engine.scheduling.scheduler import Scheduled, Scheduler, StepPlan
from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.types import BlockId


class LayerHook(Protocol):
    """Told, on the engine thread, that blocks of a held sequence are final for some layers.

    On a device that computes by itself: that they will be when it has done what was launched so far.
    """

    def __call__(self, request_id: str, first_index: int, blocks: list[BlockId], layers: range) -> None: ...


class LayerEvents:
    """One engine's. step: layers that are told of at once."""

    def __init__(self, hook: LayerHook, scheduler: Scheduler, *, num_layers: int, step: int) -> None:
        self._hook, self._scheduler = hook, scheduler
        self._num_layers, self._step = num_layers, step

    def announce_cached(self, item: Scheduled) -> None:
        """Blocks found in the prefix cache are final for every layer before the first step."""
        seq = item.seq
        num_in_pool = seq.num_cached // seq.block_size - seq.num_loaded_blocks
        if seq.hold and num_in_pool:
            blocks = [BlockId(block) for block in seq.blocks[:num_in_pool]]
            self._hook(seq.request_id, 0, blocks, range(self._num_layers))

    def on_layer(self, plan: StepPlan) -> Callable[[int], None] | None:
        """What is to be called when a layer of this step is done; None: nobody waits for it."""
        ready = [(item.seq.request_id, *self._scheduler.ready_blocks(item)) for item in plan.work if item.seq.hold]
        ready += [_brought_up(item.seq) for item in plan.work if item.seq.hold and item.seq.load is not None]
        ready = [entry for entry in ready if entry[2]]
        if not ready:
            return None
        hook, last_layer, step = self._hook, self._num_layers - 1, self._step

        def on_layer(layer: int) -> None:
            if (layer + 1) % step == 0 or layer == last_layer:
                for request_id, first, blocks in ready:
                    hook(request_id, first, blocks, range(layer - layer % step, layer + 1))

        return on_layer


def _brought_up(seq: Sequence) -> tuple[str, int, list[BlockId]]:
    """(request, first index, blocks) of what comes from below the pool: final layer by layer, like what is computed."""
    end = seq.num_cached // seq.block_size
    first = end - seq.num_loaded_blocks
    return seq.request_id, first, [BlockId(block) for block in seq.blocks[first:end]]
