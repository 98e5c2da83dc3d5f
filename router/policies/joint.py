"""The default policy: prefill worker, decode worker, KV source and path are chosen jointly, by predicted seconds. Pure.

The score is the common cost (cost.py) plus slo_miss, replica, tenant and spread: docs/design/routing.md.
"""

from dataclasses import replace
from functools import lru_cache
from typing import ClassVar, NamedTuple, Self

import numpy as np
from pydantic import Field

from kvrelay.router.policies.base import (
    MAX_CANDIDATES,
    CostModel,
    Floats,
    Ints,
    Options,
    PolicyOptions,
    RoutingContext,
    RoutingPolicy,
    WorkerTable,
    cheapest,
    parse_options,
    whole_units,
)
from kvrelay.router.policies.cost import COMPUTE, PRESSURE, STALL, CommonCost, Rows, targets
from kvrelay.router.types import TERM_NAMES, TTFT_TERMS, Candidate, RouteRequest

SHORTLIST = 6
"""Workers of each role whose pairs are all considered."""
NONE = -1
"""In an array of rows: no worker."""
OWN_TERMS = ("slo_miss", "replica", "tenant", "spread")
MISS, REPLICA, TENANT, SPREAD = range(len(TERM_NAMES), len(TERM_NAMES) + len(OWN_TERMS))
SURE_SHARE, LOST_SHARE = 0.7, 1.1
"""Shares of a target: a prediction below the first certainly meets it, above the second certainly misses it."""
FRESH_S = 0.05
"""Age of a report beyond which it is no less accurate: workers report changes about so often."""
SAME_SHARE = 0.5
"""Share of the best overlap from which a worker counts as holding the prefix."""
MAX_EXCESS = 3.0
"""Upper bound of the tenant term's factor."""
_TTFT = [TERM_NAMES.index(name) for name in TTFT_TERMS]
_GOLDEN = 0.6180339887498949


class JointOptions(PolicyOptions):
    """Parameters of the cost model that may be set; see CostModel for their meanings and defaults."""

    max_pressure: float | None = Field(None, ge=0)
    missed_s: float | None = Field(None, ge=0)
    stall_weight: float | None = Field(None, ge=0)
    ttft_s: float | None = Field(None, gt=0)
    tpot_s: float | None = Field(None, gt=0)
    tier_bytes_per_s: float | None = Field(None, gt=0)


class Joint(RoutingPolicy):
    """The lowest predicted cost: seconds to the request's own first token, and of harm to others."""

    name: ClassVar[str] = "joint"
    term_names: ClassVar[tuple[str, ...]] = TERM_NAMES + OWN_TERMS

    def __init__(self, options: Options, model: CostModel | None = None) -> None:
        chosen = parse_options(JointOptions, self.name, options).model_dump(exclude_none=True)
        self._model = replace(model or CostModel(), **chosen)

    @classmethod
    def build(cls, options: Options, model: CostModel) -> Self:
        return cls(options, model)

    def rank(self, context: RoutingContext, prefills: WorkerTable, decodes: WorkerTable) -> list[Candidate]:
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
        return _listed(scorer, _joined(candidates)) if candidates else []

    def latency_targets(self, request: RouteRequest) -> tuple[float, float]:
        return targets(request, self._model)


class _CandidateColumns(NamedTuple):
    """Candidates as columns."""

    computing: Ints  # by number, see CommonCost
    decode: Ints  # the decode worker's row, or NONE
    parts: Floats  # [terms, candidates]


def _joined(columns_of: list[_CandidateColumns]) -> _CandidateColumns:
    if len(columns_of) == 1:
        return columns_of[0]
    return _CandidateColumns(*(np.concatenate(columns, axis=-1) for columns in zip(*columns_of, strict=True)))


class _JointScorer:
    def __init__(self, context: RoutingContext, prefills: WorkerTable, decodes: WorkerTable, model: CostModel) -> None:
        self.context, self.model = context, model
        self.cost = CommonCost(context, prefills, decodes, model, num_more=len(OWN_TERMS))
        self.prefills, self.decodes = prefills, decodes
        self._spreads: Floats | None = None

    def prefill_only(self) -> _CandidateColumns:
        rows = self._prefill_shortlist()
        return _CandidateColumns(rows, np.full(len(rows), NONE), self.cost.prefill_only(rows))

    def pairs(self) -> _CandidateColumns:
        """All pairs of the cheapest workers of each role, without decode workers that need no prefill worker."""
        prefills, decodes = self._prefill_shortlist(), self._decode_shortlist()
        if self.context.request.force != "remote" and self.cost.has_near:
            decodes = decodes[~self.cost.is_near[decodes]]
        first, second = _crossed(len(prefills), len(decodes))
        computing, decode = prefills[first], decodes[second]
        return _CandidateColumns(computing, decode, self.cost.pairs(computing, decode))

    def local(self) -> _CandidateColumns:
        """The cheapest decode workers that compute the prompt themselves."""
        rows, parts = np.arange(len(self.decodes)), self.cost.local()
        if len(rows) > SHORTLIST:
            score = np.add.reduce(self.scored(parts, self.cost.decode_numbers, slice(0, len(rows))), axis=0)
            rows = cheapest(score, self.decodes.turn, SHORTLIST)
            parts = parts[:, rows]
        return _CandidateColumns(rows + self.cost.num_prefills, rows, parts)

    def _prefill_shortlist(self) -> Ints:
        if len(self.prefills) <= SHORTLIST:
            return np.arange(len(self.prefills))
        all_prefills = self.cost.prefill_numbers
        score = np.add.reduce(self.scored(self.cost.prefill_only(all_prefills), all_prefills, None), axis=0)
        return cheapest(score, self.prefills.turn, SHORTLIST)

    def _decode_shortlist(self) -> Ints:
        table, cost = self.decodes, self.cost
        if len(table) <= SHORTLIST:
            return np.arange(len(table))
        miss = chance_of_missing(table.recent_step_s / cost.tpot_s)
        score = (
            np.add.reduce(cost.decode, axis=0)
            + self.model.unhidden_share * cost.arriving_s
            + self.model.missed_s * miss
        )
        return cheapest(score, table.turn, SHORTLIST)

    def scored(self, parts: Floats, computing: Rows, decode: Rows | None) -> Floats:
        """The common terms of candidates, with this policy's terms filled in.

        `computing`: by number, see CommonCost.
        """
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
        if context.tenant_excess:
            np.multiply(parts[PRESSURE] + parts[STALL], min(context.tenant_excess, MAX_EXCESS), out=parts[TENANT])
        if context.unreported_share:
            parts[SPREAD] = self._spread()[computing]
        return parts

    def _replicate(self, terms: Floats, computing: Rows) -> None:
        """Discount the extra prefill of workers that do not hold a prefix which is too popular for those that do.

        Prompts that share this prefix keep `load` workers busy; as far as these are more than hold it, others will have
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
        factor = 1.0 + terms[PRESSURE] / np.maximum(terms[COMPUTE], 1e-9)
        terms[REPLICA] = -(1.0 - holders / load) * np.maximum(extra, 0.0) * factor

    def _spread(self) -> Floats:
        """By number: at most the work that other routers can have assigned since the worker's last report (a second per
        second).
        """
        if self._spreads is None:
            age_s = np.concatenate((self.prefills.age_s, self.decodes.age_s))
            drawn = self.context.draw + _golden(len(age_s))
            drawn -= drawn >= 1.0
            drawn *= np.minimum(age_s, FRESH_S)
            drawn *= self.context.unreported_share
            self._spreads = drawn
        return self._spreads


@lru_cache(maxsize=64)
def _golden(count: int) -> Floats:
    """The fractions of as many multiples of the golden ratio: spread evenly over [0, 1)."""
    whole: Floats = np.arange(1.0, count + 1.0) * _GOLDEN
    return whole - np.floor(whole)


@lru_cache(maxsize=64)
def _crossed(count: int, other: int) -> tuple[Ints, Ints]:
    return np.repeat(np.arange(count), other), np.tile(np.arange(other), count)


def chance_of_missing(share: Floats) -> Floats:
    """Probability of missing a target of which this share is predicted to be used."""
    chance = share - SURE_SHARE
    chance *= 1.0 / (LOST_SHARE - SURE_SHARE)
    np.maximum(chance, 0.0, out=chance)
    return np.minimum(chance, 1.0, out=chance)


def _listed(scorer: _JointScorer, candidates: _CandidateColumns) -> list[Candidate]:
    computing, decode, num_prefills = candidates.computing, candidates.decode, scorer.cost.num_prefills
    has_decode = len(decode) > 0 and decode[0] != NONE  # all have one, or none has
    prefill = np.where(computing < num_prefills, computing, NONE)
    terms = scorer.scored(candidates.parts, computing, decode if has_decode else None)
    scores = np.add.reduce(terms, axis=0)
    source_turn = np.concatenate((scorer.prefills.turn, scorer.decodes.turn))[computing]
    target_turn = scorer.decodes.turn[decode] if has_decode else decode
    keys = (decode, prefill, target_turn, source_turn, whole_units(scores))
    order = np.lexsort(keys)[:MAX_CANDIDATES]
    prefills = [None if row == NONE else row for row in prefill[order].tolist()]
    decodes = [None if row == NONE else row for row in decode[order].tolist()]
    parts = map(tuple, terms[:, order].T.tolist())
    return list(map(Candidate, prefills, decodes, scores[order].tolist(), parts))
