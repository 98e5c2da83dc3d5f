"""The registry as a named Ray actor, and how other processes use it.

Each application has one of its own. It also keeps what ingresses share (sessions of KV hints, and what tenants with
quotas use), the planner's state, the authorities of its TLS, and the application's secret and API key: these outlive
redeployments and stay out of the application's arguments, which the dashboard shows.
"""

import asyncio
import contextlib
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from kvrelay.cluster.errors import VersionMismatch
from kvrelay.cluster.registry.authorities import AuthorityKeeper
from kvrelay.cluster.registry.draining import leave_drained_node
from kvrelay.cluster.registry.ending import end_with_application
from kvrelay.cluster.registry.members import HEARTBEAT_S, Order, Orders, Registry, Roster, WorkerRecord, merged
from kvrelay.cluster.registry.names import APP_NAME, DETACHED, registry_name
from kvrelay.cluster.registry.rotation import HeldAuthorities, RotationReport
from kvrelay.cluster.registry.versions import Deployed, Installed, refusal
from kvrelay.plane.tls import Authorities
from kvrelay.serve.api.sessions import SessionHints, SessionKey, SessionTable
from kvrelay.serve.tenants.quotas import Report, StoreQuotaTable, UsageTable

logger = logging.getLogger(__name__)

WATCH_S = 30.0
_RETRY_S = 1.0
QUOTAS_S = 2.0


@dataclass(frozen=True, slots=True)
class JoinSettings:
    """What a replica needs to join the cluster."""

    secret: bytes
    is_secret_given: bool  # or made up when the cluster started
    host: str | None  # workers listen here; None: on their node's address
    api_key: str | None  # for ingresses whose settings have none
    registry: Installed


class RegistryActor:
    """Runs on one event loop. After a restart it learns its members again from their heartbeats, also when its node is
    drained and it moves to another one.
    """

    def __init__(
        self,
        secret: str,
        host: str | None,
        api_key: str | None,
        app_name: str = APP_NAME,
        *,
        is_secret_given: bool = True,
    ) -> None:
        self._app_name = app_name
        own = Installed(host or ray.util.get_node_ip_address())
        self._join_settings = JoinSettings(secret.encode(), is_secret_given, host, api_key, own)
        self._registry = Registry(uuid.uuid4().hex[:8], time.monotonic())
        self._changed = asyncio.Event()
        self._sessions = SessionTable()
        self._usage, self._store_quotas = UsageTable(), StoreQuotaTable()
        self._orders = Orders()
        self._authorities = AuthorityKeeper(registry_name(app_name))
        self._states: dict[str, bytes] = {}
        self._watching: tuple[asyncio.Task[None], ...] = ()

    async def join_settings(self) -> JoinSettings:
        return self._join_settings

    async def heartbeat(self, record: WorkerRecord) -> Order | None:
        """What this worker is to do, if anything."""
        now_s = time.monotonic()
        self._watch_application()
        order = self._orders.of(record.worker_id, now_s)
        if order is None or order.role:  # a retiring worker is no member, even while it sends heartbeats
            self._notify_if(self._registry.heartbeat(record, now_s))
        return order

    async def retire(self, worker_ids: list[str], drain_s: float) -> None:
        """Have these workers retire, each at its next heartbeat. The request must be repeated or it expires."""
        self._orders.give(dict.fromkeys(worker_ids, Order(drain_s)), time.monotonic())

    async def change_roles(self, roles: dict[str, str], drain_s: float) -> None:
        """Have workers take these roles, each at its next heartbeat. The request must be repeated or it expires."""
        self._orders.give({name: Order(drain_s, role) for name, role in roles.items()}, time.monotonic())

    async def authorities(self, process: str, held: HeldAuthorities) -> Authorities:
        """What this process is to hold (authorities.py)."""
        return await self._authorities.exchange(process, held)

    async def rotate(self, has_files: bool) -> bool:
        """Begin a rotation, or have the operator's files read again; false: one is under way."""
        return await self._authorities.rotate(has_files=has_files)

    async def rotation(self) -> RotationReport:
        return await self._authorities.report()

    async def save_state(self, name: str, data: bytes) -> None:
        """Save state that outlives its process (cluster/autoscaling/policies.py), over what had this name."""
        self._states[name] = data

    async def saved_state(self, name: str) -> bytes:
        """The state saved last; empty: none."""
        return self._states.get(name, b"")

    async def leave(self, worker_id: str, epoch: str) -> None:
        self._notify_if(self._registry.leave(worker_id, epoch))

    async def put_session(self, key: SessionKey, hints: SessionHints) -> SessionHints | None:
        """The stored hints; None: there are too many sessions."""
        return self._sessions.put(key, hints, time.monotonic())

    async def session(self, key: SessionKey) -> SessionHints | None:
        return self._sessions.get(key, time.monotonic())

    async def delete_session(self, key: SessionKey) -> SessionHints | None:
        """The removed hints; None: no such session."""
        return self._sessions.delete(key)

    async def exchange_usage(self, ingress: str, report: Report) -> Report:
        """What tenants use at this ingress, for what they use at the others."""
        return self._usage.exchange(ingress, report, time.monotonic())

    async def put_store_quotas(self, ingress: str, quotas: dict[str, int]) -> None:
        """What tenants may have of the store, as this ingress has read it."""
        self._store_quotas.put(ingress, quotas, time.monotonic())

    async def store_quotas(self) -> dict[str, int] | None:
        """Most bytes over all nodes, by tenant; None: no ingress has reported any."""
        return self._store_quotas.merged()

    async def watch(self, version: str, timeout_s: float) -> Roster:
        """The roster once its version differs from `version`, or after `timeout_s`; with "" at once."""
        deadline_s = time.monotonic() + timeout_s
        self._watch_application()
        while True:
            now_s = time.monotonic()
            self._notify_if(bool(self._registry.expire(now_s)))
            if self._registry.version != version or now_s >= deadline_s:
                return self._registry.roster(now_s)
            changed = self._changed
            try:
                async with asyncio.timeout(min(HEARTBEAT_S, deadline_s - now_s)):
                    await changed.wait()
            except TimeoutError:
                continue

    def _watch_application(self) -> None:
        if not self._watching:
            ending = end_with_application(self._app_name, lambda: self._registry.roster(time.monotonic()).members)
            self._watching = (
                asyncio.create_task(leave_drained_node(restarts=True), name="leave drained node"),
                asyncio.create_task(ending, name="end with application"),
            )

    def _notify_if(self, has_changed: bool) -> None:
        if has_changed:
            self._changed.set()
            self._changed = asyncio.Event()


def connect_registry(
    secret: str | None = None, host: str | None = None, api_key: str | None = None, *, app_name: str = APP_NAME
) -> Any:
    """The handle of the application's registry, started with these values if there is none yet.

    The actor is detached, so that a redeployment finds it again; it ends with its application (ending.py).
    """
    actor = ray.remote(RegistryActor).options(name=registry_name(app_name), **DETACHED, max_concurrency=10_000)
    made = secret or secrets.token_hex(32)
    return actor.remote(made, host, api_key, app_name, is_secret_given=secret is not None)


async def join(registry: Any, name: str, deployed: Deployed) -> JoinSettings:
    """What the replica `name` needs to join, once the registry answers: it may be restarting. Raises VersionMismatch
    naming both versions and hosts.
    """
    settings: JoinSettings | None = None
    while settings is None:
        try:
            settings = await registry.join_settings.remote()
        except ActorUnavailableError as error:
            logger.warning("%s cannot reach the registry: %s", name, error)
            await asyncio.sleep(_RETRY_S)
    own = Installed(settings.host or ray.util.get_node_ip_address())
    if why := refusal(name, own, deployed, settings.registry):
        raise VersionMismatch(why)
    return settings


async def send_heartbeats(
    registry: Any, record: WorkerRecord, on_order: Callable[[Order], None] = lambda order: None
) -> None:
    """Send heartbeats until cancelled, also while the registry is down.

    `on_order` is called with what the planner orders, perhaps several times.
    """
    while True:
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                order = await registry.heartbeat.remote(record)
            if order is not None:
                on_order(order)
        except (RayError, TimeoutError) as error:
            logger.warning("worker %s cannot reach the registry: %s", record.worker_id, error)
            await asyncio.sleep(_RETRY_S)  # it may have restarted: until then it does not list this worker
            continue
        await asyncio.sleep(HEARTBEAT_S)


@contextlib.asynccontextmanager
async def listed_as_warming(registry: Any, record: WorkerRecord) -> AsyncGenerator[None]:
    """List a worker without a port while its model is loaded. It leaves at once when that fails; else the record that
    has a port takes this one's place.
    """
    assert record.port == 0
    heartbeats = asyncio.create_task(send_heartbeats(registry, record), name="warming")
    try:
        yield
    except BaseException:
        heartbeats.cancel()
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(HEARTBEAT_S):
                await registry.leave.remote(record.worker_id, record.epoch)
        raise
    finally:
        heartbeats.cancel()


async def follow_members(registry: Any, on_members: Callable[[tuple[WorkerRecord, ...]], None]) -> None:
    """Call `on_members` with every new roster until cancelled, also after the registry was down."""
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


async def follow_store_quotas(registry: Any, on_quotas: Callable[[dict[str, int]], None]) -> None:
    """Call `on_quotas` when tenants' quotas of the store have changed, until cancelled; while the registry is away, or
    is of an older version, the last ones hold.
    """
    known: dict[str, int] | None = None
    while True:
        with contextlib.suppress(RayError, TimeoutError, AttributeError):
            async with asyncio.timeout(QUOTAS_S):
                found: dict[str, int] | None = await registry.store_quotas.remote()
            if found is not None and found != known:
                known = found
                on_quotas(found)
        await asyncio.sleep(QUOTAS_S)
