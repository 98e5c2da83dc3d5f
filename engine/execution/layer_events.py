"""Reports, layer by layer, which blocks of held sequences are final: a transfer may begin while later layers are
computed.
"""

from collections.abc import Callable
from typing import Protocol

from kvrelay.engine.scheduling.plan import Scheduled, StepPlan
from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.types import BlockId


class LayerHook(Protocol):
    """Called on the engine's thread when blocks of a held sequence are final for some layers.

    On a device that computes asynchronously: they will be final when it has done what was launched so far.
    """

    def __call__(self, request_id: str, first_index: int, blocks: list[BlockId], layers: range) -> None: ...


class LayerEvents:
    """The layer events of one engine. step: layers that are reported together."""

    def __init__(self, hook: LayerHook, *, num_layers: int, step: int) -> None:
        self._hook, self._num_layers, self._step = hook, num_layers, step

    def announce_cached(self, item: Scheduled) -> None:
        """Blocks found in the prefix cache are final for every layer before the first step."""
        seq = item.seq
        num_in_pool = seq.num_cached // seq.block_size - seq.num_loaded_blocks
        if seq.hold and num_in_pool:
            self._hook(seq.request_id, 0, _block_ids(seq, 0, num_in_pool), range(self._num_layers))

    def on_layer(self, plan: StepPlan) -> Callable[[int], None] | None:
        """What is to be called when a layer of this step is done; None: no held sequence is in it."""
        ready = [(item.seq.request_id, *completed_blocks(item)) for item in plan.work if item.seq.hold]
        ready += [_loaded(item.seq) for item in plan.work if item.seq.hold and item.seq.load is not None]
        ready = [entry for entry in ready if entry[2]]
        if not ready:
            return None
        hook, last_layer, step = self._hook, self._num_layers - 1, self._step

        def on_layer(layer: int) -> None:
            if (layer + 1) % step == 0 or layer == last_layer:
                for request_id, first, blocks in ready:
                    hook(request_id, first, blocks, range(layer - layer % step, layer + 1))

        return on_layer


def completed_blocks(item: Scheduled) -> tuple[int, list[BlockId]]:
    """(first index, ids) of the blocks that `item` completes: full ones, and the partial one with the prompt's end."""
    seq, end = item.seq, item.start + item.num_tokens
    first = item.start // seq.block_size
    last = seq.blocks_for(end) if end == seq.num_tokens else end // seq.block_size
    return first, _block_ids(seq, first, last)


def _loaded(seq: Sequence) -> tuple[str, int, list[BlockId]]:
    """(request, first index, blocks) of blocks loaded from a lower tier, which become final layer by layer."""
    end = seq.num_cached // seq.block_size
    first = end - seq.num_loaded_blocks
    return seq.request_id, first, _block_ids(seq, first, end)


def _block_ids(seq: Sequence, first: int, end: int) -> list[BlockId]:
    return [BlockId(block) for block in seq.blocks[first:end]]
