"""Ours: prefill worker, decode worker, tier source and who computes the prompt are chosen together, by predicted seconds. Pure.

The score is the common cost (cost.py), and on top of it:
- slo_miss: the chance that the request's own targets are missed, times what a miss counts.
- replica: taken off a worker that does not hold the prompt's hot prefix, while too many prompts come for those that do.
- tenant: of a tenant with more than its share of the queued work, the harm to others counts several times.
- spread: a little, drawn anew for each request and worker, as far as other routers' work may not be reported yet.

Rules:
- A decode worker that lacks at most `local_prefill_tokens` of the prompt computes it itself.
- Otherwise the least score wins, over all pairs of the shortlists and the cheapest local choices.
- Equal scores (to a microsecond) go to the worker chosen longest ago, then by row.
"""

from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
from pydantic import Field

from kvrelay.router.policies.base import MAX_CANDIDATES, Floats, Ints, Options, RoutingContext, WorkerTable
from kvrelay.router.policies.checked import Checked, checked
from kvrelay.router.policies.cost import COMPUTE, PRESSURE, STALL, CommonCost, CostModel, Rows, targets
from kvrelay.router.policies.shortlist import cheapest, whole_units
from kvrelay.router.types import TERM_NAMES, TTFT_TERMS, Candidate, RouteRequest

SHORTLIST = 6
"""Workers of each role that are paired in full."""
NONE = -1
"""In a list of rows: no such worker."""
OWN_TERMS = ("slo_miss", "replica", "tenant", "spread")
MISS, REPLICA, TENANT, SPREAD = range(len(TERM_NAMES), len(TERM_NAMES) + len(OWN_TERMS))
SURE_SHARE, LOST_SHARE = 0.7, 1.1
"""Of a target: what is predicted within the first is certain to be kept, beyond the second to be missed."""
FRESH_S = 0.05
"""A report that is older tells no less: workers report changes about so often."""
SAME_SHARE = 0.5
"""Of the best overlap: who has at least so much of it holds the prefix, too."""
MAX_EXCESS = 3.0
"""Times its share that a tenant pays for at most."""
_TTFT = [TERM_NAMES.index(name) for name in TTFT_TERMS]
_GOLDEN = 0.6180339887498949


class JointOptions(Checked):
    """Weights of the cost model that may be set; see cost.CostModel for their meanings and defaults."""

    max_pressure: float | None = Field(None, ge=0)
    missed_s: float | None = Field(None, ge=0)
    stall_weight: float | None = Field(None, ge=0)
    ttft_s: float | None = Field(None, gt=0)
    tpot_s: float | None = Field(None, gt=0)
    tier_bytes_per_s: float | None = Field(None, gt=0)


class Joint:
    """Least predicted seconds: of the request's own first token, and of harm to others."""

    name: ClassVar[str] = "joint"
    term_names: ClassVar[tuple[str, ...]] = TERM_NAMES + OWN_TERMS

    def __init__(self, options: Options, model: CostModel | None = None) -> None:
        chosen = checked(JointOptions, self.name, options).model_dump(exclude_none=True)
        self._model = replace(model or CostModel(), **chosen)

    def rank(self, context: RoutingContext, prefills: WorkerTable, decodes: WorkerTable) -> list[Candidate]:
        """See base.Policy."""
        scorer = _JointScorer(context, prefills, decodes, self._model)
        may_send = len(prefills) > 0 and context.request.force != "local"
        if may_send and not context.request.needs_decode:
            return _listed(scorer, scorer.prefill_only())
        if not len(decodes):
            return []
        candidates = []
        if may_send:
            candidates.append(scorer.pairs())
        if context.request.force != "remote":
            candidates.append(scorer.local())
        return _listed(scorer, _CandidateColumns.join(candidates)) if candidates else []

    def wanted(self, request: RouteRequest) -> tuple[float, float]:
        """See base.OrdersLines."""
        return targets(request, self._model)


class _CandidateColumns:
    """Ways as columns: who computes the prompt (by number, see CommonCost), the row of who decodes (NONE: nobody), [terms, ways]."""

    __slots__ = ("computing", "decode", "parts")

    def __init__(self, computing: Ints, decode: Ints, parts: Floats) -> None:
        self.computing, self.decode, self.parts = computing, decode, parts

    @classmethod
    def join(cls, several: list["_CandidateColumns"]) -> "_CandidateColumns":
        if len(several) == 1:
            return several[0]
        return cls(
            np.concatenate([candidates.computing for candidates in several]),
            np.concatenate([candidates.decode for candidates in several]),
            np.concatenate([candidates.parts for candidates in several], axis=1),
        )


class _JointScorer:
    """One request before all workers."""

    def __init__(self, context: RoutingContext, prefills: WorkerTable, decodes: WorkerTable, model: CostModel) -> None:
        self.context, self.model = context, model
        self.cost = CommonCost(context, prefills, decodes, model, num_more=len(OWN_TERMS))
        self.prefills, self.decodes = prefills, decodes
        self._spreads: Floats | None = None

    def prefill_only(self) -> _CandidateColumns:
        rows = self._senders()
        return _CandidateColumns(rows, np.full(len(rows), NONE), self.cost.prefill_only(rows))

    def pairs(self) -> _CandidateColumns:
        """The cheapest of each role, each with each; not with decode workers that need nobody."""
        senders, targets = self._senders(), self._targets()
        if self.context.request.force != "remote" and self.cost.has_near:
            targets = targets[~self.cost.is_near[targets]]
        first, second = _crossed(len(senders), len(targets))
        computing, decode = senders[first], targets[second]
        return _CandidateColumns(computing, decode, self.cost.pairs(computing, decode))

    def local(self) -> _CandidateColumns:
        """The cheapest decode workers that compute the prompt themselves."""
        rows, parts = np.arange(len(self.decodes)), self.cost.local()
        if len(rows) > SHORTLIST:
            score = np.add.reduce(self.judged(parts, self.cost.decode_numbers, slice(0, len(rows))), axis=0)
            rows = cheapest(score, self.decodes.turn, SHORTLIST)
            parts = parts[:, rows]
        return _CandidateColumns(rows + self.cost.num_prefills, rows, parts)

    def _senders(self) -> Ints:
        if len(self.prefills) <= SHORTLIST:
            return np.arange(len(self.prefills))
        everybody = self.cost.prefill_numbers
        score = np.add.reduce(self.judged(self.cost.prefill_only(everybody), everybody, None), axis=0)
        return cheapest(score, self.prefills.turn, SHORTLIST)

    def _targets(self) -> Ints:
        table, cost = self.decodes, self.cost
        if len(table) <= SHORTLIST:
            return np.arange(len(table))
        late = chance_of_missing(table.recent_step_s / cost.tpot_s)
        score = (
            np.add.reduce(cost.decode, axis=0)
            + self.model.unhidden_share * cost.arriving_s
            + self.model.missed_s * late
        )
        return cheapest(score, table.turn, SHORTLIST)

    def judged(self, parts: Floats, computing: Rows, decode: Rows | None) -> Floats:
        """The common terms of some ways, with ours written below them. `computing`: by number, see CommonCost."""
        context, cost = self.context, self.cost
        share = parts[_TTFT[0]] + parts[_TTFT[1]]
        for term in _TTFT[2:]:
            share += parts[term]
        share *= 1.0 / cost.ttft_s
        if decode is not None:
            share = np.maximum(share, self.decodes.recent_step_s[decode] * (1.0 / cost.tpot_s))
        np.multiply(chance_of_missing(share), self.model.missed_s, out=parts[MISS])
        if context.arrivals_per_s:
            self._replicate(parts, computing)
        if context.excess:
            np.multiply(parts[PRESSURE] + parts[STALL], min(context.excess, MAX_EXCESS), out=parts[TENANT])
        if context.others:
            parts[SPREAD] = self._spread()[computing]
        return parts

    def _replicate(self, judged: Floats, computing: Rows) -> None:
        """The hotter a prefix for those that hold it, the less it counts that another has to compute it first.

        Prompts that begin like this one keep `load` workers busy; as far as those are more than hold the prefix, others will have
        to compute it anyway, and the sooner the better.
        """
        work, uncached, num_tokens = self.cost.work[COMPUTE], self.cost.uncached, self.context.request.num_tokens
        least = int(uncached.argmin())
        load = self.context.arrivals_per_s * float(work[least])
        if load <= 1.0:
            return
        most_held = num_tokens - int(uncached[least])
        holders = int(np.count_nonzero(uncached <= num_tokens - SAME_SHARE * most_held))
        if load <= holders:
            return
        own = work[computing]
        extra = np.minimum(own - work[least], most_held / num_tokens * own)
        factor = 1.0 + judged[PRESSURE] / np.maximum(judged[COMPUTE], 1e-9)
        judged[REPLICA] = -(1.0 - holders / load) * np.maximum(extra, 0.0) * factor

    def _spread(self) -> Floats:
        """By number, at most the work that other routers can have sent since the worker's last report: a second each second, of all."""
        if self._spreads is None:
            age_s = np.concatenate((self.prefills.age_s, self.decodes.age_s))
            drawn = (self.context.draw + np.arange(1, len(age_s) + 1) * _GOLDEN) % 1.0
            self._spreads = self.context.others * np.minimum(age_s, FRESH_S) * drawn
        return self._spreads


@lru_cache(maxsize=64)
def _crossed(count: int, other: int) -> tuple[Ints, Ints]:
    """Each of so many with each of the others, by place."""
    return np.repeat(np.arange(count), other), np.tile(np.arange(other), count)


def chance_of_missing(share: Floats) -> Floats:
    """Of a target, whose share is predicted to be used up."""
    chance = share - SURE_SHARE
    chance *= 1.0 / (LOST_SHARE - SURE_SHARE)
    np.maximum(chance, 0.0, out=chance)
    return np.minimum(chance, 1.0, out=chance)


def _listed(scorer: _JointScorer, candidates: _CandidateColumns) -> list[Candidate]:
    """The best of them in order."""
    computing, decode, num_prefills = candidates.computing, candidates.decode, scorer.cost.num_prefills
    has_decode = len(decode) > 0 and decode[0] != NONE  # then all have
    prefill = np.where(computing < num_prefills, computing, NONE)
    judged = scorer.judged(candidates.parts, computing, decode if has_decode else None)
    scores = np.add.reduce(judged, axis=0)
    source_turn = np.concatenate((scorer.prefills.turn, scorer.decodes.turn))[computing]
    target_turn = scorer.decodes.turn[decode] if has_decode else decode
    keys = (decode, prefill, target_turn, source_turn, whole_units(scores))
    order = np.lexsort(keys)[:MAX_CANDIDATES]
    prefills = [None if row == NONE else row for row in prefill[order].tolist()]
    decodes = [None if row == NONE else row for row in decode[order].tolist()]
    parts = map(tuple, judged[:, order].T.tolist())
    return list(map(Candidate, prefills, decodes, scores[order].tolist(), parts))
