"""The ingress's engine: sequences run here on whichever workers are members. Imports no HTTP."""

import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Literal

from kvrelay.config import Settings
from kvrelay.errors import Overloaded
from kvrelay.plane.messages import Prefetched, SequenceRequest, TokenOutput
from kvrelay.router.decision.router import Router
from kvrelay.router.types import Decision, RouteRequest, RoutingRefusal
from kvrelay.serve.requests.job import SloRecord
from kvrelay.serve.requests.request_driver import RequestDriver
from kvrelay.serve.requests.retries import error_of_refusal
from kvrelay.serve.telemetry.explain import Explain
from kvrelay.serve.telemetry.observer import RequestArrival, RequestLog, RequestObserver, ServeStats
from kvrelay.serve.workers.membership import Membership, Placer
from kvrelay.serve.workers.queries import RETRY_AFTER_FULL_S, Queries
from kvrelay.serve.workers.worker_link import Links, Submissions

Force = Literal["local", "remote"] | None


class Dispatcher:
    """The parts of one ingress below HTTP, put together. Lives on one event loop."""

    def __init__(
        self, router: Router, secret: bytes, settings: Settings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.router, self.settings, self.clock = router, settings, clock
        self.tokens_per_hash = settings.tokens_per_hash
        self.stats, self.requests = ServeStats(), RequestLog()
        self.links = Links()
        self.queries = Queries(self.links, max_open=settings.router.max_inflight)
        self.placer = Placer(router, self.links, clock, share_load_s=settings.router.share_load_s)
        self.submissions = Submissions(self.links)
        self.workers = Membership(
            settings, secret, router, self.links, self.placer, self.submissions, self.queries, clock
        )

    async def start(self) -> None:
        """Connect to the members, now and as they come."""
        await self.workers.start()

    async def aclose(self) -> None:
        """Drop every connection; sequences that still run fail with WorkerLost."""
        await self.workers.aclose()

    def open(
        self,
        request: SequenceRequest,
        *,
        force: Force = None,
        explain: Explain | None = None,
        arrival: RequestArrival | None = None,
        slo: SloRecord | None = None,
    ) -> RequestDriver:
        """Admit one sequence, or a group; iterate over its `tokens`. Raises Overloaded when too many run."""
        limit = self.settings.router.max_inflight
        if self.stats.running + request.num_sequences > limit:
            self.stats.outcomes["overloaded"] += 1
            error = Overloaded(f"{limit} sequences are in flight already", RETRY_AFTER_FULL_S)
            record = self.requests.begin(request, self.clock(), arrival)
            self.requests.failed(record, error)
            self.requests.end(record, "overloaded", self.clock())
            raise error
        observer = RequestObserver(self.stats, self.requests, request, self.clock, explain=explain, arrival=arrival)
        return RequestDriver(
            request,
            settings=self.settings,
            placer=self.placer,
            submissions=self.submissions,
            observer=observer,
            force=force,
            slo=slo,
        )

    async def generate(
        self, request: SequenceRequest, *, force: Force = None, explain: Explain | None = None
    ) -> AsyncGenerator[TokenOutput, None]:
        """One sequence's tokens, as RequestDriver.tokens."""
        async with contextlib.aclosing(self.open(request, force=force, explain=explain).tokens()) as outputs:
            async for output in outputs:
                yield output

    async def prefetch(
        self, request: SequenceRequest, hold_s: float, *, force: Force = None, timeout_s: float = 10.0
    ) -> tuple[str, Prefetched]:
        """Have the worker that would now compute this prompt load its blocks from lower tiers; (worker, its answer).

        Raises Overloaded, InvalidRequest, RequestError (503), WorkerLost.
        """
        self.queries.check_room()
        max_tokens = request.sampling.max_tokens
        query = RouteRequest(
            request.request_id,
            tuple(request.block_hashes),
            len(request.token_ids),
            max_tokens,
            max_tokens > 1,
            force=force,
        )
        choice = self.placer.place(query)
        self.router.on_end(request.request_id)  # nothing is computed: it counts as no worker's load
        if isinstance(choice, RoutingRefusal):
            raise error_of_refusal(choice)
        assert isinstance(choice, Decision), "a prefetch is never deferred"
        worker_id = choice.prefill or choice.decode
        assert worker_id is not None
        return worker_id, await self.queries.prefetch(worker_id, request, hold_s, timeout_s=timeout_s)
