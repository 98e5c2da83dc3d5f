"""The router: one synchronous call picks workers and counts the request as theirs at once.

Owns the prefix index and what was sent to whom; the choice itself is the policy's (see policies/), and where an SLO is to be
kept admission.choose_way's. Pure: the caller passes the time. Never imports torch, Ray, sockets, a clock or a random source. Not
for use from several threads. How many requests may be in flight at all (settings.max_inflight) is the caller's.
"""

from dataclasses import replace
from hashlib import blake2b
from typing import Literal

import numpy as np

from kvrelay.plane.messages import Assigned, AssignedByOthers, KvEvents, KvSnapshot, LoadReport, Timings, WorkerInfo
from kvrelay.router.decision.deferral import IDLE_S, OVERDUE_SHARE, OVERDUE_TOKENS, Deferral
from kvrelay.router.decision.snapshot import MAX_RETRY_S, MIN_RETRY_S, RoutingSnapshot, refusal
from kvrelay.router.fleet.accounts import Assignment, Ledger, WorkerAccount
from kvrelay.router.fleet.columns import NUM_BLOCKS, PrefixHits
from kvrelay.router.fleet.compatibility import IncompatiblePairs
from kvrelay.router.fleet.fleet import Fleet
from kvrelay.router.index.prefix_index import PrefixIndex
from kvrelay.router.index.prefix_popularity import Heat
from kvrelay.router.objectives import Prediction
from kvrelay.router.policies.base import Floats, RoutingContext, RoutingPolicy, WorkerTable
from kvrelay.router.policies.cost_model import CostModel
from kvrelay.router.policies.registry import build_policy
from kvrelay.router.slo.admission import refusal_message
from kvrelay.router.slo.candidate_choice import choose_candidate
from kvrelay.router.slo.forecast import Forecast
from kvrelay.router.types import (
    Decision,
    Deferred,
    IncompatiblePair,
    IndexState,
    Ranking,
    Refusal,
    RouteRequest,
    WorkerView,
)
from kvrelay.settings.router import RouterSettings, SloSettings
from kvrelay.types import Role

HASHES_PER_BLOCK = 16
"""A worker may announce so many hashes per block of its pool (lower tiers included) before it is DEGRADED."""
_SMOOTHING = 0.2


class Router:
    """Chooses workers and keeps count of what was sent to them.

    Every `Decision`, and every `Deferred`, must be followed, however the request ends, by one `on_end`.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        tokens_per_hash: int,
        max_waiting: int = 256,
        model: CostModel | None = None,
        slo: SloSettings | None = None,
        policy: RoutingPolicy | None = None,
        has_store: bool = False,
    ) -> None:
        """`tokens_per_hash` divides every worker's block size; requests bring one hash for so many tokens.

        `max_waiting`: sequences in one worker's line before it gets no more (the engine's own limit). `slo`: while it sets
        anything, times are predicted and learned from; without, nothing is. `policy`: instead of the one that the settings name.
        `has_store`: what a worker has computed goes to a store of the cluster's, too, from where all can load it.
        Raises ConfigError where the settings name no policy.
        """
        self._settings, self._tokens_per_hash, self._max_waiting = settings, tokens_per_hash, max_waiting
        self._model = replace(model or CostModel(), local_prefill_tokens=settings.local_prefill_tokens)
        self._policy = policy or build_policy(settings, self._model)
        self._index = PrefixIndex(mode=settings.index, learned_s=settings.learned_s)
        self._fleet = Fleet(self._model, self._index.row)
        self._ledger, self._deferral = Ledger(), Deferral(settings.max_deferred)
        self._heat, self._has_store = Heat(), has_store
        self._prediction_error_s = 0.0
        self.forecast = Forecast(confidence=slo.confidence) if slo is not None and slo.is_on else None

    @property
    def index(self) -> PrefixIndex:
        """Who holds which prefix. Audits and metrics read it; what workers say comes through the calls below."""
        return self._index

    @property
    def prediction_error_s(self) -> float:
        """Moving average of observed minus predicted time to first token, seconds."""
        return self._prediction_error_s

    # ---- what workers say

    def worker_up(self, info: WorkerInfo) -> None:
        """A worker connected: new, restarted (new epoch: starts empty), or reconnected (its index is STALE)."""
        if not self._fleet.up(info):
            self._index.mark_stale(info.worker_id)
            return
        if self.forecast is not None:
            self.forecast.worker_up(info)
        stride, rest = divmod(info.block_size, self._tokens_per_hash)
        assert not rest, f"blocks of {info.block_size} tokens have no hashes of every {self._tokens_per_hash}"
        max_blocks = HASHES_PER_BLOCK * info.num_blocks
        self._index.add_worker(info.worker_id, max_blocks=max_blocks, stride=stride, max_learned=info.num_blocks)

    def worker_down(self, worker_id: str) -> None:
        """Forget a worker; its requests stay counted nowhere, and their `on_end` changes nothing else."""
        self._fleet.down(worker_id)
        self._index.remove_worker(worker_id)
        if self.forecast is not None:
            self.forecast.worker_down(worker_id)

    def apply_load(self, worker_id: str, report: LoadReport, now_s: float) -> None:
        """A worker's load; what comes after its death is ignored."""
        if self._fleet.report(worker_id, report, now_s) and self.forecast is not None:
            self.forecast.apply_load(worker_id, report, now_s)

    def apply_others(self, worker_id: str, others: AssignedByOthers) -> None:
        """What the other ingresses' routers have assigned to a worker."""
        self._fleet.apply_others(worker_id, others)

    def take_assigned(self) -> list[tuple[str, Assigned]]:
        """What the others are to hear: workers, and what is assigned to each, where it has changed since the last call."""
        return self._fleet.take_assigned()

    def apply_events(self, worker_id: str, events: KvEvents) -> bool:
        """Blocks stored and removed. False: something is missing, ask the worker for a snapshot."""
        return self._index.apply_events(
            worker_id, events.seq, events.stored, events.removed, events.lowered, events.raised
        )

    def apply_snapshot(self, worker_id: str, snapshot: KvSnapshot) -> bool:
        """Everything that a worker has cached, or a part of it: heals its index. False: it does not, ask for another."""
        return self._index.apply_snapshot(
            worker_id, snapshot.seq, snapshot.hashes, snapshot.lowered, part=snapshot.part, is_last=snapshot.is_last
        )

    def set_incompatible_pairs(self, incompatible: IncompatiblePairs) -> None:
        """From now on these pairs of live workers are not chosen; any other may be."""
        self._fleet.set_incompatible_pairs(incompatible)

    # ---- what requests do

    def select_and_reserve(self, request: RouteRequest, now_s: float) -> Decision | Refusal | Deferred:
        """Choose, and count the request from now on. An earlier attempt of the same id ends first.

        Deferred: it waits, where the request allows it, until `take_ready` names it, or until its `on_end`.
        """
        was_called = self._deferral.came(request.request_id)
        self.on_end(request.request_id)
        self._index.expire(now_s)
        best = self._choose(request, now_s)
        if not was_called:
            self._heat.observe(request.block_hashes, now_s)
        choice: Decision | Refusal | Deferred = best
        is_overdue = isinstance(best, Decision) and self._is_overdue(request, best)
        if isinstance(best, Decision) and is_overdue:
            choice = self._place_overdue(request, best, now_s, was_called=was_called)
        if isinstance(choice, Decision):
            if incompatible := self._fleet.incompatible:
                choice = replace(
                    choice, incompatible_pairs=tuple(IncompatiblePair(*pair, why) for pair, why in incompatible.items())
                )
            if self.forecast is not None:
                self.forecast.assign(request, choice, now_s)
            self._reserve(request, choice, now_s, is_overdue=is_overdue)
        return choice

    def take_ready(self) -> str | None:
        """Of the requests that are deferred, one whose turn it is: ask for it again soon, or end it. None: nobody's is.

        Look whenever a request was sent, got its first token, or ended, and when a worker reports, comes or goes.
        """
        if not self._deferral:
            return None
        role = self._overdue_role()
        if len(self._fleet.columns(role)):  # with no worker at all everybody may come and hear that
            queued_s = self._queued_s(role)
            is_owed = self._deferral.is_owed and bool((queued_s < np.inf).any())
            num_open = np.count_nonzero(queued_s < IDLE_S) or int(is_owed or self._has_room_for_overdue())
            if self._deferral.num_called >= num_open:
                return None
        return self._deferral.call()

    @property
    def num_deferred(self) -> int:
        """Requests that wait here."""
        return len(self._deferral)

    def _choose(self, request: RouteRequest, now_s: float) -> Decision | Refusal:
        """The best way as things are. Nothing is counted yet."""
        incompatible, unpaired = (
            self._fleet.incompatible,
            self._fleet.unpaired if self._fleet.incompatible else frozenset(),
        )
        if unpaired and unpaired.issuperset(self._fleet.columns(Role.DECODE).names):
            return Refusal("incompatible", "; ".join(sorted(incompatible.values())), MIN_RETRY_S)
        held = self._held(request)
        snapshot = RoutingSnapshot(
            self._context(request, held, now_s),
            self._worker_table(Role.PREFILL, request, held, now_s, unpaired),
            self._worker_table(Role.DECODE, request, held, now_s, unpaired),
            self._policy,
            self._model,
            self._policy.latency_targets(request),
        )
        ranking = snapshot.ranking(incompatible)
        if not ranking.candidates:
            wants_prefill = request.force == "remote" and (not request.needs_decode or len(snapshot.decodes) > 0)
            role = Role.PREFILL if wants_prefill else Role.DECODE
            return refusal(snapshot, role, self._fleet.columns(role), unpaired, held[role], self._fleet.prefill_rate)
        return (
            snapshot.decision(ranking)
            if self.forecast is None
            else self._admit(self.forecast, snapshot, ranking, now_s)
        )

    # ---- who is late in any case

    def _is_overdue(self, request: RouteRequest, decision: Decision) -> bool:
        """Whether its first token will be, and nobody has promised otherwise. Only policies that say what is wanted tell.

        The wait for blocks is left out: it is predicted without knowing when outputs end, many times too long where blocks are scarce.
        """
        if decision.ttft_target_s is None or not request.may_wait or not self._settings.max_deferred:
            return False
        if decision.verdict is not None:
            is_queued = decision.verdict.kind == "queued" and request.slo is not None and request.slo.on_miss == "queue"
            return is_queued and "ttft" in decision.verdict.missed
        compute = self._workers_of(decision)[0]
        passed_s = compute.unreported_overdue_tokens / self.prefill_tokens_per_s(compute.info.worker_id)
        queue_s, blocks_s = decision.terms["prefill_queue"], decision.terms["decode_wait"]
        return decision.predicted_ttft_s - min(queue_s, passed_s) - blocks_s > decision.ttft_target_s

    def _place_overdue(
        self, request: RouteRequest, decision: Decision, now_s: float, *, was_called: bool
    ) -> Decision | Refusal | Deferred:
        """It goes where it holds nobody up, or waits here, behind those that wait; who was called goes in any case."""
        if self._has_room_for_overdue() and (was_called or not self._deferral):
            return decision
        role = self._overdue_role()
        queued_s = self._queued_s(role)
        rows = np.flatnonzero(queued_s < IDLE_S)
        if was_called and not len(rows):
            rows = np.flatnonzero(queued_s < np.inf)
        names = self._fleet.columns(role).names
        takers = {names[row] for row in rows}
        if self._workers_of(decision)[0].info.worker_id in takers:
            return decision
        if takers:
            force: Literal["remote"] | None = "remote" if role is Role.PREFILL else None
            other = replace(request, excluded=request.excluded.union(names) - takers, force=force)
            if isinstance(choice := self._choose(other, now_s), Decision):
                return choice
        if was_called:
            return decision
        if self._deferral.defer(request):
            return Deferred(decision.predicted_ttft_s)
        overdue_s = decision.predicted_ttft_s - (decision.ttft_target_s or 0.0)
        waiting = f"{len(self._deferral)} requests wait already whose first tokens will be late"
        return Refusal("full", waiting, min(max(overdue_s, MIN_RETRY_S), MAX_RETRY_S))

    def _has_room_for_overdue(self) -> bool:
        """Whether late prompts keep so few of the decode workers' blocks that they may wait in the workers' lines."""
        columns = self._fleet.columns(Role.DECODE)
        return self._ledger.overdue_blocks < OVERDUE_SHARE * int(columns.ints[NUM_BLOCKS].sum())

    def _overdue_role(self) -> Role:
        """Who computes late prompts."""
        return Role.PREFILL if len(self._fleet.columns(Role.PREFILL)) else Role.DECODE

    def _queued_s(self, role: Role) -> Floats:
        """By row, seconds of prompts at each worker that a late one would hold up; infinite: it has enough late ones."""
        columns = self._fleet.columns(role)
        seconds = columns.queued_s(self._fleet.prefill_rate)
        for account in self._ledger.with_overdue:
            worker_id, row = account.info.worker_id, account.row
            if account.role is not role or self._fleet.accounts.get(worker_id) is not account:
                continue
            passed_s = account.unreported_overdue_tokens / self.prefill_tokens_per_s(worker_id)
            seconds[row] = np.inf if account.own_overdue_tokens >= OVERDUE_TOKENS else max(0.0, seconds[row] - passed_s)
        return seconds

    # ---- what becomes of them

    def on_first_token(
        self, request_id: str, now_s: float, *, timings: Timings | None = None, cached_tokens: int = 0
    ) -> None:
        """The prompt is computed: its tokens no longer queue anywhere. Idempotent. `timings`: as the worker told them."""
        if (computed := self._ledger.computing(request_id)) is not None:
            for account in (computed.compute, computed.decode):
                if account is not None and self._fleet.accounts.get(account.info.worker_id) is account:
                    self._index.learn(account.info.worker_id, computed.block_hashes, now_s)
        error_s = self._ledger.first_token(request_id, now_s)
        if self.forecast is not None:
            self.forecast.first_token(request_id, now_s, timings, cached_tokens)
        if error_s is not None:
            self._prediction_error_s += _SMOOTHING * (error_s - self._prediction_error_s)

    def on_finished(self, request_id: str, num_tokens: int, tpot_s: float, now_s: float) -> None:
        """It ran to its own end, all on the workers of its decision: what it saw is learned from. `on_end` must follow."""
        if self.forecast is not None:
            self.forecast.finished(request_id, num_tokens, tpot_s, now_s)

    def on_narrowed(self, request_id: str, width: int) -> None:
        """Of a group only so many sequences go on: the others have ended, or nobody waits for them. Idempotent."""
        self._ledger.narrow(request_id, width)
        if self.forecast is not None:
            self.forecast.narrow(request_id, width)

    def on_end(self, request_id: str) -> None:
        """The request ended, however it did: nothing is counted for it any more, and it is not deferred. Idempotent."""
        self._deferral.forget(request_id)
        self._ledger.end(request_id)
        if self.forecast is not None:
            self.forecast.end(request_id)

    def prefill_tokens_per_s(self, worker_id: str | None) -> float:
        """How fast a worker computes prompts, as it measured; the others' average until it has; 0: it is not here."""
        account = self._fleet.accounts.get(worker_id) if worker_id is not None else None
        return 0.0 if account is None else account.prefill_tokens_per_s or self._fleet.prefill_rate

    def alone_shares(self) -> dict[str, float]:
        """Of each worker whose blocks are known, the share that nobody else has: what would be lost with it."""
        shares = {name: self._index.alone_share(name) for name in self._fleet.accounts}
        return {name: share for name, share in shares.items() if share is not None}

    def workers(self) -> list[WorkerView]:
        """Every live worker, by id."""
        return [self._view(worker_id) for worker_id in sorted(self._fleet.accounts)]

    def _context(self, request: RouteRequest, held: dict[Role, PrefixHits], now_s: float) -> RoutingContext:
        hashes = request.block_hashes
        most = max(int(one.expected[one.expected.argmax()]) if len(one.expected) else 0 for one in held.values())
        arrivals = self._heat.arrivals_per_s(hashes, most // self._tokens_per_hash, now_s)
        stored = (
            max((int(one.in_any_tier.max(initial=0)) for one in held.values()), default=0) if self._has_store else 0
        )
        return RoutingContext(
            request, _draw(request.request_id, self._settings.seed), now_s,
            unreported_share=self._fleet.unreported_share(), arrivals_per_s=arrivals, tenant_excess=self._ledger.excess(request.tenant), stored_tokens=stored,
        )  # fmt: skip

    def _worker_table(
        self, role: Role, request: RouteRequest, held: dict[Role, PrefixHits], now_s: float, unpaired: frozenset[str]
    ) -> WorkerTable:
        """Those of a role that can take it now."""
        columns = self._fleet.columns(role)
        rows = columns.usable(
            request,
            max_waiting=self._max_waiting,
            needs_output=role is Role.DECODE,
            excluded=request.excluded | unpaired,
        )
        return columns.table(rows, held[role], self._fleet.prefill_rate, now_s)

    def _held(self, request: RouteRequest) -> dict[Role, PrefixHits]:
        """What all live workers hold, and will hold, of the prompt."""
        found = self._index.table(request.block_hashes)
        found *= self._tokens_per_hash
        tables, held = (
            {role: self._fleet.columns(role) for role in Role},
            {},
        )  # laid out: only now are the accounts' rows theirs
        on_the_way = self._on_the_way(request)
        for role, columns in tables.items():
            tokens = found[columns.index_rows]
            in_pool, in_any_tier = tokens[:, 1], tokens[:, 0]
            expected = in_pool
            if there := on_the_way.get(role):
                rows, expected = list(there), in_pool.copy()
                expected[rows] = np.maximum(expected[rows], list(there.values()))
                in_any_tier = np.maximum(in_any_tier, expected)
            held[role] = PrefixHits(in_pool, expected, in_any_tier)
        return held

    def _on_the_way(self, request: RouteRequest) -> dict[Role, dict[int, int]]:
        """Rows of live workers that are about to compute a beginning of the prompt, and tokens of it that will be whole blocks."""
        found: dict[Role, dict[int, int]] = {}
        live, state, size = self._fleet.accounts, self._index.state, self._tokens_per_hash
        for account, hashes in self._ledger.pending_matches(request.block_hashes).items():
            info = account.info
            if live.get(info.worker_id) is account and state(info.worker_id) is not IndexState.STALE:
                tokens = hashes * size
                found.setdefault(account.role, {})[account.row] = tokens - tokens % info.block_size
        return found

    def _admit(
        self, forecast: Forecast, snapshot: RoutingSnapshot, ranking: Ranking, now_s: float
    ) -> Decision | Refusal:
        """The decision with what is predicted of it, or the refusal of a request whose SLO would be missed."""
        request = snapshot.request
        decisions: dict[int, Decision] = {}
        pairs = [ranking.workers(candidate) for candidate in ranking.candidates]

        def decision_at(index: int) -> Decision:
            if index not in decisions:
                decisions[index] = snapshot.decision(ranking, index)
            return decisions[index]

        def predict(index: int) -> Prediction:
            decision = decision_at(index)
            return forecast.predict(request, decision, *self._workers_of(decision), now_s)

        def clears_in_s(index: int, prediction: Prediction) -> float | None:
            return self._clears_in_s(forecast, request, pairs[index][1], prediction, now_s)

        if request.slo is None:
            decision = replace(decision_at(0), forecast=predict(0))
        else:
            chosen, verdict = choose_candidate(
                request.slo, pairs, predict, clears_in_s, _spare(ranking, snapshot.prefills)
            )
            if verdict.kind == "refused":
                return Refusal("slo", refusal_message(verdict), verdict.retry_after_s, verdict)
            decision = replace(decision_at(chosen), forecast=verdict.prediction, verdict=verdict)
        return decision

    def _clears_in_s(
        self, forecast: Forecast, request: RouteRequest, decode: str | None, prediction: Prediction, now_s: float
    ) -> float | None:
        """When the batch there will have shrunk enough for the loosest target of the request; None: not soon, or it need not."""
        assert request.slo is not None
        loosest = request.slo.targets[-1].tpot_s or prediction.crowded_tpot_s
        if decode is None or loosest is None or prediction.safe_tpot_s <= loosest:
            return None
        return forecast.clears_in(self._fleet.accounts[decode], request, loosest, now_s)

    def _workers_of(self, decision: Decision) -> tuple[WorkerAccount, WorkerAccount | None]:
        """Who computes the prompt, and who decodes."""
        compute = self._fleet.accounts[decision.prefill or decision.decode or ""]
        return compute, self._fleet.accounts[decision.decode] if decision.decode is not None else None

    def _reserve(self, request: RouteRequest, decision: Decision, now_s: float, *, is_overdue: bool) -> None:
        compute, decode = self._workers_of(decision)
        size = decode.info.block_size if decode is not None else 1
        held = decision.cached_tokens_decode // size
        compute_tokens = request.num_tokens - decision.cached_tokens_prefill - decision.loaded_tokens_prefill
        self._deferral.went(compute_tokens, is_overdue=is_overdue)
        self._ledger.assign(
            Assignment(
                request_id=request.request_id,
                block_hashes=request.block_hashes,
                compute=compute,
                compute_tokens=compute_tokens,
                decode=decode,
                decode_blocks=-(-(request.num_tokens + 1) // size) - held + request.width - 1 if decode else 0,
                assigned_at_s=now_s,
                predicted_ttft_s=decision.predicted_ttft_s,
                tenant=request.tenant,
                width=request.width,
                is_overdue=is_overdue,
            )
        )

    def _view(self, worker_id: str) -> WorkerView:
        account = self._fleet.accounts[worker_id]
        return WorkerView(
            worker_id=worker_id,
            role=account.info.role,
            epoch=account.info.epoch,
            index_state=self._index.state(worker_id),
            indexed_blocks=self._index.num_blocks(worker_id),
            assigned_requests=account.own_requests,
            assigned_tokens=account.own_tokens,
            reported_at_s=account.reported_at_s,
            load=account.load(),
        )


def _spare(ranking: Ranking, prefills: WorkerTable) -> int | None:
    """The best way by a prefill worker that has nothing to do, if another one stays idle beside it; None: there is none."""
    is_idle = prefills.queued_requests == 0
    if np.count_nonzero(is_idle) < 2:
        return None
    candidates = enumerate(ranking.candidates)
    return next(
        (index for index, candidate in candidates if candidate.prefill is not None and is_idle[candidate.prefill]), None
    )


def _draw(request_id: str, seed: int) -> float:
    """In [0, 1), the same for the same request and seed."""
    digest = blake2b(f"{seed}:{request_id}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) * 2.0**-53
