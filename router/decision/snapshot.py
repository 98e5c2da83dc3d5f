"""The input of one decision, and what a policy's candidates become: a decision, or the reason why there is none. Pure.

A worker that can never hold the request, is excluded, or whose queue is full, is not shown to the policy. While some
pairs are incompatible, the policy ranks one compatible set at a time; the lowest scores of all sets win. The terms of
a decision are those of the common cost, so that decisions of different policies can be compared.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import numpy as np

from kvrelay.router.fleet.account import LONGEST, ROOM, PrefixHits
from kvrelay.router.fleet.ledger import Ledger, LiveWorkers, compatible_sets
from kvrelay.router.index.prefix_index import PrefixIndex
from kvrelay.router.policies.base import (
    MAX_CANDIDATES,
    CostModel,
    RoutingContext,
    RoutingPolicy,
    WorkerTable,
    select_rows,
)
from kvrelay.router.policies.cost import CommonCost, decode_wait_s, prefix_source, row_of
from kvrelay.router.types import (
    TERM_NAMES,
    TTFT_TERMS,
    Candidate,
    CandidateScore,
    Decision,
    IndexState,
    Path,
    Ranking,
    RefusalReason,
    Regret,
    RouteRequest,
    RoutingRefusal,
)
from kvrelay.types import Role

MIN_RETRY_S, MAX_RETRY_S = 1.0, 30.0


def workers_of(ranking: Ranking, candidate: Candidate) -> tuple[str | None, str | None]:
    """(prefill worker, decode worker)."""
    return (
        None if candidate.prefill is None else ranking.prefills[candidate.prefill],
        None if candidate.decode is None else ranking.decodes[candidate.decode],
    )


def _path(candidate: Candidate) -> Path:
    return "prefill_only" if candidate.decode is None else "local" if candidate.prefill is None else "disaggregated"


def without_self_transfers(
    candidates: Sequence[Candidate], prefills: Sequence[str], decodes: Sequence[str]
) -> list[Candidate]:
    """Without pairs of a worker of both roles with itself: it computes such a prompt where it decodes it. Where a
    policy ranks nothing else, they become that.
    """
    paired = [
        one
        for one in candidates
        if one.prefill is None or one.decode is None or prefills[one.prefill] != decodes[one.decode]
    ]
    return paired or [one._replace(prefill=None) for one in candidates]


def candidate_scores(decision: Decision, most: int = MAX_CANDIDATES) -> list[CandidateScore]:
    """The candidates that the policy ranked, best first."""
    ranking = decision.ranking
    return [
        CandidateScore(*workers_of(ranking, one), _path(one), one.score, ranking.term_names, one.parts)
        for one in ranking.candidates[:most]
    ]


@dataclass(frozen=True)
class RoutingSnapshot:
    """One request, and the workers of both roles that may take it."""

    context: RoutingContext
    prefills: WorkerTable
    decodes: WorkerTable
    taker: "SnapshotTaker"
    held: Mapping[Role, PrefixHits]  # by row of all live workers of a role
    latency_targets: tuple[float, float] | None  # (TTFT, TPOT) in seconds, of the policy

    @property
    def request(self) -> RouteRequest:
        return self.context.request

    def ranking(self) -> Ranking:
        """The policy's candidates, best first, without incompatible pairs."""
        prefills, decodes = self.prefills, self.decodes
        if self.taker.workers.incompatible and len(prefills) and len(decodes):
            candidates = self._ranked_by_compatible_set()
        else:
            candidates = self.taker.policy.rank(self.context, prefills, decodes)
        if self.taker.workers.has_both:
            candidates = without_self_transfers(candidates, prefills.names, decodes.names)
        return Ranking(tuple(candidates), prefills.names, decodes.names, self.taker.policy.term_names)

    def _ranked_by_compatible_set(self) -> list[Candidate]:
        found = []
        for prefill_rows, decode_rows in compatible_sets(
            self.prefills.names, self.decodes.names, self.taker.workers.incompatible
        ):
            prefills, decodes = np.array(prefill_rows, np.int64), np.array(decode_rows, np.int64)
            candidates = self.taker.policy.rank(
                self.context, select_rows(self.prefills, prefills), select_rows(self.decodes, decodes)
            )
            for one in candidates:
                prefill = None if one.prefill is None else prefill_rows[one.prefill]
                decode = None if one.decode is None else decode_rows[one.decode]
                found.append(one._replace(prefill=prefill, decode=decode))
        return sorted(found, key=lambda candidate: candidate.score)[:MAX_CANDIDATES]

    def decision(self, ranking: Ranking, index: int = 0) -> Decision:
        """The decision for one of the candidates."""
        candidate, request = ranking.candidates[index], self.request
        prefill, decode = workers_of(ranking, candidate)
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
            path=_path(candidate),
            predicted_ttft_s=sum(common[name] for name in TTFT_TERMS),
            cached_tokens_prefill=cached,
            loaded_tokens_prefill=loaded,
            cached_tokens_decode=int(self.decodes.held[candidate.decode]) if candidate.decode is not None else 0,
            terms=common,
            policy=self.taker.policy.name,
            score=candidate.score,
            policy_terms=dict(zip(ranking.term_names, candidate.parts, strict=True)),
            regret=self._regret(compute, row),
            ranking=ranking,
            incompatible_pairs=self.taker.workers.incompatible,
            ttft_target_s=ttft_target_s,
            tpot_target_s=tpot_target_s,
        )

    def _prefix_source(self, table: WorkerTable, row: int) -> tuple[int, int]:
        """(tokens of the prompt that a worker will have in its pool, tokens that it will load)."""
        expected, size = int(table.expected[row]), int(table.block_size[row])
        if not self.context.stored_tokens and table.in_any_tier[row] <= expected:
            return min(expected, (self.request.num_tokens - 1) // size * size), 0
        source = prefix_source(self.context, row_of(table, row), self.taker.model)
        return source.cached, source.loaded

    def _common_terms(self, candidate: Candidate) -> dict[str, float]:
        """The common cost's terms: part of the policy's own terms where it builds on them, else computed here."""
        if self.taker.policy.term_names[: len(TERM_NAMES)] == TERM_NAMES:
            return dict(zip(TERM_NAMES, candidate.parts, strict=False))
        cost = CommonCost(self.context, self.prefills, self.decodes, self.taker.model)
        prefill = None if candidate.prefill is None else row_of(self.prefills, candidate.prefill)
        decode = None if candidate.decode is None else row_of(self.decodes, candidate.decode)
        return dict(zip(TERM_NAMES, cost.terms(prefill, decode), strict=True))

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

    def refusal(self) -> RoutingRefusal:
        """Why no worker is usable. One that could hold the request, but is busy or excluded, makes it "full"."""
        request, workers = self.request, self.taker.workers
        lacks_prefill = request.force == "remote" and (not request.needs_decode or len(self.decodes) > 0)
        role = Role.PREFILL if lacks_prefill else Role.DECODE
        live, unpaired = workers.columns(role), workers.unpaired
        rows = np.array([row for row, name in enumerate(live.names) if name not in unpaired], np.int64)
        if not len(rows):
            reason: RefusalReason = "no_prefill_worker" if role is Role.PREFILL else "no_decode_worker"
            return RoutingRefusal(reason, f"no {role} worker is up", MIN_RETRY_S)
        able = live.fitting(request, needs_output=role is Role.DECODE)
        fitting = rows if able is None else np.intersect1d(rows, able)
        if not len(fitting):
            most = int(np.minimum(live.ints[LONGEST], live.ints[ROOM])[rows].max())
            tokens = f"{request.num_tokens} tokens and up to {request.max_tokens} more"
            message = f"{tokens} do not fit on any {role} worker: the largest holds {most}"
            return RoutingRefusal("too_long", message, MAX_RETRY_S)
        table = live.table(fitting, self.held[role], workers.prefill_rate, self.context.now_s)
        wait_s = float(decode_wait_s(request, table).min())
        message = f"all {len(rows)} {role} workers are full or were tried"
        return RoutingRefusal("full", message, min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S))


FADE_S = 10.0
"""Age at which an arrival counts 1/e."""
MAX_COUNTED = 65_536
"""Prefixes that are counted; the oldest are dropped."""


class PrefixPopularity:
    """Arrival rate of prompts by shared prefix: the caller passes the time.

    Counted by the hashes at a few depths of each prompt's chain, which distinguishes a system prompt that all requests
    share from one client's conversation. Counts fade; memory is bounded.
    """

    def __init__(self) -> None:
        self._counts: dict[bytes, tuple[float, float]] = {}  # (faded count, time of the last update); the oldest first

    def __len__(self) -> int:
        return len(self._counts)

    def observe(self, hashes: Sequence[bytes], now_s: float) -> None:
        """A prompt arrived."""
        for depth in _depths(len(hashes)):
            name = hashes[depth - 1]
            count, then_s = self._counts.pop(name, (0.0, now_s))
            self._counts[name] = count * math.exp((then_s - now_s) / FADE_S) + 1.0, now_s
        while len(self._counts) > MAX_COUNTED:
            del self._counts[next(iter(self._counts))]

    def arrivals_per_s(self, hashes: Sequence[bytes], depth: int, now_s: float) -> float:
        """Arrival rate of prompts that share the first `depth` hashes with this one (or a power of two of them)."""
        depths = _depths(min(depth, len(hashes)))
        if not depths:
            return 0.0
        count, then_s = self._counts.get(hashes[depths[-1] - 1], (0.0, now_s))
        return count * math.exp((then_s - now_s) / FADE_S) / FADE_S


def _depths(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


@dataclass
class SnapshotTaker:
    """Reads live workers, the prefix index and the ledger; changes none of them. See Router for the fields."""

    workers: LiveWorkers
    index: PrefixIndex
    ledger: Ledger
    popularity: PrefixPopularity
    policy: RoutingPolicy
    model: CostModel
    tokens_per_hash: int
    max_waiting: int
    has_store: bool

    def take(self, request: RouteRequest, now_s: float) -> RoutingSnapshot:
        held, unpaired = self.held(request), self.workers.unpaired
        most = max(int(one.expected[one.expected.argmax()]) if len(one.expected) else 0 for one in held.values())
        return RoutingSnapshot(
            self._context(request, held, most, now_s),
            self._worker_table(Role.PREFILL, request, held[Role.PREFILL], most, now_s, unpaired),
            self._worker_table(Role.DECODE, request, held[Role.DECODE], most, now_s, unpaired),
            self,
            held,
            self.policy.latency_targets(request),
        )

    def _context(self, request: RouteRequest, held: dict[Role, PrefixHits], most: int, now_s: float) -> RoutingContext:
        stored = max(int(one.in_any_tier.max(initial=0)) for one in held.values()) if self.has_store else 0
        return RoutingContext(
            request,
            _draw(request.request_id),
            now_s,
            unreported_share=self.workers.unreported_share(),
            arrivals_per_s=self.popularity.arrivals_per_s(request.block_hashes, most // self.tokens_per_hash, now_s),
            tenant_excess=self.ledger.excess(request.tenant),
            stored_tokens=stored,
        )

    def _worker_table(
        self, role: Role, request: RouteRequest, hits: PrefixHits, most: int, now_s: float, unpaired: frozenset[str]
    ) -> WorkerTable:
        columns, excluded = self.workers.columns(role), request.excluded | unpaired
        has_pairs = request.force or (request.slo and self.policy.weighs_both and 2 * most >= request.num_tokens)
        if role is Role.PREFILL and self.workers.all_both and not has_pairs:
            return columns.table(np.empty(0, np.int64), hits, self.workers.prefill_rate, now_s)
        usable = partial(columns.usable, request, max_waiting=self.max_waiting, needs_output=role is Role.DECODE)
        rows = usable(excluded=excluded | self.workers.suspected)
        if rows is not None and not len(rows) and self.workers.suspected:  # better a worker that may answer than none
            rows = usable(excluded=excluded)
        table = columns.table(rows, hits, self.workers.prefill_rate, now_s)
        if request.slo is not None:  # workers hold steps with prompts to its target
            table.recent_step_s = table.decode_step_s
        return table

    def held(self, request: RouteRequest) -> dict[Role, PrefixHits]:
        """Tokens of the prompt that each live worker holds, or is expected to hold."""
        found = self.index.table(request.block_hashes)
        found *= self.tokens_per_hash
        columns_of = {
            role: self.workers.columns(role) for role in Role
        }  # lays them out: accounts have rows from here on
        pending, held = self._pending(request), {}
        for role, columns in columns_of.items():
            tokens = found.take(columns.index_rows, axis=0)  # ten times as fast as found[rows]
            in_pool, in_any_tier = tokens[:, 1], tokens[:, 0]
            expected = in_pool
            if of_role := pending[role]:
                rows, expected = list(of_role), in_pool.copy()
                expected[rows] = np.maximum(expected[rows], list(of_role.values()))
                in_any_tier = np.maximum(in_any_tier, expected)
            held[role] = PrefixHits(in_pool, expected, in_any_tier)
        return held

    def _pending(self, request: RouteRequest) -> dict[Role, dict[int, int]]:
        """By row of live workers that are about to compute a prefix of the prompt: its tokens in whole blocks."""
        found: dict[Role, dict[int, int]] = {role: {} for role in Role}
        state, size = self.index.state, self.tokens_per_hash
        for account, num_hashes in self.ledger.pending_matches(request.block_hashes).items():
            places, info = account.places, account.info
            if places and state(info.worker_id) is not IndexState.STALE:
                tokens = num_hashes * size
                tokens -= tokens % info.block_size
                for role, (_, row) in places.items():
                    found[role][row] = tokens
        return found


def _draw(request_id: str) -> float:
    """In [0, 1), the same for the same request, on every ingress: policies that draw at random are reproducible."""
    digest = blake2b(f"0:{request_id}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) * 2.0**-53
