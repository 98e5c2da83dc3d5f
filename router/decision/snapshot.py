"""From a policy's ways to a decision, or to the reason why there is none.

Never imports torch, Ray, sockets, a clock or a random source. Rules, whatever the policy:
- A worker that can never hold the request, is excluded, or whose line is full, is not shown to it.
- While some pairs misfit it is shown one circle of workers at a time within which all fit (see compatibility.py); a worker that
  fits nobody is not shown at all. The least score of all circles wins.
- The terms of a decision are those of the common cost, so that decisions of different policies compare.
"""

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
from kvrelay.router.policies.cost import CommonCost, sources
from kvrelay.router.policies.cost_model import CostModel
from kvrelay.router.types import (
    TERM_NAMES,
    TTFT_TERMS,
    Candidate,
    Decision,
    Ranking,
    Refusal,
    RefusalReason,
    Regret,
    RouteRequest,
)

MIN_RETRY_S, MAX_RETRY_S = 1.0, 30.0


@dataclass(frozen=True)
class RoutingSnapshot:
    """What one decision is made of: who may take the request."""

    context: RoutingContext
    prefills: WorkerTable
    decodes: WorkerTable
    policy: RoutingPolicy
    model: CostModel
    targets: tuple[float, float] | None = None  # (TTFT, TPOT), seconds

    @property
    def request(self) -> RouteRequest:
        return self.context.request

    def ranking(self, incompatible: IncompatiblePairs) -> Ranking:
        """The policy's ways, best first; none of an incompatible pair."""
        prefills, decodes = self.prefills, self.decodes
        if incompatible and len(prefills) and len(decodes):
            candidates = self._ranked_by_compatible_set(incompatible)
        else:
            candidates = self.policy.rank(self.context, prefills, decodes)
        return Ranking(tuple(candidates), prefills.names, decodes.names, self.policy.term_names)

    def _ranked_by_compatible_set(self, incompatible: IncompatiblePairs) -> list[Candidate]:
        found = []
        for some_prefills, some_decodes in compatible_sets(self.prefills.names, self.decodes.names, incompatible):
            senders, targets = np.array(some_prefills, np.int64), np.array(some_decodes, np.int64)
            candidates = self.policy.rank(
                self.context, select_rows(self.prefills, senders), select_rows(self.decodes, targets)
            )
            found += [_renumbered(candidate, senders, targets) for candidate in candidates]
        return sorted(found, key=lambda candidate: candidate.score)[:MAX_CANDIDATES]

    def decision(self, ranking: Ranking, index: int = 0) -> Decision:
        """One of the ways, told in full."""
        ttft_target_s, tpot_target_s = self.targets or (None, None)
        candidate, request = ranking.candidates[index], self.request
        prefill, decode = ranking.workers(candidate)
        common = self._common_terms(candidate)
        computing, row = (
            (self.prefills, candidate.prefill) if candidate.prefill is not None else (self.decodes, candidate.decode)
        )
        assert row is not None, "a way without any worker"
        cached, loaded = self._sources(computing, row)
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
            regret=self._regret(computing, row),
            ranking=ranking,
            ttft_target_s=ttft_target_s,
            tpot_target_s=tpot_target_s,
        )

    def _sources(self, table: WorkerTable, row: int) -> tuple[int, int]:
        """Tokens of the prompt that a worker has in its pool when it computes it, and those that it loads."""
        expected, size = int(table.expected[row]), int(table.block_size[row])
        if not self.context.stored_tokens and table.in_any_tier[row] <= expected:
            return min(expected, (self.request.num_tokens - 1) // size * size), 0
        source = sources(self.context, (select_rows(table, np.array([row])),), self.model)
        return int(source.cached[0]), int(source.loaded[0])

    def _common_terms(self, candidate: Candidate) -> dict[str, float]:
        if self.policy.term_names[: len(TERM_NAMES)] == TERM_NAMES:
            return dict(zip(TERM_NAMES, candidate.parts, strict=False))
        return dict(
            zip(
                TERM_NAMES,
                _column(CommonCost(self.context, self.prefills, self.decodes, self.model), candidate),
                strict=True,
            )
        )

    def _regret(self, computing: WorkerTable, row: int) -> Regret:
        """Against whoever could compute the prompt and holds, or will hold, the most of it."""
        force = self.request.force
        best, holder = int(computing.expected[row]), computing.names[row]
        chosen = best
        for table, is_open in ((self.prefills, force != "local"), (self.decodes, force != "remote")):
            if is_open and len(table):
                most = int(table.expected.argmax())
                if (tokens := int(table.expected[most])) > best:
                    best, holder = tokens, table.names[most]
        return Regret(holder, best - chosen, (best - chosen) / float(computing.prefill_tokens_per_s[row]))


def _column(cost: CommonCost, candidate: Candidate) -> list[float]:
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


def _renumbered(candidate: Candidate, senders: Ints, targets: Ints) -> Candidate:
    """From rows of a circle to rows of all."""
    prefill = None if candidate.prefill is None else int(senders[candidate.prefill])
    decode = None if candidate.decode is None else int(targets[candidate.decode])
    return candidate._replace(prefill=prefill, decode=decode)


def refusal(
    snapshot: RoutingSnapshot, role: str, live: Columns, unpaired: frozenset[str], held: PrefixHits, prefill_rate: float
) -> Refusal:
    """Why no worker of `role` is usable. Whoever could hold it, but is busy or excluded, makes it "full"."""
    rows = np.array([row for row, name in enumerate(live.names) if name not in unpaired], np.int64)
    if not len(rows):
        reason: RefusalReason = "no_prefill_worker" if role == "prefill" else "no_decode_worker"
        return Refusal(reason, f"no {role} worker is up", MIN_RETRY_S)
    request = snapshot.request
    able = live.fitting(request, needs_output=role == "decode")
    fitting = rows if able is None else np.intersect1d(rows, able)
    if not len(fitting):
        most = int(np.minimum(live.ints[LONGEST], live.ints[ROOM])[rows].max())
        asked = f"{request.num_tokens} tokens and up to {request.max_tokens} more"
        return Refusal("too_long", f"{asked} cannot fit on any {role} worker: the largest holds {most}", MAX_RETRY_S)
    table = live.table(fitting, held, prefill_rate, snapshot.context.now_s)
    wait_s = float(CommonCost(snapshot.context, table, table, snapshot.model).decode[2].min())
    busy = f"all {len(rows)} {role} workers are full or were tried"
    return Refusal("full", busy, min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S))
