"""What prefill and decode workers share: one engine thread behind one request-plane server.

Imports no transport: the roles add those.
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

from kvrelay.engine.execution.launch import LayerHook
from kvrelay.engine.speculation.draft_model import DraftModel
from kvrelay.engine.step.config import StepResult
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.build import WorkerOptions, build_engine
from kvrelay.engine.worker.ingresses import EngineReports, IngressLink, RequestTable
from kvrelay.engine.worker.kv_exchange import prefetch
from kvrelay.engine.worker.role import WorkerRole
from kvrelay.engine.worker.sizing import EngineSizes, context_notice
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


class WorkerService:
    """Base of both kinds of workers, which override `_layer_hook` and `_start_role`."""

    role: Role

    def __init__(self, options: WorkerOptions) -> None:
        self.options, self.epoch = options, uuid.uuid4().hex
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
        self.requests = RequestTable(options.worker_id, self.role, self.thread, self._retry_after_s)
        self._sizes: EngineSizes | None = None  # once the engine is built
        self._role: WorkerRole | None = None  # these three from start() to aclose()
        self._reports: EngineReports | None = None
        self._server: WorkerServer | None = None

    # ---- for the roles to override

    def _layer_hook(self) -> LayerHook | None:
        """Called when layers of held sequences are final."""
        return None

    async def _start_role(self, engine: Engine) -> WorkerRole:
        """Start the KV plane of this role."""
        raise NotImplementedError

    # ---- life

    async def start(self) -> WorkerInfo:
        """Load the model, start the engine and listen. Raises ModelError, ConfigError, BackendUnavailable."""
        options = self.options
        engine = await self.thread.start()
        self._role = role = await self._start_role(engine)
        load = engine.reports.load()
        self._reports = EngineReports(self.thread, load, completed=self._completed, changes=role.changes)
        self._server = WorkerServer(self, role, self._reports)
        self.info = await self._server.start(options.host, lambda port: self._describe(engine, role, port))
        logger.info(
            "%s worker %s serves %s at %s:%d",
            self.role,
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
        if self._role is not None:
            await self._role.aclose()
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
        engine, self._sizes = build_engine(self.options, self.role, self._layer_hook(), self._wake)
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
        load = msgspec.structs.asdict(self.load())  # zeros, too
        role = self._role
        return {
            "info": msgspec.to_builtins(self.info) if self.info else {},
            "load": load
            | {name: [msgspec.structs.asdict(one) for one in load[name]] for name in ("kv_paths", "tiers")},
            "transfer": msgspec.to_builtins(role.plane.stats()) if role is not None else None,
            "pairs": [_plain(pair) for pair in role.plane.pairs()] if role is not None else [],
            "backend": self._backend_facts(),
            "sizes": self._size_facts(),
            "pid": os.getpid(),
        }

    def _size_facts(self) -> list[str]:
        """What was chosen for the engine and why, then what to note of it."""
        engine = self.thread.engine
        if engine is None or self._sizes is None:
            return []
        wanted = min(engine.model.spec.max_position, self.options.settings.model.max_model_len or 1 << 62)
        line = self._sizes.describe(engine.cache.memory.layout.num_bytes)
        return [line, *filter(None, [context_notice(engine.max_model_len, wanted)])]

    def _backend_facts(self) -> dict[str, Any]:
        engine = self.thread.engine
        describe = getattr(engine.backend, "describe", None) if engine else None
        facts = dict(describe()) if describe else {}
        if engine is not None and isinstance(draft := engine.drafts.model, DraftModel):
            facts["draft model"] = draft.describe()
        if engine is not None and (error := engine.model.weight_error) is not None:
            weights = engine.config.quantization or engine.model.spec.quantization
            facts["weights"] = f"{weights}, relative RMS error {error.relative:.2%}"
        return facts

    def _describe(self, engine: Engine, role: WorkerRole, port: int) -> WorkerInfo:
        layout, options = engine.cache.memory.layout, self.options
        return WorkerInfo(
            worker_id=options.worker_id,
            role=str(self.role),
            epoch=self.epoch,
            host=options.host,
            port=port,
            node_id=options.node_id,
            model=options.model_name,
            fingerprint=engine.cache.fingerprint,
            block_size=layout.block_size,
            num_blocks=layout.num_blocks,
            max_model_len=engine.max_model_len,
            max_running=engine.config.max_running,
            kv_bytes_per_token=layout.block_bytes // layout.block_size,
            device=str(engine.backend.device),
            transports=role.plane.transports,
            kv_port=role.plane.port,
        )

    def _completed(self, load: LoadReport) -> LoadReport:
        """With what the engine does not know: whether the worker drains, and its transfers' counters."""
        if self.requests.is_draining:
            load = msgspec.structs.replace(load, is_draining=True)
        if self._role is None:
            return load
        return msgspec.structs.replace(load, **self._role.plane.stats().load_fields())

    def _retry_after_s(self) -> float:
        return self._reports.retry_after_s() if self._reports is not None else 1.0

    # ---- from the engine

    def _send_tokens(self, result: StepResult) -> None:
        """On the engine's thread: send the outputs in a stream's middle; leave the others to the loop."""
        watches_all = self._role is None or self._role.watches_outputs
        plain: list[wire.TokenOutput] = []
        watched: list[wire.TokenOutput] = []
        for output in result.outputs:
            is_watched = watches_all or output.finish_reason is not None or self.requests.is_traced(output.request_id)
            (watched if is_watched else plain).append(output)
        result.outputs = watched
        for link, outputs in self.requests.by_link(plain).items():
            if not link.send_from_thread(wire.Tokens(outputs=outputs)):
                result.outputs += outputs

    def _on_step(self, result: StepResult) -> None:
        if self._role is None or self._reports is None:
            return  # a tier woke the engine while the worker starts: there are no requests yet
        for link, outputs in self.requests.by_link(result.outputs).items():
            link.send(wire.Tokens(outputs=outputs))  # before what follows from them, which must not overtake them
            for output in outputs:
                self._role.on_output(output)
                self.requests.trace_output(output)
                if output.ends_request:
                    self.requests.remove(output.request_id)
        for refusal in result.refused:
            self._on_refused(*refusal)
        for request_id in result.returned_to_prefill:
            self.requests.fail(request_id, wire.PREEMPTED, "returned to prefill")
        for request_id, problem in result.failed:
            self.requests.fail(request_id, "grammar", problem, retryable=False)  # before what its transfer's end brings
            self._role.drop(request_id, problem)
        self._role.on_reservations(result.reservations)
        self._reports.publish(result)

    def _on_refused(self, request_id: str, reason: str, message: str) -> None:
        if self._role is not None:
            self._role.drop(request_id, reason)
        self.requests.refuse_added(request_id, reason, message)

    def _on_failure(self, error: BaseException) -> None:
        """The engine has failed: every request fails, and nothing new is taken."""
        self.requests.is_draining = True
        reason = WorkerError(self.options.worker_id, f"{type(error).__name__}: {error}")
        for request_id in self.requests.ids:
            if self._role is not None:
                self._role.drop(request_id, "the engine failed")
            self.requests.fail(request_id, "engine", str(reason))


def _plain(pair: PairReport) -> dict[str, Any]:
    """As plain data, zeros and empty fields included."""
    return msgspec.structs.asdict(pair) | {"paths": [msgspec.structs.asdict(path) for path in pair.paths]}


MAX_AUDITED = 1024  # hashes of one Audit that are answered


class WorkerServer:
    """Listens from start() to aclose(). An ingress that disconnects takes its requests with it."""

    def __init__(self, service: WorkerService, role: WorkerRole, reports: EngineReports) -> None:
        self._service, self._role, self._reports = service, role, reports
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
        await self._server.aclose()

    async def _serve(self, connection: Connection) -> None:
        assert self._info is not None
        link = IngressLink(connection)
        self._reports.connect(link)
        link.send(wire.Welcome(protocol=wire.PROTOCOL_VERSION, info=self._info))
        try:
            await connection.read_all(lambda frame: self._dispatch(link, wire.decode_to_worker(frame)))
        except msgspec.DecodeError as error:
            logger.warning("dropping %s: malformed message: %s", link.peer, error)
        finally:
            self._reports.disconnect(link)
            for request_id in list(link.requests):
                self._requests.remove(request_id)
                self._role.release(request_id, "the ingress disconnected")

    def _dispatch(self, link: IngressLink, message: wire.ToWorker) -> None:
        match message:
            case wire.Prefill() | wire.Reserve() | wire.Pair():
                self._role.handle(link, message)
            case wire.Generate(request=request):

                def add(engine: Engine, grammar: CompiledGrammar | None) -> None:
                    engine.add(request, grammar=grammar)

                if self._requests.admit(link, request, add, self._role.drop):
                    self._requests.begin_span(request.request_id, "prefill")
            case wire.Abort(request_id=request_id, choice=int(choice)):
                if request_id in link.requests:
                    self._requests.post(request_id, lambda engine: engine.requests.abort_choice(request_id, choice))
            case wire.Abort(request_id=request_id, reason=reason):
                if request_id in link.requests:
                    self._requests.remove(request_id)
                    self._role.release(request_id, reason)
            case wire.Subscribe():
                self._role.subscribed()
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
            case wire.CacheReset(query_id=query_id):
                self._thread.post(lambda engine: engine.reset_cache())
                link.send(Status(query_id=query_id, json=b"{}"))

    def _prefetch(self, link: IngressLink, message: wire.Prefetch) -> None:
        if self._requests.is_draining:
            link.send(wire.Prefetched(query_id=message.query_id, problem="draining"))
            return
        self._thread.post(lambda engine: prefetch(engine, message, lambda answer: self._send_soon(link, answer)))

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
