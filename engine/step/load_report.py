"""An engine's load report. Reads; changes nothing."""

from collections.abc import Mapping
from typing import Any

from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.scheduling.tier_requests import LowerTiers
from kvrelay.engine.step.step_timing import StepTiming
from kvrelay.kvcache.memory.swap import SwapArea
from kvrelay.plane.messages import LoadReport


def load_report(
    seq: int, scheduler: Scheduler, timing: StepTiming, others: Mapping[str, Any], *, tiers: LowerTiers | None = None,
    output_tokens: float = 0.0, cascade_saved_tokens: int = 0,
) -> LoadReport:  # fmt: skip
    """The load now, as report number `seq`; the transfer fields are the worker's to fill.

    Args:
        others: fields that the caller knows, such as those of `DraftSteps.load`.
        output_tokens: mean length of the last outputs; 0: not known.
    """
    queues, aside, preemption = scheduler.queues, scheduler.aside, scheduler.preemption
    blocks, counts, area = scheduler.admission.blocks, scheduler.pool.counts(), preemption.swapping.area
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
        quarantined_blocks=sum(map(len, aside.quarantined.values())),
        probe_blocks=len(aside.probe_blocks),
        step_s=timing.step_s,
        prefill_tokens_per_s=timing.prefill_tokens_per_s,
        decode_step_s=timing.decode_step_s,
        output_tokens=output_tokens,
        preemptions=preemption.num_preemptions,
        preempted={str(mode): count for mode, count in preemption.num_by_mode.items()},
        swapped=len(queues.swapped),
        recomputed_tokens=preemption.recomputed_tokens,
        prefix_hit_tokens=blocks.hit_tokens,
        prefix_query_tokens=blocks.query_tokens,
        tier_hit_tokens=tiers.hit_tokens if tiers is not None else 0,
        fetching=tiers.controller.num_fetching if tiers is not None else 0,
        waiting_by_priority=_added(queues.waiting.num_by_priority, queues.reserving.num_by_priority),
        waiting_tenants=len(scheduler.fair_share.num_waiting),
        deadline_refusals=scheduler.arrivals.num_overdue,
        displaced=scheduler.arrivals.num_displaced,
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


def _added(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    """The sum of both, by key."""
    counts = dict(one)
    for key, count in other.items():
        counts[key] = counts.get(key, 0) + count
    return counts


def _swap_load(area: SwapArea) -> dict[str, Any]:
    """LoadReport's fields about preempted sequences' KV."""
    return {
        "swapped_blocks": area.num_held,
        "swapped_bytes": area.num_held * area.slab.block_bytes,
        "swap_out_s": area.stats.save_s,
        "swap_in_s": area.stats.load_s,
        "swap_corrupt_blocks": area.stats.corrupt,
    }
