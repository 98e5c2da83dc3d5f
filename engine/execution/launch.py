"""Launches a planned step on the device: copies, loads, layer events, the model, and the draw where nothing else is
needed.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from kvrelay.engine.execution.in_flight import InFlightStep, sampled
from kvrelay.engine.execution.runner import Runner
from kvrelay.engine.execution.sampling import StepSampling
from kvrelay.engine.scheduling.plan import Scheduled, StepPlan
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.engine.scheduling.tier_requests import LowerTiers
from kvrelay.kvcache.memory.storage import KvStorage
from kvrelay.kvcache.memory.swap import SwapLoad
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


logger = logging.getLogger(__name__)


class StepLoads:
    """What a step waits for. may_load: whether sequences' blocks can be on their way at all."""

    def __init__(self, scheduler: Scheduler, tiers: LowerTiers | None, *, num_layers: int, may_load: bool) -> None:
        self._scheduler, self._tiers = scheduler, tiers
        self._last_layer, self._may_load = num_layers - 1, may_load

    def verified(self, plan: StepPlan) -> StepPlan:
        """The plan without sequences whose saved blocks turned out to be corrupt: those are computed again."""
        if not self._may_load:
            return plan
        bad = {id(item.seq) for item in plan.work if item.seq.load is not None and not item.seq.load.wait_verified()}
        if not bad:
            return plan
        rewound = tuple(item.seq for item in plan.work if id(item.seq) in bad)
        for seq in rewound:
            logger.warning("request %s: its saved blocks are corrupt; they are computed again", seq.request_id)
            self._rewind(seq)
        return StepPlan(
            tuple(item for item in plan.work if id(item.seq) not in bad),
            sum(1 for item in plan.work[: plan.num_single] if id(item.seq) not in bad),
            plan.preempted + rewound,
            tuple(copy for copy in plan.copies if id(copy.seq) not in bad),
        )

    def _rewind(self, seq: Sequence) -> None:
        load = seq.load
        self._scheduler.rewind(seq)
        if load is not None and not isinstance(load, SwapLoad):
            assert self._tiers is not None
            self._tiers.give_up(load)

    def wait_for(self, seq: Sequence) -> bool:
        """Wait until all blocks of `seq` are loaded. False: they are corrupt, and `seq` is computed again."""
        load = seq.load
        if load is None:
            return True
        if not (load.wait_verified() and load.wait_layer(self._last_layer)):
            self._rewind(seq)
            return False
        LowerTiers.settle(seq)
        return True

    def before_layer(self, plan: StepPlan) -> Callable[[int], None] | None:
        """Waits until a layer's loaded KV is in place; None when none is on its way."""
        if not self._may_load:
            return None
        last = self._last_layer
        loads = [load for item in plan.work if (load := item.seq.load) is not None and not load.has_layer(last)]
        if not loads:
            return None

        def before_layer(layer: int) -> None:
            for load in loads:
                if not load.wait_layer(layer):
                    raise RuntimeError("the load of KV from host memory stopped before its last layer")

        return before_layer

    def settle(self, plan: StepPlan) -> None:
        """The step was launched: its loads are over."""
        if self._may_load:
            for item in plan.work:
                if item.seq.load is not None:
                    LowerTiers.settle(item.seq)


class StepLauncher:
    """Launches the steps of one engine."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, storage: KvStorage, loads: StepLoads, sampling: StepSampling,
        layer_events: LayerEvents | None,
    ) -> None:  # fmt: skip
        self._scheduler, self._runner, self._storage = scheduler, runner, storage
        self._loads, self._sampling, self._layer_events = loads, sampling, layer_events

    def launch(self, plan: StepPlan, now_s: float, before: InFlightStep | None) -> InFlightStep:
        """Have a plan computed. before: the step in flight, whose tokens this one may read on the device."""
        begun = [item for item in plan.work if not item.seq.plain_until]
        for item in begun:
            seq = item.seq
            seq.num_chunks += 1
            if seq.scheduled_s is None:
                seq.scheduled_s = now_s
                if self._layer_events is not None:
                    self._layer_events.announce_cached(item)
        step = InFlightStep(plan, *sampled(plan), now_s, self._scheduler.aside)
        try:
            self._copy_blocks(step)
            drawn = before.drawn() if before is not None else None
            on_layer = None if self._layer_events is None else self._layer_events.on_layer(plan)
            hidden = self._runner.run(plan, on_layer, self._loads.before_layer(plan), drawn)
            self._loads.settle(plan)
            step.wants_prompt_logprobs = any(item.seq.request.sampling.prompt_logprobs is not None for item in begun)
            self._sampling.launched(step, hidden)
        except BaseException:
            step.release_kept()
            raise
        return step

    def _copy_blocks(self, step: InFlightStep) -> None:
        if copies := step.plan.copies:
            for copy in copies:
                self._runner.forget(copy.seq)  # its row of the block table names the shared block
            step.keep_blocks(copy.source for copy in copies)
            self._storage.copy_blocks([(copy.source, copy.target) for copy in copies])
        self._scheduler.copied()
