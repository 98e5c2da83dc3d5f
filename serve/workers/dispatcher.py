"""The ingress's side of the request plane: links to the workers, and the sequences that run there.

Owns which worker is connected, which attempt a message belongs to, and the admission limit. One
sequence's life is sequence_life.py; the choice of workers is the router's. Imports no HTTP.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvrelay.config import Settings
from kvrelay.errors import ConnectionLost, Overloaded, WorkerLost
from kvrelay.pacing import Paced
from kvrelay.plane import messages as wire
from kvrelay.plane.messages import SequenceRequest, TokenOutput
from kvrelay.plane.tls import cluster_tls
from kvrelay.router.decision.router import Router
from kvrelay.router.types import Decision, Deferred, Refusal, RouteRequest
from kvrelay.serve.requests.attempt import Attempt, WorkerGone
from kvrelay.serve.requests.refusals import error_of_refusal
from kvrelay.serve.requests.request_driver import SequenceLife, num_sequences
from kvrelay.serve.requests.slo import SloRecord
from kvrelay.serve.telemetry.explain import Explain
from kvrelay.serve.telemetry.request_log import Arrival, RequestLog
from kvrelay.serve.telemetry.stats import ServeStats
from kvrelay.serve.workers.audits import AuditWatch
from kvrelay.serve.workers.pairs import PairWatch
from kvrelay.serve.workers.snapshot_slices import Intake
from kvrelay.serve.workers.worker_link import Member, WorkerLink

__all__ = ["Dispatcher", "Member"]

logger = logging.getLogger(__name__)

Force = Literal["local", "remote"] | None
Answer = wire.Status | wire.Prefetched | wire.Audited
RETRY_AFTER_FULL_S = 1.0
_SAME_SETTINGS = "start every worker and ingress with the same settings"


def _later(delay_s: float, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(delay_s, call)


@dataclass(frozen=True, slots=True)
class _Query:
    """A question to a worker, and the link it went over."""

    link: WorkerLink
    answer: asyncio.Future[Answer]


class Dispatcher:
    """Runs sequences on whichever workers are members. Lives on one event loop."""

    def __init__(
        self, router: Router, secret: bytes, settings: Settings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.router, self.settings, self.clock = router, settings, clock
        self.stats, self.requests = ServeStats(), RequestLog()
        self._secret, self._tls = secret, cluster_tls(settings.cluster, secret)
        self._links: dict[str, WorkerLink] = {}
        self._retired: set[WorkerLink] = set()
        self._attempts: dict[str, Attempt] = {}
        self._turns: dict[str, asyncio.Future[None]] = {}  # of requests that the router has deferred
        self._queries: dict[int, _Query] = {}
        self._query_ids = itertools.count(1)
        self._changed = asyncio.Event()
        self._is_open = self._has_others = False
        self._sharing = Paced(self._tell_assigned, settings.router.share_load_s, now=clock, after=_later)
        self.pairs = PairWatch(self.send, self._on_pairs, clock)
        self._blocked: str | None = None
        self._intake = Intake(router.index)
        self._audits = AuditWatch(
            router.index, lambda: list(self._links), self.audit, self._resync, settings.router.audit_s
        )

    # ---- life and membership

    async def start(self) -> None:
        """From now on members are connected to."""
        self._is_open = True
        self.pairs.start()
        self._audits.start()
        for link in self._links.values():
            link.start()

    async def aclose(self) -> None:
        """Drop every connection; sequences that still run fail with WorkerLost."""
        self._is_open = False
        links = [*self._links.values(), *self._retired]
        self._links, self._retired = {}, set()
        await self.pairs.aclose()
        await self._audits.aclose()
        await asyncio.gather(*(link.aclose() for link in links))

    def set_members(self, members: Sequence[Member]) -> None:
        """Connect to the new ones; the vanished get no new work and are dropped when they hold none."""
        listed = {member.worker_id: member for member in members}
        for worker_id, link in list(self._links.items()):
            if listed.get(worker_id) != link.member:
                self._retire(self._links.pop(worker_id))
        for worker_id, member in listed.items():
            if worker_id not in self._links:
                link = self._links[worker_id] = WorkerLink(member, self._secret, self, tls=self._tls)
                if self._is_open:
                    link.start()

    def _retire(self, link: WorkerLink) -> None:
        if self._is_open:
            self._retired = {known for known in self._retired if known.is_up}
            self._retired.add(link)
            link.retire()
        self.router.worker_down(link.worker_id)
        self.pairs.worker_down(link.worker_id)
        self._notify()

    def live_workers(self) -> list[tuple[wire.WorkerInfo, wire.LoadReport]]:
        """Every connected member and its last load report."""
        empty = wire.LoadReport(seq=0)
        return [(link.info, link.load or empty) for link in self._links.values() if link.info is not None]

    def links(self) -> list[tuple[WorkerLink, bool]]:
        """Every member, connected or not, and who is no longer listed but still holds something: (link, is leaving)."""
        return [(link, False) for link in self._links.values()] + [(link, True) for link in self._retired if link.is_up]

    def max_model_len(self) -> int | None:
        """The longest sequence that every connected worker can hold, tokens; None without workers."""
        return min((info.max_model_len for info, _ in self.live_workers()), default=None)

    def is_ready(self) -> bool:
        """Whether a decode worker is connected (one can serve alone) that is not cut off from every prefill worker."""
        return any(info.role == "decode" for info, _ in self.live_workers()) and self._blocked is None

    async def wait_for(self, condition: Callable[["Dispatcher"], bool]) -> None:
        """Wait until `condition` holds; looked at whenever a worker comes or goes."""
        while not condition(self):
            self._changed.clear()
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._call_deferred()

    def _on_pairs(self) -> None:
        self._blocked = self.pairs.book.blocked()
        self.router.set_incompatible_pairs(self.pairs.book.incompatible_pairs())
        self._notify()

    # ---- LinkOwner

    def link_up(self, link: WorkerLink, info: wire.WorkerInfo) -> str | None:
        """Take a worker, unless it cannot work with us or with those who are here."""
        if (why := self._why_not(info)) is not None:
            if self._links.get(link.worker_id) is link:
                self.pairs.turn_away(info, why)
            return why
        if self._links.get(link.worker_id) is link:
            self.router.worker_up(info)
            self.pairs.worker_up(info)
        logger.info("worker %s (%s) is up", info.worker_id, info.role)
        asyncio.get_running_loop().call_soon(self._notify)
        return None

    def _why_not(self, info: wire.WorkerInfo) -> str | None:
        step = self.settings.tokens_per_hash
        if info.block_size % step:
            return f"block_size: its blocks have {info.block_size} tokens, but prompts are hashed by {step}: {_SAME_SETTINGS}"
        for other, _ in self.live_workers():  # whether the two roles fit each other, they find out: see pairs.py
            convert_dtype = self.settings.transfer.convert_dtype
            difference = info.fingerprint.incompatibility(other.fingerprint, convert_dtype=convert_dtype)
            if difference and other.role == info.role:
                return f"{difference} of worker {other.worker_id}: {difference.remedy}"
        return None

    def link_down(self, link: WorkerLink, why: str) -> None:
        """Everything that the worker held is lost."""
        logger.info("worker %s is gone: %s", link.worker_id, why)
        self._retired.discard(link)
        if self._links.get(link.worker_id, link) is link:
            self.router.worker_down(link.worker_id)
            self.pairs.worker_down(link.worker_id)
        for attempt in list(self._attempts.values()):
            if attempt.holders.get(link.worker_id) is link:
                attempt.inbox.put((link.worker_id, WorkerGone(why)))
        for query in self._queries.values():
            if query.link is link and not query.answer.done():
                query.answer.set_exception(ConnectionLost(why))
        self._notify()

    def holds(self, link: WorkerLink) -> bool:
        return any(attempt.holders.get(link.worker_id) is link for attempt in self._attempts.values())

    def deliver(self, link: WorkerLink, message: wire.FromWorker) -> None:
        """Hand a worker's message to whom it concerns; what nobody waits for any more is dropped."""
        worker_id = link.worker_id
        if isinstance(message, wire.Tokens):
            attempts = self._attempts
            for output in message.outputs:
                attempt = attempts.get(output.request_id)
                if attempt is not None:
                    attempt.inbox.put((worker_id, output))
        elif isinstance(message, wire.Reserved | wire.Refused | wire.Failed | wire.Transferred):
            attempt = self._attempts.get(message.request_id)
            if attempt is not None:
                attempt.inbox.put((worker_id, message))
        elif isinstance(message, Answer):
            query = self._queries.get(message.query_id)
            if query is not None and query.link is link and not query.answer.done():
                query.answer.set_result(message)
        elif self._links.get(worker_id) is link:
            self._deliver_event(link, message)

    def _deliver_event(self, link: WorkerLink, message: wire.FromWorker) -> None:
        if isinstance(message, wire.LoadReport):
            link.load = message
            self.router.apply_load(link.worker_id, message, self.clock())
            self._call_deferred()
        elif isinstance(message, wire.AssignedByOthers):
            if self.settings.router.share_load_s:
                self._has_others |= message.num_others > 0
                self.router.apply_others(link.worker_id, message)
                self.load_changed()
        elif isinstance(message, wire.KvEvents):
            if not self.router.apply_events(link.worker_id, message):
                link.send(wire.Subscribe())
        elif isinstance(message, wire.KvSnapshot):
            if not self.router.apply_snapshot(link.worker_id, message):
                link.send(wire.Subscribe())
        elif isinstance(message, wire.Paired):
            self.pairs.answered(message.report)
        elif isinstance(message, wire.PairsSeen):
            for report in message.reports:
                self.pairs.book.seen(report)

    # ---- other ingresses

    def load_changed(self) -> None:
        """What the router counts at some worker is not what it was: whoever it has deferred may go, and other ingresses are to hear of it."""
        self._call_deferred()
        if self.settings.router.share_load_s and self._has_others:
            self._sharing.ask()

    def _tell_assigned(self) -> None:
        for worker_id, assigned in self.router.take_assigned():
            with contextlib.suppress(ConnectionLost):
                self.send(worker_id, assigned)

    # ---- questions to workers

    async def status(self, worker_id: str, *, timeout_s: float = 5.0) -> bytes:
        """A worker's own account of its state, JSON. Raises WorkerLost."""
        query_id = next(self._query_ids)
        return await self._ask_status(worker_id, wire.StatusQuery(query_id=query_id), query_id, timeout_s)

    async def reset_cache(self, worker_id: str, *, timeout_s: float = 5.0) -> bytes:
        """Make a worker forget its unused cached blocks; answers its state. Raises WorkerLost."""
        query_id = next(self._query_ids)
        return await self._ask_status(worker_id, wire.CacheReset(query_id=query_id), query_id, timeout_s)

    async def prefetch(
        self, request: SequenceRequest, hold_s: float, *, force: Force = None, timeout_s: float = 10.0
    ) -> tuple[str, wire.Prefetched]:
        """Have the worker that would compute this prompt now bring what it can of its KV nearer; (worker, its answer).

        Raises Overloaded, InvalidRequest, RequestError (503), WorkerLost.
        """
        if len(self._queries) >= self.settings.router.max_inflight:
            raise Overloaded("too many questions to workers are open already", RETRY_AFTER_FULL_S)
        max_tokens = request.sampling.max_tokens
        query = RouteRequest(
            request.request_id, tuple(request.block_hashes), len(request.token_ids), max_tokens, max_tokens > 1,
            force=force,
        )  # fmt: skip
        choice = self.route(query)
        self.router.on_end(request.request_id)  # it computes nothing: it counts as nobody's load
        if isinstance(choice, Refusal):
            raise error_of_refusal(choice)
        assert isinstance(choice, Decision), "it may not wait"
        worker_id = choice.prefill or choice.decode
        assert worker_id is not None
        query_id = next(self._query_ids)
        message = wire.Prefetch(query_id=query_id, request=request, hold_s=hold_s)
        answer = await self._ask(worker_id, message, query_id, timeout_s)
        if not isinstance(answer, wire.Prefetched):
            raise WorkerLost(worker_id, "it answered something else")
        return worker_id, answer

    async def audit(self, worker_id: str, hashes: list[bytes], *, timeout_s: float = 5.0) -> wire.Audited:
        """Where a worker has these blocks. Raises WorkerLost."""
        query_id = next(self._query_ids)
        answer = await self._ask(worker_id, wire.Audit(query_id=query_id, hashes=hashes), query_id, timeout_s)
        if not isinstance(answer, wire.Audited):
            raise WorkerLost(worker_id, "it answered something else")
        return answer

    def _resync(self, worker_id: str) -> None:
        """Have it send all that it holds; one that is not connected does when it is."""
        with contextlib.suppress(ConnectionLost):
            self.send(worker_id, wire.Subscribe())

    def tell_all(self, message: wire.ToWorker) -> None:
        """Send to every connected worker."""
        for link in [*self._links.values(), *self._retired]:
            if link.is_up:
                with contextlib.suppress(ConnectionLost):
                    link.send(message)

    async def _ask_status(self, worker_id: str, message: wire.ToWorker, query_id: int, timeout_s: float) -> bytes:
        answer = await self._ask(worker_id, message, query_id, timeout_s)
        if not isinstance(answer, wire.Status):
            raise WorkerLost(worker_id, "it answered something else")
        return answer.json

    async def _ask(self, worker_id: str, message: wire.ToWorker, query_id: int, timeout_s: float) -> Answer:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        try:
            self._queries[query_id] = _Query(self.send(worker_id, message), answer)
            async with asyncio.timeout(timeout_s):
                return await answer
        except (ConnectionLost, TimeoutError) as error:
            raise WorkerLost(worker_id, str(error) or "it did not answer") from error
        finally:
            self._queries.pop(query_id, None)

    # ---- sequences

    def open(
        self,
        request: SequenceRequest,
        *,
        force: Force = None,
        explain: Explain | None = None,
        arrival: Arrival | None = None,
        slo: SloRecord | None = None,
    ) -> SequenceLife:
        """Admit one sequence, or a group; `close` it in a `finally`. Raises Overloaded when too many run."""
        limit = self.settings.router.max_inflight
        if self.stats.running + num_sequences(request) > limit:
            self.stats.outcomes["overloaded"] += 1
            error = Overloaded(f"{limit} sequences are in flight already", RETRY_AFTER_FULL_S)
            self.requests.refuse(request, error, "overloaded", self.clock(), arrival)
            raise error
        return SequenceLife(self, request, force=force, explain=explain, arrival=arrival, slo=slo)

    async def generate(
        self, request: SequenceRequest, *, force: Force = None, explain: Explain | None = None
    ) -> AsyncGenerator[TokenOutput, None]:
        """One sequence's tokens, in order, each once. Close the generator to abort.

        Raises: Overloaded, InvalidRequest, RequestError (503, 504), WorkerLost, EngineFailed.
        """
        life = self.open(request, force=force, explain=explain)
        try:
            while (output := await life.next()) is not None:
                yield output
        finally:
            life.close("client")

    # ---- for SequenceLife

    def route(self, request: RouteRequest) -> Decision | Refusal | Deferred:
        if self._blocked is not None:
            self.give_up(request.request_id)
            return Refusal("incompatible", self._blocked, RETRY_AFTER_FULL_S)
        self._turns.pop(request.request_id, None)
        choice = self.router.select_and_reserve(request, self.clock())
        if isinstance(choice, Deferred):  # its turn may come with the next line
            self._turns[request.request_id] = asyncio.get_running_loop().create_future()
        self.load_changed()
        return choice

    def turn_of(self, request_id: str) -> asyncio.Future[None]:
        """Of a request that the router has deferred: done when its turn has come. `give_up`, or `route` it again."""
        return self._turns[request_id]

    def give_up(self, request_id: str) -> None:
        """It waits for its turn no more, or does not take it."""
        if (turn := self._turns.pop(request_id, None)) is not None:
            turn.cancel()
        self.router.on_end(request_id)
        self._call_deferred()

    def _call_deferred(self) -> None:
        while (request_id := self.router.take_ready()) is not None:
            turn = self._turns[request_id]
            if not turn.done():
                turn.set_result(None)

    def attach(self, attempt: Attempt) -> None:
        self._attempts[attempt.id] = attempt

    def detach(self, attempt: Attempt, reason: str) -> None:
        """The one release path: whoever may still hold something is told to let go."""
        if self._attempts.pop(attempt.id, None) is None:
            return
        self.router.on_end(attempt.id)
        self.load_changed()
        for link in attempt.holders.values():
            try:
                link.send(wire.Abort(request_id=attempt.id, reason=reason))
            except ConnectionLost:
                logger.debug("request %s: worker %s is gone, nothing to abort", attempt.id, link.worker_id)

    def abort_choice(self, attempt: Attempt, choice: int) -> None:
        """Whoever computes this choice may stop."""
        for link in attempt.holders.values():
            with contextlib.suppress(ConnectionLost):  # then there is nobody who computes it
                link.send(wire.Abort(request_id=attempt.id, choice=choice))

    def max_group(self) -> int:
        """Sequences that every worker can run at once."""
        return min((info.max_running for info, _ in self.live_workers()), default=1 << 16)

    def send(self, worker_id: str, message: wire.ToWorker) -> WorkerLink:
        """Returns the link it went over. Raises ConnectionLost when the worker is not connected."""
        link = self._links.get(worker_id)
        if link is None or not link.is_up:
            link = next((old for old in self._retired if old.worker_id == worker_id and old.is_up), link)
        if link is None:
            raise ConnectionLost("it is not a member")
        link.send(message)
        return link
