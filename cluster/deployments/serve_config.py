"""The Ray Serve config of the application, as `serve deploy` takes it: built from settings, and changed by `kvrelay
scale`.

Pure: plain data in, plain data out.
"""

import copy
from typing import Any

from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.registry.names import APP_NAME
from kvrelay.config import Settings

APPLICATIONS = "/api/serve/applications/"  # path of Ray's dashboard
DEPLOY_S = 120.0
CLOSE_S = 15.0  # after the drain: for closing connections, transfers and the engine; then Serve kills the replica
IMPORT_PATH = "kvrelay.cluster.deployments.app:build"
PLANNER_POLICY_PATH = "kvrelay.cluster.autoscaling.policies:PlannerPolicy"
METRICS_S = 2.0
SECRETS = {"serve": {"api_key"}, "cluster": {"secret"}}  # the dashboard and `serve config` show the rest


def serve_config(settings: Settings, *, http_port: int) -> dict[str, Any]:
    """The whole config, without secrets, which replicas get from the registry.

    `http_port` is for Serve's own proxy; the ingress listens on settings.serve.port, which the one that replaces it
    can have only after it.
    """
    cluster = settings.cluster
    counts = {"ingress": cluster.ingress, "prefill": cluster.prefill, "decode": cluster.decode}
    planned = settings.planner.mode == "auto"
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": settings.serve.host, "port": http_port},
        "applications": [
            {
                "name": APP_NAME,
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": settings.model_dump(mode="json", exclude_defaults=True, exclude=SECRETS),
                "deployments": [
                    {
                        "name": name,
                        **(_scaling(settings, name, count) if planned else {"num_replicas": count}),
                        **({"max_surge_percent": 0} if (name, count) == ("ingress", 1) else {}),
                    }
                    for name, count in counts.items()
                    if count
                ],
                **({"autoscaling_policy": _policy(settings)} if planned else {}),
            }
        ],
    }


def _policy(settings: Settings) -> dict[str, Any]:
    """The application's policy: the planner, for both roles at once."""
    from kvrelay.cluster.autoscaling.worker_model import planner_settings  # 8 MiB, for those that have a planner

    own = planner_settings(settings).model_dump(mode="json", exclude_defaults=True)
    own |= settings.cluster.model_dump(mode="json", include={"drain_timeout_s"}, exclude_defaults=True)
    return {"policy_function": PLANNER_POLICY_PATH, "policy_kwargs": own}


def _scaling(settings: Settings, name: str, count: int) -> dict[str, Any]:
    """A deployment's bounds and initial count. Serve's own delays are 0, because the planner damps.

    The ingress has one too, though its count stays: without it Serve does not collect the reports that the planner
    reads.
    """
    from kvrelay.cluster.autoscaling.worker_model import interval_of

    planner = settings.planner
    low, high = {
        "prefill": (planner.min_prefill, planner.max_prefill),
        "decode": (planner.min_decode, planner.max_decode),
    }.get(name, (count, count))
    return {
        "autoscaling_config": {
            "min_replicas": low,
            "max_replicas": high,
            "initial_replicas": min(max(count, low), high),
            "metrics_interval_s": METRICS_S,
            "look_back_period_s": interval_of(planner),
            "upscale_delay_s": 0,
            "downscale_delay_s": 0,
        }
    }


def planned_workers(details: dict[str, Any], app_name: str) -> int:
    """Serve's target number of prefill and decode workers, the maximum where it autoscales; 0: unknown.

    Args:
        details: as for `scaled`.
    """
    deployments = details.get("applications", {}).get(app_name, {}).get("deployments", {})
    return sum(_planned(deployments[name]) for name in ("prefill", "decode") if name in deployments)


def _planned(deployment: dict[str, Any]) -> int:
    autoscaling = (deployment.get("deployment_config") or {}).get("autoscaling_config") or {}
    return max(int(deployment.get("target_num_replicas") or 0), int(autoscaling.get("max_replicas") or 0))


def applications(details: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The deployed configs of kvrelay's applications, by name.

    Args:
        details: as for `scaled`.
    """
    configs = {name: app.get("deployed_app_config") or {} for name, app in details.get("applications", {}).items()}
    return {name: config for name, config in configs.items() if config.get("import_path") == IMPORT_PATH}


def chosen_application(details: dict[str, Any], app_name: str | None) -> str:
    """The application that a command means: the named one, else the only one. Raises ClusterError listing them."""
    names = sorted(applications(details))
    if not names:
        raise ClusterError("kvrelay is not deployed there")
    if app_name is None and len(names) > 1:
        raise ClusterError(f"{len(names)} kvrelay applications run there: choose with --app {' or '.join(names)}")
    if app_name not in (None, *names):
        raise ClusterError(f"no kvrelay application {app_name!r} runs there, but {', '.join(names)}")
    return app_name or names[0]


def scaled(details: dict[str, Any], counts: dict[str, int], app_name: str | None = None) -> dict[str, Any]:
    """The running config with other replica counts and nothing else changed; the planner no longer decides them.

    Args:
        details: the answer of GET /api/serve/applications/.
        counts: deployment name -> replicas, at least 1.
        app_name: None: the only one of kvrelay's.

    Raises:
        ClusterError: kvrelay is not deployed there, or has no such deployment.
    """
    name = chosen_application(details, app_name)
    running = {one: app.get("deployed_app_config") for one, app in details["applications"].items()}
    configs = {one: copy.deepcopy(config) for one, config in running.items() if config}
    ours, known = configs[name], details["applications"][name].get("deployments", {})
    listed = {entry["name"]: entry for entry in ours.setdefault("deployments", [])}
    for name, count in counts.items():
        if known and name not in known:
            raise ClusterError(f"this cluster was started without {name} workers; start it with --{name} 1 or more")
        if name not in listed:
            listed[name] = {"name": name}
            ours["deployments"].append(listed[name])
        listed[name].pop("autoscaling_config", None)
        listed[name]["num_replicas"] = count
    if ours.pop("autoscaling_policy", None) is not None:  # the planner decides both roles together or none
        for name, entry in listed.items():
            if entry.pop("autoscaling_config", None) is not None and name not in counts:
                entry["num_replicas"] = int(known.get(name, {}).get("target_num_replicas") or 1)
    return with_options(list(configs.values()), details)


def with_options(apps: list[dict[str, Any]], details: dict[str, Any]) -> dict[str, Any]:
    """A whole config of these applications, with the options of the Serve that runs."""
    http = details.get("http_options") or {}
    config: dict[str, Any] = {"applications": apps}
    if details.get("proxy_location"):
        config["proxy_location"] = details["proxy_location"]
    if http.get("port"):
        config["http_options"] = {"host": http.get("host"), "port": http["port"]}
    return config
