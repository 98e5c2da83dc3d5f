"""The router: one synchronous call chooses workers for a request and counts it as their load.

Owns the prefix index and the ledger of assigned requests. The choice is the policy's best candidate (see policies/) or,
under an SLO, the cheapest that is predicted to meet it (see slo/). Pure: the caller passes the time. Never imports
torch, Ray, sockets, a clock or a random source. Not thread-safe. The caller limits how many requests are in flight
(settings.max_inflight).
"""

from dataclasses import replace
from functools import cache, partial

import numpy as np

from kvrelay.plane.messages import Assigned, Timings
from kvrelay.plane.reports import AssignedByOthers, KvEvents, KvSnapshot, LoadReport, WorkerInfo
from kvrelay.router.decision.deferral import Deferral, ExpectedWait, compute_tokens
from kvrelay.router.decision.deferral_queue import DeferralQueue
from kvrelay.router.decision.snapshot import MIN_RETRY_S, PrefixPopularity, RoutingSnapshot, SnapshotTaker, workers_of
from kvrelay.router.fleet.ledger import Assignment, IncompatiblePairs, Ledger, LiveWorkers
from kvrelay.router.index.indexed_worker import Schedule
from kvrelay.router.index.prefix_index import PrefixIndex
from kvrelay.router.policies.base import CostModel, RoutingPolicy, WorkerTable
from kvrelay.router.policies.selection import build_policy
from kvrelay.router.slo.admission import choose_candidate, refusal_message
from kvrelay.router.slo.forecast import Forecast
from kvrelay.router.types import Decision, Deferred, Prediction, Ranking, RouteRequest, RoutingRefusal, WorkerView
from kvrelay.settings.router import RouterSettings, SloSettings
from kvrelay.types import MAX_WAITING, Role

HASHES_PER_BLOCK = 16
"""Hashes per block of its pool (lower tiers included) that a worker may announce before its index is DEGRADED."""
SPARE_SHARE = 0.5
"""Share of the workers for prompts that must be idle for one to compute a prompt that will be late in any case."""
_SMOOTHING = 0.2


class Router:
    """Chooses workers and counts what was assigned to them.

    Every `Decision`, and every `Deferred`, must be followed, however the request ends, by one `on_end`.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        tokens_per_hash: int,
        max_waiting: int = MAX_WAITING,
        model: CostModel | None = None,
        slo: SloSettings | None = None,
        policy: RoutingPolicy | None = None,
        has_store: bool = False,
        schedule: Schedule | None = None,
    ) -> None:
        """Raises ConfigError if the settings name no policy.

        Args:
            tokens_per_hash: divides every worker's block size; requests have one hash for so many tokens.
            max_waiting: sequences queued at a worker beyond which it gets no more (the engine's own limit).
            slo: latencies are predicted and learned if it sets any target.
            policy: used instead of the one that the settings name.
            has_store: workers also write KV to a store of the cluster, from where all can load it.
            schedule: runs the index's long work in slices; None: at once.
        """
        self._tokens_per_hash = tokens_per_hash
        model = replace(model or CostModel(), local_prefill_tokens=settings.local_prefill_tokens)
        self.index = PrefixIndex(schedule=schedule)  # for audits and metrics; messages go through the calls below
        self._popularity = PrefixPopularity()
        self._workers, self._ledger = LiveWorkers(model, self.index.row), Ledger()
        self.forecast = Forecast() if slo is not None and slo.is_on else None
        self._snapshots = SnapshotTaker(
            self._workers,
            self.index,
            self._ledger,
            self._popularity,
            policy or build_policy(settings, model),
            model,
            tokens_per_hash=tokens_per_hash,
            max_waiting=max_waiting,
            has_store=has_store,
        )
        self._queue = DeferralQueue()
        self._wait = ExpectedWait(self._queue, self._workers, self._ledger, settings.max_queue_s)
        self._deferral = Deferral(self._queue, self._choose, self._workers, self._ledger, self._wait)
        self.prediction_error_s = 0.0  # moving average of observed minus predicted TTFT

    @property
    def num_deferred(self) -> int:
        return len(self._queue.waiting)

    # ---- messages of workers

    def worker_up(self, info: WorkerInfo) -> None:
        """A worker connected: new, restarted (new epoch: starts empty), or reconnected (its index is STALE)."""
        if not self._workers.up(info):
            self.index.mark_stale(info.worker_id)
            return
        if self.forecast is not None:
            self.forecast.worker_up(info)
        stride, rest = divmod(info.block_size, self._tokens_per_hash)
        assert not rest, f"blocks of {info.block_size} tokens have no hashes of every {self._tokens_per_hash}"
        self.index.add_worker(info.worker_id, max_blocks=HASHES_PER_BLOCK * info.num_blocks, stride=stride)

    def role_changed(self, worker_id: str, role: str) -> None:
        """A live worker has another role: what it holds and what was assigned to it still count."""
        self._workers.role_changed(worker_id, role)

    def worker_down(self, worker_id: str) -> None:
        """Forget a worker. The load of its requests is counted nowhere, and their `on_end` changes nothing there."""
        self._workers.down(worker_id)
        self.index.remove_worker(worker_id)
        if self.forecast is not None:
            self.forecast.worker_down(worker_id)

    def apply_load(self, worker_id: str, report: LoadReport, now_s: float) -> None:
        """A worker's load report; ignored if the worker is down."""
        if self._workers.report(worker_id, report, now_s) and self.forecast is not None:
            self.forecast.apply_load(worker_id, report, now_s)

    def apply_others(self, worker_id: str, others: AssignedByOthers) -> None:
        self._workers.apply_others(worker_id, others)

    def take_assigned(self) -> list[tuple[str, Assigned]]:
        """(worker, our load on it) where it has changed since the last call, for the other routers."""
        return self._workers.take_assigned()

    def apply_events(self, worker_id: str, events: KvEvents) -> bool:
        """Blocks stored and removed. False: an event is missing, request a snapshot from the worker."""
        return self.index.apply_events(worker_id, events)

    def apply_snapshot(self, worker_id: str, snapshot: KvSnapshot) -> bool:
        """All blocks that a worker has cached, or a part of them: heals its index.

        False: it does not, request another.
        """
        return self.index.apply_snapshot(worker_id, snapshot)

    def set_incompatible_pairs(self, pairs: IncompatiblePairs) -> None:
        """From now on these pairs of workers are not chosen; any other may be."""
        self._workers.set_incompatible_pairs(pairs)

    def set_suspected(self, workers: frozenset[str]) -> None:
        """These workers do not answer: they get nothing while any other worker of the role may take it."""
        self._workers.suspected = workers

    # ---- requests

    def select_and_reserve(self, request: RouteRequest, now_s: float) -> Decision | RoutingRefusal | Deferred:
        """Choose workers, and count the request as their load from now on. An earlier attempt of the same id ends
        first.

        Deferred: it waits, where the request allows it, until `take_ready` returns it, or until its `on_end`. Call this
        again, too, when it has waited for `longest_s`.
        """
        self._wait.forget(now_s)
        is_called = request.request_id in self._queue.called
        waited_s = self._queue.waited_s(request.request_id, now_s) if self._queue.waiting or is_called else None
        self.on_end(request.request_id)
        if request.source:
            return self._place_move(request, now_s)
        choice: Decision | RoutingRefusal | Deferred = self._choose(request, now_s)
        if waited_s is None:
            self._popularity.observe(request.block_hashes, now_s)
            waited_s = 0.0
        is_overdue = False
        if isinstance(choice, Decision):
            if is_called:
                choice = self._deferral.without_target(choice, now_s, waited_s)
            is_overdue = self._deferral.is_overdue(request, choice, waited_s)
            choice = self._deferral.place(request, choice, now_s, waited_s, is_overdue=is_overdue, is_called=is_called)
        if isinstance(choice, Decision):
            self._account(request, choice, now_s, is_overdue=is_overdue)
        return choice

    def _place_move(self, request: RouteRequest, now_s: float) -> Decision | RoutingRefusal:
        """The best decode worker for a sequence that decodes already: it counts as decoding there at once."""
        snapshot = self._snapshots.take(request, now_s)
        ranking = snapshot.ranking()
        if not ranking.candidates:
            return snapshot.refusal()
        decision = snapshot.decision(ranking)
        assert decision.decode is not None
        account = self._workers.accounts[decision.decode]
        id_and_hashes = request.request_id, request.block_hashes
        self._ledger.assign(
            Assignment(*id_and_hashes, account, 0, account, 0, now_s, 0.0, tenant=request.tenant, width=request.width)
        )
        self._ledger.first_token(request.request_id)
        return replace(decision, prefill=request.source, path="disaggregated")

    def _choose(self, request: RouteRequest, now_s: float) -> Decision | RoutingRefusal:
        """Candidates, their cost, and the choice; counts nothing."""
        workers = self._workers
        if workers.unpaired and workers.unpaired.issuperset(workers.columns(Role.DECODE).names):
            return RoutingRefusal("incompatible", "; ".join(sorted(workers.incompatible.values())), MIN_RETRY_S)
        snapshot = self._snapshots.take(request, now_s)
        ranking = snapshot.ranking()
        if not ranking.candidates:
            return snapshot.refusal()
        if self.forecast is None:
            return snapshot.decision(ranking)
        return self._admit(self.forecast, snapshot, ranking, now_s)

    def _admit(
        self, forecast: Forecast, snapshot: RoutingSnapshot, ranking: Ranking, now_s: float
    ) -> Decision | RoutingRefusal:
        """The decision with its prediction, or the refusal of a request whose SLO would be missed."""
        request = snapshot.request
        decision_at = cache(partial(snapshot.decision, ranking))
        pairs = [workers_of(ranking, candidate) for candidate in ranking.candidates]

        def predict(index: int) -> Prediction:
            decision = decision_at(index)
            accounts, mean_tokens = self._workers.accounts_of(decision), self._ledger.mean_tokens
            return forecast.predict(request, decision, *accounts, now_s, mean_tokens=mean_tokens)

        def clears_in_s(index: int, prediction: Prediction) -> float | None:
            """Seconds until the decode worker's batch meets the loosest target; None: not soon, or it meets it now."""
            assert request.slo is not None
            decode = pairs[index][1]
            loosest = request.slo.targets[-1].tpot_s or prediction.crowded_tpot_s
            if decode is None or loosest is None or prediction.safe_tpot_s(loosest) <= loosest:
                return None
            return forecast.clears_in(self._workers.accounts[decode], request, prediction, loosest, now_s)

        if request.slo is None:
            return replace(decision_at(0), forecast=predict(0))
        spare = _spare_candidate(ranking, snapshot.prefills)
        chosen, verdict = choose_candidate(request.slo, pairs, predict, clears_in_s, spare)
        if verdict.kind == "refused":
            return RoutingRefusal("slo", refusal_message(verdict), verdict.retry_after_s, verdict)
        return replace(decision_at(chosen), forecast=verdict.prediction, verdict=verdict)

    def _account(self, request: RouteRequest, decision: Decision, now_s: float, *, is_overdue: bool) -> None:
        if self.forecast is not None:
            self.forecast.assign(request, decision, now_s)
        compute, decode = self._workers.accounts_of(decision)
        size = decode.info.block_size if decode is not None else 1
        held = decision.cached_tokens_decode // size
        num_tokens = compute_tokens(request, decision)
        self._ledger.assign(
            Assignment(
                request_id=request.request_id,
                block_hashes=request.block_hashes,
                compute=compute,
                compute_tokens=num_tokens,
                decode=decode,
                decode_blocks=-(-(request.num_tokens + 1) // size) - held + request.width - 1 if decode else 0,
                assigned_at_s=now_s,
                predicted_ttft_s=decision.predicted_ttft_s,
                tenant=request.tenant,
                width=request.width,
                is_overdue=is_overdue,
                num_overdue_tokens=compute.overdue_tokens + num_tokens,
                num_queued=self._wait.num_at_workers() + 1,
            )
        )

    def take_ready(self) -> str | None:
        """A deferred request whose turn has come: call `select_and_reserve` for it again soon, or end it. None: none is
        ready.

        Poll it whenever a request was placed, got its first token, or ended, and when a worker reports, connects or
        leaves.
        """
        return self._deferral.take_ready() if self._queue.waiting else None

    def on_first_token(
        self, request_id: str, now_s: float, *, timings: Timings | None = None, cached_tokens: int = 0
    ) -> None:
        """The prompt is computed: its tokens are no longer queued.

        Idempotent. `timings`: as the worker reports them.
        """
        assignment = self._ledger.first_token(request_id)
        if self.forecast is not None:
            self.forecast.first_token(request_id, now_s, timings, cached_tokens)
        if assignment is not None:
            observed_s = now_s - assignment.assigned_at_s
            self._wait.observe(assignment.num_queued, observed_s, now_s)
            if assignment.is_overdue:
                self._wait.overdue.observe(assignment.num_overdue_tokens, observed_s)
            error_s = observed_s - assignment.predicted_ttft_s
            self.prediction_error_s += _SMOOTHING * (error_s - self.prediction_error_s)

    def on_finished(self, request_id: str, num_tokens: int, tpot_s: float, now_s: float) -> None:
        """The request finished on the workers of its decision: predictions learn from it. `on_end` must follow."""
        if self.forecast is not None:
            self.forecast.finished(request_id, num_tokens, tpot_s, now_s)

    def on_narrowed(self, request_id: str, width: int) -> None:
        """Only `width` sequences of a group continue: the others have ended or were aborted. Idempotent."""
        self._ledger.narrow(request_id, width)
        if self.forecast is not None:
            self.forecast.narrow(request_id, width)

    def on_end(self, request_id: str) -> None:
        """The request ended, however it did: it counts nowhere any more, and is not deferred. Idempotent."""
        if self._queue.waiting or self._queue.called:
            self._queue.remove(request_id)
        self._ledger.end(request_id)
        if self.forecast is not None:
            self.forecast.end(request_id)

    # ---- views

    def prefill_tokens_per_s(self, worker_id: str | None) -> float:
        """A worker's prefill speed: measured, or the mean of the others; 0: the worker is unknown."""
        return self._workers.prefill_tokens_per_s(worker_id)

    def alone_shares(self) -> dict[str, float]:
        """Of each worker whose blocks are known, the share that no other worker holds: what would be lost with it."""
        shares = {name: self.index.alone_share(name) for name in self._workers.accounts}
        return {name: share for name, share in shares.items() if share is not None}

    def workers(self) -> list[WorkerView]:
        """Every live worker, by id."""
        return [
            WorkerView(
                worker_id=worker_id,
                role=account.info.role,
                epoch=account.info.epoch,
                index_state=self.index.state(worker_id),
                indexed_blocks=self.index.num_blocks(worker_id),
                assigned_requests=account.own.requests,
                assigned_tokens=account.own.tokens,
                reported_at_s=account.reported_at_s,
                load=account.load(),
            )
            for worker_id, account in sorted(self._workers.accounts.items())
        ]


def _spare_candidate(ranking: Ranking, prefills: WorkerTable) -> int | None:
    """Index of the best candidate with an idle prefill worker; None while too few are idle, and others would wait."""
    is_idle = prefills.queued_requests == 0
    if np.count_nonzero(is_idle) < max(2, SPARE_SHARE * len(is_idle)):
        return None
    candidates = enumerate(ranking.candidates)
    return next((index for index, one in candidates if one.prefill is not None and is_idle[one.prefill]), None)
