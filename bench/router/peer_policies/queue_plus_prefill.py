"""The sanity baseline: the queue, and the request's own prefill several times over. Pure.

Ours, of no product: near saturation a token that is computed needlessly delays all later requests, so a request is
charged `weight` times what it computes. Prefixes that are on their way to a worker count as cached there.
"""

from typing import ClassVar

import numpy as np
from pydantic import Field

from kvrelay.router.policies.base import (
    Floats,
    Ints,
    Options,
    PolicyOptions,
    RoutingContext,
    WorkerTable,
    parse_options,
)
from kvrelay.router.policies.selection import IndependentChoice, RankedRows, best_rows, rank_rows


def uncached(context: RoutingContext, table: WorkerTable, cached: Ints) -> Ints:
    """Tokens that each worker would compute: at least the last one, whose logits give the first output token."""
    num_tokens = context.request.num_tokens
    usable = (num_tokens - 1) // table.block_size * table.block_size
    computed: Ints = num_tokens - np.minimum(cached, usable)
    return computed


class QueuePlusPrefillOptions(PolicyOptions):
    """weight: times the own prefill."""

    weight: float = Field(16.0, ge=0)


class QueuePlusPrefill(IndependentChoice):
    """The least seconds of queue and `weight` times own prefill; the decode worker with the fewest sequences; equal
    ones in turn.
    """

    name: ClassVar[str] = "queue_plus_prefill"
    term_names: ClassVar[tuple[str, ...]] = ("queue_s", "weighted_prefill_s", "decode_sequences")

    def __init__(self, options: Options) -> None:
        self._weight = parse_options(QueuePlusPrefillOptions, self.name, options).weight

    def rank_prefill(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        queue_s, own_s = self._seconds(context, table)
        score = queue_s + own_s
        return rank_rows(best_rows(score, table.turn), score, (queue_s, own_s, 0.0))

    def rank_decode(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        return rank_rows(best_rows(table.sequences, table.turn), table.sequences, (0.0, 0.0, table.sequences))

    def rank_local(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        return self.rank_prefill(context, table)

    def _seconds(self, context: RoutingContext, table: WorkerTable) -> tuple[Floats, Floats]:
        rate = table.prefill_tokens_per_s
        return table.queued_tokens / rate, self._weight * uncached(context, table, table.expected) / rate
