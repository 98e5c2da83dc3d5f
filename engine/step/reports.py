"""What an engine reports of itself: cache events, snapshots, load; and what it learns from each step's time.

No torch.
"""

import math
from collections.abc import Callable

from kvrelay.engine.execution.in_flight import InFlightStep
from kvrelay.engine.scheduling.headroom import OutputLengths
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.scheduling.swapping import MeasuredSpeeds
from kvrelay.engine.scheduling.tier_requests import LowerTiers
from kvrelay.engine.speculation.speculation_steps import DraftSteps
from kvrelay.engine.step.config import StepResult
from kvrelay.engine.step.load_report import load_report
from kvrelay.engine.step.step_timing import StepTiming
from kvrelay.kernels.backend import Backend
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.tiers.events import EventLog
from kvrelay.plane.messages import KvEvents, KvSnapshot, LoadReport


class StepRecorder:
    """Measures collected steps, for the predictions of the router, the scheduler, drafts and lower tiers."""

    def __init__(
        self, timing: StepTiming, speeds: MeasuredSpeeds, drafts: DraftSteps, pool: BlockPool, tiers: LowerTiers | None,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._timing, self._speeds, self._drafts, self._pool = timing, speeds, drafts, pool
        self._tiers, self._clock = tiers, clock
        self._collected_s = -math.inf

    def record(self, step: InFlightStep, num_outputs: int, result: StepResult) -> None:
        """A step was collected and brought so many outputs."""
        plan, timing, now_s = step.plan, self._timing, self._clock()
        seconds = now_s - max(step.launched_s, self._collected_s)
        self._collected_s = now_s
        num_tokens, num_decode = plan.num_tokens, plan.num_decode
        result.num_tokens += num_tokens
        result.num_decode += num_decode
        result.seconds += seconds
        timing.note_batch(len(plan.work), num_tokens)
        if plan.num_drafted:
            timing.observe_drafted(len(plan.work), num_outputs, seconds)
        else:
            timing.observe(num_tokens, num_decode, seconds)
        if self._drafts.is_enabled:
            self._drafts.note_step(plan, seconds)
        self._speeds.compute_tokens_per_s = timing.compute_tokens_per_s
        if self._tiers is not None:
            self._tiers.end_step(self._pool, timing.prefill_tokens_per_s)


class EngineMonitor:
    """One engine's reports. Reads; changes nothing."""

    def __init__(
        self, scheduler: Scheduler, timing: StepTiming, lengths: OutputLengths, drafts: DraftSteps, backend: Backend,
        tiers: LowerTiers | None,
    ) -> None:  # fmt: skip
        self._scheduler, self.timing, self._lengths, self._drafts = scheduler, timing, lengths, drafts
        self._backend, self._tiers = backend, tiers
        self._events = EventLog()
        self._load_seq = 0

    def drain_events(self) -> KvEvents | None:
        """What changed in the prefix cache since the last call."""
        changes = self._tiers.controller.drain_changes() if self._tiers is not None else ()
        return self._events.drain(self._scheduler.pool, changes)

    def snapshot(self) -> KvSnapshot:
        """The prefix cache as of the last drained event."""
        return self._events.snapshot()

    def audit(self, hashes: list[bytes]) -> tuple[int, list[int]]:
        """(the last drained event, where each of these blocks really is); see `Audited`."""
        index = self._tiers.controller.host.index if self._tiers is not None else None
        return self._events.audit(hashes, self._scheduler.pool, index)

    def load(self) -> LoadReport:
        """This engine's load now; the transfer fields are the worker's to fill."""
        self._load_seq += 1
        return load_report(
            self._load_seq, self._scheduler, self.timing, self._drafts.load(), tiers=self._tiers,
            output_tokens=self._lengths.mean_tokens, cascade_saved_tokens=self._backend.cascade_saved_tokens,
        )  # fmt: skip
