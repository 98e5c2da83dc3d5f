"""Launches a planned step on the device: copies, loads, layer events, the model, and the draw where nothing else is
needed.
"""

from kvrelay.engine.execution.in_flight import InFlightStep, sampled
from kvrelay.engine.execution.layer_events import LayerEvents
from kvrelay.engine.execution.loads import StepLoads
from kvrelay.engine.execution.runner import Runner
from kvrelay.engine.execution.sampling import StepSampling
from kvrelay.engine.scheduling.plan import StepPlan
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.kvcache.memory.storage import KvStorage


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
