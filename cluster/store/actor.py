"""A node of the cluster's store as a Ray actor, one on each machine that has workers.

Ray restarts it when it dies; it is detached, so it outlives a redeployment of the application. Blocks and requests
use its own sockets and memory, never Ray.
"""

import asyncio
import logging
import os
import threading
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvrelay.cluster.registry.actor import (
    JoinSettings,
    connect_registry,
    follow_members,
    follow_store_quotas,
    send_heartbeats,
)
from kvrelay.cluster.registry.authorities import hold_authorities
from kvrelay.cluster.registry.draining import leave_drained_node
from kvrelay.cluster.registry.members import STORE_ROLE, WorkerRecord
from kvrelay.cluster.registry.names import DETACHED, store_name
from kvrelay.cluster.store.service import make_service
from kvrelay.config import Settings, settings_from
from kvrelay.kvcache.stores.placement import StoreAddress

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0


def store_nodes(members: tuple[WorkerRecord, ...]) -> list[StoreAddress]:
    """The store's nodes among the registry's members."""
    return [
        StoreAddress(record.worker_id, record.host, record.port, record.capacity_bytes, record.epoch)
        for record in members
        if record.role == STORE_ROLE
    ]


class StoreActor:
    """The Ray actor: one node, with an event loop on a thread of its own. Its only method returns its address."""

    def __init__(self, app_name: str, node_id: str, settings: dict[str, Any]) -> None:
        logging.basicConfig(level=logging.INFO)
        self._registry, self._node_id = connect_registry(app_name=app_name), node_id
        join: JoinSettings = ray.get(self._registry.join_settings.remote())
        host = join.host or ray.util.get_node_ip_address()
        self._service = make_service(f"{STORE_ROLE}-{node_id[:8]}", settings_from(settings), join.secret, host)
        self._tasks: list[asyncio.Task[None]] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="store", daemon=True).start()
        self._record = asyncio.run_coroutine_threadsafe(self._start(host), self._loop).result()

    def record(self) -> WorkerRecord:
        """The node's address, as a registry record."""
        return self._record

    async def _start(self, host: str) -> WorkerRecord:
        name, tls = f"{STORE_ROLE}-{self._node_id[:8]}", self._service.tls
        holding = await hold_authorities(self._registry, name, host, tls)
        address = await self._service.start()
        record = WorkerRecord(
            address.node_id,
            STORE_ROLE,
            address.epoch,
            address.host,
            address.port,
            self._node_id,
            os.getpid(),
            address.capacity_bytes,
        )
        self._tasks = [
            holding,
            asyncio.create_task(send_heartbeats(self._registry, record), name="heartbeat"),
            asyncio.create_task(follow_members(self._registry, self._set_members), name="follow registry"),
            asyncio.create_task(follow_store_quotas(self._registry, self._service.set_quotas), name="follow quotas"),
            asyncio.create_task(leave_drained_node(restarts=False), name="leave drained node"),
        ]
        return record

    def _set_members(self, members: tuple[WorkerRecord, ...]) -> None:
        self._service.set_nodes(store_nodes(members))


def ensure_store(settings: Settings, app_name: str, node_id: str) -> WorkerRecord:
    """Start this machine's node of the application's store, if there is none; returns its record. Blocking.

    Raises Ray's errors.
    """
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    actor = ray.remote(StoreActor).options(name=store_name(app_name, node_id), **DETACHED, scheduling_strategy=here)
    handle = actor.remote(
        app_name, node_id, settings.model_dump(mode="json", include={"store", "cache", "transfer", "cluster"})
    )
    record: WorkerRecord = ray.get(handle.record.remote(), timeout=_START_TIMEOUT_S)
    return record
