"""What an engine reports of itself: cache events, snapshots, load; and what it learns from each step's time.

No torch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvrelay.engine.execution.runner import InFlightStep
from kvrelay.engine.scheduling.preempt import MeasuredSpeeds
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.speculation.speculation import DraftSteps
from kvrelay.engine.step.config import StepResult
from kvrelay.kernels.backend import Backend
from kvrelay.kvcache.index.changes import EventLog
from kvrelay.kvcache.memory.swap import SwapArea
from kvrelay.kvcache.pool.resident_audit import ResidentAudit
from kvrelay.plane.reports import KvEvents, KvSnapshot, LoadReport

FIRST_STEPS = 4  # of a kind: the fastest of them counts, and the very first, which may take seconds, not at all
PREFILL_KEEP = 0.95  # of what was measured, at each further step with prompts


@dataclass(slots=True)
class StepTiming:
    """Moving averages of step times and speeds, for the router's predictions; 0: not known yet."""

    step_s: float = 0.0
    decode_step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    num_steps: int = 0
    batch_sequences: int = 0  # of the last step
    batch_tokens: int = 0
    num_observed: int = 0  # steps
    num_decode_steps: int = 0  # of those, that only decoded
    num_prefill_steps: int = 0  # with enough prompt tokens to measure their speed
    _prefill_tokens: float = 0.0
    _prefill_s: float = 0.0

    @property
    def compute_tokens_per_s(self) -> float:
        """Of a prompt: as measured, or, on a worker that has computed none, at least what its decode steps reach."""
        return self.prefill_tokens_per_s or self.decode_tokens_per_s

    def copy_to(self, speeds: MeasuredSpeeds) -> None:
        """What the scheduler plans by."""
        speeds.compute_tokens_per_s, speeds.decode_step_s = self.compute_tokens_per_s, self.decode_step_s

    def observe(self, num_tokens: int, num_decode: int, seconds: float, num_steps: int = 1) -> None:
        """So many steps in a row were like this one."""
        self.step_s = _learnt(self.step_s, seconds, self.num_observed, num_steps)
        self.num_observed += num_steps
        if num_tokens == num_decode:
            self.decode_step_s = _learnt(self.decode_step_s, seconds, self.num_decode_steps, num_steps)
            self.num_decode_steps += num_steps
            if seconds > 0:
                self.decode_tokens_per_s = max(0.95**num_steps * self.decode_tokens_per_s, num_decode / seconds)
        elif num_tokens - num_decode >= 64 and seconds > 0:
            self._observe_prefill(num_tokens, seconds, num_steps)
            self.num_prefill_steps += num_steps

    def _observe_prefill(self, num_tokens: int, seconds: float, num_steps: int) -> None:
        """All late tokens over all late seconds: one short last chunk, or one far into a long prompt, says little."""
        if self.num_prefill_steps < FIRST_STEPS:
            rate = _learnt(self.prefill_tokens_per_s, num_tokens / seconds, self.num_prefill_steps, num_steps, max)
            self.prefill_tokens_per_s, self._prefill_tokens = rate, float(num_tokens)
            self._prefill_s = num_tokens / rate if rate else 0.0
            return
        keep = PREFILL_KEEP**num_steps
        self._prefill_tokens = keep * self._prefill_tokens + num_tokens * num_steps
        self._prefill_s = keep * self._prefill_s + seconds * num_steps
        self.prefill_tokens_per_s = self._prefill_tokens / self._prefill_s

    def observe_drafted(self, num_sequences: int, num_output: int, seconds: float) -> None:
        """A step that brought several tokens of a sequence counts as so many."""
        self.step_s = _blend(self.step_s, seconds)
        if num_output and seconds > 0:
            self.decode_step_s = _blend(self.decode_step_s, seconds * num_sequences / num_output)

    def note_batch(self, num_sequences: int, num_tokens: int, num_steps: int = 1) -> None:
        self.num_steps += num_steps
        self.batch_sequences, self.batch_tokens = num_sequences, num_tokens


def _learnt(old: float, new: float, seen: int, count: int, best: Callable[[float, float], float] = min) -> float:
    """The average after `count` times `new`, which follow `seen` others; `best`: the faster of two."""
    if seen + count == 1:
        return 0.0
    if seen < FIRST_STEPS:
        return best(old, new) if old else new
    return _blend(old, new, count)


def _blend(old: float, new: float, count: int = 1) -> float:
    """The average after `count` times `new`."""
    keep = 0.8**count
    return new if old == 0.0 else keep * old + (1 - keep) * new


def load_report(
    seq: int, scheduler: Scheduler, timing: StepTiming, others: Mapping[str, Any], *, cascade_saved_tokens: int = 0
) -> LoadReport:
    """The load now, as report number `seq`; the transfer fields are the worker's to fill.

    others: fields that the caller knows, such as those of `DraftSteps.load`.
    """
    queues, blocks, preemption, tiers = scheduler.queues, scheduler.blocks, scheduler.preemption, scheduler.tiers
    counts, area = scheduler.pool.counts(), preemption.area
    num_overdue, overdue_tokens = queues.overdue()
    return LoadReport(
        seq=seq,
        running=len(queues.running),
        waiting=queues.num_queued,
        receiving=len(queues.receiving),
        queued_tokens=queues.queued_tokens,
        overdue=num_overdue,
        overdue_tokens=overdue_tokens,
        free_blocks=scheduler.pool.num_available,
        cached_blocks=counts.cached,
        used_blocks=counts.used,
        total_blocks=scheduler.pool.num_blocks,
        leased_blocks=sum([len(seq.blocks) for seq in queues.held.values()]),
        quarantined_blocks=sum(map(len, blocks.quarantined.values())),
        probe_blocks=len(blocks.probe_blocks),
        step_s=timing.step_s,
        prefill_tokens_per_s=timing.prefill_tokens_per_s,
        decode_step_s=timing.decode_step_s,
        output_tokens=scheduler.headroom.lengths.mean_tokens,
        preemptions=preemption.num_preemptions,
        preempted={str(mode): count for mode, count in preemption.num_by_mode.items()},
        swapped=len(queues.swapped),
        recomputed_tokens=preemption.recomputed_tokens,
        prefix_hit_tokens=scheduler.admission.hit_tokens,
        prefix_query_tokens=scheduler.admission.query_tokens,
        tier_hit_tokens=tiers.hit_tokens if tiers is not None else 0,
        fetching=len(tiers.fetches) if tiers is not None else 0,
        waiting_by_priority=dict(queues.waiting.num_by_priority + queues.reserving.num_by_priority),
        waiting_tenants=len(scheduler.fair_share.num_waiting),
        deadline_refusals=scheduler.num_overdue,
        displaced=scheduler.num_displaced,
        tenant_tokens=dict(scheduler.fair_share.computed_tokens),
        other_tenant_tokens=scheduler.fair_share.other_tokens,
        tiers=tiers.controller.tier_loads() if tiers is not None else [],
        reserving=len(queues.reserving),
        held=len(queues.held),
        pinned_blocks=counts.pinned,
        steps=timing.num_steps,
        batch_sequences=timing.batch_sequences,
        batch_tokens=timing.batch_tokens,
        cascade_saved_tokens=cascade_saved_tokens,
        **others,
        **(_swap_load(area) if area is not None else {}),
    )


def _swap_load(area: SwapArea) -> dict[str, Any]:
    """LoadReport's fields about preempted sequences' KV."""
    return {
        "swapped_blocks": len(area.held),
        "swapped_bytes": len(area.held) * area.slab.block_bytes,
        "swap_out_s": area.stats.save_s,
        "swap_in_s": area.stats.load_s,
        "swap_corrupt_blocks": area.stats.corrupt,
    }


class EngineMonitor:
    """One engine's reports, and what it measures of collected steps, for the predictions of the router, the scheduler,
    drafts and lower tiers.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        speeds: MeasuredSpeeds,
        drafts: DraftSteps,
        backend: Backend,
        audit: ResidentAudit,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler, self._speeds, self._drafts, self._backend = scheduler, speeds, drafts, backend
        self._audit = audit
        self.timing, self._clock, self._collected_s = StepTiming(), clock, -math.inf
        self._events, self._load_seq = EventLog(), 0

    def record(self, step: InFlightStep, num_outputs: int, result: StepResult) -> None:
        """A step was collected and brought so many outputs."""
        plan, timing, now_s = step.plan, self.timing, self._clock()
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
        timing.copy_to(self._speeds)
        if (tiers := self._scheduler.tiers) is not None:
            tiers.end_step(self._scheduler.pool, timing.prefill_tokens_per_s)

    def drain_events(self) -> KvEvents | None:
        """What changed in the prefix cache since the last call."""
        tiers = self._scheduler.tiers
        changes = tiers.controller.drain_changes() if tiers is not None else ()
        return self._events.number(self._scheduler.pool.drain_changes(), changes)

    def snapshot(self) -> KvSnapshot:
        """The prefix cache as of the last drained event."""
        return self._events.snapshot()

    def audit(self, hashes: list[bytes]) -> tuple[int, list[int]]:
        """(the last drained event, where each of these blocks really is); see `Audited`."""
        pool, tiers = self._scheduler.pool, self._scheduler.tiers
        index = None if tiers is None else tiers.host
        is_changing = pool.has_changes or (index is not None and index.has_changes)
        return self._events.audit(hashes, pool.cached_hashes(), index or (), is_changing=is_changing)

    def load(self) -> LoadReport:
        """This engine's load now; the transfer fields are the worker's to fill."""
        self._load_seq += 1
        saved = self._backend.cascade_saved_tokens
        report = load_report(
            self._load_seq, self._scheduler, self.timing, self._drafts.load(), cascade_saved_tokens=saved
        )
        if not self._audit.num_corrupt:
            return report
        return msgspec.structs.replace(report, tiers=[*report.tiers, self._audit.tier_load()])
