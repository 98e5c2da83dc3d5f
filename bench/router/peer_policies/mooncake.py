"""Mooncake's Conductor: the prefill worker with the least time to first token, prefixes fetched from the worker that
has more. Pure.

Source: Qin et al., "Mooncake: Trading More Storage for Less Computation" (FAST 2025), algorithm 1. Where the longest
prefix anywhere is more than `balancing_threshold` times the worker's own, the rest of it is fetched; then queue,
transfer and computation add up, and the least sum wins. A request whose TTFT or TBT is predicted beyond its limit is
rejected before its prefill (early rejection): there is no candidate. The TBT is the chosen decode worker's present one;
what it will be when the prefill ends, which the paper's last variant predicts, is not.

The paper gives no threshold (it is "adjusted manually"): 1 here, to fetch whatever another worker has more of. It does
not say how the decode worker is chosen beyond balancing load under the limit of its memory: here the least share of KV
blocks in use. Its prefill time is a fitted function of both lengths; here it is tokens at the measured speed.
"""

from typing import ClassVar

import numpy as np
from pydantic import Field

from bench.router.peer_policies.queue_plus_prefill import uncached
from kvrelay.router.policies.base import Floats, Options, PolicyOptions, RoutingContext, WorkerTable, parse_options
from kvrelay.router.policies.selection import IndependentChoice, RankedRows, best_rows, rank_rows
from kvrelay.router.types import Candidate


class MooncakeOptions(PolicyOptions):
    """balancing_threshold: infinite never fetches. other_node_share: of a link's speed, between machines.

    Limits in seconds.
    """

    balancing_threshold: float = Field(1.0, gt=0)
    other_node_share: float = Field(0.25, gt=0, le=1)
    ttft_slo_s: float | None = Field(None, gt=0)
    tbt_slo_s: float | None = Field(None, gt=0)


class Mooncake(IndependentChoice):
    """The least predicted TTFT; equal ones in turn."""

    name: ClassVar[str] = "mooncake"
    term_names: ClassVar[tuple[str, ...]] = ("transfer_s", "queue_s", "prefill_s", "decode_share")

    def __init__(self, options: Options) -> None:
        self._options = parse_options(MooncakeOptions, self.name, options)

    def rank(self, context: RoutingContext, prefills: WorkerTable, decodes: WorkerTable) -> list[Candidate]:
        """See RoutingPolicy. Empty, too, where the chosen way is predicted to miss a limit."""
        candidates = super().rank(context, prefills, decodes)
        return [] if candidates and self._is_overdue(candidates[0], decodes) else candidates

    def rank_prefill(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        terms = self._ttft_terms(context, table)
        ttft = terms[0] + terms[1] + terms[2]
        return rank_rows(best_rows(ttft, table.turn), ttft, (*terms, 0.0))

    def rank_decode(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        share = _share(context, table)
        return rank_rows(best_rows(share, table.turn), share, (0.0, 0.0, 0.0, share))

    def rank_local(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        terms, share = self._ttft_terms(context, table), _share(context, table)
        score = terms[0] + terms[1] + terms[2] + share
        return rank_rows(best_rows(score, table.turn), score, (*terms, share))

    def _ttft_terms(self, context: RoutingContext, table: WorkerTable) -> tuple[Floats, Floats, Floats]:
        """Seconds: to fetch what others have more of, in the queue, to compute the rest."""
        own = table.in_any_tier
        longest = max(int(own.max()), context.stored_tokens)
        is_fetched = own < longest / self._options.balancing_threshold
        prefix = np.where(is_fetched, longest, own)
        holders = table.nodes[own == longest]
        share = np.where(np.isin(table.nodes, holders), 1.0, self._options.other_node_share)
        transfer_s = (prefix - own) * table.kv_bytes_per_token / (table.kv_bytes_per_s * share)
        rate = table.prefill_tokens_per_s
        return transfer_s, table.queued_tokens / rate, uncached(context, table, prefix) / rate

    def _is_overdue(self, candidate: Candidate, decodes: WorkerTable) -> bool:
        options = self._options
        if options.ttft_slo_s is not None and sum(candidate.parts[:3]) > options.ttft_slo_s:
            return True
        if options.tbt_slo_s is None or candidate.decode is None:
            return False
        return bool(decodes.decode_step_s[candidate.decode] > options.tbt_slo_s)


def _share(context: RoutingContext, table: WorkerTable) -> Floats:
    """Of the pool's blocks, in use when the prompt is there; above 1: it does not fit now."""
    needed = -(-context.request.num_tokens // table.block_size)
    share: Floats = (table.num_blocks - table.free_blocks + needed) / table.num_blocks
    return share
