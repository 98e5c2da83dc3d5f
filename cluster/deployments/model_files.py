"""The checkpoint on this host: from its cache, its folder or the model's source, else fetched from another host that
has it. One process of a host fetches; others wait for it.
"""

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvrelay.cluster.deployments.model_sharing import ModelOffer, ModelServer, fetch, log_progress
from kvrelay.cluster.registry.actor import JoinSettings
from kvrelay.cluster.registry.authorities import hold_authorities
from kvrelay.cluster.registry.names import NAMESPACE
from kvrelay.config import Settings, settings_from
from kvrelay.engine.checkpoints.checkpoint import Progress, cached, model_name, prepare_checkpoint
from kvrelay.errors import ModelError, ModelNotFound, PlaneError
from kvrelay.plane.ports import use_ports
from kvrelay.plane.tls import cluster_tls

logger = logging.getLogger(__name__)

_PREPARE_S = 1800.0  # the other host may have to download or convert it first


class ModelHost:
    """The Ray actor on a host that may have the model: it serves the files until the process that asked lets it go."""

    def __init__(self, settings: dict[str, Any], join: JoinSettings, registry: Any) -> None:
        logging.basicConfig(level=logging.INFO)
        self._settings, self._join, self._registry = settings_from(settings), join, registry
        use_ports(self._settings.cluster.ports)

    async def offer(self) -> ModelOffer | None:
        """Where the files are, once this host has prepared them; None: it cannot get the model either."""
        try:
            folder = await asyncio.to_thread(prepare_checkpoint, self._settings.model)
        except ModelError as error:
            logger.info("this host cannot serve the model's files: %s", error)
            return None
        tls = cluster_tls(self._settings.cluster, self._join.secret)
        host, name = self._join.host or ray.util.get_node_ip_address(), f"model-host-{os.getpid()}"
        self._holding = await hold_authorities(self._registry, f"{name}@{host}", host, tls)
        self._server = ModelServer(folder, self._join.secret, tls)
        return await self._server.start(host)


def model_on_host(settings: Settings, join: JoinSettings, registry: Any, replica: str) -> Path:
    """The checkpoint's folder on this host, for that replica. Blocking, minutes perhaps; progress is logged.

    Raises:
        ModelNotFound: this host cannot get the model from its source, nor can any other host of the cluster.
        ModelError: it is there, but not servable.
    """
    report = log_progress(model_name(settings.model))
    logger.info("looking for %s", settings.model.source)
    try:
        return prepare_checkpoint(settings.model, report)
    except ModelNotFound as error:
        logger.info("model %s: asking the cluster's other hosts, as %s", model_name(settings.model), error)
        for node_id in _other_nodes():
            if (folder := _from_node(node_id, settings, join, registry, replica, report)) is not None:
                return folder
        raise


def _other_nodes() -> list[str]:
    """Ray's ids of the other live nodes, the head first."""
    own, nodes = ray.get_runtime_context().get_node_id(), [node for node in ray.nodes() if node["Alive"]]
    nodes.sort(key=lambda node: "node:__internal_head__" not in node["Resources"])
    return [node["NodeID"] for node in nodes if node["NodeID"] != own]


def _from_node(
    node_id: str, settings: Settings, join: JoinSettings, registry: Any, replica: str, report: Progress
) -> Path | None:
    """The folder, fetched from that node; None when the node cannot serve it."""
    own, secret, name = ray.get_runtime_context().get_node_id(), join.secret, model_name(settings.model)
    actor = ray.remote(ModelHost).options(
        name=f"kvrelay-model-host-{node_id[:16]}-for-{replica}",
        namespace=NAMESPACE,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )
    host = actor.remote(settings.model_dump(mode="json", include={"model", "cluster"}), join, registry)
    tls = cluster_tls(settings.cluster, secret)
    try:
        offer: ModelOffer | None = ray.get(host.offer.remote(), timeout=_PREPARE_S)
        if offer is None:
            return None

        def build(work: Path, target: Path, report: Progress) -> None:
            try:
                asyncio.run(fetch(offer, target, secret, report, tls))
            except (PlaneError, TimeoutError) as error:
                raise ModelError(name, f"fetching it from {offer.host} failed: {error or 'timed out'}") from error

        return cached(settings.model.source, offer.key(name), build, report)
    except (ray.exceptions.RayError, ModelError) as error:
        logger.warning("model %s: node %s does not serve it to node %s: %s", name, node_id[:8], own[:8], error)
        return None
    finally:
        ray.kill(host)
