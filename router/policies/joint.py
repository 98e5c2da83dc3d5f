"""The default policy: prefill worker, decode worker, KV source and path are chosen jointly, by predicted seconds. Pure.

The score is the common cost (cost.py) plus slo_miss, replica, tenant, spread and overdue: docs/design/routing.md. All
candidates are ranked by one call into C (native/candidates.c) where there is a compiler, else by PlainRanking, to the
same bits.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import replace
from heapq import nsmallest
from itertools import product
from typing import Any, ClassVar, Self

from pydantic import Field

from kvrelay.native.build import NativeLibrary
from kvrelay.router.policies.base import (
    MAX_CANDIDATES,
    CostModel,
    Options,
    PolicyOptions,
    RoutingContext,
    RoutingPolicy,
    WorkerTable,
    parse_options,
)
from kvrelay.router.policies.cost import UNSET_SHARE, CommonCost, WorkerRow, columns_of, rows_of, targets
from kvrelay.router.types import TERM_NAMES, TTFT_TERMS, Candidate, RouteRequest

SHORTLIST = 6
"""Workers of each role whose pairs are all considered."""
OWN_TERMS = ("slo_miss", "replica", "tenant", "spread", "overdue")
SURE_SHARE, LOST_SHARE = 0.7, 1.1
"""Shares of a target: a prediction below the first certainly meets it, above the second certainly misses it."""
FRESH_S = 0.05
"""Age of a report beyond which it is no less accurate: workers report changes about so often."""
SAME_SHARE = 0.5
"""Share of the best overlap from which a worker counts as holding the prefix."""
OVERDUE_WEIGHT = 1.5
"""Of a second of overdue prompts at a worker: a new one overtakes them, and keeps them waiting still longer."""
MAX_EXCESS = 3.0
"""Upper bound of the tenant term's factor."""
UNIT = 1e-6
"""Scores that differ by less are equal: a microsecond."""
_GOLDEN = 0.6180339887498949  # the fractions of its multiples spread evenly over [0, 1)
_COMPUTE, _PRESSURE, _STALL = (TERM_NAMES.index(name) for name in ("prefill_compute", "prefill_pressure", "stall"))
_TTFT = [TERM_NAMES.index(name) for name in TTFT_TERMS]

LIBRARY = NativeLibrary.extension("kvrelay_candidates", __file__, "candidates.c")


@functools.cache
def compiled() -> Callable[..., list[Any]] | None:
    """PlainRanking in C; None without a compiler."""
    module = LIBRARY.load_or_none(instead="requests are routed in Python")
    rank: Callable[..., list[Any]] | None = None if module is None else module.rank
    return rank


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
    weighs_both: ClassVar[bool] = True

    def __init__(self, options: Options, model: CostModel | None = None) -> None:
        chosen = parse_options(JointOptions, self.name, options).model_dump(exclude_none=True)
        self._model = replace(model or CostModel(), **chosen)
        compiled()  # now: a compiler takes seconds, in which the first request would wait

    @classmethod
    def build(cls, options: Options, model: CostModel) -> Self:
        return cls(options, model)

    def rank(self, context: RoutingContext, prefills: WorkerTable, decodes: WorkerTable) -> list[Candidate]:
        rank = compiled()
        if rank is None:
            return PlainRanking(context, prefills, decodes, self._model).candidates()
        found = rank(_numbers(context, self._model), columns_of(prefills), columns_of(decodes))
        return list(map(Candidate._make, found))

    def latency_targets(self, request: RouteRequest) -> tuple[float, float]:
        return targets(request, self._model, UNSET_SHARE)


def _numbers(context: RoutingContext, model: CostModel) -> tuple[float, ...]:
    """As candidates.c expects them."""
    request, force = context.request, context.request.force
    return (
        *(request.num_tokens, request.max_tokens, request.width),
        *(force == "local", force == "remote", request.needs_decode),
        *(context.stored_tokens, context.draw, context.unreported_share),
        *(context.arrivals_per_s, context.tenant_excess),
        *targets(request, model),
        request.slo is not None,
        *(model.tier_bytes_per_s, model.other_node_share, model.unhidden_share, model.handoff_s, model.displaced_share),
        *(model.decode_load_weight, model.both_load_weight, model.stall_weight, model.next_stall_weight),
        *(model.max_pressure, model.missed_s),
        *(model.expected_output_tokens, model.local_prefill_tokens),
        *(SURE_SHARE, LOST_SHARE, FRESH_S, SAME_SHARE, OVERDUE_WEIGHT, MAX_EXCESS, _GOLDEN, UNIT),
    )


class PlainRanking:
    """The candidates of one request, worker by worker.

    Workers that may compute the prompt are numbered: prefill workers by their row, decode workers by their row plus the
    number of prefill workers.
    """

    def __init__(self, context: RoutingContext, prefills: WorkerTable, decodes: WorkerTable, model: CostModel) -> None:
        self._context, self._model, self._cost = context, model, CommonCost(context, prefills, decodes, model)
        self._prefills, self._decodes = rows_of(prefills), rows_of(decodes)
        self._popular = self._popularity() if context.arrivals_per_s else None

    def candidates(self) -> list[Candidate]:
        """Best first. Equal scores go to the least recently chosen workers, then by row."""
        found = [self._candidate(prefill, decode) for prefill, decode in self._placements()]
        return nsmallest(MAX_CANDIDATES, found, key=self._order)

    def _order(self, one: Candidate) -> tuple[int, ...]:
        target_turn = self._decodes[one.decode].turn if one.decode is not None else -1
        source_turn = self._prefills[one.prefill].turn if one.prefill is not None else target_turn
        prefill, decode = (-1 if row is None else row for row in one[:2])
        return _whole_units(one.score), source_turn, target_turn, prefill, decode

    def _placements(self) -> list[tuple[int | None, int | None]]:
        """(prefill row, decode row): all pairs of the cheapest workers of each role, without decode workers that need
        no prefill worker; and the cheapest decode workers that compute the prompt themselves.
        """
        request, decodes = self._cost.request, self._decodes
        may_send, may_stay = bool(self._prefills) and request.force != "local", request.force != "remote"
        prefill_rows, decode_rows, local_rows = [], [], []
        if may_send:
            prefill_rows = _shortlist(self._prefills, lambda row: self._candidate(row, None).score)
            if not request.needs_decode:
                return [(row, None) for row in prefill_rows]
            decode_rows = _shortlist(decodes, self._decode_score)
        if may_stay:
            decode_rows = [row for row in decode_rows if not self._cost.is_near(decodes[row])]
            local_rows = _shortlist(decodes, lambda row: self._candidate(None, row).score)
        return [*product(prefill_rows, decode_rows), *((None, row) for row in local_rows)]

    def _decode_score(self, row: int) -> float:
        """What a decode worker costs any request that another worker computes."""
        decode, cost, model = self._decodes[row], self._cost, self._model
        miss = _chance_of_missing(decode.recent_step_s / cost.tpot_s)
        return _total(cost.decode(decode)) + model.unhidden_share * cost.arriving_s(decode) + model.missed_s * miss

    def _candidate(self, prefill: int | None, decode: int | None) -> Candidate:
        """Its terms, the common ones and this policy's, and their sum."""
        cost, context = self._cost, self._context
        source = self._prefills[prefill] if prefill is not None else None
        target = self._decodes[decode] if decode is not None else None
        computing, number = source or target, prefill if prefill is not None else len(self._prefills) + (decode or 0)
        assert computing is not None
        parts = cost.terms(source, target)
        share = _total(parts[term] for term in _TTFT) * (1.0 / cost.ttft_s)
        if target is not None:
            share = max(share, target.recent_step_s * (1.0 / cost.tpot_s))
        parts.append(_chance_of_missing(share) * self._model.missed_s)
        parts.append(self._replica(parts[_COMPUTE], parts[_PRESSURE]))
        parts.append((parts[_PRESSURE] + parts[_STALL]) * min(context.tenant_excess, MAX_EXCESS))
        parts.append(self._spread(computing.age_s, number))
        parts.append(OVERDUE_WEIGHT * computing.overdue_tokens / computing.prefill_tokens_per_s)
        return Candidate(prefill, decode, _total(parts), tuple(parts))

    def _popularity(self) -> tuple[float, float, float] | None:
        """Of a prefix that is too popular for the workers that hold it: seconds to compute the rest, the share of the
        prompt that it is, and the share of the load that has to go elsewhere; None: it is not.

        Prompts that share this prefix keep `load` workers busy; as far as these are more than hold it, others will have
        to compute it anyway, and the sooner the better.
        """
        workers, num_tokens = (*self._prefills, *self._decodes), self._cost.request.num_tokens
        uncached = list(map(self._cost.uncached_tokens, workers))
        fewest = min(uncached, default=0)
        least_s = fewest / workers[uncached.index(fewest)].prefill_tokens_per_s if workers else 0.0
        load, most_held = self._context.arrivals_per_s * least_s, num_tokens - fewest
        holders = sum(tokens <= num_tokens - SAME_SHARE * most_held for tokens in uncached)
        return (least_s, most_held / num_tokens, 1.0 - holders / load) if load > max(1.0, holders) else None

    def _replica(self, compute_s: float, pressure_s: float) -> float:
        """Discount the extra prefill of workers that do not hold a too popular prefix."""
        if self._popular is None:
            return 0.0
        least_s, held_share, lacking_share = self._popular
        extra_s = min(compute_s - least_s, held_share * compute_s)
        return -lacking_share * max(extra_s, 0.0) * (1.0 + pressure_s / max(compute_s, 1e-9))

    def _spread(self, age_s: float, number: int) -> float:
        """At most the work that other routers can have assigned since the worker's last report (a second per second).

        `number`: of the worker.
        """
        whole = (number + 1) * _GOLDEN
        drawn = self._context.draw + (whole - math.floor(whole))
        drawn -= drawn >= 1.0
        return drawn * min(age_s, FRESH_S) * self._context.unreported_share


def _shortlist(workers: list[WorkerRow], score: Callable[[int], float]) -> list[int]:
    """Rows of the lowest scores; ties go to the lowest turn, then to the first row."""
    rows = range(len(workers))
    return nsmallest(SHORTLIST, rows, key=lambda row: (_whole_units(score(row)), workers[row].turn, row))


def _whole_units(score: float) -> int:
    """So that two sums of the same terms tie."""
    return round(score * (1.0 / UNIT))


def _chance_of_missing(share: float) -> float:
    """Probability of missing a target of which this share is predicted to be used."""
    return min(max((share - SURE_SHARE) * (1.0 / (LOST_SHARE - SURE_SHARE)), 0.0), 1.0)


def _total(terms: Iterable[float]) -> float:
    """Their plain sum; newer Pythons' `sum` rounds once."""
    return functools.reduce(operator.add, terms)
