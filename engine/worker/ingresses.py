"""The ingresses that a worker is connected to: which requests came from each (with the spans of those that are traced),
and what is reported to them.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kvrelay.engine.step.config import StepResult
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.load_sharing import AssignedShares
from kvrelay.engine.worker.thread import EngineThread
from kvrelay.errors import ConnectionLost, InvalidRequest
from kvrelay.grammar.compiler import CompiledGrammar
from kvrelay.kvcache.index.changes import parts_of
from kvrelay.logs import with_facts
from kvrelay.pacing import Paced
from kvrelay.plane import messages as wire
from kvrelay.plane.framing import Connection
from kvrelay.plane.reports import KvSnapshot, LoadReport
from kvrelay.tracing import Spans
from kvrelay.types import Role, sides

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0


class IngressLink:
    """Sends to one ingress. `requests`: ids of its requests that have not ended."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.requests: set[str] = set()
        self.peer = connection.peer
        self._snapshot: asyncio.Task[None] | None = None
        connection.allow_threads()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; its reader sees a lost connection."""
        with contextlib.suppress(ConnectionLost):
            self._connection.send_nowait(wire.encode(message))

    def send_from_thread(self, message: msgspec.Struct) -> bool:
        """Send a message from any thread, now, if the socket takes it. False: the loop must send it."""
        return self._connection.send_from_thread(wire.encode(message))

    def send_parts(self, parts: Iterable[msgspec.Struct]) -> None:
        """Send a snapshot's parts as fast as the ingress reads, other messages between them. Replaces an earlier
        snapshot.
        """
        self.stop_parts()
        self._snapshot = asyncio.create_task(self._send_parts(parts), name="send snapshot")

    def stop_parts(self) -> None:
        """Send no more of a snapshot's parts."""
        if self._snapshot is not None:
            self._snapshot.cancel()

    async def _send_parts(self, parts: Iterable[msgspec.Struct]) -> None:
        with contextlib.suppress(ConnectionLost):
            for part in parts:
                await asyncio.sleep(0)
                await self._connection.send(wire.encode(part))


class RequestTable:
    """Lives on the worker's loop; the engine's thread only calls `by_link` and `is_traced`.

    `role`: the worker's role now, which decides what new requests are admitted.
    """

    def __init__(self, worker_id: str, role: str, thread: EngineThread, retry_after_s: Callable[[], float]) -> None:
        self._worker_id, self.role, self._thread, self._retry_after_s = worker_id, str(role), thread, retry_after_s
        self._links: dict[str, IngressLink] = {}
        self._sides: dict[str, Role] = {}  # what each is here for
        self._spans: dict[str, Spans] = {}  # of traced requests
        self._compiling: dict[str, tuple[asyncio.Task[None], list[Callable[[Engine], object]]]] = {}
        self.is_draining = False  # every new request is refused

    def __len__(self) -> int:
        return len(self._links)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._links

    @property
    def ids(self) -> list[str]:
        return list(self._links)

    def not_of_role(self) -> list[str]:
        """The requests that are here from before the worker had its role, which does not take them."""
        taken = sides(self.role)
        return [request_id for request_id, side in self._sides.items() if side not in taken]

    def admit(
        self,
        link: IngressLink,
        request: wire.SequenceRequest,
        take: Callable[[Engine, CompiledGrammar | None], None],
        drop: Callable[[str, str], None],
        *,
        side: Role,
        moves: str = "",
    ) -> bool:
        """Have the engine take a request, once its grammar is compiled. False: it was refused on the spot; the engine
        may refuse it later.

        Args:
            side: what it is here for.
            take: adds the request to the engine, on its thread, with its compiled grammar.
            drop: called with (request_id, reason) when the engine refused, before the ingress receives Refused.
            moves: the id of a request that is here and that this one moves away: taken whatever the worker's role, and
                also while it drains.
        """
        if not self._add(link, request, side, moves):
            return False
        request_id, loop = request.request_id, asyncio.get_running_loop()

        def refused(reason: str, message: str) -> None:
            drop(request_id, reason)
            self.refuse_added(request_id, reason, message)

        def take_or_refuse(engine: Engine, grammar: CompiledGrammar | None = None) -> None:
            refusal = engine.requests.refusal(request)
            if refusal is None:
                take(engine, grammar)
            else:
                loop.call_soon_threadsafe(refused, *refusal)

        if (spec := request.sampling.grammar) is None:
            self._thread.post(take_or_refuse)
        else:
            compiling = self._compile(request_id, spec, take_or_refuse, refused)
            task = loop.create_task(compiling, name=f"compile {request_id}")
            self._compiling[request_id] = task, []
        return True

    async def _compile(
        self,
        request_id: str,
        spec: wire.GrammarSpec,
        take: Callable[[Engine, CompiledGrammar], None],
        refused: Callable[[str, str], None],
    ) -> None:
        """Compile a request's grammar beside the loop and the engine, then have it taken.

        Cancelled when the request is removed before that.
        """
        grammars = self._thread.grammars
        try:
            grammar = await asyncio.to_thread(grammars.compile, spec)
        except Exception as error:  # of a library, too: the ingress gets the reason
            if not isinstance(error, InvalidRequest):
                logger.exception("request %s: its grammar does not compile", request_id)
            self._compiling.pop(request_id, None)
            refused("grammar", str(error))
            return
        _, behind = self._compiling.pop(request_id)
        self._thread.post(lambda engine: take(engine, grammar))
        for action in behind:
            self._thread.post(action)

    def post(self, request_id: str, action: Callable[[Engine], object]) -> None:
        """Have the engine do something about a request, after it has taken it."""
        if (compiling := self._compiling.get(request_id)) is not None:
            compiling[1].append(action)
        else:
            self._thread.post(action)

    def _add(self, link: IngressLink, request: wire.SequenceRequest, side: Role, moves: str) -> bool:
        request_id, is_move = request.request_id, moves in link.requests
        if self.is_draining and not is_move:
            self.refuse(link, request_id, "draining", f"{self._worker_id} is shutting down")
            return False
        if side not in sides(self.role) and not is_move:
            self.refuse(link, request_id, "draining", f"{self._worker_id} takes no {side} requests: it is {self.role}")
            return False
        if request_id in self._links:
            self.refuse(link, request_id, "duplicate", f"{request_id} is already here")
            return False
        self._links[request_id], self._sides[request_id] = link, side
        link.requests.add(request_id)
        self._log(request_id, "arrived", prompt_tokens=request.num_prompt_tokens, source=link.peer)
        if request.traceparent:
            self._spans[request_id] = Spans(request.traceparent, request_id=request_id, worker=self._worker_id)
        return True

    def remove(self, request_id: str) -> IngressLink | None:
        """The request has ended here. Its link, or None when it had been removed before."""
        link = self._links.pop(request_id, None)
        self._sides.pop(request_id, None)
        if link is not None:
            link.requests.discard(request_id)
            self._log(request_id, "ended")
        if (compiling := self._compiling.pop(request_id, None)) is not None:
            compiling[0].cancel()
        if (spans := self._spans.pop(request_id, None)) is not None:
            spans.close("given up")
        return link

    def by_link(self, outputs: Iterable[wire.TokenOutput]) -> dict[IngressLink, list[wire.TokenOutput]]:
        """Outputs of requests that have not been removed, by the link that they go to."""
        batches: dict[IngressLink, list[wire.TokenOutput]] = defaultdict(list)
        for output in outputs:
            if (link := self._links.get(output.request_id)) is not None:
                batches[link].append(output)
        return batches

    def refuse(self, link: IngressLink, request_id: str, reason: str, message: str) -> None:
        """Answer a request that was not added. `reason`: see Refused."""
        after_s = self._retry_after_s()
        link.send(wire.Refused(request_id=request_id, reason=reason, message=message, retry_after_s=after_s))

    def refuse_added(self, request_id: str, reason: str, message: str) -> None:
        """Refuse a request that was added, and remove it."""
        link = self.remove(request_id)
        if link is not None:
            self.refuse(link, request_id, reason, message)

    def fail(self, request_id: str, code: str, message: str, *, retryable: bool = True) -> None:
        """Send Failed, which the ingress may retry unless it would fail again, and remove the request."""
        if (spans := self._spans.get(request_id)) is not None:
            spans.close(message)
        link = self.remove(request_id)
        if link is not None:
            link.send(wire.Failed(request_id=request_id, code=code, message=message, retryable=retryable))

    def _log(self, request_id: str, what: str, **facts: object) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("request %s: %s: %s%s", request_id, self._worker_id, what, with_facts(facts))

    # ---- phases of a request: a log line at DEBUG each, and a span where it is traced

    def is_traced(self, request_id: str) -> bool:
        return request_id in self._spans

    def begin_span(self, request_id: str, name: str, **attributes: Any) -> None:
        self._log(request_id, f"{name} begins", **attributes)
        if (spans := self._spans.get(request_id)) is not None:
            spans.begin(name, **attributes)

    def end_span(self, request_id: str, name: str, **attributes: Any) -> None:
        self._log(request_id, f"{name} ends", **attributes)
        if (spans := self._spans.get(request_id)) is not None:
            spans.end(name, **attributes)

    def trace_output(self, output: wire.TokenOutput) -> None:
        """The spans that end or begin with it: prefill with a first token, decode with the last."""
        spans = self._spans.get(output.request_id)
        if spans is None:
            return
        if spans.has("prefill"):
            timings = output.timings or wire.Timings()
            took: dict[str, Any] = {"queue_s": timings.queue_s, "compute_s": timings.compute_s}
            spans.end("prefill", cached_tokens=output.cached_tokens or 0, chunks=timings.num_chunks, **took)
            if self._sides.get(output.request_id) is Role.DECODE and output.finish_reason is None:
                spans.begin("decode")
        if output.finish_reason is not None and output.ends_request:
            num_tokens = output.position + len(output.token_ids)
            spans.end("decode", output_tokens=num_tokens, finish_reason=output.finish_reason)


class EngineReports:
    """Made on the worker's loop once the engine is there; reports from then on until aclose().

    Args:
        load: the first load report.
        completed: adds to a load report what the engine does not know.
        changes: what else subscribers receive with a heartbeat; None: nothing changed.
    """

    def __init__(
        self,
        thread: EngineThread,
        load: LoadReport,
        *,
        completed: Callable[[LoadReport], LoadReport],
        changes: Callable[[], msgspec.Struct | None],
    ) -> None:
        self._thread, self._load, self._completed, self._changes = thread, load, completed, changes
        self._loop = loop = asyncio.get_running_loop()
        self._links: set[IngressLink] = set()  # connected
        self._subscribers: set[IngressLink] = set()
        self._assigned: AssignedShares[IngressLink] = AssignedShares()
        self._share = Paced(self._send_assigned, wire.SHARE_LOAD_S, now=loop.time, after=loop.call_later)
        self._heartbeat = asyncio.create_task(self._beat(), name="heartbeat")

    async def aclose(self) -> None:
        self._heartbeat.cancel()
        await asyncio.gather(self._heartbeat, return_exceptions=True)

    def load(self) -> LoadReport:
        """The last load report, completed."""
        return self._completed(self._load)

    def retry_after_s(self) -> float:
        """When a refused request may try again: about when today's queue has been computed."""
        return max(1.0, self._load.queued_tokens / max(self._load.prefill_tokens_per_s, 100.0))

    def connect(self, link: IngressLink) -> None:
        """It may subscribe from now on."""
        self._links.add(link)

    def disconnect(self, link: IngressLink) -> None:
        """It receives nothing more, and what it had assigned no longer counts."""
        self._links.discard(link)
        self._subscribers.discard(link)
        link.stop_parts()
        self._assigned.leave(link)
        self._share.request()

    def subscribe(self, link: IngressLink) -> None:
        """Send the snapshot's first part, then events in the engine's order; the other parts come between them."""

        def begin(snapshot: KvSnapshot) -> None:
            if link in self._links:
                parts = parts_of(snapshot)
                link.send(next(parts))
                link.send_parts(parts)
                link.send(self.load())
                self._subscribers.add(link)
                self._assigned.join(link)
                self._share.request()

        def snap(engine: Engine) -> None:
            snapshot = engine.reports.snapshot()
            self._loop.call_soon_threadsafe(begin, snapshot)

        self._subscribers.discard(link)
        self._thread.post(snap)

    def assign(self, link: IngressLink, share: wire.Assigned) -> None:
        """This is what `link` has assigned to the worker now."""
        if self._assigned.hear(link, share):
            self._share.request()

    def publish(self, result: StepResult) -> None:
        """A step's events and load."""
        if result.load is not None:
            self._load = result.load
        if not self._subscribers or not (result.events or result.load):
            return
        load = self.load() if result.load else None
        for link in self._subscribers:
            if result.events is not None:
                link.send(result.events)
            if load is not None:
                link.send(load)

    def send_to_all(self, message: msgspec.Struct) -> None:
        """Send to every connected ingress."""
        for link in self._links:
            link.send(message)

    def announce(self) -> None:
        """Send the load now: what it says of the worker has changed."""
        for link in self._subscribers:
            link.send(self.load())

    def _send_assigned(self) -> None:
        for link, others in self._assigned.take_changes():
            link.send(others)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            changes = self._changes()
            for link in self._subscribers:
                link.send(self.load())
                if changes is not None:
                    link.send(changes)
