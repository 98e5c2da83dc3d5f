"""Fewer workers, for `kvrelay scale`: those that cost least retire, their sequences move, and Serve's counts follow.

A worker that has retired ends its actor. Serve notices at its next health check and would start another: the count is
lowered in that moment, so that Serve stops no worker of its own choice.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvrelay.cluster.autoscaling.retirement import GRACE_S, candidate_of, victims
from kvrelay.cluster.deployments.serve_config import scaled
from kvrelay.cluster.launch.dashboard import RayDashboard
from kvrelay.cluster.registry.names import APP_NAME, worker_name

REPEAT_S = 2.0  # between two requests to retire, which expire
POLL_S = 0.25
WORKERS = ("prefill", "decode")

Retire = Callable[[list[str]], float]
"""Has these workers retire; returns the seconds that each may take to drain. Raises ClusterError."""


def running_workers(details: Mapping[str, Any], name: str, app_name: str = APP_NAME) -> list[str]:
    """The ids of a deployment's running workers."""
    replicas = details["applications"][app_name]["deployments"].get(name, {}).get("replicas", [])
    return [worker_name(name, replica["replica_id"]) for replica in replicas if replica["state"] == "RUNNING"]


def leaving_workers(
    details: Mapping[str, Any],
    workers: Mapping[str, Mapping[str, Any]],
    counts: Mapping[str, int],
    app_name: str = APP_NAME,
) -> list[str]:
    """The workers that retire: of each role that has more than its count, those that cost least.

    Args:
        workers: as `kvrelay status --json` lists them, by id.
    """
    found = list[str]()
    for name in WORKERS:
        if name in counts:
            running = running_workers(details, name, app_name)
            candidates = [candidate_of(workers.get(one, {"worker_id": one})) for one in running]
            found += victims(candidates, len(running) - counts[name])
    return found


def scale_down(
    dashboard: RayDashboard,
    workers: Callable[[], Iterable[Mapping[str, Any]]],
    counts: Mapping[str, int],
    retire: Retire,
    show: Callable[[str], None],
    app_name: str = APP_NAME,
) -> None:
    """Have surplus workers retire, and lower Serve's counts as they go. Returns when they are gone.

    One that has not gone a while after its drain time no longer counts: then Serve stops one by its own choice. Raises
    ClusterError.

    workers: asks for them, as `kvrelay status --json` lists them; called where there are too many.
    """
    details = dashboard.details()
    if all(len(running_workers(details, name, app_name)) <= counts[name] for name in WORKERS if name in counts):
        return
    known = {worker["worker_id"]: worker for worker in workers()}
    leaving = leaving_workers(details, known, counts, app_name)
    for name in leaving:
        show(candidate_of(known.get(name, {"worker_id": name})).line())
    dashboard.deploy(scaled(details, counts_with(counts, leaving), app_name))  # the planner decides nothing meanwhile
    started_s, asked_s, limit_s = time.monotonic(), float("-inf"), GRACE_S
    while leaving and time.monotonic() - started_s < limit_s:
        if time.monotonic() - asked_s >= REPEAT_S:
            limit_s, asked_s = retire(leaving) + GRACE_S, time.monotonic()
        time.sleep(POLL_S)
        details = dashboard.details()
        there = {one for name in WORKERS for one in running_workers(details, name, app_name)}
        if gone := [name for name in leaving if name not in there]:
            leaving = [name for name in leaving if name in there]
            dashboard.deploy(scaled(details, counts_with(counts, leaving), app_name))
            for name in gone:
                show(f"{name} has left after {time.monotonic() - started_s:.1f} s")
    for name in leaving:
        show(f"{name} has not left in time: Ray Serve stops a worker")


def counts_with(counts: Mapping[str, int], leaving: Iterable[str]) -> dict[str, int]:
    """The counts, with the workers that have yet to leave."""
    names = list(leaving)
    return {role: count + sum(one.startswith(f"{role}-") for one in names) for role, count in counts.items()}
