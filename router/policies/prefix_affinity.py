"""Ray Serve LLM's prefix affinity: the longest prefix where load is even enough, else the less loaded of two. Pure.

Source: Ray 2.60, llm/_internal/serve/routing_policies/prefix_aware/prefix_aware_router.py, its defaults: load is always even enough
(no threshold); a match of less than 10 % is none, and then the replica with the smallest part of the prefix tree is taken. Prefill
and decode are deployments with a router each, so the rule holds for both. Ray's tree holds the text of all prompts that this router
has sent anywhere; here the index answers (`WorkerTable.coming`).
"""

from typing import ClassVar

from pydantic import Field

from kvrelay.router.policies.base import Floats, Ints, Options, RoutingContext, WorkerTable
from kvrelay.router.policies.checked import Checked, checked
from kvrelay.router.policies.picking import DECODE_STREAM, PREFILL_STREAM, Ranked, TwoChoices, best_rows, ranked
from kvrelay.router.policies.power_of_two import places, two_by_two


class PrefixAffinityOptions(Checked):
    """imbalanced_threshold: requests between the most and the least loaded worker. match_rate_threshold: share of the prompt."""

    imbalanced_threshold: float = Field(float("inf"), ge=0)
    match_rate_threshold: float = Field(0.1, ge=0, le=1)


class PrefixAffinity(TwoChoices):
    """Those with the longest prefix; of these the one with the fewest requests."""

    name: ClassVar[str] = "prefix_affinity"
    term_names: ClassVar[tuple[str, ...]] = ("prefill_matched", "prefill_requests", "decode_matched", "decode_requests")

    def __init__(self, options: Options) -> None:
        self._options = checked(PrefixAffinityOptions, self.name, options)

    def prefill(self, context: RoutingContext, table: WorkerTable) -> Ranked:
        rows, score = self._order(context, table, PREFILL_STREAM)
        return ranked(rows, score, (_matched(context, table), table.sequences, 0.0, 0.0))

    def decode(self, context: RoutingContext, table: WorkerTable) -> Ranked:
        rows, score = self._order(context, table, DECODE_STREAM)
        return ranked(rows, score, (0.0, 0.0, _matched(context, table), table.sequences))

    def alone(self, context: RoutingContext, table: WorkerTable) -> Ranked:
        return self.decode(context, table)

    def _order(self, context: RoutingContext, table: WorkerTable, stream: int) -> tuple[Ints, Floats | Ints]:
        """The best rows, best first, and what ordered them: place by chance, minus the share matched, or the last turn."""
        load = table.sequences
        if load.max() - load.min() > self._options.imbalanced_threshold:
            rows = two_by_two(context, load, stream)
            return rows, places(rows, len(table))
        matched = _matched(context, table)
        if matched.max() < self._options.match_rate_threshold:
            return best_rows(table.turn, load), table.turn
        return best_rows(-matched, load), -matched


def _matched(context: RoutingContext, table: WorkerTable) -> Floats:
    return table.expected / context.request.num_tokens
