"""Blocks that are still being loaded from a lower tier or the swap area while their sequences are computed.

No torch.
"""

import logging
from collections.abc import Callable

from kvrelay.engine.scheduling.plan import StepPlan
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.engine.scheduling.tier_requests import LowerTiers
from kvrelay.kvcache.memory.swap import SwapLoad

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
