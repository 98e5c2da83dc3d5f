"""An engine's load as the router hears it. Reads; changes nothing."""

from collections.abc import Mapping
from typing import Any

from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.step.step_timing import StepTiming
from kvrelay.kvcache.memory.swap import SwapArea
from kvrelay.plane.messages import LoadReport


def load_report(
    seq: int, scheduler: Scheduler, speed: StepTiming, drafts: Mapping[str, Any], cascade_saved_tokens: int = 0
) -> LoadReport:
    """The load now, as report number `seq`; the transfer fields are the worker's to fill. drafts: see `DraftSteps.load`."""
    pool, tiers, preemptor = scheduler.pool, scheduler.tiers, scheduler.preemptor
    counts, by_way = pool.counts(), preemptor.num_by_mode
    num_overdue, overdue_tokens = scheduler.overdue()
    return LoadReport(
        seq=seq,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting) + len(scheduler.reserving),
        receiving=len(scheduler.receiving),
        queued_tokens=scheduler.queued_tokens,
        overdue=num_overdue,
        overdue_tokens=overdue_tokens,
        free_blocks=pool.num_available,
        cached_blocks=counts.cached,
        used_blocks=counts.used,
        total_blocks=pool.num_blocks,
        leased_blocks=sum([len(seq.blocks) for seq in scheduler.held.values()]),
        quarantined_blocks=sum(map(len, scheduler.quarantined.values())),
        probe_blocks=len(scheduler.probe_blocks),
        step_s=speed.step_s,
        prefill_tokens_per_s=speed.prefill_tokens_per_s,
        decode_step_s=speed.decode_step_s,
        output_tokens=scheduler.lengths.mean_tokens,
        preemptions=scheduler.num_preemptions,
        preempted={str(way): count for way, count in by_way.items()} if by_way else {},
        swapped=len(scheduler.swapped),
        recomputed_tokens=preemptor.recomputed_tokens,
        prefix_hit_tokens=scheduler.hit_tokens,
        prefix_query_tokens=scheduler.query_tokens,
        tier_hit_tokens=tiers.hit_tokens if tiers is not None else 0,
        fetching=tiers.tiers.num_fetching if tiers is not None else 0,
        waiting_by_priority=_sums(scheduler.waiting.num_by_priority, scheduler.reserving.num_by_priority),
        waiting_tenants=len(scheduler.shares.num_waiting),
        deadline_refusals=scheduler.num_overdue,
        displaced=scheduler.num_displaced,
        tenant_tokens=dict(scheduler.shares.computed_tokens),
        other_tenant_tokens=scheduler.shares.other_tokens,
        tiers=tiers.tiers.tier_loads() if tiers is not None else [],
        reserving=len(scheduler.reserving),
        held=len(scheduler.held),
        pinned_blocks=counts.pinned,
        steps=speed.num_steps,
        batch_sequences=speed.batch_sequences,
        batch_tokens=speed.batch_tokens,
        cascade_saved_tokens=cascade_saved_tokens,
        **drafts,
        **(_swap_load(preemptor.area) if preemptor.area is not None else {}),
    )


def _sums(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    """Of both, by key."""
    sums = dict(one)
    for key, count in other.items():
        sums[key] = sums.get(key, 0) + count
    return sums


def _swap_load(area: SwapArea) -> dict[str, Any]:
    """LoadReport's fields about pre-empted sequences' KV."""
    return {
        "swapped_blocks": area.num_held,
        "swapped_bytes": area.num_held * area.slab.block_bytes,
        "swap_out_s": area.stats.save_s,
        "swap_in_s": area.stats.load_s,
        "swap_corrupt_blocks": area.stats.corrupt,
    }
