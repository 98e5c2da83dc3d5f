"""The registry as a named Ray actor, and how the other processes talk to it.

It also keeps the cluster's secret: so that the secret outlives redeployments, and never stands
among a deployment's arguments, where a change would restart every replica and the dashboard show it.
"""

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from kvrelay.cluster.registry import HEARTBEAT_S, Registry, Roster, WorkerRecord, merged

logger = logging.getLogger(__name__)

REGISTRY_NAME = "kvrelay-registry"
NAMESPACE = "kvrelay"
WATCH_S = 30.0
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Terms:
    """What a replica must know to take part."""

    secret: bytes
    host: str | None  # workers listen here; None: at their node's address
    planned_workers: int  # prefill and decode workers as deployed; 0 when not known


class RegistryActor:
    """Runs on one event loop; a restarted one learns its members again from their heartbeats."""

    def __init__(self, secret: str, host: str | None) -> None:
        self._secret, self._host = secret, host
        self._planned = 0
        self._registry = Registry(uuid.uuid4().hex[:8], time.monotonic())
        self._changed = asyncio.Event()

    async def plan_workers(self, count: int) -> None:
        """Note how many prefill and decode workers the application was deployed with."""
        self._planned = count

    async def terms(self) -> Terms:
        return Terms(self._secret.encode(), self._host, self._planned)

    async def heartbeat(self, record: WorkerRecord) -> None:
        self._tell(self._registry.heartbeat(record, time.monotonic()))

    async def leave(self, worker_id: str, epoch: str) -> None:
        self._tell(self._registry.leave(worker_id, epoch))

    async def watch(self, version: str, timeout_s: float) -> Roster:
        """The roster as soon as it is not `version`, or after `timeout_s`; "" returns at once."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            now_s = time.monotonic()
            self._tell(bool(self._registry.expire(now_s)))
            if self._registry.version != version or now_s >= deadline_s:
                return self._registry.roster(now_s)
            changed = self._changed
            try:
                async with asyncio.timeout(min(HEARTBEAT_S, deadline_s - now_s)):
                    await changed.wait()
            except TimeoutError:
                continue

    def _tell(self, has_changed: bool) -> None:
        if has_changed:
            self._changed.set()
            self._changed = asyncio.Event()


def connect_registry(secret: str | None = None, host: str | None = None) -> Any:
    """The handle of the cluster's registry, which is started with these terms when there is none yet.

    It is detached: it lives as long as the Ray cluster, so that a redeployment finds it again.
    """
    actor = ray.remote(RegistryActor).options(
        name=REGISTRY_NAME, namespace=NAMESPACE, lifetime="detached", get_if_exists=True,
        num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=10_000,
    )  # fmt: skip
    return actor.remote(secret or secrets.token_hex(32), host)


async def keep_listed(registry: Any, record: WorkerRecord) -> None:
    """Send heartbeats until cancelled. A registry that is down is waited for."""
    while True:
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                await registry.heartbeat.remote(record)
        except (RayError, TimeoutError) as error:
            logger.warning("worker %s cannot reach the registry: %s", record.worker_id, error)
        await asyncio.sleep(HEARTBEAT_S)


async def follow(registry: Any, on_members: Callable[[tuple[WorkerRecord, ...]], None]) -> None:
    """Call `on_members` with every new roster until cancelled. A registry that is down is waited for."""
    version = ""
    known: tuple[WorkerRecord, ...] = ()
    while True:
        try:
            async with asyncio.timeout(WATCH_S + 10.0):
                roster: Roster = await registry.watch.remote(version, WATCH_S)
        except (RayError, TimeoutError) as error:
            logger.warning("the registry does not answer: %s", error)
            await asyncio.sleep(_RETRY_S)
            continue
        known = merged(known, roster)
        version = roster.version if roster.is_settled else ""
        on_members(known)
        if not roster.is_settled:
            await asyncio.sleep(_RETRY_S)
