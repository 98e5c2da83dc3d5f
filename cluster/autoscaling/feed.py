"""What replicas report to Serve for the planner, and the intervals made of it. Pure.

Serve keeps named floats for each replica. Ingresses report counters since their start (requests, tokens, TTFT
histogram); workers report their current load and speed. The planner uses a counter's growth since the last observation;
a replica's first observation only sets the baseline, so a restarted ingress neither adds nor removes anything.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvrelay.plane.reports import LoadReport, WorkerInfo
from kvrelay.router.planning.capacity import prompts_of
from kvrelay.router.planning.types import Interval, PlanningTarget, WorkerModel, Workload
from kvrelay.types import Role, sides

if TYPE_CHECKING:  # `kvrelay plan --help` is to import no numpy
    from kvrelay.serve.telemetry.observer import Histogram, ServeStats

AT = "kvrelay_at_s"  # when an ingress reported, by its own clock
REQUESTS, TAKEN, REFUSED = "kvrelay_requests", "kvrelay_taken", "kvrelay_refused"
PROMPT_TOKENS, PROMPT_SQUARES = "kvrelay_prompt_tokens", "kvrelay_prompt_squares"
CACHED_TOKENS, OUTPUT_TOKENS = "kvrelay_cached_tokens", "kvrelay_output_tokens"
# 1: an ingress refuses requests that would miss the TTFT target; has decode workers with time to spare compute prompts
REFUSES_LATE, PREFILLS_ON_DECODE = "kvrelay_refuses_late", "kvrelay_prefills_on_decode"
TTFT, TPOT = "kvrelay_ttft_s", "kvrelay_tpot_s"  # "<name>/<bound>": cumulative counts of a histogram
ALONE = "kvrelay_alone"  # "<name>/<worker id>": share of its blocks that no other worker has
RUNNING, QUEUED, CACHED = "kvrelay_running", "kvrelay_queued", "kvrelay_cached_blocks"
ROLES = "kvrelay_roles"  # of a worker: the sum of the values in ROLE_BITS; 0: it is changing its role
DECODING = "kvrelay_decoding"  # sequences of a worker without queued prompt tokens, else 0
HIT_SHARE = "kvrelay_hit_share"
PREFILL_SPEED, STEP_S, CONTEXT = "kvrelay_prefill_tokens_per_s", "kvrelay_decode_step_s", "kvrelay_context_tokens"
POOL_TOKENS, BLOCK_SIZE, MAX_RUNNING = "kvrelay_pool_tokens", "kvrelay_block_size", "kvrelay_max_running"
KV_BYTES_PER_TOKEN = "kvrelay_kv_bytes_per_token"

ROLE_BITS = {Role.PREFILL: 1.0, Role.DECODE: 2.0}

Values = Mapping[str, float]


def ingress_report(
    stats: "ServeStats", alone_shares: Mapping[str, float] = MappingProxyType({}), at_s: float = 0.0
) -> dict[str, float]:
    """One ingress's report: counters of its requests, and for each worker the share of its blocks that no other has.
    at_s: the ingress's time now; 0: observed as it is reported.
    """
    ended = sum(stats.outcomes.values())
    return {
        AT: at_s,
        REQUESTS: float(ended + stats.running),
        TAKEN: float(stats.taken),
        REFUSED: float(sum(stats.outcomes[name] for name in ("slo", "deadline", "overloaded")) - stats.hopeless),
        REFUSES_LATE: float(stats.refuses_late),
        PREFILLS_ON_DECODE: float(stats.prefills_on_decode),
        PROMPT_TOKENS: float(stats.prompt_tokens),
        PROMPT_SQUARES: float(stats.prompt_squares),
        CACHED_TOKENS: float(stats.cached_prefix_tokens),
        OUTPUT_TOKENS: float(stats.output_tokens),
        **_bounds(TTFT, stats.ttft_s),
        **_bounds(TPOT, stats.tpot_s),
        **{f"{ALONE}/{worker_id}": share for worker_id, share in alone_shares.items()},
    }


def _bounds(name: str, histogram: "Histogram") -> dict[str, float]:
    return {f"{name}/{bound:.12g}": float(count) for bound, count in histogram.cumulative()}


def worker_report(load: LoadReport, info: WorkerInfo, role: str) -> dict[str, float]:
    """One worker's report: its load, speed and sizes, and its role now."""
    queried = load.prefix_query_tokens
    return {
        ROLES: sum(ROLE_BITS[side] for side in sides(role)),
        RUNNING: float(load.running + load.receiving + load.held),
        DECODING: float(load.running if load.queued_tokens == 0 else 0),
        QUEUED: float(load.waiting),
        CONTEXT: float(load.used_blocks * info.block_size),
        CACHED: float(load.cached_blocks),
        HIT_SHARE: load.prefix_hit_tokens / queried if queried else 0.0,
        PREFILL_SPEED: load.prefill_tokens_per_s,
        STEP_S: load.decode_step_s,
        POOL_TOKENS: float(info.num_blocks * info.block_size),
        BLOCK_SIZE: float(info.block_size),
        MAX_RUNNING: float(info.max_running),
        KV_BYTES_PER_TOKEN: float(info.kv_bytes_per_token),
    }


def role_in(values: Values, home: Role) -> Role | None:
    """A reported worker's role; None while it changes, its deployment's where it reports none. One of both roles counts
    as decode.
    """
    value = values.get(ROLES, ROLE_BITS[home])
    return None if value == 0 else Role.PREFILL if value == ROLE_BITS[Role.PREFILL] else Role.DECODE


@dataclass(frozen=True, slots=True)
class Observation:
    """The latest values of every replica that has reported, by replica. Workers are listed by their role now."""

    at_s: float
    ingresses: Mapping[str, Values]
    prefills: Mapping[str, Values]
    decodes: Mapping[str, Values]
    is_changing: bool  # workers start, drain or change their roles


@dataclass(slots=True)
class Feed:
    """Turns observations into intervals. The first observation only begins one. Counters only grow, so that a restarted
    policy also sees what happened meanwhile."""

    target: PlanningTarget
    counters: dict[str, Values] = field(default_factory=dict)  # of the last observation, by replica
    at_s: float | None = None

    def interval(self, seen: Observation, model: WorkerModel | None, load: Workload | None) -> Interval | None:
        """What happened since the last observation; None: this is the first, or no time has passed.

        `model` and `load`: the expected speeds; without them the interval has no slowness.
        """
        model = model.crowded(len(seen.prefills) + len(seen.decodes)) if model is not None else None
        start_s, self.at_s = self.at_s, seen.at_s
        grown = self._grown(seen.ingresses, seen.at_s - start_s if start_s is not None else 0.0)
        if start_s is None or seen.at_s <= start_s:
            return None
        arrivals, taken = grown.get(REQUESTS, 0.0), grown.get(TAKEN, 0.0)
        scale = arrivals / taken if taken else 1.0  # requests refused before tokenisation count like the others
        firsts, refused = grown.get(f"{TTFT}/{math.inf:g}", 0.0), grown.get(REFUSED, 0.0)
        return Interval(
            start_s,
            seen.at_s,
            arrivals=round(arrivals),
            input_tokens=round(grown.get(PROMPT_TOKENS, 0.0) * scale),
            input_squares=grown.get(PROMPT_SQUARES, 0.0) * scale,
            cached_tokens=round(grown.get(CACHED_TOKENS, 0.0)),
            ended=round(firsts),
            output_tokens=round(grown.get(OUTPUT_TOKENS, 0.0)),
            queued=round(sum(values.get(QUEUED, 0.0) for values in (seen.prefills or seen.decodes).values())),
            ttft_kept=kept_share(grown, TTFT, self.target.ttft_s, self.target.share, refused),
            tpot_kept=kept_share(grown, TPOT, self.target.tpot_s, self.target.share, refused),
            judged=round(firsts + refused),
            prefill_slowness=_prefill_slowness(seen.prefills.values(), model, load),
            decode_slowness=_decode_slowness(seen.decodes.values(), model),
            is_changing=seen.is_changing,
            refuses_late=any(values.get(REFUSES_LATE) for values in seen.ingresses.values()),
            prefills_on_decode=any(values.get(PREFILLS_ON_DECODE) for values in seen.ingresses.values()),
        )

    def _grown(self, ingresses: Mapping[str, Values], seconds: float) -> dict[str, float]:
        """Growth of all counters in `seconds`, at the pace of the time between an ingress's two reports: Serve's last
        one is up to two seconds old, which would make a steady load look like more and less in turn.
        """
        grown: dict[str, float] = {}
        for replica, values in ingresses.items():
            before = self.counters.get(replica)
            if before is not None:
                own_s = values.get(AT, 0.0) - before.get(AT, 0.0)
                pace = seconds / own_s if own_s > 0.0 else 1.0
                for name, value in values.items():
                    grown[name] = grown.get(name, 0.0) + pace * max(0.0, value - before.get(name, value))
        self.counters = dict(ingresses)
        return grown


def kept_share(grown: Values, name: str, limit_s: float, wanted: float, refused: float = 0.0) -> float | None:
    """Share of a histogram's new values at or below `limit_s`, precise enough to compare it with `wanted`. refused:
    requests that have no value because they were refused, for want of workers: they missed it.

    Where the limit lies between two of the histogram's bounds, the share lies between theirs. None: that leaves open
    whether `wanted` is reached, or there are no values.
    """
    pairs = sorted(
        (float(key.partition("/")[2]), count) for key, count in grown.items() if key.partition("/")[0] == name
    )
    total = pairs[-1][1] + refused if pairs else 0.0
    if total <= 0:
        return None
    low = max((count for bound_s, count in pairs if bound_s <= limit_s), default=0.0) / total
    high = min(count for bound_s, count in pairs if bound_s >= limit_s) / total
    if low >= wanted:
        return low
    return high if high < wanted else None


def _prefill_slowness(workers: Iterable[Values], model: WorkerModel | None, load: Workload | None) -> float | None:
    """Measured time per prompt token over the model's, as a mean over the workers that have measured it."""
    if model is None or load is None:
        return None
    prompts = prompts_of(load, model.prefill, model.token_budget)
    token_s = prompts.work_s / max(prompts.computed_tokens, 1.0)
    speeds = [values[PREFILL_SPEED] for values in workers if values.get(PREFILL_SPEED, 0.0) > 0]
    return _mean([1.0 / speed / token_s for speed in speeds])


def _decode_slowness(workers: Iterable[Values], model: WorkerModel | None) -> float | None:
    """Measured step time over the model's for the same batch, as a mean over the workers that only decode now.

    A worker with prompts has few pure decode steps, and the last one may have had another batch.
    """
    if model is None:
        return None
    ratios = [
        values[STEP_S] / model.decode.decode_step_s(round(values[DECODING]), round(values.get(CONTEXT, 0.0)))
        for values in workers
        if values.get(STEP_S, 0.0) > 0 and values.get(DECODING, 0.0) >= 1
    ]
    return _mean(ratios)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
