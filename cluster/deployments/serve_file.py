"""A Ray Serve file with kvrelay in it, checked before Serve gets it: Serve itself ignores keys that it does not know,
and finds a wrong setting only when it builds the application, where the reason ends a traceback.

Reads the file and nothing else.
"""

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from kvrelay.cluster.deployments.serve_config import IMPORT_PATH, PLANNER_POLICY_PATH, applications
from kvrelay.config import Settings, in_one_line, planner_settings_from, settings_from
from kvrelay.engine.checkpoints.checkpoint import source_problem
from kvrelay.errors import ConfigError
from kvrelay.settings.cluster import NEVER_NONE
from kvrelay.settings.section import first_problem

ROLES = ("ingress", "prefill", "decode")
_FOREIGN_FILES = {  # a top-level key that only such a file has -> what it is, and the command that takes it
    **dict.fromkeys(("available_node_types", "head_start_ray_commands"), "a Ray cluster file: ray up"),
    "services": "a compose file: docker compose up",
    **dict.fromkeys(Settings.model_fields, "a file of settings: kvrelay serve --config"),
}
_NO_EFFECT = {  # in a Serve file
    "serve.host": "http_options.host",
    "serve.port": "http_options.port",
    "cluster.dashboard_port": "ray start --dashboard-port",
}
_SECRETS = {"serve.api_key": "KVRELAY_API_KEY", "cluster.secret": "KVRELAY_SECRET"}


@dataclass(frozen=True, slots=True)
class ServeFile:
    """A checked file, seen as one of kvrelay's applications in it. `counts`: deployment -> fewest and most replicas.
    `is_kubernetes`: of KubeRay, for kubectl.
    """

    config: dict[str, Any]
    app_name: str
    settings: Settings
    counts: dict[str, tuple[int, int]]
    warnings: tuple[str, ...]
    is_kubernetes: bool

    def summary(self) -> str:
        """The model and the replicas, in a few words."""
        parts = [f"{low if low == high else f'{low} to {high}'} {name}" for name, (low, high) in self.counts.items()]
        return f"{self.settings.model.source}, {', '.join(parts)}" + (
            "" if "prefill" in self.counts else ", aggregated"
        )

    def only(self) -> dict[str, Any]:
        """The file without the other applications."""
        apps = [app for app in self.config["applications"] if app.get("name", "default") == self.app_name]
        return {**self.config, "applications": apps}

    @property
    def num_gpus(self) -> float:
        """Ray GPUs that the fewest replicas request."""
        workers = sum(low for name, (low, _) in self.counts.items() if name != "ingress")
        return self.settings.cluster.num_gpus_per_worker * workers


def read_serve_file(path: Path) -> list[ServeFile]:
    """The file, once for each of kvrelay's applications in it. Raises ConfigError: one line that names the file, the
    key and, for a misspelt one, the nearest.
    """
    try:
        parts = list(yaml.safe_load_all(path.read_text()))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {in_one_line(error)}") from error
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise ConfigError(f"{path}: expected a Ray Serve file, with applications:")
    data = next((part for part in parts if part.get("kind") == "RayService"), parts[0])
    try:
        if data.get("kind") == "RayService":
            inner = yaml.safe_load(data["spec"]["serveConfigV2"])
            return _checked(inner, is_kubernetes=True)
        if "apiVersion" in data:
            raise ConfigError(f"is a Kubernetes file: kubectl apply -f {path}")
        if kind := next((kind for key, kind in _FOREIGN_FILES.items() if key in data), None):
            raise ConfigError(f"is {kind} {path}")
        return _checked(data, is_kubernetes=False)
    except (KeyError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: spec.serveConfigV2: {in_one_line(error)}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _checked(data: dict[str, Any], *, is_kubernetes: bool) -> list[ServeFile]:
    _check_schema(data)
    ours = [app for app in data["applications"] if app["import_path"] == IMPORT_PATH]
    if not ours:
        raise ConfigError(f"expected an application with import_path: {IMPORT_PATH}")
    return [_application(data, app, is_kubernetes=is_kubernetes) for app in ours]


def _application(data: dict[str, Any], app: dict[str, Any], *, is_kubernetes: bool) -> ServeFile:
    name, args, listed = app.get("name", "default"), app.get("args") or {}, app.get("deployments") or []
    settings = settings_from(args)
    policy, history = app.get("autoscaling_policy") or {}, None
    if policy.get("policy_function") == PLANNER_POLICY_PATH:  # Serve would find out when its controller first plans
        history = planner_settings_from(policy.get("policy_kwargs") or {}).history
        asked = {one["name"] for one in listed if one.get("autoscaling_config") or one.get("num_replicas") == "auto"}
        needed = [name for name in ROLES if name != "prefill" or settings.cluster.prefill]
        if missing := ", ".join(name for name in needed if name not in asked):  # it would plan nothing
            raise ConfigError(f"autoscaling_policy: the planner needs an autoscaling_config of {missing}")
    for key, source in (("model.source", settings.model.source), ("engine.draft_model", settings.engine.draft_model)):
        if source is not None and (why := source_problem(source)):
            raise ConfigError(f"{key}: {why}")
    files = {"model.chat_template": settings.model.chat_template, "serve.api_keys_file": settings.serve.api_keys_file}
    files["planner.history"] = history
    for key, file in files.items():
        if file and not Path(file).is_absolute():
            raise ConfigError(f"{key}: {file!r}: replicas run in other folders, so write an absolute path")
    given = {f"{section}.{key}" for section, values in args.items() for key in values or {}}
    warnings = [f"{key} has no effect here; set {other}" for key, other in _NO_EFFECT.items() if key in given]
    warnings += [f"Ray's dashboard shows {key}; set {other} instead" for key, other in _SECRETS.items() if key in given]
    counts = _counts(listed, settings)
    return ServeFile(data, name, settings, counts, tuple(warnings), is_kubernetes)


def _check_schema(data: dict[str, Any]) -> None:
    """As Serve checks it, and its keys, of which Serve ignores those that it does not know. Raises ConfigError."""
    from ray.serve.config import AutoscalingConfig
    from ray.serve.schema import (
        DeploymentSchema,
        HTTPOptionsSchema,
        RayActorOptionsSchema,
        ServeApplicationSchema,
        ServeDeploySchema,
    )

    _check_keys(data, ServeDeploySchema.model_fields, "")
    _check_keys(data.get("http_options"), HTTPOptionsSchema.model_fields, "http_options.")
    apps = data.get("applications")
    for number, app in enumerate(apps if isinstance(apps, list) else []):
        place = f"applications.{number}."
        _check_keys(app, ServeApplicationSchema.model_fields, place)
        listed = app.get("deployments") if isinstance(app, dict) else None
        for deployment in listed if isinstance(listed, list) else []:
            name = deployment.get("name") if isinstance(deployment, dict) else deployment
            where = f"{place}deployments.{name}."
            _check_keys(deployment, DeploymentSchema.model_fields, where)
            if name in ROLES and app.get("import_path") == IMPORT_PATH and deployment.get("num_replicas") == 0:
                raise ConfigError(f"{where}num_replicas: cannot be 0: {NEVER_NONE[name]}")
            _check_keys(
                deployment.get("autoscaling_config"), AutoscalingConfig.model_fields, f"{where}autoscaling_config."
            )
            _check_keys(
                deployment.get("ray_actor_options"), RayActorOptionsSchema.model_fields, f"{where}ray_actor_options."
            )
    try:
        ServeDeploySchema.model_validate(data)
    except ValidationError as error:
        raise ConfigError(first_problem(error, "the file", ())) from error


def _check_keys(values: Any, known: Collection[str], place: str) -> None:
    """Raises ConfigError for a key that is not known, with the nearest."""
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{place.rstrip('.') or 'the file'}: expected `key: value`, not {values!r}")
    for key in values or {}:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.4)
            raise ConfigError(f"unknown key {place}{key}" + (f"; did you mean {place}{near[0]}?" if near else ""))


def _counts(deployments: list[dict[str, Any]], settings: Settings) -> dict[str, tuple[int, int]]:
    """Fewest and most replicas of each deployment: as listed, else by the settings. Raises ConfigError."""
    cluster = settings.cluster
    own = {"ingress": cluster.ingress, "prefill": cluster.prefill, "decode": cluster.decode}
    counts = {name: (count, count) for name, count in own.items() if count}
    for deployment in deployments:
        name, number = deployment["name"], deployment.get("num_replicas")
        if name == "prefill" and name not in counts:
            raise ConfigError("deployments lists prefill, but args say cluster.prefill: 0 (aggregated): remove one")
        if name not in counts:
            near = difflib.get_close_matches(name, counts, n=1, cutoff=0.0)
            raise ConfigError(f"unknown deployment {name}; did you mean {near[0]}? There are {', '.join(counts)}")
        if bounds := deployment.get("autoscaling_config"):
            low = bounds.get("min_replicas", 1)
            if low < 1:
                raise ConfigError(
                    f"deployments.{name}.autoscaling_config.min_replicas: cannot be 0: {NEVER_NONE[name]}"
                )
            counts[name] = (low, bounds.get("max_replicas", max(low, 1)))
        elif isinstance(number, int):
            counts[name] = (number, number)
    return counts


def with_other_applications(config: dict[str, Any], details: dict[str, Any]) -> dict[str, Any]:
    """The configuration and, as Serve removes what it does not list, the other applications of Serve's details."""
    named = {app.get("name", "default") for app in config["applications"]}
    others = [
        app["deployed_app_config"]
        for name, app in details.get("applications", {}).items()
        if name not in named and app.get("deployed_app_config")
    ]
    return {**config, "applications": [*config["applications"], *others]}


def cluster_warnings(file: ServeFile, details: dict[str, Any], nodes: list[dict[str, Any]]) -> list[str]:
    """What of the file this cluster cannot give now, or ignores."""
    warnings = []
    before = (applications(details).get(file.app_name, {}).get("args") or {}).get("model", {}).get("source")
    if before not in (None, file.settings.model.source):
        warnings.append(
            f"{file.app_name} serves {before} now: requests fail while its replicas change; with another name for the "
            "application none does"
        )
    gpus = sum(float(node.get("resources_total", {}).get("GPU", 0)) for node in nodes)
    if file.num_gpus > gpus:
        warnings.append(
            f"the workers request {file.num_gpus:g} GPUs, and the cluster has {gpus:g} now: they wait for more nodes"
        )
    running, wanted = details.get("http_options") or {}, file.config.get("http_options") or {}
    for key in ("host", "port"):
        if details.get("proxies") and key in wanted and running.get(key) != wanted[key]:
            warnings.append(
                f"Serve already listens on {key} {running.get(key)}; {wanted[key]} takes effect after `serve shutdown`"
            )
    return warnings
