"""Ray Serve's autoscaling policy: both roles by the planner (`autoscaling_policy` in configs/autoscaling.yaml), or the
one count of workers that do both.

Replicas report what it needs through Serve's `record_autoscaling_stats`. Serve makes one instance, in its controller,
and calls it for all deployments at every tick. The registry's actor keeps its state across restarts of the controller:
saved at every observation, with Serve's times, seconds since the epoch.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from kvrelay.cluster.autoscaling import feed
from kvrelay.cluster.autoscaling.history import check_history, season_of
from kvrelay.cluster.autoscaling.retirement import RetirementCandidate, Retiring
from kvrelay.cluster.autoscaling.room import NOTICE, RETRY_S, Room
from kvrelay.cluster.autoscaling.start_times import StartTimes
from kvrelay.cluster.autoscaling.worker_model import (
    LearnedModel,
    PlannerMemory,
    decoded,
    encoded,
    interval_of,
    model_of,
    rules_of,
    target_of,
)
from kvrelay.cluster.profiles.profile import find_profile
from kvrelay.cluster.registry.names import APP_NAME, NAMESPACE, registry_name, worker_name
from kvrelay.config import planner_settings_from
from kvrelay.router.planning.planner import Planner, PlannerRules, PlannerState, ScalingPlan
from kvrelay.router.planning.roles import PlacedWorker, counts_now, role_plan
from kvrelay.router.planning.types import CountLimits, WorkerCounts, WorkerModel
from kvrelay.settings.cluster import ClusterSettings
from kvrelay.types import Role

logger = logging.getLogger("ray.serve")  # it runs in Serve's controller

NAME = "planner"  # its key in the registry
LOAD_TIMEOUT_S = 10.0  # for the registry to return the saved state
DRAIN_S: float = ClusterSettings.model_fields["drain_timeout_s"].default
INGRESS, PREFILL, DECODE = "ingress", "prefill", "decode"
NO_PREFILL: Any = SimpleNamespace(  # Serve's context of a deployment that aggregated workers go without
    deployment_name=PREFILL,
    deployment_id=PREFILL,
    raw_metrics={},
    running_replicas=(),
    current_num_replicas=0,
    target_num_replicas=0,
    capacity_adjusted_max_replicas=0,
)


class PlannerPolicy:
    """Serve's application-level autoscaling policy: the counts of prefill and decode workers, from
    `router.planning.planner.Planner`.

    The deployment `ingress` needs an `autoscaling_config` too (min = max: its count stays): ingresses report the
    incoming load, refused requests included. The counts' bounds are those of Serve's `autoscaling_config`s, and of the
    cluster's room. It has 16 attributes, because Serve allows one object for feed, learned speeds and start times,
    retirements, room, planner and saved state.
    """

    def __init__(self, drain_timeout_s: float = DRAIN_S, **settings: Any) -> None:
        """Raises ConfigError.

        Args:
            drain_timeout_s: as `cluster.drain_timeout_s` of kvrelay's settings.
            settings: as their section `planner`.
        """
        self._settings = planner_settings_from(settings)
        self._profile = model_of(find_profile(self._settings.profile)) if self._settings.profile else None
        if self._settings.history:
            check_history(self._settings.history)
        self._feed, self._learned = feed.Feed(target_of(self._settings)), LearnedModel()
        self._retiring = {str(role): Retiring(drain_timeout_s) for role in Role}
        self._ordered: dict[str, Role] = {}  # the role that each worker is to take
        self._rooms = {str(role): Room() for role in Role}
        self._starts = StartTimes()
        self.store = RegistryStateStore()
        self._loading_s: float | None = None  # when loading the saved state began
        self.is_loaded = False
        self.resumed: PlannerState | None = None  # saved by an earlier policy
        self.planner: Planner | None = None
        self._observed_s = -math.inf
        self._plan: ScalingPlan | None = None
        self._has_warned = False  # that it cannot plan

    def __call__(self, contexts: Mapping[Any, Any]) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
        """Replicas of prefill and decode, by deployment; the other counts stay.

        Args:
            contexts: a ray.serve AutoscalingContext for each deployment that has an autoscaling_config.
        """
        by_name = {context.deployment_name: context for context in contexts.values()}
        if DECODE in by_name and PREFILL not in by_name:
            if (are_aggregated := _are_aggregated(by_name[DECODE])) is None:
                return {}, {}
            by_name |= {PREFILL: NO_PREFILL} if are_aggregated else {}
        if missing := [name for name in (PREFILL, DECODE) if name not in by_name]:
            self._warn_of(missing, by_name)
            return {}, {}
        self.store.app_name = by_name[DECODE].app_name or APP_NAME
        now_s = float(by_name[DECODE].current_time)
        if not self.is_loaded and not self._load(now_s):
            return {}, {}
        if is_due := now_s - self._observed_s >= interval_of(self._settings):
            self._observed_s = now_s
            self._observe(by_name, now_s)
        before, running = self.retiring, {role: _candidates(by_name, role) for role in Role}
        names = [name for found in running.values() for name in found]
        self._starts.observe(sum(by_name[role].target_num_replicas for role in Role), names, now_s)
        deployed, workers = self._placed(by_name, running)
        wanted = self.planner.counts if self.planner is not None else counts_now(deployed, workers)
        may_switch = self._settings.switch_roles
        plan = role_plan(wanted, deployed, workers, self._limits(by_name), self._ordered, may_switch=may_switch)
        has_new = self._order(plan.switches, by_name)
        decided = {
            by_name[role].deployment_id: self._retiring[role].replicas(
                plan.replicas[role], running[role], now_s, plan.leaving & running[role].keys()
            )
            for role in Role
            if by_name[role] is not NO_PREFILL
        }
        if (names := self.retiring) != before:
            logger.info("kvrelay planner: retiring workers: %s", ", ".join(names) or "none")
        if names:
            self._retire(names)
        if is_due or has_new or names != before:
            self._save()
        return decided, {}

    def _warn_of(self, missing: list[str], by_name: Mapping[str, Any]) -> None:
        """Log once why nothing is planned: `kvrelay deploy` refuses such a file, `serve deploy` does not ask."""
        if by_name and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "kvrelay planner: plans nothing, counts stay: the Serve file has no autoscaling_config of %s; add it, "
                "or remove autoscaling_policy",
                " and ".join(missing),
            )

    def _placed(
        self, by_name: Mapping[str, Any], running: Mapping[Role, Mapping[str, RetirementCandidate]]
    ) -> tuple[WorkerCounts, list[PlacedWorker]]:
        """Replicas by deployment without those that retire, and the running ones of them."""
        found = []
        for home in Role:
            gone, roles = self._retiring[home], self._roles(by_name[home])
            for name, one in running[home].items():
                if name not in gone.until_s and name not in gone.overdue:
                    role = roles.get(name) or self._ordered.get(name, home)
                    found.append(PlacedWorker(name, home, role, (one.cost_bytes, one.sequences)))
        staying = (self._staying(by_name[home], running[home]) for home in Role)
        there = (sum(one.home is home for one in found) for home in Role)
        return WorkerCounts(*map(max, staying, there)), found

    def _roles(self, context: Any) -> dict[str, Role | None]:
        """The roles of a deployment's workers now; None: it is changing."""
        home = Role(context.deployment_name)
        return {
            worker_name(home, replica): feed.role_in(values, home) if self._settings.switch_roles else home
            for replica, values in latest(context).items()
        }

    def _order(self, switches: Mapping[str, Role], by_name: Mapping[str, Any]) -> bool:
        """Order these switches; returns whether there are new ones.

        Repeated at every tick, since a restarted registry has no orders. An order holds until its worker has changed.
        """
        changing = {name for home in Role for name, role in self._roles(by_name[home]).items() if role is None}
        new = {name: role for name, role in switches.items() if self._ordered.get(name) != role}
        if new:
            logger.info("kvrelay planner: new roles: %s", ", ".join(f"{name} {role}" for name, role in new.items()))
        self._ordered = {name: role for name, role in self._ordered.items() if name in changing} | dict(switches)
        if self._ordered:
            self._change_roles(self._ordered)
        return bool(new)

    @property
    def retiring(self) -> list[str]:
        """All retiring workers."""
        return [name for retiring in self._retiring.values() for name in retiring.names]

    def _staying(self, context: Any, running: Mapping[str, RetirementCandidate]) -> int:
        """Serve's target count without the retiring workers."""
        going = sum(name in running for name in self._retiring[context.deployment_name].names)
        return int(context.target_num_replicas) - going

    def _load(self, now_s: float) -> bool:
        """Resume from the saved state, if there is one. False: the registry has not answered yet."""
        self._loading_s = now_s if self._loading_s is None else self._loading_s
        found = self.store.load()
        if found is None:
            if now_s - self._loading_s < LOAD_TIMEOUT_S:
                return False
            logger.warning("kvrelay planner: the registry does not answer; the planner starts without its saved state")
        self.is_loaded = True
        if (memory := decoded(found or b"")) is not None:
            self._feed = replace(memory.feed, target=self._feed.target)
            self._learned, self.resumed, self._ordered = memory.learned, memory.planner, memory.ordered
            self._rooms, self._starts = memory.rooms or self._rooms, memory.starts
            drain_s = self._retiring[DECODE].drain_s
            self._retiring |= {role: replace(state, drain_s=drain_s) for role, state in memory.retiring.items()}
            logger.info("kvrelay planner: resumes from its saved state")
        return True

    def _save(self) -> None:
        planner = self.planner.state if self.planner is not None else self.resumed
        known = (self._feed, self._learned, self._retiring, self._ordered, self._rooms, self._starts)
        self.store.save(encoded(PlannerMemory(planner, *known)))

    def _observe(self, by_name: Mapping[str, Any], now_s: float) -> None:
        self._note_room(by_name, now_s)
        ingresses = latest(by_name[INGRESS]) if INGRESS in by_name else {}
        reports: dict[Role | None, dict[str, dict[str, float]]] = {role: {} for role in (*Role, None)}
        for home in Role:
            roles = self._roles(by_name[home])
            for replica, values in latest(by_name[home]).items():
                reports[roles[worker_name(home, replica)]][replica] = values
        is_changing = self._is_changing(by_name[PREFILL], by_name[DECODE])
        seen = feed.Observation(now_s, ingresses, reports[Role.PREFILL], reports[Role.DECODE], is_changing)
        workers = [*seen.prefills.values(), *seen.decodes.values()]
        self._learned.observe(workers, now_s)
        model = self._profile or self._learned.model(workers, now_s)
        load = self._plan.load if self._plan is not None else None
        interval = self._feed.interval(seen, self._profile, load)
        if model is None or interval is None:
            return
        planner = self._planner_with(model, by_name)
        before, self._plan = planner.counts, planner.observe(interval)
        if planner.counts != before:
            logger.info("kvrelay planner: %s", "; ".join(self._plan.reasons))

    def _planner_with(self, model: WorkerModel, by_name: Mapping[str, Any]) -> Planner:
        """The planner; a new one, with the state of the last, when the bounds or the time of a start have changed."""
        # quicker starts: a need still has to last until what the other role can spare shows
        start_s = max(self._starts.mean_s or 0.0, PlannerRules().horizon_s)
        limits, rules = self._limits(by_name), rules_of(self._settings, start_s)
        if self.planner is None or (self.planner.limits, self.planner.rules) != (limits, rules):
            learned = self.planner.state if self.planner is not None else self.resumed
            running = {role: _candidates(by_name, role) for role in Role}
            counts = self.planner.counts if self.planner is not None else counts_now(*self._placed(by_name, running))
            path = self._settings.history if learned is None else None
            season = season_of(path, rules.period_s, self._observed_s)
            self.planner = Planner(model, target_of(self._settings), limits, rules, counts, learned, season)
        self.planner.model = model
        return self.planner

    def _limits(self, by_name: Mapping[str, Any]) -> CountLimits:
        bounds = [self._bounds(by_name[role]) for role in (PREFILL, DECODE)]
        total = max(self._settings.max_workers or 1 << 20, sum(low for low, _ in bounds))
        return CountLimits(*bounds[0], *bounds[1], total)

    def _bounds(self, context: Any) -> tuple[int, int]:
        """A role's fewest and most workers: Serve's bounds, never 0 where there is the role, and no more than the
        cluster has room for.
        """
        if context is NO_PREFILL:
            return 0, 0
        low = max(context.capacity_adjusted_min_replicas, 1)
        room = self._rooms[context.deployment_name].most
        high = context.capacity_adjusted_max_replicas
        return low, max(low, high if room is None else min(high, room))

    def _note_room(self, by_name: Mapping[str, Any], now_s: float) -> None:
        """Compare Serve's targets with the workers that have a place: those that run, and the registry's members."""
        if (members := self.store.members()) is None:
            return
        is_tight = any(room.is_tight for room in self._rooms.values())
        resources = self.store.resources() if is_tight else {}
        before, notices = [room.most for room in self._rooms.values()], []
        for role, room in self._rooms.items():
            running = {worker_name(role, replica.unique_id) for replica in by_name[role].running_replicas}
            placed = running | {name for name in members if name.startswith(f"{role}-")}
            retry_s = max(RETRY_S, self._settings.scale_down_delay_s)
            room.observe(by_name[role].target_num_replicas, len(placed), resources, now_s, retry_s)
            notices += [line] if (line := room.line(role, now_s)) else []
        if (after := [room.most for room in self._rooms.values()]) != before:
            logger.info("kvrelay planner: %s", "; ".join(notices) or "the cluster may have room again")
        if after != before or notices:
            self.store.notice(notices)

    def _is_changing(self, *contexts: Any) -> bool:
        return bool(self.retiring or self._ordered) or any(
            one.current_num_replicas != one.target_num_replicas for one in contexts
        )

    def _retire(self, names: list[str]) -> None:
        """Have workers retire. Repeated at every tick, since a restarted registry has no requests."""
        if (found := registry(self.store.app_name)) is None:
            logger.warning("kvrelay planner: there is no registry to take the retirements")
        else:
            found.retire.remote(names, self._retiring[DECODE].drain_s)

    def _change_roles(self, roles: Mapping[str, Role]) -> None:
        if (found := registry(self.store.app_name)) is not None:
            found.change_roles.remote(dict(roles), self._retiring[DECODE].drain_s)


def _are_aggregated(context: Any) -> bool | None:
    """Whether the deployment's workers have both roles; None: none has reported yet, or they are changing."""
    roles = {values.get(feed.ROLES, 0.0) for values in latest(context).values()} - {0.0}
    return roles == {sum(feed.ROLE_BITS.values())} if roles else None


def latest(context: Any) -> dict[str, dict[str, float]]:
    """The last value of each metric of each running replica, by replica."""
    found: dict[str, dict[str, float]] = {}
    for name, by_replica in (context.raw_metrics or {}).items():
        for replica, series in by_replica.items():
            if series:
                found.setdefault(replica.unique_id, {})[name] = float(series[-1].value)
    return found


def _candidates(by_name: Mapping[str, Any], role: str) -> dict[str, RetirementCandidate]:
    """The running workers of a role, by id; those without a report have zeros."""
    context = by_name[role]
    reports = latest(context)
    alone = latest(by_name[INGRESS]) if INGRESS in by_name else {}
    found = {}
    for replica in context.running_replicas:
        name, values = worker_name(role, replica.unique_id), reports.get(replica.unique_id, {})
        shares = [report[key] for report in alone.values() if (key := f"{feed.ALONE}/{name}") in report]
        found[name] = RetirementCandidate(
            name,
            sequences=values.get(feed.RUNNING, 0.0) + values.get(feed.QUEUED, 0.0),
            context_tokens=values.get(feed.CONTEXT, 0.0),
            cached_tokens=values.get(feed.CACHED, 0.0) * values.get(feed.BLOCK_SIZE, 0.0),
            hit_share=values.get(feed.HIT_SHARE, 0.0),
            alone_share=min(shares, default=1.0),
            kv_bytes_per_token=values.get(feed.KV_BYTES_PER_TOKEN, 1.0),
        )
    return found


class RegistryStateStore:
    """The planner's state in the registry's actor. Saving does not wait; loading is polled, so that no tick blocks."""

    def __init__(self) -> None:
        self._pending: Any = None
        self._roster: Any = None
        self.app_name = APP_NAME  # Serve names it when it asks for a decision

    def save(self, data: bytes) -> None:
        if (found := registry(self.app_name)) is not None:
            found.save_state.remote(NAME, data)

    def notice(self, lines: list[str]) -> None:
        """For `kvrelay status`, over the last ones."""
        if (found := registry(self.app_name)) is not None:
            found.save_state.remote(NOTICE, "\n".join(lines).encode())

    def members(self) -> frozenset[str] | None:
        """The ids of the registry's members at the last call, warming ones included; None: no answer to that yet."""
        import ray

        try:
            if (asked := self._roster) is None or (ready := ray.wait([asked], timeout=0)[0]):
                found = registry(self.app_name)
                self._roster = None if found is None else found.watch.remote("", 0.0)
                return None if asked is None else frozenset(one.worker_id for one in ray.get(ready[0]).members)
        except ray.exceptions.RayError as error:
            self._roster = None
            logger.warning("kvrelay planner: the registry does not list its members: %s", error)
        return None

    def resources(self) -> dict[str, float]:
        """The cluster's, used ones included; empty: unknown."""
        import ray

        try:
            return {name: amount for name, amount in ray.cluster_resources().items() if not name.startswith("node:")}
        except ray.exceptions.RayError:
            return {}

    def load(self) -> bytes | None:
        """What was saved, empty if nothing was; None: the registry has not answered yet, call again."""
        import ray

        try:
            if self._pending is None:
                found = registry(self.app_name)
                if found is None:
                    return b""
                self._pending = found.saved_state.remote(NAME)
            ready, _ = ray.wait([self._pending], timeout=0)
            return bytes(ray.get(ready[0])) if ready else None
        except ray.exceptions.RayError as error:
            logger.warning("kvrelay planner: the registry does not return the saved state: %s", error)
            return b""


def registry(app_name: str) -> Any:
    """The handle of the application's registry; None: there is none."""
    import ray

    try:
        return ray.get_actor(registry_name(app_name), namespace=NAMESPACE)
    except (ValueError, ray.exceptions.RayError):
        return None
