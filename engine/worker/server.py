"""The worker's side of the request plane: accepts ingresses and passes each of their messages to its handler."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.prefetch import prefetch
from kvrelay.engine.worker.reports import EngineReports
from kvrelay.engine.worker.requests import IngressLink, RequestTable
from kvrelay.engine.worker.thread import EngineThread
from kvrelay.plane.connection import Server
from kvrelay.plane.framing import Connection
from kvrelay.plane.messages import (
    PROTOCOL_VERSION,
    Abort,
    Assigned,
    Audit,
    Audited,
    CacheReset,
    EndPins,
    Generate,
    Pair,
    Prefetch,
    Prefetched,
    Prefill,
    Reserve,
    Status,
    StatusQuery,
    Subscribe,
    ToWorker,
    Welcome,
    WorkerInfo,
    decode_to_worker,
)
from kvrelay.plane.tls import ClusterTls

logger = logging.getLogger(__name__)

MAX_AUDITED = 1024  # hashes of one Audit that are answered


class RequestHandler(Protocol):
    """The role of a worker, as its server sees it."""

    def handle(self, link: IngressLink, message: Prefill | Reserve | Pair) -> None:
        """A message that is for one role only."""

    def drop(self, request_id: str, reason: str) -> None:
        """The engine does not have this request: end what the role holds for it."""

    def release(self, request_id: str, reason: str) -> None:
        """Free what the request holds here and in the engine, whatever its state."""

    def subscribed(self) -> None:
        """A subscriber was added, which knows nothing yet."""


class WorkerServer:
    """Listens from start() to aclose(). An ingress that disconnects takes its requests with it."""

    def __init__(
        self,
        role: RequestHandler,
        thread: EngineThread,
        requests: RequestTable,
        reports: EngineReports,
        status: Callable[[], dict[str, Any]],
        *,
        secret: bytes,
        tls: ClusterTls | None,
    ) -> None:
        self._role, self._thread, self._requests, self._reports = role, thread, requests, reports
        self._status = status
        self._server = Server(self._serve, secret, tls=tls)
        self._info: WorkerInfo | None = None
        self._loop = asyncio.get_running_loop()

    async def start(self, host: str, describe: Callable[[int], WorkerInfo]) -> WorkerInfo:
        """Listen at a free port of `host`. `describe(port)`: what every ingress is sent first."""
        self._info = describe(await self._server.start(host))
        return self._info

    async def aclose(self) -> None:
        await self._server.aclose()

    async def _serve(self, connection: Connection) -> None:
        assert self._info is not None
        link = IngressLink(connection)
        self._reports.connect(link)
        link.send(Welcome(protocol=PROTOCOL_VERSION, info=self._info))
        try:
            while True:
                frame = await link.receive()
                try:
                    message = decode_to_worker(frame)
                except msgspec.DecodeError as error:
                    logger.warning("dropping %s: malformed message: %s", link.peer, error)
                    return
                self._dispatch(link, message)
        finally:
            self._reports.disconnect(link)
            for request_id in list(link.requests):
                self._requests.remove(request_id)
                self._role.release(request_id, "the ingress disconnected")

    def _dispatch(self, link: IngressLink, message: ToWorker) -> None:
        match message:
            case Prefill() | Reserve() | Pair():
                self._role.handle(link, message)
            case Generate(request=request):
                if self._requests.admit(link, request, lambda engine: engine.add(request), self._role.drop):
                    self._requests.begin_span(request.request_id, "prefill")
            case Abort(request_id=request_id, choice=int(choice)):
                if request_id in link.requests:
                    self._thread.post(lambda engine: engine.requests.abort_choice(request_id, choice))
            case Abort(request_id=request_id, reason=reason):
                if request_id in link.requests:
                    self._requests.remove(request_id)
                    self._role.release(request_id, reason)
            case Subscribe():
                self._role.subscribed()
                self._reports.subscribe(link)
            case Assigned():
                self._reports.assign(link, message)
            case StatusQuery(query_id=query_id):
                link.send(Status(query_id=query_id, json=json.dumps(self._status()).encode()))
            case Prefetch():
                self._prefetch(link, message)
            case Audit():
                self._audit(link, message)
            case EndPins(session=session):
                self._thread.post(lambda engine: engine.requests.end_pins(session))
            case CacheReset(query_id=query_id):
                self._thread.post(lambda engine: engine.reset_cache())
                link.send(Status(query_id=query_id, json=b"{}"))

    def _prefetch(self, link: IngressLink, message: Prefetch) -> None:
        if self._requests.is_draining:
            link.send(Prefetched(query_id=message.query_id, problem="draining"))
            return
        self._thread.post(lambda engine: prefetch(engine, message, lambda answer: self._send_soon(link, answer)))

    def _audit(self, link: IngressLink, message: Audit) -> None:
        hashes = message.hashes[:MAX_AUDITED]

        def look_up(engine: Engine) -> None:
            seq, tiers = engine.reports.audit(hashes)
            self._send_soon(link, Audited(query_id=message.query_id, seq=seq, tiers=tiers))

        self._thread.post(look_up)

    def _send_soon(self, link: IngressLink, answer: msgspec.Struct) -> None:
        """Send from the engine's thread, behind what it has sent before."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(link.send, answer)
