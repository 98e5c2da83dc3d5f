"""Prefix affinity, as in Ray Serve LLM: the longest cached prefix while load is balanced, else power of two choices.
Pure.

Source: Ray 2.60, llm/_internal/serve/routing_policies/prefix_aware/prefix_aware_router.py, with its defaults: any load
counts as balanced (no threshold); a match of less than 10 % is none, and then the replica with the smallest part of the
prefix tree is taken. Prefill and decode are deployments with a router each, so the rule holds for both. Ray's tree
holds the text of all prompts that this router has sent anywhere; here the prefix index answers
(`WorkerTable.expected`).
"""

from typing import ClassVar

from pydantic import Field

from kvrelay.router.policies.base import Floats, Ints, Options, RoutingContext, WorkerTable
from kvrelay.router.policies.options import PolicyOptions, parse_options
from kvrelay.router.policies.power_of_two import positions, two_by_two
from kvrelay.router.policies.selection import (
    DECODE_STREAM,
    PREFILL_STREAM,
    IndependentChoice,
    RankedRows,
    best_rows,
    matched_share,
    rank_rows,
)


class PrefixAffinityOptions(PolicyOptions):
    """imbalanced_threshold: requests between the most and the least loaded worker. match_rate_threshold: share of the
    prompt.
    """

    imbalanced_threshold: float = Field(float("inf"), ge=0)
    match_rate_threshold: float = Field(0.1, ge=0, le=1)


class PrefixAffinity(IndependentChoice):
    """The longest prefix; ties go to the worker with the fewest requests."""

    name: ClassVar[str] = "prefix_affinity"
    term_names: ClassVar[tuple[str, ...]] = ("prefill_matched", "prefill_requests", "decode_matched", "decode_requests")

    def __init__(self, options: Options) -> None:
        self._options = parse_options(PrefixAffinityOptions, self.name, options)

    def rank_prefill(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        rows, score = self._order(context, table, PREFILL_STREAM)
        return rank_rows(rows, score, (matched_share(context, table), table.sequences, 0.0, 0.0))

    def rank_decode(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        rows, score = self._order(context, table, DECODE_STREAM)
        return rank_rows(rows, score, (0.0, 0.0, matched_share(context, table), table.sequences))

    def _order(self, context: RoutingContext, table: WorkerTable, stream: int) -> tuple[Ints, Floats | Ints]:
        """The best rows, best first, and the score that orders them: a random position, minus the share matched, or the
        turn.
        """
        load = table.sequences
        if load.max() - load.min() > self._options.imbalanced_threshold:
            rows = two_by_two(context, load, stream)
            return rows, positions(rows, len(table))
        matched = matched_share(context, table)
        if matched.max() < self._options.match_rate_threshold:
            return best_rows(table.turn, load), table.turn
        return best_rows(-matched, load), -matched
