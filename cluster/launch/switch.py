"""An application takes over another one's route: the new one starts beside it, at a route of its own, then both change
routes, and the old one ends when it has nothing left to do. No request fails, and until the end the way back is open.

The plans are pure; `take_over` carries them out.
"""

import copy
import time
from collections.abc import Callable, Iterable
from typing import Any

from kvrelay.cluster.deployments.serve_config import applications, with_options
from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.launch.dashboard import RayDashboard
from kvrelay.settings.cluster import ClusterSettings

POLL_S = 0.5
ROUTED_S = 5.0  # until every proxy has the new routes
IDLE_POLLS = 3  # in a row without a request
DRAIN_S: float = ClusterSettings.model_fields["drain_timeout_s"].default


def predecessor(config: dict[str, Any], details: dict[str, Any], app_name: str) -> str | None:
    """The running kvrelay application whose route `app_name` of the config takes; None: there is none.

    Raises ClusterError: an application that is not kvrelay's has that route.
    """
    listed = {app.get("name", "default"): app.get("route_prefix", "/") for app in config["applications"]}
    for name, app in details.get("applications", {}).items():
        if name not in listed and app.get("route_prefix") == listed[app_name]:
            if name in applications(details):
                return str(name)
            raise ClusterError(f"application {name!r} has the route {listed[app_name]}; it is not kvrelay's")
    return None


def beside(config: dict[str, Any], details: dict[str, Any], new: Iterable[str]) -> dict[str, Any]:
    """The config with the new applications at their present routes, else each at one of its own."""
    apps = details.get("applications", {})
    return _routed(config, {name: apps.get(name, {}).get("route_prefix") or f"/{name}" for name in new})


def exchanged(config: dict[str, Any], old: str) -> dict[str, Any]:
    """The config with the old application at a route of its own, and the new one where the file has it."""
    return _routed(config, {old: f"/{old}"})


def _routed(config: dict[str, Any], routes: dict[str, str]) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    for app in changed["applications"]:
        if (name := app.get("name", "default")) in routes:
            app["route_prefix"] = routes[name]
    return changed


def without(details: dict[str, Any], old: str) -> dict[str, Any]:
    """What runs, without the old application."""
    apps = [app.get("deployed_app_config") for name, app in details["applications"].items() if name != old]
    return with_options([app for app in apps if app], details)


def drain_s(details: dict[str, Any], app_name: str) -> float:
    """How long the application's requests may take to end."""
    args = applications(details).get(app_name, {}).get("args") or {}
    return float((args.get("cluster") or {}).get("drain_timeout_s", DRAIN_S))


def exchange_routes(dashboard: RayDashboard, config: dict[str, Any], new: str, old: str) -> None:
    """Deploy the config with both routes exchanged, and wait until every proxy has them. Raises ClusterError."""
    dashboard.deploy(exchanged(config, old))
    wanted = {
        app.get("name", "default"): app.get("route_prefix", "/") for app in exchanged(config, old)["applications"]
    }
    until_s = time.monotonic() + DRAIN_S
    while True:
        apps = {name: dashboard.application(name) for name in (new, old)}
        if all(
            apps[name].get("status") == "RUNNING" and apps[name].get("route_prefix") == wanted[name] for name in apps
        ):
            break
        if time.monotonic() > until_s:
            raise ClusterError(f"{new} and {old} have not exchanged their routes in {DRAIN_S:.0f} s")
        time.sleep(POLL_S)
    time.sleep(ROUTED_S)


def end(dashboard: RayDashboard, old: str, num_requests: Callable[[], int]) -> float:
    """Wait until the old application has no requests, at most its drain time, then remove it; returns the seconds
    waited. What is left then has the drain time once more, as in any application that stops. Raises ClusterError.
    """
    started_s, num_idle = time.monotonic(), 0
    limit_s = drain_s(dashboard.details(), old)
    while num_idle < IDLE_POLLS and time.monotonic() - started_s < limit_s:
        num_idle = 0 if num_requests() else num_idle + 1
        time.sleep(POLL_S)
    waited_s = time.monotonic() - started_s
    dashboard.deploy(without(dashboard.details(), old))
    return waited_s
