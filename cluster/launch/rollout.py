"""How far a deployment is, by Serve's details, and why one has failed. Waits until every replica runs.

`kvrelay serve`, `kvrelay deploy`, `kvrelay scale` and `kvrelay status` share it.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.launch.dashboard import RayDashboard
from kvrelay.cluster.registry.names import APP_NAME

POLL_S = 0.25
LOGS_S = 2.0  # between two looks at the logs of starting replicas
PLACE_S = 60.0  # on a Ray of our own: a replica without resources by then will never get them
START_S = 1800.0  # a large model from a slow disk
UNHEALTHY_S = 60.0  # Serve replaces a lost worker well within this
_RESOURCES = re.compile(r"Resources required for each replica: (\{.*?\}), total resources available: (\{.*?\})\.")
_ERROR = re.compile(r"kvrelay\.(?:cluster\.)?errors\.(\w+: .*)")
Report = Callable[[str, str], None]  # part of the cluster, its state


def wait_until_running(
    dashboard: RayDashboard,
    report: Report,
    *,
    app_name: str = APP_NAME,
    counts: Mapping[str, int] | None = None,
    place_s: float | None = None,
    unhealthy_s: float = UNHEALTHY_S,
) -> None:
    """Wait until every replica runs; report the counts, and what starting replicas log, meanwhile.

    Args:
        counts: the deployments that must have so many running replicas and no others.
        place_s: how long a replica may lack resources; None: for ever, as a cluster may grow.
        unhealthy_s: how long the application may be unhealthy.

    Raises ClusterError with a replica's own error, with the resources that one has lacked, or after START_S.
    """
    counts = counts or {}
    started_s = placed_s = healthy_s = time.monotonic()
    looked_s, lines = started_s, dict[str, list[str]]()
    while True:
        app, now_s = dashboard.application(app_name), time.monotonic()
        if now_s - looked_s >= LOGS_S:
            looked_s, lines = now_s, latest_lines(dashboard, app)
        deployments = app.get("deployments", {})
        for name, one in deployments.items():
            report(name, progress(one, lines.get(name, [])))
        status, summary = app.get("status"), ", ".join(f"{name} {progress(one)}" for name, one in deployments.items())
        if status == "RUNNING" and all(
            _states(deployments.get(name, {})) == ["RUNNING"] * counts[name] for name in counts
        ):
            return
        if status != "UNHEALTHY":
            healthy_s = now_s
        if status == "DEPLOY_FAILED" or now_s - healthy_s > unhealthy_s:
            raise ClusterError(failure(app))
        if place_s is None or not any(missing(one["message"]) for one in deployments.values()):
            placed_s = now_s
        elif now_s - placed_s > place_s:
            raise ClusterError(f"this machine has no place for every replica: {summary}")
        if now_s - started_s > START_S:
            raise ClusterError(f"not running after {START_S:.0f} s: {summary or 'Serve has not begun'}")
        time.sleep(POLL_S)


def latest_lines(dashboard: RayDashboard, app: dict[str, Any]) -> dict[str, list[str]]:
    """What the starting replicas of each deployment logged last, each once with its hosts' addresses."""
    lines: dict[str, list[str]] = {}
    for name, deployment in app.get("deployments", {}).items():
        if starting := _starting(deployment):
            lines[name] = sorted(set(dashboard.latest_lines(app["name"], name, starting).values()))
    return lines


def _starting(deployment: dict[str, Any]) -> list[str]:
    """Ids of the replicas that start."""
    return [one["replica_id"] for one in deployment["replicas"] if one["state"] == "STARTING"]


def _states(deployment: dict[str, Any]) -> list[str]:
    return [replica["state"] for replica in deployment.get("replicas", [])]


def progress(deployment: dict[str, Any], lines: Iterable[str] = ()) -> str:
    """A deployment's running replicas, missing resources and last error, from Serve's details of it; then `lines`,
    where replicas start.
    """
    states = _states(deployment)
    wanted, message = deployment.get("target_num_replicas") or len(states), deployment.get("message", "")
    text = f"{states.count('RUNNING')} of {wanted} running"
    trouble = missing(message) or own_error(message)
    first = f"{text}, {trouble}" if trouble else text
    return "; ".join([first, *(lines if "STARTING" in states else ())])


def missing(message: str) -> str | None:
    """The resources that a replica needs and this Ray lacks, parsed from Serve's message; None when it names none."""
    found = _RESOURCES.search(message or "")
    if found is None:
        return None
    needed, free = json.loads(found[1]), json.loads(found[2])
    lacks = [
        f"{needed[name]:g} {name} (free: {free.get(name, 0):g})" for name in needed if needed[name] > free.get(name, 0)
    ]
    return f"a replica needs {', '.join(lacks)}" if lacks else None


def own_error(message: str) -> str | None:
    """kvrelay's own error out of Serve's message, which holds a traceback; None when it names none."""
    found = _ERROR.findall(message or "")
    return str(found[-1]).strip() if found else None


def failure(app: dict[str, Any]) -> str:
    """The last line of Serve's error messages, kvrelay's own error if there is one."""
    texts = [one["message"] for one in app.get("deployments", {}).values() if one.get("message")]
    text = max([*texts, app.get("message", "")], key=len)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return own_error(text) or (lines or ["the application did not start"])[-1]
