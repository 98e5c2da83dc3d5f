"""Which workers this ingress works with, and where it places each sequence.

`Placer` asks the router, keeps deferred requests waiting, and shares what it assigned with other ingresses.
`Membership` connects to members, checks that they fit, and routes their messages. Imports no HTTP.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from kvrelay.config import Settings
from kvrelay.errors import ConnectionLost
from kvrelay.pacing import Paced
from kvrelay.plane import messages as wire
from kvrelay.plane.reports import AssignedByOthers, KvEvents, KvSnapshot, LoadReport, Paired, PairsSeen, WorkerInfo
from kvrelay.plane.tls import cluster_tls
from kvrelay.router.decision.router import Router
from kvrelay.router.types import Decision, Deferred, RouteRequest, RoutingRefusal
from kvrelay.serve.workers.liveness import LivenessWatch
from kvrelay.serve.workers.pairs import PairWatch
from kvrelay.serve.workers.queries import IndexAudits, Queries, QueryAnswer
from kvrelay.serve.workers.worker_link import LinkEvents, Links, Member, WorkerLink
from kvrelay.types import Role, sides

logger = logging.getLogger(__name__)

RETRY_AFTER_BLOCKED_S = 1.0
_SAME_SETTINGS = "start every worker and ingress with the same settings"


def _call_later(delay_s: float, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(delay_s, call)


class Placer:
    """Asks the router for workers, and wakes deferred requests when their turn comes."""

    def __init__(self, router: Router, links: Links, clock: Callable[[], float]) -> None:
        self._router, self._links, self._clock = router, links, clock
        self._turns: dict[str, asyncio.Future[None]] = {}  # of deferred requests
        self._sharing = Paced(self._share_assigned, wire.SHARE_LOAD_S, now=clock, after=_call_later)
        self._has_other_ingresses = False
        self.blocked: str | None = None  # why KV can travel between no two workers: then nothing is placed

    def place(self, request: RouteRequest) -> Decision | RoutingRefusal | Deferred:
        """Choose workers and count the request as theirs. After Deferred: `turn`, then ask again."""
        if self.blocked is not None:
            self.ended(request.request_id)
            return RoutingRefusal("incompatible", self.blocked, RETRY_AFTER_BLOCKED_S)
        self._turns.pop(request.request_id, None)
        choice = self._router.select_and_reserve(request, self._clock())
        if isinstance(choice, Deferred):
            self._turns[request.request_id] = asyncio.get_running_loop().create_future()
        self.load_changed()
        return choice

    async def turn(self, request_id: str, longest_s: float) -> None:
        """Wait until a deferred request may be placed, at most `longest_s`: then `place` refuses it. A caller that is
        cancelled meanwhile loses its turn.
        """
        try:
            await asyncio.wait([self._turns[request_id]], timeout=longest_s)
        except BaseException:
            self.ended(request_id)
            raise

    # ---- placed requests

    def prefill_tokens_per_s(self, worker_id: str) -> float:
        """Measured prefill speed of a worker; 0: not known."""
        return self._router.prefill_tokens_per_s(worker_id)

    def first_token(self, request_id: str, output: wire.TokenOutput, now_s: float) -> None:
        """The prompt is computed: its tokens no longer queue anywhere."""
        self._router.on_first_token(request_id, now_s, timings=output.timings, cached_tokens=output.cached_tokens or 0)
        self.load_changed()

    def narrowed(self, request_id: str, num_sequences: int) -> None:
        """Only so many sequences of a group still run."""
        self._router.on_narrowed(request_id, num_sequences)
        self.load_changed()

    def finished(self, request_id: str, num_tokens: int, tpot_s: float, now_s: float) -> None:
        """The request ran to its own end on these workers; the forecast learns from it. `ended` must follow."""
        self._router.on_finished(request_id, num_tokens, tpot_s, now_s)

    def ended(self, request_id: str) -> None:
        """Nothing is counted for the request any more, and it is not deferred. Idempotent."""
        self._turns.pop(request_id, None)
        self._router.on_end(request_id)
        self.load_changed()

    # ---- deferral and load sharing

    def wake_deferred(self) -> None:
        """Call after anything that may let a deferred request go: load, a first token, an end, a worker up or down."""
        while (request_id := self._router.take_ready()) is not None:
            turn = self._turns[request_id]
            if not turn.done():
                turn.set_result(None)

    def load_changed(self) -> None:
        """What the router counts at some worker has changed."""
        self.wake_deferred()
        if self._has_other_ingresses:
            self._sharing.request()

    def apply_others(self, worker_id: str, others: AssignedByOthers) -> None:
        """What other ingresses have assigned to a worker."""
        self._has_other_ingresses |= others.num_others > 0
        self._router.apply_others(worker_id, others)
        self.load_changed()

    def _share_assigned(self) -> None:
        for worker_id, assigned in self._router.take_assigned():
            with contextlib.suppress(ConnectionLost):
                self._links.send(worker_id, assigned)


class Membership:
    """The members, their links and pairs. 18 attributes: most are the parts that get what the links deliver."""

    def __init__(
        self,
        settings: Settings,
        secret: bytes,
        router: Router,
        links: Links,
        placer: Placer,
        queries: Queries,
        clock: Callable[[], float],
        on_draining: Callable[[str], None] = lambda worker_id: None,
    ) -> None:
        """The router, the placer and the queries get what the links deliver.

        on_draining: called with a worker that takes no new sequences to decode, perhaps several times.
        """
        self._on_draining = on_draining
        self._settings, self._secret, self._clock = settings, secret, clock
        self._router, self._links, self._placer = router, links, placer
        self._queries = queries
        self._tls = cluster_tls(settings.cluster, secret)
        self._events = LinkEvents(self._accept, self._lost, self._deliver, links.holds)
        self._changed = asyncio.Event()
        self.warming: dict[str, tuple[Member, float]] = {}  # and since when this ingress knows of it
        self._is_open = False
        self._tasks: list[asyncio.Task[None]] = []
        self.pairs = PairWatch(links.send, self._pairs_changed, clock)
        self.audits = IndexAudits(router.index, links, queries)
        self._liveness = LivenessWatch(links, router, placer.wake_deferred)

    async def start(self) -> None:
        """Connect to the members, now and as they come."""
        self._is_open = True
        watches = self.pairs, self.audits, self._liveness
        self._tasks = [asyncio.create_task(watch.run()) for watch in watches]
        for link in self._links.members():
            link.start()

    async def aclose(self) -> None:
        """Drop every connection; sequences that still run fail with WorkerLost."""
        self._is_open = False
        links = self._links.take_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(link.aclose() for link in links))

    def set_members(self, members: Sequence[Member]) -> None:
        """Connect to new members. Former ones get no new sequences, and are dropped once they hold none. A member
        without a port is warming: it is only shown.
        """
        coming, now_s = [member for member in members if not member.port], self._clock()
        self.warming = {one.worker_id: self.warming.get(one.worker_id, (one, now_s)) for one in coming}
        listed = {member.worker_id: member for member in members if member.port}
        for link in self._links.members():
            if listed.get(link.worker_id) != link.member:
                self._retire(link)
        for worker_id, member in listed.items():
            if self._links.get(worker_id) is None:
                link = WorkerLink(member, self._secret, self._events, tls=self._tls)
                self._links.add(link)
                if self._is_open:
                    link.start()

    def _retire(self, link: WorkerLink) -> None:
        self._links.retire(link)
        if self._is_open:
            link.retire()
        self._router.worker_down(link.worker_id)
        self.pairs.book.worker_down(link.worker_id)
        self.pairs.notify()
        self._on_draining(link.worker_id)

    # ---- workers

    def live_workers(self) -> list[tuple[WorkerInfo, LoadReport]]:
        """Every connected member and its last load report."""
        empty = LoadReport(seq=0)
        return [(link.info, link.load or empty) for link in self._links.members() if link.info is not None]

    @property
    def losses(self) -> Counter[str]:
        """Connections lost to workers that were still members, by role."""
        return self._links.losses

    def all_links(self) -> list[tuple[WorkerLink, bool]]:
        """Every member's link, connected or not, and those of former members that are still up: (link, is retired)."""
        return [(link, False) for link in self._links.members()] + [(link, True) for link in self._links.retired()]

    def max_model_len(self) -> int | None:
        """The longest sequence that every connected worker can hold, tokens; None without workers."""
        return min((info.max_model_len for info, _ in self.live_workers()), default=None)

    def max_group(self) -> int:
        """Sequences that every connected worker can run at once."""
        return min((info.max_running for info, _ in self.live_workers()), default=1 << 16)

    def is_ready(self) -> bool:
        """Whether a decode worker is connected (one can serve alone), and KV can travel to it from prefill workers."""
        return any(Role.DECODE in sides(info.role) for info, _ in self.live_workers()) and self._placer.blocked is None

    async def wait_for(self, condition: Callable[["Membership"], bool]) -> None:
        """Wait until `condition` holds; it is checked whenever a worker comes or goes."""
        while not condition(self):
            self._changed.clear()
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._placer.wake_deferred()

    def _pairs_changed(self) -> None:
        self._placer.blocked = self.pairs.book.blocked()
        self._router.set_incompatible_pairs(self.pairs.book.incompatible_pairs())
        self._notify()

    # ---- what links report

    def _accept(self, link: WorkerLink, info: WorkerInfo) -> str | None:
        """Take a worker, unless it cannot work with this ingress or with the workers that are here."""
        if (why := self._why_not(info)) is not None:
            if self._links.is_member(link):
                self.pairs.book.reject(info, why)
                self.pairs.notify()
            return why
        if self._links.is_member(link):
            self._router.worker_up(info)
            self.pairs.book.worker_up(info, self._clock())
            self.pairs.notify()
        logger.info("worker %s (%s) is up", info.worker_id, info.role)
        asyncio.get_running_loop().call_soon(self._notify)
        return None

    def _why_not(self, info: WorkerInfo) -> str | None:
        step = self._settings.tokens_per_hash
        if info.block_size % step:
            blocks = f"its blocks have {info.block_size} tokens, but prompts are hashed by {step}"
            return f"block_size: {blocks}: {_SAME_SETTINGS}"
        for other, _ in self.live_workers():  # workers of different roles compare each other: see pairs.py
            convert_dtype = self._settings.transfer.convert_dtype
            difference = info.fingerprint.incompatibility(other.fingerprint, convert_dtype=convert_dtype)
            if difference and other.role == info.role:
                return f"{difference} of worker {other.worker_id}: {difference.remedy}"
        return None

    def _lost(self, link: WorkerLink, why: str) -> None:
        """All that the worker held is lost."""
        logger.info("worker %s is gone: %s", link.worker_id, why)
        if self._links.get(link.worker_id) in (link, None):
            self._router.worker_down(link.worker_id)
            self.pairs.book.worker_down(link.worker_id)
            self.pairs.notify()
        self._links.link_lost(link, why)
        self._queries.link_lost(link, why)
        self._notify()

    def _deliver(self, link: WorkerLink, message: wire.FromWorker) -> None:
        """Pass a worker's message on to the part that it concerns."""
        worker_id = link.worker_id
        if isinstance(message, wire.Tokens):
            deliver = self._links.deliver
            for output in message.outputs:
                deliver(worker_id, output)
        elif isinstance(message, wire.Reserved | wire.Refused | wire.Failed | wire.Transferred):
            self._links.deliver(worker_id, message)
        elif isinstance(message, QueryAnswer):
            self._queries.answered(link, message)
        elif self._links.is_member(link):
            self._deliver_event(link, message)
        elif isinstance(message, LoadReport):
            link.load = message

    def _deliver_event(self, link: WorkerLink, message: wire.FromWorker) -> None:
        if isinstance(message, LoadReport):
            link.load = message
            self._router.apply_load(link.worker_id, message, self._clock())
            self._placer.wake_deferred()
            if message.is_draining:
                self._on_draining(link.worker_id)
        elif isinstance(message, wire.RoleNow) and link.info is not None:
            link.info = msgspec.structs.replace(link.info, role=message.role)
            self._router.role_changed(link.worker_id, message.role)
            self.pairs.book.role_changed(link.info, self._clock())
            self.pairs.notify()
            if Role.DECODE not in sides(message.role):
                self._on_draining(link.worker_id)
        elif isinstance(message, AssignedByOthers):
            self._placer.apply_others(link.worker_id, message)
        elif isinstance(message, KvEvents):
            if not self._router.apply_events(link.worker_id, message):
                link.send(wire.Subscribe())
        elif isinstance(message, KvSnapshot):
            if not self._router.apply_snapshot(link.worker_id, message):
                link.send(wire.Subscribe())
        elif isinstance(message, Paired):
            self.pairs.answered(message.report)
        elif isinstance(message, PairsSeen):
            for report in message.reports:
                self.pairs.book.seen(report)
