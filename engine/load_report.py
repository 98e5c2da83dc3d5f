"""An engine's load as the router hears it. Reads; changes nothing."""

from collections.abc import Mapping
from typing import Any

from kvrelay.engine.preemptor import Preemptor
from kvrelay.engine.scheduler import Scheduler
from kvrelay.engine.speed import Speed
from kvrelay.wire import LoadReport


def load_report(
    seq: int, scheduler: Scheduler, speed: Speed, drafts: Mapping[str, Any], spared_kv_tokens: int = 0
) -> LoadReport:
    """The load now, as report number `seq`; the transfer fields are the worker's to fill. drafts: see `DraftSteps.load`."""
    pool, tiers = scheduler.pool, scheduler.tiers
    counts = pool.counts()
    return LoadReport(
        seq=seq,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting) + len(scheduler.reserving),
        receiving=len(scheduler.receiving),
        queued_tokens=scheduler.queued_tokens,
        free_blocks=pool.num_available,
        cached_blocks=counts.cached,
        used_blocks=counts.used,
        total_blocks=pool.num_blocks,
        leased_blocks=sum(len(seq.blocks) for seq in scheduler.held.values()),
        quarantined_blocks=sum(map(len, scheduler.quarantined.values())),
        lent_blocks=len(scheduler.lent),
        step_s=speed.step_s,
        prefill_tokens_per_s=speed.prefill_tokens_per_s,
        decode_step_s=speed.decode_step_s,
        preemptions=scheduler.num_preemptions,
        preempted={str(way): count for way, count in scheduler.preemptor.num_by_way.items()},
        **_swap_load(scheduler.preemptor, len(scheduler.swapped)),
        prefix_hit_tokens=scheduler.hit_tokens,
        prefix_query_tokens=scheduler.query_tokens,
        tier_hit_tokens=tiers.hit_tokens if tiers is not None else 0,
        fetching=len(tiers.tiers.fetches) if tiers is not None else 0,
        waiting_by_priority=dict(scheduler.waiting.num_by_priority + scheduler.reserving.num_by_priority),
        waiting_tenants=len(scheduler.shares.num_waiting),
        deadline_refusals=scheduler.num_late,
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
        spared_kv_tokens=spared_kv_tokens,
        **drafts,
    )


def _swap_load(preemptor: Preemptor, num_swapped: int) -> dict[str, Any]:
    """LoadReport's fields about pre-empted sequences."""
    found: dict[str, Any] = {
        "swapped": num_swapped,
        "recomputed_tokens": preemptor.recomputed_tokens,
    }
    if (area := preemptor.area) is not None:
        found |= {
            "swapped_blocks": area.num_held,
            "swapped_bytes": area.num_held * area.slab.block_bytes,
            "swap_out_s": area.sums.save_s,
            "swap_in_s": area.sums.load_s,
            "swap_corrupt_blocks": area.sums.corrupt,
        }
    return found
