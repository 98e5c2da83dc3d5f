"""What prefill and decode workers share: one engine thread behind one request-plane server.

Owns the connections of the ingresses and knows which request belongs to which; an ingress that
goes takes its requests with it. Imports no transport: the roles add those.
"""

import asyncio
import contextlib
import json
import logging
import os
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from kvrelay.config import Settings
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.scheduling.fair_share import queue_rules
from kvrelay.engine.speculation.draft_model import DraftModel, make_draft_model
from kvrelay.engine.step.engine import Engine, EngineConfig, StepResult, load_engine
from kvrelay.engine.step.layer_events import LayerHook
from kvrelay.engine.worker.load_sharing import AssignedShares
from kvrelay.engine.worker.prefetch import prefetch
from kvrelay.engine.worker.preflight import check_fit, check_kv_layout, check_quantization, scheme_of
from kvrelay.engine.worker.thread import EngineThread
from kvrelay.engine.worker.tier_setup import make_lower_tiers, make_swap_area
from kvrelay.errors import ConnectionLost, WorkerError
from kvrelay.kernels.select import select_backend
from kvrelay.kvcache.memory.storage import DTYPES
from kvrelay.kvcache.stores.namespace import namespace_of
from kvrelay.kvcache.stores.remote import ClusterStore
from kvrelay.kvcache.tiers.events import parts_of
from kvrelay.machine import physical_cores
from kvrelay.pacing import Paced
from kvrelay.plane.connection import Server
from kvrelay.plane.framing import Connection
from kvrelay.plane.messages import (
    PREEMPTED,
    PROTOCOL_VERSION,
    Abort,
    Assigned,
    Audit,
    Audited,
    CacheReset,
    EndPins,
    Failed,
    Generate,
    KvPathLoad,
    KvSnapshot,
    LoadReport,
    Pair,
    PairReport,
    Prefetch,
    Prefetched,
    Prefill,
    Refused,
    Reserve,
    SequenceRequest,
    Status,
    StatusQuery,
    Subscribe,
    Timings,
    TokenOutput,
    Tokens,
    ToWorker,
    Welcome,
    WorkerInfo,
    decode_to_worker,
    encode,
)  # fmt: skip
from kvrelay.plane.tls import cluster_tls
from kvrelay.settings.engine import EngineSettings
from kvrelay.tracing import Spans, spans_of
from kvrelay.types import Role

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
MAX_AUDITED = 1024  # hashes of one Audit that are looked at


class TransferSums(Protocol):
    """What is used of kvtransfer's TransferStats, which this folder may not import."""

    transport: str
    num_bytes: int
    seconds: float
    check_s: float
    refusals: int
    refusals_by_reason: Counter[str]
    open_transfers: int
    expired_leases: int

    def path_loads(self) -> list[KvPathLoad]: ...


class Link:
    """One ingress's connection and the requests that came over it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.requests: set[str] = set()
        self.peer = connection.peer
        self._following: asyncio.Task[None] | None = None

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; a lost connection is noticed by its reader, not here."""
        with contextlib.suppress(ConnectionLost):
            self._connection.send_nowait(encode(message))

    def send_from_thread(self, message: msgspec.Struct) -> bool:
        """Send a message from any thread, at once where the ingress keeps up. False: the loop must do it."""
        return self._connection.send_from_thread(encode(message))

    def follow(self, messages: Iterable[msgspec.Struct]) -> None:
        """Send these too, as fast as the ingress reads, whatever else there is to send between them. Ends those of an earlier call."""
        self.stop_following()
        self._following = asyncio.create_task(self._follow(messages), name="follow")

    def stop_following(self) -> None:
        if self._following is not None:
            self._following.cancel()

    async def _follow(self, messages: Iterable[msgspec.Struct]) -> None:
        with contextlib.suppress(ConnectionLost):
            for message in messages:
                await asyncio.sleep(0)
                await self._connection.send(encode(message))


def _plain(pair: PairReport) -> dict[str, Any]:
    """As plain data, zeros and empty fields included."""
    return msgspec.structs.asdict(pair) | {"paths": [msgspec.structs.asdict(path) for path in pair.paths]}


def _pool_size(engine: EngineSettings, num_workers: int) -> dict[str, Any]:
    """EngineConfig's fields for the pool's size."""
    if (share := engine.kv_memory_share) is not None:
        return {"kv_memory_share": share, "num_workers": num_workers}
    return {"kv_memory_bytes": engine.kv_memory_bytes}


class WorkerService:
    """Base of both roles. Subclasses handle `Prefill` or `Reserve`, and override the hooks."""

    role: Role

    def __init__(
        self,
        settings: Settings,
        *,
        model_dir: Path,
        model_name: str,
        worker_id: str,
        node_id: str,
        secret: bytes,
        host: str,
        cores: tuple[int, ...] | None,
        num_workers: int | None = None,
        cluster_store: ClusterStore | None = None,
    ) -> None:
        """`num_workers`: of this machine, which share its memory; default: as many as the settings count.

        `cluster_store`: makes this process's client of the cluster's store; None: there is none.
        """
        self.num_workers = num_workers or settings.cluster.prefill + settings.cluster.decode
        self.settings, self.worker_id, self.node_id = settings, worker_id, node_id
        self.model_dir, self.model_name = model_dir, model_name
        self.host, self.secret, self.cores, self.cluster_store = host, secret, cores, cluster_store
        self.tls = cluster_tls(settings.cluster, secret)
        self.epoch = uuid.uuid4().hex
        self.thread = EngineThread(
            self.build_engine, on_step=self._on_step, on_failure=self._on_failure, send=self._send_tokens, cores=cores
        )
        self.info: WorkerInfo | None = None
        self.draining = False
        self._server = Server(self._serve_link, secret, tls=self.tls)
        self._owners: dict[str, Link] = {}
        self._spans: dict[str, Spans] = {}  # of the requests that are traced
        self._links: set[Link] = set()
        self._subscribers: set[Link] = set()
        self._assigned: AssignedShares[Link] = AssignedShares()
        self._tell_others: Paced | None = None
        self._load = LoadReport(seq=0)
        self._heartbeat: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- life

    async def start(self) -> WorkerInfo:
        """Load the model, start the engine and listen. Raises ModelError, ConfigError, BackendUnavailable."""
        self._loop = loop = asyncio.get_running_loop()
        period_s = self.settings.router.share_load_s
        self._tell_others = Paced(self._on_assigned, period_s, now=loop.time, after=loop.call_later)
        engine = await self.thread.start()
        await self._start_transfers(engine)
        port = await self._server.start(self.host)
        self.info = self._describe(engine, port)
        self._load = engine.load()
        self._heartbeat = asyncio.create_task(self._beat(), name="heartbeat")
        logger.info("%s worker %s serves %s at %s:%d", self.role, self.worker_id, self.model_name, self.host, port)
        return self.info

    async def aclose(self) -> None:
        """Close every connection, then the transfers, then the engine."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        await self._server.aclose()
        await self._stop_transfers()
        await self.thread.aclose()

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new; return when nothing is left, or after `timeout_s`."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._owners:
                    await asyncio.sleep(0.1)

    def healthy(self) -> bool:
        return self.thread.is_alive

    def load(self) -> LoadReport:
        """The last load report, with the transfer's figures."""
        return self._with_transfer_figures(self._load)

    def status(self) -> dict[str, Any]:
        """Everything that `kvrelay status` shows of this worker."""
        load = msgspec.structs.asdict(self.load())  # zeros, too
        return {
            "info": msgspec.to_builtins(self.info) if self.info else {},
            "load": load
            | {name: [msgspec.structs.asdict(one) for one in load[name]] for name in ("kv_paths", "tiers")},
            "transfer": msgspec.to_builtins(self._transfer_stats()),
            "pairs": [_plain(pair) for pair in self._pairs()],
            "backend": self._backend_facts(),
            "pid": os.getpid(),
        }

    def _transfer_stats(self) -> TransferSums | None:
        """The role's sums over its KV transfers; None before there is a transfer engine."""
        return None

    def _pairs(self) -> list[PairReport]:
        """Whom of the other role this worker is connected to, and over which paths."""
        return []

    def _backend_facts(self) -> dict[str, Any]:
        engine = self.thread.engine
        describe = getattr(engine.backend, "describe", None) if engine else None
        facts = dict(describe()) if describe else {}
        if engine is not None and isinstance(draft := engine.drafts.model, DraftModel):
            facts["draft model"] = draft.describe()
        if engine is not None and (error := engine.model.weight_error) is not None:
            facts["weights"] = f"{engine.config.quantization}, relative RMS error {error.relative:.2%}"
        return facts

    def build_engine(self) -> Engine:
        """On the engine's thread: backend, weights, pool."""
        check_fit(ModelSpec.from_folder(self.model_dir), self.settings, self.role)
        own = self.settings.for_role(self.role)
        settings = own.engine
        num_threads = settings.num_threads or (len(physical_cores(self.cores)) if self.cores else None)
        if num_threads:
            torch.set_num_threads(num_threads)
        backend = select_backend(settings.backend, settings.device, num_threads)
        check_kv_layout(backend.name, backend.kv_layouts, self.settings, self.role)
        check_quantization(backend.name, self.settings, quantizes=backend.quantizes)
        draft_model = make_draft_model(own, self.model_dir, backend) if self.role is Role.DECODE else None
        config = EngineConfig(
            block_size=settings.block_size,
            kv_layout=settings.kv_layout,
            **_pool_size(settings, self.num_workers),
            kv_dtype=own.kv_dtype,
            quantization=scheme_of(own.model),
            token_budget=settings.token_budget,
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            max_model_len=self.settings.model.max_model_len,
            prefix_caching=settings.prefix_caching,
            policy=self.settings.cache.eviction_policy,
            rules=queue_rules(self.settings.scheduler),
            preemption=settings.preemption,
            headroom=settings.headroom,
            cascade=settings.cascade == "auto",
            draft_tokens=settings.draft_tokens if settings.speculation != "off" else 0,
            warm_up=settings.warm_up,
            prompt_lookup=settings.speculation != "model",
        )
        engine = load_engine(
            self.model_dir, backend, DTYPES[own.model.compute_dtype], config,
            layer_hook=self._layer_hook(), layers_per_hook=self.settings.transfer.layers_per_announce,
        )  # fmt: skip
        if draft_model is not None:
            engine.attach_draft_model(draft_model)
        if self.settings.cache.host_bytes:
            namespace = namespace_of(engine.fingerprint, engine.memory.layout)
            tiers = make_lower_tiers(
                engine.pool, engine.memory, self.settings.cache, self.settings.transfer.checks, namespace, self._wake,
                self.cluster_store,
            )  # fmt: skip
            engine.attach(tiers)
        if (
            area := make_swap_area(engine.memory, settings.swap_bytes, self.settings.transfer.checks, self._wake)
        ) is not None:
            engine.attach_swap(area)
        return engine

    def _wake(self) -> None:
        """From any thread: the engine has something to take note of."""
        self.thread.post(lambda engine: None)

    def _describe(self, engine: Engine, port: int) -> WorkerInfo:
        layout = engine.memory.layout
        return WorkerInfo(
            worker_id=self.worker_id,
            role=str(self.role),
            epoch=self.epoch,
            host=self.host,
            port=port,
            node_id=self.node_id,
            model=self.model_name,
            fingerprint=engine.fingerprint,
            block_size=layout.block_size,
            num_blocks=layout.num_blocks,
            max_model_len=engine.max_model_len,
            max_running=engine.max_running,
            kv_bytes_per_token=layout.block_bytes // layout.block_size,
            device=str(engine.backend.device),
            transports=self._transports(),
            kv_port=self._kv_port(),
        )

    # ---- for the roles to override

    def _layer_hook(self) -> LayerHook | None:
        return None

    def _transports(self) -> list[str]:
        return []

    def _kv_port(self) -> int:
        return 0

    async def _start_transfers(self, engine: Engine) -> None:
        """Start the KV plane of this role."""

    async def _stop_transfers(self) -> None:
        """Stop the KV plane of this role."""

    def _with_transfer_figures(self, load: LoadReport) -> LoadReport:
        if self.draining:
            load = msgspec.structs.replace(load, is_draining=True)
        stats = self._transfer_stats()
        if stats is None:
            return load
        return msgspec.structs.replace(
            load,
            transport=stats.transport,
            kv_bytes=stats.num_bytes,
            kv_seconds=stats.seconds,
            kv_refusals=stats.refusals,
            kv_refused=dict(stats.refusals_by_reason),
            kv_check_s=stats.check_s,
            kv_leases=stats.open_transfers,
            kv_expired_leases=stats.expired_leases,
            kv_paths=stats.path_loads(),
        )

    def _on_prefill(self, link: Link, message: Prefill) -> None:
        self._refuse(link, message.request.request_id, "invalid", f"{self.worker_id} does not prefill for others")

    def _on_reserve(self, link: Link, message: Reserve) -> None:
        self._refuse(link, message.request.request_id, "invalid", f"{self.worker_id} does not decode")

    def _on_pair(self, link: Link, message: Pair) -> None:
        logger.warning("%s is asked to pair with %s, but sends no KV", self.worker_id, message.worker_id)

    def _on_output(self, output: TokenOutput) -> None:
        """An output has been sent to its ingress."""

    def _on_reservations(self, result: StepResult) -> None:
        assert not result.reservations

    def _news(self) -> msgspec.Struct | None:
        """What else subscribers hear with this heartbeat."""
        return None

    def _release(self, request_id: str, reason: str) -> None:
        """Free what the request holds here, whatever its state."""
        self.thread.post(lambda engine: engine.abort(request_id))

    # ---- connections

    async def _serve_link(self, connection: Connection) -> None:
        assert self.info is not None
        link = Link(connection)
        connection.allow_threads()
        self._links.add(link)
        link.send(Welcome(protocol=PROTOCOL_VERSION, info=self.info))
        try:
            while True:
                frame = await connection.receive()
                try:
                    message = decode_to_worker(frame)
                except msgspec.DecodeError as error:
                    logger.warning("dropping %s: malformed message: %s", link.peer, error)
                    return
                self._dispatch(link, message)
        finally:
            self._links.discard(link)
            self._subscribers.discard(link)
            link.stop_following()
            self._assigned.leave(link)
            self._ask_to_tell()
            for request_id in list(link.requests):
                self._forget(request_id)
                self._release(request_id, "the ingress went")

    def _dispatch(self, link: Link, message: ToWorker) -> None:
        match message:
            case Prefill():
                self._on_prefill(link, message)
            case Reserve():
                self._on_reserve(link, message)
            case Generate(request=request):
                request_id = request.request_id
                if self._admit(link, request, lambda engine: engine.add(request)):
                    self._begin_span(request_id, "prefill")
            case Abort(request_id=request_id, choice=int(choice)):
                if request_id in link.requests:
                    self.thread.post(lambda engine: engine.abort_choice(request_id, choice))
            case Abort(request_id=request_id, reason=reason):
                if request_id in link.requests:
                    self._forget(request_id)
                    self._release(request_id, reason)
            case Subscribe():
                self._subscribe(link)
            case Assigned():
                if self._assigned.hear(link, message):
                    self._ask_to_tell()
            case Pair():
                self._on_pair(link, message)
            case StatusQuery(query_id=query_id):
                link.send(Status(query_id=query_id, json=json.dumps(self.status()).encode()))
            case Prefetch():
                self._on_prefetch(link, message)
            case Audit():
                self._on_audit(link, message)
            case EndPins(session=session):
                self.thread.post(lambda engine: engine.end_pins(session))
            case CacheReset(query_id=query_id):
                self.thread.post(lambda engine: engine.reset_cache())
                link.send(Status(query_id=query_id, json=b"{}"))

    def _on_prefetch(self, link: Link, message: Prefetch) -> None:
        if self.draining:
            link.send(Prefetched(query_id=message.query_id, problem="draining"))
            return
        loop = self._loop
        assert loop is not None

        def told(answer: Prefetched) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(link.send, answer)

        self.thread.post(lambda engine: prefetch(engine, message, told))

    def _on_audit(self, link: Link, message: Audit) -> None:
        loop = self._loop
        assert loop is not None
        hashes = message.hashes[:MAX_AUDITED]

        def look(engine: Engine) -> None:
            seq, tiers = engine.audit(hashes)
            answer = Audited(query_id=message.query_id, seq=seq, tiers=tiers)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(link.send, answer)

        self.thread.post(look)

    def _subscribe(self, link: Link) -> None:
        """The snapshot's first part, then events, in the order in which the engine's thread saw them; its other parts between them."""
        loop = self._loop
        assert loop is not None

        def begin(snapshot: KvSnapshot) -> None:
            if link in self._links:
                parts = parts_of(snapshot)
                link.send(next(parts))
                link.follow(parts)
                link.send(self.load())
                self._subscribers.add(link)
                self._assigned.join(link)
                self._ask_to_tell()

        def snap(engine: Engine) -> None:
            snapshot = engine.snapshot()
            loop.call_soon_threadsafe(begin, snapshot)

        self._subscribers.discard(link)
        self.thread.post(snap)

    def _ask_to_tell(self) -> None:
        assert self._tell_others is not None
        self._tell_others.ask()

    def _on_assigned(self) -> None:
        """Tell each ingress what the others have assigned here."""
        for link, others in self._assigned.take_news():
            link.send(others)

    def _admit(self, link: Link, request: SequenceRequest, take: Callable[[Engine], None]) -> bool:
        """Take a request unless there is a reason not to; the answer to a refusal is `Refused`.

        False: refused on the spot. The engine may still refuse it (see `_refused`).
        """
        request_id = request.request_id
        if self.draining:
            self._refuse(link, request_id, "draining", f"{self.worker_id} is shutting down")
            return False
        if request_id in self._owners:
            self._refuse(link, request_id, "duplicate", f"{request_id} is already here")
            return False
        self._owners[request_id] = link
        link.requests.add(request_id)
        if (spans := spans_of(request.traceparent, request_id=request_id, worker=self.worker_id)) is not None:
            self._spans[request_id] = spans
        loop = self._loop
        assert loop is not None

        def admit(engine: Engine) -> None:
            refusal = engine.refusal(request)
            if refusal is None:
                take(engine)
            else:
                loop.call_soon_threadsafe(self._refused, request_id, *refusal)

        self.thread.post(admit)
        return True

    def _refused(self, request_id: str, reason: str, message: str) -> None:
        link = self._forget(request_id)
        if link is not None:
            self._refuse(link, request_id, reason, message)

    def _refuse(self, link: Link, request_id: str, reason: str, message: str) -> None:
        retry_after_s = max(1.0, self._load.queued_tokens / max(self._load.prefill_tokens_per_s, 100.0))
        link.send(Refused(request_id=request_id, reason=reason, message=message, retry_after_s=retry_after_s))

    def _forget(self, request_id: str) -> Link | None:
        link = self._owners.pop(request_id, None)
        if link is not None:
            link.requests.discard(request_id)
        if (spans := self._spans.pop(request_id, None)) is not None:
            spans.close("given up")
        return link

    # ---- spans: no-ops for a request that nobody traces

    def _begin_span(self, request_id: str, name: str, **attributes: Any) -> None:
        if (spans := self._spans.get(request_id)) is not None:
            spans.begin(name, **attributes)

    def _end_span(self, request_id: str, name: str, **attributes: Any) -> None:
        if (spans := self._spans.get(request_id)) is not None:
            spans.end(name, **attributes)

    def _trace_output(self, output: TokenOutput) -> None:
        """The spans that end or begin with it: prefill with a first token, decode with the last."""
        spans = self._spans.get(output.request_id)
        if spans is None:
            return
        if spans.has("prefill"):
            timings = output.timings or Timings()
            spans.end(
                "prefill", cached_tokens=output.cached_tokens or 0, queue_s=timings.queue_s,
                compute_s=timings.compute_s, chunks=timings.num_chunks,
            )  # fmt: skip
            if self.role is Role.DECODE and output.finish_reason is None:
                spans.begin("decode")
        if output.finish_reason is not None and output.ends_request:
            num_tokens = output.position + len(output.token_ids)
            spans.end("decode", output_tokens=num_tokens, finish_reason=output.finish_reason)

    def _fail(self, request_id: str, code: str, message: str, *, retryable: bool) -> None:
        """Tell the ingress, if it still cares, that nothing more will come."""
        if (spans := self._spans.get(request_id)) is not None:
            spans.close(message)
        link = self._forget(request_id)
        if link is not None:
            link.send(Failed(request_id=request_id, code=code, message=message, retryable=retryable))

    # ---- from the engine

    def _send_tokens(self, result: StepResult) -> None:
        """On the engine's thread: what changes nothing here but the stream is sent at once; the rest is left to the loop."""
        plain: list[TokenOutput] = []
        noted: list[TokenOutput] = []
        for output in result.outputs:
            (noted if self._is_noted(output) else plain).append(output)
        result.outputs = noted
        for link, outputs in self._by_link(plain).items():
            if not link.send_from_thread(Tokens(outputs=outputs)):
                result.outputs += outputs

    def _is_noted(self, output: TokenOutput) -> bool:
        """Whether the books are to be kept of this output: always the same of those in a stream's middle."""
        return output.finish_reason is not None or output.request_id in self._spans

    def _by_link(self, outputs: Iterable[TokenOutput]) -> dict[Link, list[TokenOutput]]:
        """Those that somebody waits for, by whom they go to."""
        batches: dict[Link, list[TokenOutput]] = defaultdict(list)
        for output in outputs:
            if (link := self._owners.get(output.request_id)) is not None:
                batches[link].append(output)
        return batches

    def _on_step(self, result: StepResult) -> None:
        for link, outputs in self._by_link(result.outputs).items():
            link.send(Tokens(outputs=outputs))  # first the tokens: what follows from them must not overtake them
            for output in outputs:
                self._on_output(output)
                if self._spans:
                    self._trace_output(output)
                if output.ends_request:
                    self._forget(output.request_id)
        for refusal in result.refused:
            self._refused(*refusal)
        for request_id in result.returned_to_prefill:
            self._fail(request_id, PREEMPTED, "handed back to a prefill worker", retryable=True)
        self._on_reservations(result)
        if result.load is not None:
            self._load = result.load
        if self._subscribers and (result.events or result.load):
            self._publish(result)

    def _publish(self, result: StepResult) -> None:
        load = self.load() if result.load else None
        for link in self._subscribers:
            if result.events is not None:
                link.send(result.events)
            if load is not None:
                link.send(load)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            news = self._news()
            for link in self._subscribers:
                link.send(self.load())
                if news is not None:
                    link.send(news)

    def _on_failure(self, error: BaseException) -> None:
        """The engine is gone: every request fails at once, and nothing new is taken."""
        self.draining = True
        reason = WorkerError(self.worker_id, f"{type(error).__name__}: {error}")
        for request_id in list(self._owners):
            self._fail(request_id, "engine", str(reason), retryable=True)
