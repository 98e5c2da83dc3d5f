"""The ingress as a Ray Serve deployment: hosts the OpenAI app and follows the registry.

It also answers `GET /kvrelay/status` for `kvrelay status`, `POST /kvrelay/role` for `kvrelay role`, and
`/kvrelay/rotate` for `kvrelay rotate`. Must not import torch: of the model it needs only the tokenizer.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
import ray
from prometheus_client.core import Metric
from ray.exceptions import RayError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvrelay import __version__, tracing
from kvrelay.cluster.autoscaling.feed import ingress_report
from kvrelay.cluster.autoscaling.room import NOTICE
from kvrelay.cluster.deployments.http_server import finish_before_stop, listen_with_limits
from kvrelay.cluster.deployments.model_files import model_on_host
from kvrelay.cluster.deployments.ray_metrics import export_metrics
from kvrelay.cluster.deployments.startup import return_freed_memory
from kvrelay.cluster.deployments.worker import join_application, log_as_replica, own_replica
from kvrelay.cluster.registry.actor import follow_members
from kvrelay.cluster.registry.draining import time_to_stop_s
from kvrelay.cluster.registry.members import STORE_ROLE, WorkerRecord
from kvrelay.cluster.registry.versions import Deployed
from kvrelay.cluster.tenants.following import exchange_usage, follow_keys, report_store_quotas
from kvrelay.config import Settings, settings_from, with_api_key
from kvrelay.errors import InvalidRequest, KvrelayError, PeerLost
from kvrelay.grammar.gate import GrammarGate
from kvrelay.kvtransfer.slabs.client import SlabPeer
from kvrelay.plane.tls import cluster_tls
from kvrelay.router.planning.roles import change_notice, change_problem
from kvrelay.serve.api.app import ModelCard, create_app
from kvrelay.serve.api.endpoint import INGRESS, bearer_token, error_response, read_json_body
from kvrelay.serve.api.sessions import MAX_SESSIONS, SessionHints, SessionKey, too_many_sessions
from kvrelay.serve.requests.dispatcher import Dispatcher
from kvrelay.serve.requests.retries import Unavailable
from kvrelay.serve.requests.stopping import finish
from kvrelay.serve.telemetry.history import PERIOD_S, History
from kvrelay.serve.telemetry.metrics import ingress_metrics
from kvrelay.serve.tenants.access import Access
from kvrelay.serve.text.tokenizer import Tokenizer
from kvrelay.serve.workers.membership import Membership
from kvrelay.serve.workers.queries import make_router
from kvrelay.serve.workers.worker_link import Member

logger = logging.getLogger(__name__)


STATUS_TIMEOUT_S = 3.0
FRESH_S = 2.0  # how long an ingress uses a session of KV hints that it has looked up
REGISTRY_S = 5.0
READY_S = 10.0
_RETRY_AFTER_S = 1.0


class SharedSessions:
    """Sessions of KV hints that all ingresses share: the registry keeps them, each ingress caches them for FRESH_S.

    A change on one ingress reaches the others within FRESH_S. A restarted registry has no sessions: requests that name
    one get 404 until the client creates it again. `registry`: the handle of the registry's actor.
    """

    def __init__(self, registry: Any, clock: Callable[[], float]) -> None:
        self._registry, self._clock = registry, clock
        self._known: dict[SessionKey, tuple[float, SessionHints]] = {}  # time of the registry's answer

    async def put(self, key: SessionKey, hints: SessionHints) -> None:
        kept = await self._call(self._registry.put_session, key, hints)
        if kept is None:
            raise too_many_sessions()
        self._note(key, kept)

    async def get(self, key: SessionKey) -> SessionHints | None:
        known = self._known.get(key)
        if known is not None and self._clock() - known[0] < FRESH_S:
            return known[1]
        hints: SessionHints | None = await self._call(self._registry.session, key)
        self._note(key, hints)
        return hints

    async def delete(self, key: SessionKey) -> SessionHints | None:
        self._note(key, None)
        hints: SessionHints | None = await self._call(self._registry.delete_session, key)
        self._note(key, None)  # another request may have cached it meanwhile
        return hints

    def _note(self, key: SessionKey, hints: SessionHints | None) -> None:
        self._known.pop(key, None)
        if hints is not None:
            self._known[key] = (self._clock(), hints)
            if len(self._known) > MAX_SESSIONS:
                del self._known[next(iter(self._known))]

    @staticmethod
    async def _call(method: Any, *arguments: object) -> Any:
        message = "sessions cannot be looked up now: the registry does not answer"
        away = Unavailable(message, _RETRY_AFTER_S, "sessions_unavailable")
        return await ask_registry(away, method, *arguments)


async def ask_registry(away: Unavailable, method: Any, *arguments: object) -> Any:
    """The answer of a method of the registry's actor. Raises `away` where there is none."""
    try:
        async with asyncio.timeout(REGISTRY_S):
            return await method.remote(*arguments)
    except (RayError, TimeoutError) as error:
        logger.warning("%s: %s", away, error or "timed out")
        raise away from error


async def until_ready(workers: Membership, limit_s: float = READY_S) -> None:
    """Wait for a decode worker: a registry that has just moved lists none before their next heartbeats. Where none
    comes within the limit, requests get 503.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await workers.wait_for(Membership.is_ready)


class IngressReplica:
    """One ingress. `workers` are the application's other deployments; requests do not pass their handles."""

    docs_path = "/ui"  # Serve's status and its page in the dashboard name it

    async def __init__(self, settings: dict[str, Any], deployed: Deployed, *workers: object) -> None:  # type: ignore[misc]
        log_as_replica("ingress")
        listen_with_limits(settings_from(settings).router.max_inflight)
        tracing.configure(f"ingress-{(ray.get_runtime_context().get_actor_id() or '')[:8]}", "ingress")
        given, name = settings_from(settings), f"ingress-{own_replica()}"
        self._registry, joined, holding = await join_application(name, deployed, given)
        self._settings = with_api_key(given, joined.api_key)
        keys = self._settings.serve
        self._access = await asyncio.to_thread(Access, keys.api_key, keys.api_keys_file, joined.secret)
        model_dir = await asyncio.to_thread(model_on_host, self._settings, joined, self._registry, name)
        self._tokenizer = await asyncio.to_thread(Tokenizer, model_dir, self._settings.model.chat_template)
        return_freed_memory()  # 26 MiB of what the tokenizer's file was parsed into
        self._card = model_card(self._settings, model_dir)
        self._grammars = GrammarGate(model_dir, self._tokenizer.vocab_size, self._tokenizer.eos_ids)
        self._dispatcher = Dispatcher(make_router(self._settings), joined.secret, self._settings, time.monotonic)
        self._secret = joined.secret
        self._members: tuple[WorkerRecord, ...] = ()
        await self._dispatcher.start()
        finish_before_stop(self._finish)
        self._following = asyncio.create_task(follow_members(self._registry, self._set_members), name="follow registry")
        self._history = History()
        background = [self._record_history(), export_metrics(self._metrics, {"ingress": INGRESS})]
        if keys.api_keys_file:
            shared = self._access, self._registry, own_replica()
            background += [follow_keys(self._access), exchange_usage(*shared), report_store_quotas(*shared)]
        self._background = [holding, *(asyncio.create_task(one) for one in background)]
        await until_ready(self._dispatcher.workers)  # from the end of this function on Serve sends it requests

    async def _finish(self) -> None:
        await finish(self._dispatcher, await time_to_stop_s(self._settings.cluster.drain_timeout_s))

    def _metrics(self) -> Iterable[Metric]:
        parts = self._dispatcher
        return ingress_metrics(parts.stats, parts.router, parts.workers)

    def __serve_build_asgi_app__(self) -> Any:
        sessions = SharedSessions(self._registry, time.monotonic)
        check = self._grammars.check
        parts = self._dispatcher, self._tokenizer, self._settings, self._card
        app = create_app(*parts, sessions, self._access, check, self._history)
        app.router.routes.append(Route("/kvrelay/status", self._endpoint(self.status), methods=["GET"]))
        app.router.routes.append(Route("/kvrelay/role", self._endpoint(self.set_role), methods=["POST"]))
        app.router.routes.append(Route("/kvrelay/retire", self._endpoint(self.retire), methods=["POST"]))
        app.router.routes.append(Route("/kvrelay/rotate", self._endpoint(self.rotation), methods=["GET"]))
        app.router.routes.append(Route("/kvrelay/rotate", self._endpoint(self.rotate), methods=["POST"]))
        return app

    async def _record_history(self) -> None:
        while True:
            self._history.record(self._dispatcher.stats, self._dispatcher.clock())
            await asyncio.sleep(PERIOD_S)

    def _set_members(self, members: tuple[WorkerRecord, ...]) -> None:
        if members != self._members:
            logger.info("workers: %s", ", ".join(record.worker_id for record in members) or "none")
        self._members = members
        workers = [m for m in members if m.role != STORE_ROLE]
        self._dispatcher.workers.set_members([Member(m.worker_id, m.role, m.host, m.port) for m in workers])

    def _endpoint(self, answer: Callable[..., Awaitable[dict[str, Any]]]) -> Callable[[Request], Awaitable[Response]]:
        """`answer` behind the operator's key; a POST gives it its body."""

        async def handle(request: Request) -> Response:
            try:
                self._access.operator(bearer_token(request))
                body = [await read_json_body(request, _MAX_BODY_BYTES)] if request.method == "POST" else []
                return JSONResponse(await answer(*body))
            except KvrelayError as error:
                return error_response(error)

        return handle

    async def set_role(self, body: bytes) -> dict[str, Any]:
        """Change a worker's role: a RoleOrder. Raises InvalidRequest (409): why it stays."""
        try:
            order = msgspec.json.decode(body, type=RoleOrder)
        except msgspec.DecodeError as error:
            raise InvalidRequest(str(error)) from error
        worker_id, role = order.worker, order.role
        roles = {info.worker_id: info.role for info, _ in self._dispatcher.workers.live_workers()}
        problem = change_problem(roles, worker_id, role)
        if problem is None:
            drain_s = self._settings.cluster.drain_timeout_s if order.drain_s is None else order.drain_s
            answer = json.loads(await self._dispatcher.queries.set_role(worker_id, role, drain_s))
            if "error" not in answer:
                return {"worker": worker_id, **answer, "notice": change_notice(roles | {worker_id: role})}
            problem = f"{worker_id} stays {roles[worker_id]}: {answer['error']}"
        raise InvalidRequest(problem, None, 409, "role")

    async def retire(self, body: bytes) -> dict[str, Any]:
        """Have workers retire, for `kvrelay scale`: {"workers": [ids]}. The order must be repeated or it expires."""
        try:
            workers = msgspec.json.decode(body, type=dict[str, list[str]]).get("workers", [])
        except msgspec.DecodeError as error:
            raise InvalidRequest(str(error)) from error
        drain_s = self._settings.cluster.drain_timeout_s
        await self._registry.retire.remote(workers, drain_s)
        return {"drain_timeout_s": drain_s}

    async def rotate(self, body: bytes) -> dict[str, Any]:
        """Begin a rotation of the authority, unless one is under way. Raises InvalidRequest (409): there is no TLS."""
        cluster = self._settings.cluster
        if not cluster.tls:
            raise InvalidRequest("cluster.tls is off: there is no authority to rotate", None, 409, "rotate")
        is_begun = await self._ask(self._registry.rotate, cluster.tls_dir is not None)
        return {"is_begun": is_begun, "has_files": cluster.tls_dir is not None, **await self.rotation()}

    async def rotation(self) -> dict[str, Any]:
        """How far it is: a RotationReport."""
        return asdict(await self._ask(self._registry.rotation))

    @staticmethod
    async def _ask(method: Any, *arguments: object) -> Any:
        away = Unavailable("the registry does not answer", _RETRY_AFTER_S, "registry_unavailable")
        return await ask_registry(away, method, *arguments)

    async def status(self) -> dict[str, Any]:
        """Every member with its own status; a worker that does not answer has only its record. Those that warm up, and
        those that drain while they still run something, are listed apart.
        """
        links, now_s = self._dispatcher.workers, self._dispatcher.clock()
        known = [record for record in self._members if record.role != STORE_ROLE]
        workers = [record for record in known if record.port]
        answers = await asyncio.gather(*(self._worker_status(record) for record in workers))
        router = self._dispatcher.router
        views = {view.worker_id: asdict(view) for view in router.workers()}
        return {
            "version": __version__,
            "model": self._card.name,
            "max_model_len": min(
                self._card.max_model_len, self._dispatcher.workers.max_model_len() or self._card.max_model_len
            ),
            "is_ready": self._dispatcher.workers.is_ready(),
            "prediction_error_s": router.prediction_error_s,
            "pairs": self._dispatcher.workers.pairs.book.view()["pairs"],
            "planner": await self._planner_notices(),
            "workers": [answer | {"router": views.get(answer["worker_id"])} for answer in answers],
            "warming": [
                _address(record) | {"seconds": now_s - links.warming[record.worker_id][1]}
                for record in known
                if record.worker_id in links.warming
            ],
            "draining": [
                {
                    "worker_id": link.worker_id,
                    "role": link.member.role,
                    "address": f"{link.member.host}:{link.member.port}",
                }
                for link, is_leaving in links.all_links()
                if is_leaving
            ],
            "stores": await asyncio.gather(
                *(self._store_status(record) for record in self._members if record.role == STORE_ROLE)
            ),
        }

    async def _planner_notices(self) -> list[str]:
        """Why there are not more workers; empty also while the registry does not answer."""
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                notice: bytes = await self._registry.saved_state.remote(NOTICE)
                return notice.decode().splitlines()
        except (RayError, TimeoutError):
            return []

    async def _worker_status(self, record: WorkerRecord) -> dict[str, Any]:
        try:
            answer = json.loads(await self._dispatcher.queries.status(record.worker_id, timeout_s=STATUS_TIMEOUT_S))
        except (KvrelayError, TimeoutError) as error:
            why = str(error).removeprefix(f"worker {record.worker_id}: ") or "no answer"
            return {**_address(record), "is_up": False, "error": why}
        return {**_address(record), **answer, "is_up": True}

    async def _store_status(self, record: WorkerRecord) -> dict[str, Any]:
        """One node of the KV store."""
        peer = SlabPeer(
            record.host,
            record.port,
            self._secret,
            None,
            peer_id="status",
            block_bytes=0,
            answer_s=STATUS_TIMEOUT_S,
            tls=cluster_tls(self._settings.cluster, self._secret),
        )
        try:
            await peer.connect()
            return {**_address(record), **json.loads(await peer.describe()), "is_up": True}
        except PeerLost as error:
            return {**_address(record), "is_up": False, "error": error.why}
        finally:
            await peer.aclose()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The load for the planner (cluster/autoscaling/feed.py)."""
        parts = self._dispatcher
        return ingress_report(parts.stats, parts.router.alone_shares(), parts.clock())

    async def check_health(self) -> None:
        """Serve replaces the ingress when it no longer follows the registry."""
        if self._following.done():
            raise RuntimeError("the ingress no longer follows the registry")

    async def __del__(self) -> None:
        if following := getattr(self, "_following", None):
            for task in (following, *self._background):
                task.cancel()
            await self._dispatcher.aclose()
            await self._grammars.aclose()
            await asyncio.to_thread(tracing.shutdown)


_MAX_BODY_BYTES = 4096


class RoleOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /kvrelay/role. `drain_s`: for what runs there to move or end; None: the cluster's setting."""

    worker: str
    role: str
    drain_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] | None = None


def _address(record: WorkerRecord) -> dict[str, Any]:
    known = {name: getattr(record, name) for name in ("worker_id", "role", "node_id", "pid", "epoch")}
    return known | {"address": f"{record.host}:{record.port}"}


def model_card(settings: Settings, model_dir: Path) -> ModelCard:
    """Names, longest sequence in tokens and creation time of the one model."""
    from kvrelay.engine.checkpoints.checkpoint import model_name

    config = json.loads((model_dir / "config.json").read_text())
    text = config.get("text_config") or config
    longest = int(text.get("max_position_embeddings") or 2048)
    created = int((model_dir / "config.json").stat().st_mtime)
    longest = min(longest, settings.model.max_model_len or longest)
    return ModelCard(model_name(settings.model), longest, created, settings.model.served_names[1:])
