"""The registry as a named Ray actor, and how the other processes talk to it.

It also keeps the sessions of KV hints, which ingresses share, and the cluster's secret and the API key, so that they outlive redeployments and need not stand among the
application's arguments, where a change would restart every replica and the dashboard show them.
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

from kvrelay.cluster.registry.members import HEARTBEAT_S, Registry, Retirements, Roster, WorkerRecord, merged
from kvrelay.serve.api.sessions import SessionHints, SessionKey, SessionTable

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
    api_key: str | None  # for an ingress whose settings have none


class RegistryActor:
    """Runs on one event loop; a restarted one learns its members again from their heartbeats."""

    def __init__(self, secret: str, host: str | None, api_key: str | None) -> None:
        self._terms = Terms(secret.encode(), host, api_key)
        self._registry = Registry(uuid.uuid4().hex[:8], time.monotonic())
        self._changed = asyncio.Event()
        self._sessions = SessionTable()
        self._retirements = Retirements()
        self._kept: dict[str, tuple[bytes, float]] = {}  # and when, on this process's clock

    async def terms(self) -> Terms:
        return self._terms

    async def heartbeat(self, record: WorkerRecord) -> float | None:
        """The seconds that this worker may take to finish, where it is asked to retire; else None."""
        now_s = time.monotonic()
        drain_s = self._retirements.drain_s(record.worker_id, now_s)
        if drain_s is None:  # who retires has left, whatever its last heartbeats say
            self._tell(self._registry.heartbeat(record, now_s))
        return drain_s

    async def retire(self, worker_ids: list[str], drain_s: float) -> None:
        """Ask these to retire, each at its next heartbeat; to be said again while it shall hold."""
        self._retirements.ask(worker_ids, drain_s, time.monotonic())

    async def keep(self, name: str, data: bytes) -> None:
        """Keep this for whoever comes after its teller (cluster/autoscaling/memory.py); the last one counts."""
        self._kept[name] = (data, time.monotonic())

    async def kept(self, name: str) -> tuple[bytes, float] | None:
        """What was kept last, and how many seconds ago; None: nothing."""
        if name not in self._kept:
            return None
        data, at_s = self._kept[name]
        return data, time.monotonic() - at_s

    async def leave(self, worker_id: str, epoch: str) -> None:
        self._tell(self._registry.leave(worker_id, epoch))

    async def put_session(self, key: SessionKey, hints: SessionHints) -> SessionHints | None:
        """What is kept; None: there are too many."""
        return self._sessions.put(key, hints, time.monotonic())

    async def session(self, key: SessionKey) -> SessionHints | None:
        return self._sessions.get(key, time.monotonic())

    async def delete_session(self, key: SessionKey) -> SessionHints | None:
        """What it was; None: it was not there."""
        return self._sessions.delete(key)

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


def connect_registry(secret: str | None = None, host: str | None = None, api_key: str | None = None) -> Any:
    """The handle of the cluster's registry, which is started with these terms when there is none yet.

    It is detached: it lives as long as the Ray cluster, so that a redeployment finds it again.
    """
    actor = ray.remote(RegistryActor).options(
        name=REGISTRY_NAME, namespace=NAMESPACE, lifetime="detached", get_if_exists=True,
        num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=10_000,
    )  # fmt: skip
    return actor.remote(secret or secrets.token_hex(32), host, api_key)


async def keep_listed(
    registry: Any, record: WorkerRecord, on_retire: Callable[[float], None] = lambda drain_s: None
) -> None:
    """Send heartbeats until cancelled. A registry that is down is waited for.

    `on_retire` is called when the worker is asked to retire, maybe more than once, with the seconds that it may take.
    """
    while True:
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                drain_s = await registry.heartbeat.remote(record)
            if drain_s is not None:
                on_retire(drain_s)
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
