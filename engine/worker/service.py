"""What every worker runs: one engine thread, and both ends of its KV plane, behind one request-plane server.

Imports no transport: the ends bring those.
"""

import asyncio
import contextlib
import json
import logging
import os
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from kvrelay import __version__
from kvrelay.engine.step.config import StepResult
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.build import WorkerOptions, build_engine
from kvrelay.engine.worker.facts import backend_facts, plain_load, plain_pair, size_facts, worker_info
from kvrelay.engine.worker.ingresses import EngineReports, IngressLink, RequestTable
from kvrelay.engine.worker.kv_exchange import prefetch
from kvrelay.engine.worker.role import EndStarters, SourceEnd, TargetEnd, TransferCounters, WorkerParts
from kvrelay.engine.worker.role_switch import RoleSwitch
from kvrelay.engine.worker.sizing import EngineSizes
from kvrelay.engine.worker.thread import EngineThread
from kvrelay.errors import BackendUnavailable, WorkerError
from kvrelay.grammar.compiler import CompiledGrammar
from kvrelay.kvcache.stores.remote import ClusterStore
from kvrelay.kvcache.tiers.host_tier import HostTier
from kvrelay.plane import messages as wire
from kvrelay.plane.connection import Server
from kvrelay.plane.framing import Connection
from kvrelay.plane.ports import use_ports
from kvrelay.plane.reports import Audited, LoadReport, PairReport, Status, WorkerInfo
from kvrelay.plane.tls import cluster_tls
from kvrelay.types import Role

logger = logging.getLogger(__name__)


class WorkerEnds:
    """Both ends of a worker's KV plane: each request is held by one of them, or by the engine alone."""

    def __init__(self, source: SourceEnd, target: TargetEnd) -> None:
        self.source, self.target = source, target

    def handle(self, link: IngressLink, message: wire.Prefill | wire.Reserve | wire.Pair) -> None:
        if isinstance(message, wire.Reserve):
            self.target.handle(link, message)
        else:
            self.source.handle(link, message)

    def drop(self, request_id: str, reason: str) -> None:
        """The engine does not have this request: end what is held for it here."""
        self.source.drop(request_id, reason)
        self.target.drop(request_id, reason)

    def release(self, request_id: str, reason: str) -> None:
        """Free what the request holds here and in the engine, whatever its state."""
        end = self.source if self.source.holds(request_id) else self.target
        end.release(request_id, reason)

    @property
    def transports(self) -> list[str]:
        """What KV can be read over, best first."""
        return self.source.plane.transports or self.target.plane.transports

    def pairs(self) -> list[PairReport]:
        """The workers that KV can go to, then those that it can come from."""
        return [*self.source.plane.pairs(), *self.target.plane.pairs()]

    def stats(self) -> TransferCounters:
        """Counters of the KV transfers of both ends."""
        counters: TransferCounters = self.source.plane.stats().plus(self.target.plane.stats())
        return counters

    async def aclose(self) -> None:
        """End every transfer."""
        await self.source.aclose()
        await self.target.aclose()


class WorkerService:
    """A worker of any role. `role` is what it was built as, whose settings its engine has; `requests.role` is its role
    now. 14 attributes: its parts, which there are from start() to aclose().
    """

    def __init__(self, options: WorkerOptions, role: Role, starters: EndStarters) -> None:
        self.options, self.role, self.epoch = options, role, uuid.uuid4().hex
        self.info: WorkerInfo | None = None
        use_ports(options.settings.cluster.ports)
        self.tls = cluster_tls(options.settings.cluster, options.secret)
        self.thread = EngineThread(
            self.build_engine,
            on_step=self._on_step,
            on_failure=self._on_failure,
            send=self._send_tokens,
            cores=options.cores,
        )
        begins_as = options.settings.cluster.first_role(role)
        self.requests = RequestTable(options.worker_id, begins_as, self.thread, self._retry_after_s)
        self._starters = starters
        self._sizes: EngineSizes | None = None  # once the engine is built
        self.ends: WorkerEnds | None = None  # these four from start() to aclose()
        self.roles: RoleSwitch | None = None
        self._reports: EngineReports | None = None
        self._server: WorkerServer | None = None

    # ---- life

    async def start(self) -> WorkerInfo:
        """Load the model, start the engine and listen. Raises ModelError, ConfigError, BackendUnavailable."""
        options = self.options
        engine = await self.thread.start()
        parts = WorkerParts(options, self.epoch, self.tls, engine, self.thread, self.requests)
        self.ends = ends = WorkerEnds(await self._starters.source(parts), await self._starters.target(parts))
        load = engine.reports.load()
        self._reports = EngineReports(self.thread, load, completed=self._completed, changes=ends.target.changes)
        self.roles = RoleSwitch(options.worker_id, self.requests, self._reports, self.thread, ends.release)
        self._server = WorkerServer(self, ends, self._reports, self.roles)
        self.info = await self._server.start(
            options.host,
            lambda port: worker_info(
                options,
                self.epoch,
                self.requests.role,
                engine,
                port=port,
                kv_port=ends.target.plane.port,
                transports=ends.transports,
            ),
        )
        logger.info(
            "%s worker %s serves %s at %s:%d",
            self.requests.role,
            options.worker_id,
            options.model_name,
            options.host,
            self.info.port,
        )
        return self.info

    async def aclose(self) -> None:
        """Close every connection, then the transfers, then the engine."""
        if self._reports is not None:
            await self._reports.aclose()
        if self._server is not None:
            await self._server.aclose()
        if self.ends is not None:
            await self.ends.aclose()
        await self.thread.aclose()

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, and return when nothing is left, or after `timeout_s`.

        What is queued is refused, and ingresses receive the load at once: they place it elsewhere, and move what runs.
        """
        self.requests.is_draining = True
        self.thread.post(lambda engine: engine.scheduler.reject_queued())
        if self._reports is not None:
            self._reports.announce()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(self.requests):
                    await asyncio.sleep(0.1)

    def build_engine(self) -> Engine:
        """On the engine's thread."""
        engine, self._sizes = build_engine(self.options, self.role, self._starters.layer_hook, self._wake)
        return engine

    def _wake(self) -> None:
        """From any thread: the engine has something to take note of."""
        self.thread.post(lambda engine: None)

    # ---- facts

    @property
    def worker_id(self) -> str:
        return self.options.worker_id

    @property
    def host_tier(self) -> HostTier | None:
        """The engine's host tier; None before start(), and without one."""
        tiers = None if self.thread.engine is None else self.thread.engine.tiers
        return None if tiers is None else tiers.host

    @property
    def cluster_store(self) -> ClusterStore | None:
        return self.options.cluster_store

    def healthy(self) -> bool:
        return self.thread.is_alive

    def load(self) -> LoadReport:
        """The last load report, with the transfers' counters."""
        return self._reports.load() if self._reports is not None else self._completed(LoadReport(seq=0))

    def status(self) -> dict[str, Any]:
        """Everything that `kvrelay status` shows of this worker."""
        engine, ends = self.thread.engine, self.ends
        wanted_len = self.options.settings.model.max_model_len
        return {
            "info": msgspec.to_builtins(self.info) | {"role": self.requests.role} if self.info else {},
            "load": plain_load(self.load()),
            "transfer": msgspec.to_builtins(ends.stats()) if ends is not None else None,
            "pairs": [plain_pair(pair) for pair in ends.pairs()] if ends is not None else [],
            "backend": backend_facts(engine) if engine is not None else {},
            "version": __version__,
            "sizes": size_facts(engine, self._sizes, wanted_len) if engine is not None and self._sizes else [],
            "pid": os.getpid(),
        }

    def _completed(self, load: LoadReport) -> LoadReport:
        """With what the engine does not know: whether the worker drains, and its transfers' counters."""
        if self.requests.is_draining:
            load = msgspec.structs.replace(load, is_draining=True)
        if self.ends is None:
            return load
        return msgspec.structs.replace(load, **self.ends.stats().load_fields())

    def _retry_after_s(self) -> float:
        return self._reports.retry_after_s() if self._reports is not None else 1.0

    # ---- from the engine

    def _send_tokens(self, result: StepResult) -> None:
        """On the engine's thread: send the outputs in a stream's middle; leave the others to the loop."""
        is_held = self.ends.source.holds if self.ends is not None else self.requests.__contains__
        plain: list[wire.TokenOutput] = []
        watched: list[wire.TokenOutput] = []
        for output in result.outputs:
            request_id = output.request_id
            is_watched = output.finish_reason is not None or is_held(request_id) or self.requests.is_traced(request_id)
            (watched if is_watched else plain).append(output)
        result.outputs = watched
        for link, outputs in self.requests.by_link(plain).items():
            if not link.send_from_thread(wire.Tokens(outputs=outputs)):
                result.outputs += outputs

    def _on_step(self, result: StepResult) -> None:
        ends = self.ends
        if ends is None or self._reports is None:
            return  # a tier woke the engine while the worker starts: there are no requests yet
        for link, outputs in self.requests.by_link(result.outputs).items():
            link.send(wire.Tokens(outputs=outputs))  # before what follows from them, which must not overtake them
            for output in outputs:
                ends.source.on_output(output)
                self.requests.trace_output(output)
                if output.ends_request:
                    self.requests.remove(output.request_id)
        for refusal in result.refused:
            self._on_refused(*refusal)
        for request_id in result.returned_to_prefill:
            self.requests.fail(request_id, wire.PREEMPTED, "returned to prefill")
        for request_id, problem in result.failed:
            self.requests.fail(request_id, "grammar", problem, retryable=False)  # before what its transfer's end brings
            ends.drop(request_id, problem)
        ends.target.on_reservations(result.reservations)
        self._reports.publish(result)

    def _on_refused(self, request_id: str, reason: str, message: str) -> None:
        if self.ends is not None:
            self.ends.drop(request_id, reason)
        self.requests.refuse_added(request_id, reason, message)

    def _on_failure(self, error: BaseException) -> None:
        """The engine has failed: every request fails, and nothing new is taken."""
        self.requests.is_draining = True
        reason = WorkerError(self.options.worker_id, f"{type(error).__name__}: {error}")
        for request_id in self.requests.ids:
            if self.ends is not None:
                self.ends.drop(request_id, "the engine failed")
            self.requests.fail(request_id, "engine", str(reason))


MAX_AUDITED = 1024  # hashes of one Audit that are answered


class WorkerServer:
    """Listens from start() to aclose(). An ingress that disconnects takes its requests with it."""

    def __init__(self, service: WorkerService, ends: WorkerEnds, reports: EngineReports, roles: RoleSwitch) -> None:
        self._service, self._ends, self._reports, self._roles = service, ends, reports, roles
        self._thread, self._requests = service.thread, service.requests
        self._server = Server(self._serve, service.options.secret, tls=service.tls)
        self._info: WorkerInfo | None = None
        self._loop = asyncio.get_running_loop()

    async def start(self, host: str, describe: Callable[[int], WorkerInfo]) -> WorkerInfo:
        """Listen at a free port of `host`. `describe(port)`: what every ingress is sent first.

        Raises BackendUnavailable.
        """
        try:
            self._info = describe(await self._server.start(host))
        except OSError as error:
            raise BackendUnavailable("request plane", f"cannot listen on {host}: {error}") from error
        return self._info

    async def aclose(self) -> None:
        self._roles.close()
        await self._server.aclose()

    async def _serve(self, connection: Connection) -> None:
        assert self._info is not None
        link = IngressLink(connection)
        self._reports.connect(link)
        info = msgspec.structs.replace(self._info, role=self._requests.role)
        link.send(wire.Welcome(protocol=wire.PROTOCOL_VERSION, info=info))
        try:
            await connection.read_all(lambda frame: self._dispatch(link, wire.decode_to_worker(frame)))
        except msgspec.DecodeError as error:
            logger.warning("dropping %s: malformed message: %s", link.peer, error)
        finally:
            self._reports.disconnect(link)
            for request_id in list(link.requests):
                self._requests.remove(request_id)
                self._ends.release(request_id, "the ingress disconnected")

    def _dispatch(self, link: IngressLink, message: wire.ToWorker) -> None:
        match message:
            case wire.Prefill() | wire.Reserve() | wire.Pair():
                self._ends.handle(link, message)
            case wire.Generate(request=request):

                def add(engine: Engine, grammar: CompiledGrammar | None) -> None:
                    engine.add(request, grammar=grammar)

                if self._requests.admit(link, request, add, self._ends.drop, side=Role.DECODE):
                    self._requests.begin_span(request.request_id, "prefill")
            case wire.Abort(request_id=request_id, choice=int(choice)):
                if request_id in link.requests:
                    self._requests.post(request_id, lambda engine: engine.requests.abort_choice(request_id, choice))
            case wire.Abort(request_id=request_id, reason=reason):
                if request_id in link.requests:
                    self._requests.remove(request_id)
                    self._ends.release(request_id, reason)
            case wire.Ping():
                link.send(wire.Pong())
            case wire.Subscribe():
                self._ends.target.subscribed()
                self._reports.subscribe(link)
            case wire.Assigned():
                self._reports.assign(link, message)
            case wire.StatusQuery(query_id=query_id):
                link.send(Status(query_id=query_id, json=json.dumps(self._service.status()).encode()))
            case wire.Prefetch():
                self._prefetch(link, message)
            case wire.Audit():
                self._audit(link, message)
            case wire.EndPins(session=session):
                self._thread.post(lambda engine: engine.requests.end_pins(session))
            case wire.SetRole():
                self._set_role(link, message)
            case wire.CacheReset(query_id=query_id):
                self._thread.post(lambda engine: engine.reset_cache())
                link.send(Status(query_id=query_id, json=b"{}"))

    def _prefetch(self, link: IngressLink, message: wire.Prefetch) -> None:
        if self._requests.is_draining:
            link.send(wire.Prefetched(query_id=message.query_id, problem="draining"))
            return
        self._thread.post(lambda engine: prefetch(engine, message, lambda answer: self._send_soon(link, answer)))

    def _set_role(self, link: IngressLink, message: wire.SetRole) -> None:
        try:
            answer = self._roles.change(message.role, message.drain_s)
        except WorkerError as error:
            answer = {"error": error.why}
        link.send(Status(query_id=message.query_id, json=json.dumps(answer).encode()))

    def _audit(self, link: IngressLink, message: wire.Audit) -> None:
        hashes = message.hashes[:MAX_AUDITED]

        def look_up(engine: Engine) -> None:
            seq, tiers = engine.reports.audit(hashes)
            self._send_soon(link, Audited(query_id=message.query_id, seq=seq, tiers=tiers))

        self._thread.post(look_up)

    def _send_soon(self, link: IngressLink, answer: msgspec.Struct) -> None:
        """Send from the engine's thread, behind what it has sent before."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(link.send, answer)
