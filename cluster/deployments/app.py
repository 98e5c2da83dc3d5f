"""The Ray Serve application `kvrelay`: ingress, prefill and decode as deployments.

`kvrelay.cluster.deployments.app:build` is what `serve deploy configs/laptop.yaml` and `serve run` import.
"""

from typing import Any

import ray
from ray import serve
from ray.serve import Application

from kvrelay import __version__
from kvrelay.cluster.deployments.ingress import IngressReplica
from kvrelay.cluster.deployments.serve_config import CLOSE_S
from kvrelay.cluster.deployments.worker import DecodeReplica, PrefillReplica
from kvrelay.cluster.registry.versions import Deployed
from kvrelay.config import Settings, settings_from
from kvrelay.environment import environment_api_key, environment_secret

DEFAULT_CPUS = 0.1  # what Ray accounts for; cores.py pins the real cores
MAX_ONGOING = 10_000  # above router.max_inflight: the ingress itself answers 429 with Retry-After
SURGE_PERCENT = 1  # of the replicas, rounded up: one more than wanted may run while a change replaces them


def build(args: dict[str, Any] | Settings | None = None) -> Application:
    """The application for these settings. Raises ConfigError naming the key.

    Args:
        args: kvrelay's settings as nested plain data (sections model, engine, transfer, router,
            serve, cluster). Replica counts may also be set per deployment in a Serve config file.
    """
    settings = args if isinstance(args, Settings) else settings_from(args or {})
    return application(settings)


def application(settings: Settings) -> Application:
    """The deployments, bound. The replicas' arguments hold no counts, so that scaling restarts no replica."""
    cluster, plain = settings.cluster, replica_arguments(settings)
    deployed = Deployed(
        version=__version__,
        host=ray.util.get_node_ip_address() if ray.is_initialized() else "localhost",
        secret=cluster.secret or environment_secret(),  # None where kvrelay's commands have given it to the registry
        api_key=environment_api_key(),
    )
    workers = [
        serve.deployment(kind, name=kind.role, num_replicas=count, **worker_options(settings)).bind(plain, deployed)
        for kind, count in ((PrefillReplica, cluster.prefill), (DecodeReplica, cluster.decode))
        if count
    ]
    ingress = serve.deployment(
        serve.ingress()(IngressReplica),
        name="ingress",
        num_replicas=cluster.ingress,
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options={"num_cpus": DEFAULT_CPUS},
        **_watched(settings),
    )
    return ingress.bind(plain, deployed, *workers)


def worker_options(settings: Settings) -> dict[str, Any]:
    """Serve options of both worker deployments."""
    actor: dict[str, Any] = {"num_cpus": DEFAULT_CPUS}
    if settings.cluster.num_gpus_per_worker:
        actor["num_gpus"] = settings.cluster.num_gpus_per_worker
    return {"ray_actor_options": actor, "max_ongoing_requests": 16, **_watched(settings)}


def _watched(settings: Settings) -> dict[str, Any]:
    """How Serve checks a replica's health, how long it waits for one to stop, and how it replaces the replicas when
    their arguments or the code change: the new one runs before the old one stops, so that there is always one. Where
    the cluster has no room for one more, `max_surge_percent: 0` in the Serve file has the old one stop first.
    """
    return {
        "health_check_period_s": 5.0,
        "health_check_timeout_s": 30.0,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": settings.cluster.drain_timeout_s + CLOSE_S,
        "max_surge_percent": SURGE_PERCENT,
    }


def replica_arguments(settings: Settings) -> dict[str, Any]:
    """The settings as plain data, without what may change while replicas run and without the secret.

    Replicas get the secret from the registry, the number of workers from Serve. `prefill: 0` stays: it decides roles.
    """
    plain = settings.model_dump(mode="json")
    for name in ("prefill", "decode", "ingress", "dashboard_port", "secret"):
        if plain["cluster"][name] != 0:
            plain["cluster"].pop(name)
    plain.pop("planner")  # Serve's controller plans
    return plain
