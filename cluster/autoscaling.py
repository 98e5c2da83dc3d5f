"""How many workers of a role are wanted, from how busy they say they are. Pure.

Serve counts requests at its own handles, which kvrelay's tokens do not pass; so each worker
reports its utilisation through Serve's `record_autoscaling_stats`, and `by_utilisation` is named
as the policy in the deployment's `autoscaling_config` (configs/autoscaling.yaml).
"""

import math
from collections.abc import Iterable
from typing import Any

UTILISATION = "kvrelay_utilisation"
TARGET = 0.7
QUEUE_TARGET_S = 1.0  # of prompt tokens in line, in seconds of measured prefill speed


def utilisation(
    *,
    used_blocks: int,
    total_blocks: int,
    running: int,
    waiting: int,
    max_running: int,
    queued_tokens: int,
    tokens_per_s: float,
) -> float:
    """How busy one worker is: 1.0 is full, more means that requests wait."""
    blocks = used_blocks / total_blocks if total_blocks else 0.0
    batch = (running + waiting) / max_running if max_running else 0.0
    queue = queued_tokens / tokens_per_s / QUEUE_TARGET_S if tokens_per_s > 0 else 0.0
    return max(blocks, batch, queue)


def wanted_replicas(busy: Iterable[float], current: int, *, target: float = TARGET) -> int:
    """Replicas that bring the mean utilisation to `target`; one down at a time."""
    total = sum(busy)
    wanted = math.ceil(total / target - 1e-9)
    return max(wanted, current - 1)


def by_utilisation(ctx: Any) -> tuple[int, dict[str, Any]]:
    """Serve's autoscaling policy: `ctx` is a ray.serve AutoscalingContext; its state is not used."""
    busy = (ctx.aggregated_metrics or {}).get(UTILISATION, {})
    if not busy:
        return ctx.current_num_replicas, {}
    wanted = wanted_replicas(busy.values(), ctx.current_num_replicas)
    low, high = ctx.capacity_adjusted_min_replicas, ctx.capacity_adjusted_max_replicas
    return min(max(wanted, low), high), {}
