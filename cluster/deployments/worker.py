"""Prefill and decode workers as Ray Serve deployments: start, membership, health, and shutdown.

Serve starts, watches, replaces and stops them; no request passes through Serve. Heavy imports happen when a replica
starts, so that building the application stays cheap.
"""

import asyncio
import logging
import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import ray
from prometheus_client.core import Metric

from kvrelay import tracing
from kvrelay.cluster.autoscaling.feed import worker_report
from kvrelay.cluster.deployments.cores import CoreLease, acquire_cores, fair_share, within_quota
from kvrelay.cluster.deployments.model_files import model_on_host
from kvrelay.cluster.deployments.ray_metrics import export_metrics
from kvrelay.cluster.deployments.serve_config import planned_workers
from kvrelay.cluster.deployments.startup import garbage_collection_paused, without_meta_kernels
from kvrelay.cluster.errors import WorkerRetired
from kvrelay.cluster.registry.actor import (
    JoinSettings,
    connect_registry,
    follow_members,
    join,
    listed_as_warming,
    send_heartbeats,
)
from kvrelay.cluster.registry.authorities import hold_authorities
from kvrelay.cluster.registry.draining import time_to_stop_s
from kvrelay.cluster.registry.members import Order, WorkerRecord
from kvrelay.cluster.registry.names import worker_name
from kvrelay.cluster.registry.versions import Deployed
from kvrelay.config import Settings, check_sealed, settings_from
from kvrelay.environment import cache_dir
from kvrelay.errors import EngineFailed, StoreError, WorkerError
from kvrelay.kvcache.stores.remote import CLUSTER
from kvrelay.logs import configure_logging
from kvrelay.machine import cpu_quota, own_cores
from kvrelay.plane.tls import cluster_tls
from kvrelay.serve.telemetry.metrics import worker_metrics
from kvrelay.types import Role

logger = logging.getLogger(__name__)

DETAILS_S = 10.0
LEAST_WORKERS = 2  # one of each role, while Serve's targets are unknown

HUNG_S = 60.0  # far above the longest step, also of a large model on a slow CPU


class StepWatch:
    """Measures how long the engine's thread takes to answer between two steps; an idle engine is not woken for it.

    The time of the last step would say less: it is also long ago when work has just arrived after a pause.
    """

    def __init__(self, thread: "EngineThread") -> None:
        self._thread = thread
        self._answer: asyncio.Future[None] | None = None
        self._called_s = 0.0

    def silence_s(self, now_s: float) -> float:
        """How long a call to the engine has been pending; 0 without one. Starts the next call."""
        if self._answer is not None and not self._answer.done():
            return now_s - self._called_s
        engine = self._thread.engine
        self._answer = None
        if engine is not None and engine.scheduler.has_work:
            self._answer, self._called_s = self._thread.call(lambda engine: None), now_s
        return 0.0


class WorkerReplica:
    """One worker process. The subclasses name its role."""

    role = ""

    async def __init__(self, settings: dict[str, Any], deployed: Deployed) -> None:  # type: ignore[misc]  # Serve awaits it
        """Raises VersionMismatch."""
        log_as_replica(self.role)
        self._listing: asyncio.Task[None] | None = None
        self._settings, name = settings_from(settings), worker_name(self.role, own_replica())
        self._registry, joined, holding = await join_application(name, deployed, self._settings)
        self._background = [holding]
        self._ending: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._stores: ClusterStores | None = None
        node_id = str(ray.get_runtime_context().get_node_id())
        host = joined.host or ray.util.get_node_ip_address()
        warming = WorkerRecord(name, self.role, "", host, 0, node_id, os.getpid())
        async with listed_as_warming(self._registry, warming):
            model_dir = await asyncio.to_thread(model_on_host, self._settings, joined, self._registry, name)
            num_workers = await deployed_workers()
            self._lease = self._lease_cores(num_workers)
            if self._settings.cache.remote == CLUSTER:
                await self._join_store(node_id)
            self._worker = await asyncio.to_thread(self._make, model_dir, joined, node_id, num_workers)
            tracing.configure(self._worker.worker_id, self.role)
            logger.info("loading the model")
            info = await self._worker.start()
            if self._stores is not None:
                await self._stores.share_host_tier(self._worker)
                self._following = asyncio.create_task(
                    follow_members(self._registry, self._set_members), name="follow stores"
                )
        self._record = WorkerRecord(
            info.worker_id, info.role, info.epoch, info.host, info.port, info.node_id, os.getpid()
        )
        self._watch = StepWatch(self._worker.thread)
        self._listing = asyncio.create_task(send_heartbeats(self._registry, self._record, self._obey), name="heartbeat")
        self._background.append(asyncio.create_task(export_metrics(self._metrics), name="export metrics"))

    def _metrics(self) -> Iterable[Metric]:
        """For Ray's port, which asks for no key: tenants' keys keep tenants out of it."""
        has_tenants = self._settings.serve.api_keys_file is not None
        return worker_metrics([(self._worker.info, self._worker.load())], shows_tenants=not has_tenants)

    def _lease_cores(self, num_workers: int) -> CoreLease | None:
        """Pinned cores for CPU workers. GPU workers are not pinned, nor those under a CPU quota, which may run on any
        CPU: containers of one machine would pin the same ones, as each has lock files of its own.
        """
        cluster, cores = self._settings.cluster, own_cores()
        engine = self._settings.for_role(Role(self.role)).engine
        if engine.device.startswith("cuda") or cluster.num_gpus_per_worker or cpu_quota() is not None:
            return None
        want = cluster.cores_per_worker or fair_share(len(cores), num_workers)
        return acquire_cores(cache_dir() / "cores", cores, want)

    async def _join_store(self, node_id: str) -> None:
        """Ensure that this machine runs a node of the KV store. Raises StoreError."""
        from kvrelay.cluster.store.actor import ensure_store

        try:
            await asyncio.to_thread(ensure_store, self._settings, own_application(), node_id)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise StoreError(CLUSTER, f"its node on this machine did not start: {error}") from error

    def _set_members(self, members: tuple[WorkerRecord, ...]) -> None:
        from kvrelay.cluster.store.actor import store_nodes

        assert self._stores is not None
        self._stores.set_nodes(store_nodes(members))

    def _make(self, model_dir: Any, joined: JoinSettings, node_id: str, num_workers: int) -> Any:
        """The worker, not started. Runs in a thread, because it imports torch."""
        with garbage_collection_paused(), without_meta_kernels():
            from kvrelay.cluster.compiling.kernels import compile_missing
            from kvrelay.cluster.deployments.service import worker_service
            from kvrelay.engine.checkpoints.checkpoint import model_name
            from kvrelay.engine.worker.build import WorkerOptions

        compile_missing(self._settings, Role(self.role), model_dir)
        worker_id = worker_name(self.role, own_replica())
        host = joined.host or ray.util.get_node_ip_address()
        if self._settings.cache.remote == CLUSTER:
            from kvrelay.cluster.store.remote_store import ClusterStores

            self._stores = ClusterStores(self._settings, joined.secret, worker_id=worker_id, host=host)
        options = WorkerOptions(
            settings=within_quota(self._settings, num_workers),
            model_dir=model_dir,
            model_name=model_name(self._settings.model),
            worker_id=worker_id,
            node_id=node_id,
            secret=joined.secret,
            host=host,
            cores=self._lease.cpus if self._lease else None,
            cluster_store=self._stores,
            num_workers=num_workers,
        )
        return worker_service(options, Role(self.role))

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        worker_id = self._record.worker_id
        if self._ending is not None:
            if self._ending.done():
                raise WorkerRetired(worker_id)
            return
        if not self._worker.healthy():
            raise EngineFailed(worker_id, "its engine has stopped")
        if (silence_s := self._watch.silence_s(time.monotonic())) > HUNG_S:
            raise EngineFailed(worker_id, f"its engine has work and has not finished a step for {silence_s:.0f} s")
        if self._listing is None or self._listing.done():
            raise EngineFailed(worker_id, "it no longer sends heartbeats to the registry")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The load for the policy of cluster/autoscaling/policies.py."""
        return worker_report(self._worker.load(), self._worker.info, self._worker.requests.role)

    async def __del__(self) -> None:
        """Serve stops the replica: accept nothing new, finish what runs, release everything."""
        if self._listing is None:
            return
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(self._settings.cluster.drain_timeout_s), name="end")
        await self._ending

    def _obey(self, order: Order) -> None:
        """The planner has it retire, or take another role; repeated orders change nothing."""
        if not order.role:
            self._retire(order.drain_s)
        elif order.role != self._worker.requests.role:
            try:
                self._worker.roles.change(order.role, order.drain_s)
            except WorkerError as error:
                logger.warning("%s", error)

    def _retire(self, drain_s: float) -> None:
        """The planner retires the worker: the same, before Serve removes the replica."""
        if self._ending is None:
            logger.info("worker %s retires", self._record.worker_id)
            self._ending = asyncio.create_task(self._end(drain_s, is_retiring=True), name="end")

    async def _end(self, drain_s: float, *, is_retiring: bool = False) -> None:
        """Leave the registry, so that no ingress sends anything new; then wait for running requests, and for KV to be
        read. One that retires then exits its actor, which Serve removes at its next health check.
        """
        assert self._listing is not None
        self._listing.cancel()
        if self._following is not None:
            self._following.cancel()
        try:
            await self._registry.leave.remote(self._record.worker_id, self._record.epoch)
        except ray.exceptions.RayError as error:
            logger.warning("worker %s could not leave the registry: %s", self._record.worker_id, error)
        await self._worker.drain(await time_to_stop_s(drain_s))
        for task in self._background:
            task.cancel()
        await self._worker.aclose()
        if self._lease is not None:
            self._lease.release()
        await asyncio.to_thread(tracing.shutdown)
        if is_retiring:
            logger.info("worker %s has retired", self._record.worker_id)
            ray.kill(ray.get_runtime_context().current_actor, no_restart=True)  # without a fault


class PrefillReplica(WorkerReplica):
    """A prefill worker."""

    role = "prefill"


class DecodeReplica(WorkerReplica):
    """A decode worker."""

    role = "decode"


def own_replica() -> str:
    """Serve's id of this process's replica."""
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def own_application() -> str:
    """The name of this process's application in Serve."""
    from ray import serve

    return str(serve.get_replica_context().app_name)


async def join_application(
    name: str, deployed: Deployed, settings: Settings
) -> tuple[Any, JoinSettings, "asyncio.Task[None]"]:
    """The application's registry, what the replica `name` needs to join, and the task that keeps it trusted. Raises
    VersionMismatch, ConfigError.
    """
    _listen_at_own_address(ray.util.get_node_ip_address())
    registry = connect_registry(deployed["secret"], api_key=deployed["api_key"], app_name=own_application())
    joined = await join(registry, name, deployed)
    check_sealed(settings, has_secret=joined.is_secret_given)
    host = joined.host or ray.util.get_node_ip_address()
    return registry, joined, await hold_authorities(registry, name, host, cluster_tls(settings.cluster, joined.secret))


def _listen_at_own_address(host: str) -> None:
    """Have this replica's gRPC server, which is Serve's for calls between deployments, listen at the address of its
    node. Serve has it listen at every address of the machine, and asks for no token there.
    """
    from ray._common.network_utils import build_address
    from ray.serve._private import replica

    if (add_port := getattr(replica, "add_port_to_grpc_server", None)) is None:
        logger.warning(
            "this version of Ray is unknown: Serve may listen at all addresses for calls between deployments"
        )
        return
    replica.add_port_to_grpc_server = lambda server, address: add_port(server, build_address(host, 0))


async def deployed_workers() -> int:
    """Serve's target number of prefill and decode workers; LEAST_WORKERS when it is unknown.

    The application's arguments do not hold it: counts are also set per deployment, and changed by `kvrelay scale`.
    """
    try:
        async with asyncio.timeout(DETAILS_S):
            return planned_workers(await asyncio.to_thread(_serve_details), own_application()) or LEAST_WORKERS
    except (ray.exceptions.RayError, TimeoutError) as error:
        logger.warning("Serve does not report how many workers it runs: %s", error)
        return LEAST_WORKERS


def _serve_details() -> dict[str, Any]:
    from ray.serve.context import _get_global_client  # as serve.status() does, which omits the targets

    client = _get_global_client(raise_if_no_controller_running=False)
    return dict(client.get_serve_details()) if client is not None else {}


def log_as_replica(role: str) -> None:
    """Send kvrelay's INFO lines to Serve's replica logs, and those that `kvrelay serve` shows to its file."""
    own, serve = logging.getLogger("kvrelay"), logging.getLogger("ray.serve")
    configure_logging(f"{role}-{own_replica()}")
    for handler in serve.handlers:
        if handler not in own.handlers:
            own.addHandler(handler)


if TYPE_CHECKING:
    from kvrelay.cluster.store.remote_store import ClusterStores
    from kvrelay.engine.worker.thread import EngineThread
