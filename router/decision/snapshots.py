"""Takes the snapshot that one decision is made from: usable workers, their load, and what they hold of the prompt.
Pure.
"""

from hashlib import blake2b

import numpy as np

from kvrelay.router.decision.snapshot import RoutingSnapshot
from kvrelay.router.fleet.columns import PrefixHits
from kvrelay.router.fleet.ledger import Ledger
from kvrelay.router.fleet.live_workers import LiveWorkers
from kvrelay.router.index.prefix_index import PrefixIndex
from kvrelay.router.index.prefix_popularity import PrefixPopularity
from kvrelay.router.policies.base import RoutingContext, RoutingPolicy, WorkerTable
from kvrelay.router.policies.cost_model import CostModel
from kvrelay.router.types import IndexState, RouteRequest, RoutingRefusal
from kvrelay.types import Role


class SnapshotTaker:
    """Reads live workers, the prefix index and the ledger; changes none of them."""

    def __init__(
        self,
        workers: LiveWorkers,
        index: PrefixIndex,
        ledger: Ledger,
        popularity: PrefixPopularity,
        policy: RoutingPolicy,
        model: CostModel,
        *,
        seed: int,
        tokens_per_hash: int,
        max_waiting: int,
        has_store: bool,
    ) -> None:
        """See Router for the arguments."""
        self._workers, self._index, self._ledger, self._popularity = workers, index, ledger, popularity
        self._policy, self._model, self._seed = policy, model, seed
        self._tokens_per_hash, self._max_waiting, self._has_store = tokens_per_hash, max_waiting, has_store

    def take(self, request: RouteRequest, now_s: float) -> RoutingSnapshot:
        """The workers that can take the request now."""
        held, unpaired = self.held(request), self._workers.unpaired
        return RoutingSnapshot(
            self._context(request, held, now_s),
            self._worker_table(Role.PREFILL, request, held, now_s, unpaired),
            self._worker_table(Role.DECODE, request, held, now_s, unpaired),
            self._policy,
            self._model,
            self._workers.incompatible,
            held,
            self._policy.latency_targets(request),
        )

    def refusal(self, snapshot: RoutingSnapshot) -> RoutingRefusal:
        """Why the snapshot has no candidate."""
        request = snapshot.request
        lacks_prefill = request.force == "remote" and (not request.needs_decode or len(snapshot.decodes) > 0)
        role = Role.PREFILL if lacks_prefill else Role.DECODE
        columns = self._workers.columns(role)
        return snapshot.refusal(role, columns, self._workers.unpaired, self._workers.prefill_rate)

    def _context(self, request: RouteRequest, held: dict[Role, PrefixHits], now_s: float) -> RoutingContext:
        hashes = request.block_hashes
        most = max(int(one.expected[one.expected.argmax()]) if len(one.expected) else 0 for one in held.values())
        stored = max((int(one.in_any_tier.max(initial=0)) for one in held.values()), default=0)
        return RoutingContext(
            request,
            _draw(request.request_id, self._seed),
            now_s,
            unreported_share=self._workers.unreported_share(),
            arrivals_per_s=self._popularity.arrivals_per_s(hashes, most // self._tokens_per_hash, now_s),
            tenant_excess=self._ledger.excess(request.tenant),
            stored_tokens=stored if self._has_store else 0,
        )

    def _worker_table(
        self, role: Role, request: RouteRequest, held: dict[Role, PrefixHits], now_s: float, unpaired: frozenset[str]
    ) -> WorkerTable:
        """The workers of a role that can take the request now."""
        columns, excluded = self._workers.columns(role), request.excluded | unpaired
        rows = columns.usable(
            request, max_waiting=self._max_waiting, needs_output=role is Role.DECODE, excluded=excluded
        )
        return columns.table(rows, held[role], self._workers.prefill_rate, now_s)

    def held(self, request: RouteRequest) -> dict[Role, PrefixHits]:
        """Tokens of the prompt that each live worker holds, or is expected to hold."""
        found = self._index.table(request.block_hashes)
        found *= self._tokens_per_hash
        columns_of = {
            role: self._workers.columns(role) for role in Role
        }  # lays them out: accounts have rows from here on
        pending, held = self._pending(request), {}
        for role, columns in columns_of.items():
            tokens = found[columns.index_rows]
            in_pool, in_any_tier = tokens[:, 1], tokens[:, 0]
            expected = in_pool
            if of_role := pending.get(role):
                rows, expected = list(of_role), in_pool.copy()
                expected[rows] = np.maximum(expected[rows], list(of_role.values()))
                in_any_tier = np.maximum(in_any_tier, expected)
            held[role] = PrefixHits(in_pool, expected, in_any_tier)
        return held

    def _pending(self, request: RouteRequest) -> dict[Role, dict[int, int]]:
        """By row of live workers that are about to compute a prefix of the prompt: its tokens in whole blocks."""
        found: dict[Role, dict[int, int]] = {}
        live, state, size = self._workers.accounts, self._index.state, self._tokens_per_hash
        for account, num_hashes in self._ledger.pending_matches(request.block_hashes).items():
            info = account.info
            if live.get(info.worker_id) is account and state(info.worker_id) is not IndexState.STALE:
                tokens = num_hashes * size
                found.setdefault(account.role, {})[account.row] = tokens - tokens % info.block_size
        return found


def _draw(request_id: str, seed: int) -> float:
    """In [0, 1), the same for the same request and seed."""
    digest = blake2b(f"{seed}:{request_id}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) * 2.0**-53
