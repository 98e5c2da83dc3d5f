"""Chooses one candidate: the policy's best, or under an SLO the cheapest that is predicted to meet it.

Counts nothing. Pure.
"""

from dataclasses import replace

import numpy as np

from kvrelay.router.decision.snapshot import MIN_RETRY_S, RoutingSnapshot, SnapshotTaker
from kvrelay.router.fleet.account import WorkerAccount
from kvrelay.router.fleet.ledger import LiveWorkers
from kvrelay.router.objectives import Prediction
from kvrelay.router.policies.base import WorkerTable
from kvrelay.router.slo.admission import refusal_message
from kvrelay.router.slo.candidate_choice import choose_candidate
from kvrelay.router.slo.forecast import Forecast
from kvrelay.router.types import Decision, Ranking, RouteRequest, RoutingRefusal
from kvrelay.types import Role


class Chooser:
    """From a request to a decision or a refusal, as things are now."""

    def __init__(self, snapshots: SnapshotTaker, workers: LiveWorkers, forecast: Forecast | None) -> None:
        """`forecast`: None where no SLO is configured."""
        self._snapshots, self._workers, self._forecast = snapshots, workers, forecast

    def choose(self, request: RouteRequest, now_s: float) -> Decision | RoutingRefusal:
        """Candidates, their cost, and the choice."""
        workers = self._workers
        if workers.unpaired and workers.unpaired.issuperset(workers.columns(Role.DECODE).names):
            return RoutingRefusal("incompatible", "; ".join(sorted(workers.incompatible.values())), MIN_RETRY_S)
        snapshot = self._snapshots.take(request, now_s)
        ranking = snapshot.ranking()
        if not ranking.candidates:
            return self._snapshots.refusal(snapshot)
        if self._forecast is None:
            return snapshot.decision(ranking)
        return self._admit(self._forecast, snapshot, ranking, now_s)

    def accounts_of(self, decision: Decision) -> tuple[WorkerAccount, WorkerAccount | None]:
        """(the worker that computes the prompt, the worker that decodes)."""
        accounts = self._workers.accounts
        compute = accounts[decision.prefill or decision.decode or ""]
        return compute, accounts[decision.decode] if decision.decode is not None else None

    def _admit(
        self, forecast: Forecast, snapshot: RoutingSnapshot, ranking: Ranking, now_s: float
    ) -> Decision | RoutingRefusal:
        """The decision with its prediction, or the refusal of a request whose SLO would be missed."""
        request = snapshot.request
        decisions: dict[int, Decision] = {}
        pairs = [ranking.workers(candidate) for candidate in ranking.candidates]

        def decision_at(index: int) -> Decision:
            if index not in decisions:
                decisions[index] = snapshot.decision(ranking, index)
            return decisions[index]

        def predict(index: int) -> Prediction:
            decision = decision_at(index)
            return forecast.predict(request, decision, *self.accounts_of(decision), now_s)

        def clears_in_s(index: int, prediction: Prediction) -> float | None:
            return self._clears_in_s(forecast, request, pairs[index][1], prediction, now_s)

        if request.slo is None:
            return replace(decision_at(0), forecast=predict(0))
        spare = _spare_candidate(ranking, snapshot.prefills)
        chosen, verdict = choose_candidate(request.slo, pairs, predict, clears_in_s, spare)
        if verdict.kind == "refused":
            return RoutingRefusal("slo", refusal_message(verdict), verdict.retry_after_s, verdict)
        return replace(decision_at(chosen), forecast=verdict.prediction, verdict=verdict)

    def _clears_in_s(
        self, forecast: Forecast, request: RouteRequest, decode: str | None, prediction: Prediction, now_s: float
    ) -> float | None:
        """Seconds until the decode worker's batch meets the loosest target; None: not soon, or it meets it now."""
        assert request.slo is not None
        loosest = request.slo.targets[-1].tpot_s or prediction.crowded_tpot_s
        if decode is None or loosest is None or prediction.safe_tpot_s <= loosest:
            return None
        return forecast.clears_in(self._workers.accounts[decode], request, loosest, now_s)


def _spare_candidate(ranking: Ranking, prefills: WorkerTable) -> int | None:
    """Index of the best candidate with an idle prefill worker, if another one stays idle; None: there is none."""
    is_idle = prefills.queued_requests == 0
    if np.count_nonzero(is_idle) < 2:
        return None
    candidates = enumerate(ranking.candidates)
    return next((index for index, one in candidates if one.prefill is not None and is_idle[one.prefill]), None)
