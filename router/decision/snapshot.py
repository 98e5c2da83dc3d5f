"""The input of one decision, and what a policy's candidates become: a decision, or the reason why there is none.

Never imports torch, Ray, sockets, a clock or a random source. Rules, whatever the policy:
- A worker that can never hold the request, is excluded, or whose queue is full, is not shown to the policy.
- While some pairs of workers are incompatible, the policy ranks one compatible set at a time (see compatibility.py);
  the lowest scores of all sets win. A worker that is compatible with none is not shown at all.
- The terms of a decision are those of the common cost, so that decisions of different policies can be compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvrelay.router.fleet.columns import LONGEST, ROOM, Columns, PrefixHits
from kvrelay.router.fleet.compatibility import IncompatiblePairs, compatible_sets
from kvrelay.router.policies.base import (
    MAX_CANDIDATES,
    Floats,
    Ints,
    RoutingContext,
    RoutingPolicy,
    WorkerTable,
    select_rows,
)
from kvrelay.router.policies.cost import CommonCost, prefix_sources
from kvrelay.router.policies.cost_model import CostModel
from kvrelay.router.types import (
    TERM_NAMES,
    TTFT_TERMS,
    Candidate,
    Decision,
    IncompatiblePair,
    Ranking,
    RefusalReason,
    Regret,
    RouteRequest,
    RoutingRefusal,
)
from kvrelay.types import Role

MIN_RETRY_S, MAX_RETRY_S = 1.0, 30.0


@dataclass(frozen=True)
class RoutingSnapshot:
    """One request, and the workers of both roles that may take it."""

    context: RoutingContext
    prefills: WorkerTable
    decodes: WorkerTable
    policy: RoutingPolicy
    model: CostModel
    incompatible: IncompatiblePairs
    held: Mapping[Role, PrefixHits]  # by row of all live workers of a role
    latency_targets: tuple[float, float] | None  # (TTFT, TPOT) in seconds, of the policy

    @property
    def request(self) -> RouteRequest:
        return self.context.request

    def ranking(self) -> Ranking:
        """The policy's candidates, best first, without incompatible pairs."""
        prefills, decodes = self.prefills, self.decodes
        if self.incompatible and len(prefills) and len(decodes):
            candidates = self._ranked_by_compatible_set()
        else:
            candidates = self.policy.rank(self.context, prefills, decodes)
        return Ranking(tuple(candidates), prefills.names, decodes.names, self.policy.term_names)

    def _ranked_by_compatible_set(self) -> list[Candidate]:
        found = []
        for prefill_rows, decode_rows in compatible_sets(self.prefills.names, self.decodes.names, self.incompatible):
            prefills, decodes = np.array(prefill_rows, np.int64), np.array(decode_rows, np.int64)
            candidates = self.policy.rank(
                self.context, select_rows(self.prefills, prefills), select_rows(self.decodes, decodes)
            )
            found += [_renumbered(candidate, prefills, decodes) for candidate in candidates]
        return sorted(found, key=lambda candidate: candidate.score)[:MAX_CANDIDATES]

    def decision(self, ranking: Ranking, index: int = 0) -> Decision:
        """The decision for one of the candidates."""
        candidate, request = ranking.candidates[index], self.request
        prefill, decode = ranking.workers(candidate)
        common = self._common_terms(candidate)
        compute, row = (
            (self.prefills, candidate.prefill) if candidate.prefill is not None else (self.decodes, candidate.decode)
        )
        assert row is not None, "a candidate without any worker"
        cached, loaded = self._prefix_source(compute, row)
        ttft_target_s, tpot_target_s = self.latency_targets or (None, None)
        return Decision(
            request_id=request.request_id,
            prefill=prefill,
            decode=decode,
            path=candidate.path,
            predicted_ttft_s=sum(common[name] for name in TTFT_TERMS),
            cached_tokens_prefill=cached,
            loaded_tokens_prefill=loaded,
            cached_tokens_decode=int(self.decodes.held[candidate.decode]) if candidate.decode is not None else 0,
            terms=common,
            policy=self.policy.name,
            score=candidate.score,
            policy_terms=dict(zip(ranking.term_names, candidate.parts, strict=True)),
            regret=self._regret(compute, row),
            ranking=ranking,
            incompatible_pairs=tuple(IncompatiblePair(*pair, reason) for pair, reason in self.incompatible.items()),
            ttft_target_s=ttft_target_s,
            tpot_target_s=tpot_target_s,
        )

    def _prefix_source(self, table: WorkerTable, row: int) -> tuple[int, int]:
        """(tokens of the prompt that a worker will have in its pool, tokens that it will load)."""
        expected, size = int(table.expected[row]), int(table.block_size[row])
        if not self.context.stored_tokens and table.in_any_tier[row] <= expected:
            return min(expected, (self.request.num_tokens - 1) // size * size), 0
        source = prefix_sources(self.context, (select_rows(table, np.array([row])),), self.model)
        return int(source.cached[0]), int(source.loaded[0])

    def _common_terms(self, candidate: Candidate) -> dict[str, float]:
        """The common cost's terms: part of the policy's own terms where it builds on them, else computed here."""
        if self.policy.term_names[: len(TERM_NAMES)] == TERM_NAMES:
            return dict(zip(TERM_NAMES, candidate.parts, strict=False))
        cost = CommonCost(self.context, self.prefills, self.decodes, self.model)
        return dict(zip(TERM_NAMES, _cost_terms(cost, candidate), strict=True))

    def _regret(self, table: WorkerTable, row: int) -> Regret:
        """Against the worker with the best overlap among all that could compute the prompt."""
        force = self.request.force
        best, holder = int(table.expected[row]), table.names[row]
        chosen = best
        for other, is_open in ((self.prefills, force != "local"), (self.decodes, force != "remote")):
            if is_open and len(other):
                most = int(other.expected.argmax())
                if (tokens := int(other.expected[most])) > best:
                    best, holder = tokens, other.names[most]
        return Regret(holder, best - chosen, (best - chosen) / float(table.prefill_tokens_per_s[row]))

    def refusal(self, role: Role, live: Columns, unpaired: frozenset[str], prefill_rate: float) -> RoutingRefusal:
        """Why no worker of `role` is usable.

        One that could hold the request, but is busy or excluded, makes it "full".
        """
        rows = np.array([row for row, name in enumerate(live.names) if name not in unpaired], np.int64)
        if not len(rows):
            reason: RefusalReason = "no_prefill_worker" if role is Role.PREFILL else "no_decode_worker"
            return RoutingRefusal(reason, f"no {role} worker is up", MIN_RETRY_S)
        request = self.request
        able = live.fitting(request, needs_output=role is Role.DECODE)
        fitting = rows if able is None else np.intersect1d(rows, able)
        if not len(fitting):
            most = int(np.minimum(live.ints[LONGEST], live.ints[ROOM])[rows].max())
            tokens = f"{request.num_tokens} tokens and up to {request.max_tokens} more"
            message = f"{tokens} do not fit on any {role} worker: the largest holds {most}"
            return RoutingRefusal("too_long", message, MAX_RETRY_S)
        table = live.table(fitting, self.held[role], prefill_rate, self.context.now_s)
        wait_s = float(CommonCost(self.context, table, table, self.model).decode[2].min())
        message = f"all {len(rows)} {role} workers are full or were tried"
        return RoutingRefusal("full", message, min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S))


def _cost_terms(cost: CommonCost, candidate: Candidate) -> list[float]:
    def rows(row: int | None) -> Ints:
        return np.array([row or 0], np.int64)

    parts: Floats
    if candidate.decode is None:
        parts = cost.prefill_only(rows(candidate.prefill))
    elif candidate.prefill is None:
        parts = cost.local(rows(candidate.decode))
    else:
        parts = cost.pairs(rows(candidate.prefill), rows(candidate.decode))
    return [float(part) for part in parts[:, 0]]


def _renumbered(candidate: Candidate, prefills: Ints, decodes: Ints) -> Candidate:
    """From rows of a compatible set to rows of the whole tables."""
    prefill = None if candidate.prefill is None else int(prefills[candidate.prefill])
    decode = None if candidate.decode is None else int(decodes[candidate.decode])
    return candidate._replace(prefill=prefill, decode=decode)
