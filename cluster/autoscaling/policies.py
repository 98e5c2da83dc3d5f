"""Ray Serve's autoscaling policies of kvrelay: both roles by the planner, or one role by how busy its workers are.

Serve counts requests at its own handles, which kvrelay's tokens do not pass; so replicas report what a policy needs through Serve's
`record_autoscaling_stats`. `Planned` is an application's policy (`autoscaling_policy` in configs/autoscaling.yaml): Serve makes one
instance, in its controller, and asks it for both roles at every tick. What it has learnt is kept by the registry's actor
(cluster/autoscaling/memory.py), so that it goes on where it was when the controller restarts. `by_utilisation` is the simple alternative: the policy of a deployment's own
`autoscaling_config`, each role for itself.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from kvrelay.cluster.autoscaling import feed
from kvrelay.cluster.autoscaling.memory import Keeper, Kept, Memory, RegistryKeeper, decoded, encoded
from kvrelay.cluster.autoscaling.retirement import Candidate, Retiring
from kvrelay.cluster.autoscaling.worker_model import LearntModel, model_of, rules_of, target_of
from kvrelay.cluster.profiles.profile import find_profile
from kvrelay.config import planner_settings_from
from kvrelay.router.planning.planner import Plan, Planner, PlannerState
from kvrelay.router.planning.types import Counts, Limits, WorkerModel

logger = logging.getLogger("ray.serve")  # it runs in Serve's controller

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


COMPARE_EVERY = 30  # looks between two comparisons with aggregated workers
RECALL_S = 10.0  # that the registry may take to say what was learnt before
INGRESS, PREFILL, DECODE = "ingress", "prefill", "decode"


class Planned:
    """Serve's application-level autoscaling policy: numbers of prefill and decode workers from `router.planner.Planner`.

    Needs a deployment `ingress` with an `autoscaling_config` as well (min = max: its count stays): ingresses know what comes in,
    refused requests included. Bounds of the counts are those of Serve's `autoscaling_config`s.
    """

    def __init__(self, **settings: Any) -> None:
        """`settings`: as the section `planner` of kvrelay's settings. Raises ConfigError."""
        self._settings = planner_settings_from(settings)
        self._profile = model_of(find_profile(self._settings.profile)) if self._settings.profile else None
        self._feed, self._learnt = feed.Feed(target_of(self._settings)), LearntModel()
        self._retiring = {role: Retiring(self._settings.drain_timeout_s) for role in (PREFILL, DECODE)}
        self._keeper: Keeper = RegistryKeeper()
        self._asked_s: float | None = None  # since when the keeper is asked
        self._has_recalled = False
        self._known: tuple[PlannerState, float] | None = None  # that a new planner goes on from, and when it was so
        self._planner: Planner | None = None
        self._wanted: dict[str, int] = {}
        self._looked_s = -math.inf
        self._looks = 0
        self._plan: Plan | None = None

    def __call__(self, contexts: Mapping[Any, Any]) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
        """Replicas of prefill and decode, by deployment; the others' counts stay as they are.

        Args:
            contexts: a ray.serve AutoscalingContext for each deployment that has an autoscaling_config.
        """
        by_name = {context.deployment_name: context for context in contexts.values()}
        if DECODE not in by_name or PREFILL not in by_name:
            return {}, {}
        now_s = float(by_name[DECODE].current_time)
        if not self._has_recalled and not self._recall(now_s):
            return {}, {}
        if is_due := now_s - self._looked_s >= self._settings.interval_s:
            self._looked_s = now_s
            self._look(by_name, now_s)
        decided = {}
        before = self._names()
        for role in (PREFILL, DECODE):
            context = by_name[role]
            running = _candidates(by_name, role)
            wanted = self._wanted.get(role, self._staying(context, running))
            decided[context.deployment_id] = self._retiring[role].replicas(wanted, running, now_s)
        if (names := self._names()) != before:
            logger.info("kvrelay planner: workers that retire: %s", ", ".join(names) or "none")
        if names:
            self._tell(names)
        if is_due or names != before:
            self._keep(now_s)
        return decided, {}

    def _names(self) -> list[str]:
        """Of all who retire."""
        return [name for retiring in self._retiring.values() for name in retiring.names]

    def _staying(self, context: Any, running: Mapping[str, Candidate]) -> int:
        """Replicas that Serve is to have, less those of them that retire."""
        going = sum(name in running for name in self._retiring[context.deployment_name].names)
        return int(context.target_num_replicas) - going

    def _recall(self, now_s: float) -> bool:
        """Go on from what is kept, if anything is; False: the keeper has not answered yet, and may still."""
        self._asked_s = now_s if self._asked_s is None else self._asked_s
        found = self._keeper.recall()
        if found is None:
            if now_s - self._asked_s < RECALL_S:
                return False
            logger.warning("kvrelay planner: the registry does not answer; what was learnt before is not known")
            found = Kept(None)
        self._has_recalled = True
        memory = decoded(found.data) if found.data is not None else None
        if memory is not None:
            self._resume(memory, now_s - found.age_s)
            logger.info("kvrelay planner: goes on from what it knew %.0f s ago", found.age_s)
        return True

    def _resume(self, memory: Memory, then_s: float) -> None:
        """`then_s`: when it was kept, on this process's clock."""
        self._feed.resume(memory.feed, then_s)
        self._learnt.resume(memory.learnt, then_s)
        for role, state in memory.retiring.items():
            if role in self._retiring:
                self._retiring[role].resume(state, then_s)
        if memory.planner is not None:
            self._known = memory.planner, then_s

    def _keep(self, now_s: float) -> None:
        states = {role: retiring.state(now_s) for role, retiring in self._retiring.items()}
        planner = self._planner.state(now_s) if self._planner is not None else None
        self._keeper.keep(encoded(Memory(planner, self._feed.state(now_s), self._learnt.state(now_s), states)))

    def _look(self, by_name: Mapping[str, Any], now_s: float) -> None:
        prefill, decode = by_name[PREFILL], by_name[DECODE]
        ingresses = latest(by_name[INGRESS]) if INGRESS in by_name else {}
        look = feed.Look(now_s, ingresses, latest(prefill), latest(decode), self._is_changing(prefill, decode))
        workers = [*look.prefills.values(), *look.decodes.values()]
        self._learnt.observe(workers, now_s)
        model = self._profile or self._learnt.model(workers, now_s)
        load = self._plan.load if self._plan is not None else None
        interval = self._feed.interval(look, self._profile, load)
        if model is None or interval is None:
            return
        planner = self._planner_with(model, by_name, now_s)
        before, self._plan = planner.counts, planner.observe(interval)
        self._wanted = {PREFILL: planner.counts.prefill, DECODE: planner.counts.decode}
        if planner.counts != before:
            logger.info("kvrelay planner: %s", "; ".join(self._plan.reasons))
        self._looks += 1
        if self._looks % COMPARE_EVERY == 0 and (found := planner.comparison()) is not None and not found.disaggregate:
            logger.info(
                "kvrelay planner: %d aggregated workers would carry %.3g requests/s within the targets, %d + %d carry %.3g; see kvrelay plan",
                found.workers, found.aggregated_rate, found.split.prefill, found.split.decode, found.split_rate,
            )  # fmt: skip

    def _planner_with(self, model: WorkerModel, by_name: Mapping[str, Any], now_s: float) -> Planner:
        """Another one where the bounds have changed, which goes on from what the last one knew."""
        prefill, decode = by_name[PREFILL], by_name[DECODE]
        limits = Limits(
            max(prefill.capacity_adjusted_min_replicas, 1), max(prefill.capacity_adjusted_max_replicas, 1),
            max(decode.capacity_adjusted_min_replicas, 1), max(decode.capacity_adjusted_max_replicas, 1),
            self._settings.max_workers or 1 << 20,
        )  # fmt: skip
        if self._planner is None or self._planner.limits != limits:
            if self._planner is not None:
                self._known = self._planner.state(now_s), now_s
            staying = [self._staying(by_name[role], _candidates(by_name, role)) for role in (PREFILL, DECODE)]
            counts = Counts(
                *(self._wanted.get(role, one) for role, one in zip((PREFILL, DECODE), staying, strict=True))
            )
            self._planner = Planner(model, target_of(self._settings), limits, rules_of(self._settings), counts)
            if self._known is not None:
                self._planner.resume(*self._known)
        self._planner.model = model
        return self._planner

    def _is_changing(self, *contexts: Any) -> bool:
        retires = any(retiring.names for retiring in self._retiring.values())
        return retires or any(one.current_num_replicas != one.target_num_replicas for one in contexts)

    def _tell(self, names: list[str]) -> None:
        """Ask workers to retire. Told again at every tick: a registry that has restarted knows of nobody."""
        import ray

        from kvrelay.cluster.registry.actor import NAMESPACE, REGISTRY_NAME

        try:
            ray.get_actor(REGISTRY_NAME, namespace=NAMESPACE).retire.remote(names, self._settings.drain_timeout_s)
        except (ValueError, ray.exceptions.RayError) as error:
            logger.warning("kvrelay planner: the registry cannot be told who retires: %s", error)


def latest(context: Any) -> dict[str, dict[str, float]]:
    """The last value of everything that each running replica has reported, by replica."""
    found: dict[str, dict[str, float]] = {}
    for name, by_replica in (context.raw_metrics or {}).items():
        for replica, series in by_replica.items():
            if series:
                found.setdefault(replica.unique_id, {})[name] = float(series[-1].value)
    return found


def worker_name(role: str, replica: str) -> str:
    """A worker's id, from its replica's: so that whoever sees Serve's side knows whom to ask."""
    return f"{role}-{replica}"


def _candidates(by_name: Mapping[str, Any], role: str) -> dict[str, Candidate]:
    """The running workers of a role, by id; of those that have not reported nothing is known but that they run."""
    context = by_name[role]
    reports = latest(context)
    alone = latest(by_name[INGRESS]) if INGRESS in by_name else {}
    found = {}
    for replica in context.running_replicas:
        name, values = worker_name(role, replica.unique_id), reports.get(replica.unique_id, {})
        shares = [told[key] for told in alone.values() if (key := f"{feed.ALONE}/{name}") in told]
        found[name] = Candidate(
            name,
            sequences=values.get(feed.RUNNING, 0.0) + values.get(feed.QUEUED, 0.0),
            context_tokens=values.get(feed.CONTEXT, 0.0),
            cached_tokens=values.get(feed.CACHED, 0.0) * values.get(feed.BLOCK_SIZE, 0.0),
            hit_share=values.get(feed.HIT_SHARE, 0.0),
            alone_share=min(shares, default=1.0),
        )  # fmt: skip
    return found
