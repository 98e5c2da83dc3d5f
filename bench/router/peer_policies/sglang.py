"""SGLang's cache-aware routing: the longest prefix where it is long enough and load is even, else the fewest requests.
Pure.

Source: sgl-project/sglang, sgl-model-gateway/src/policies/cache_aware.rs (commit b93974f), with the defaults of its
launcher: load is uneven when the most loaded worker has over 64 requests more than the least loaded one, and over 1.5
times as many; a match counts above 30 % of the prompt. With prefill and decode workers (src/routers/http/pd_router.rs)
both are chosen by the same policy unless configured otherwise. Its tree holds the text of what was sent anywhere; here
the index answers (`WorkerTable.expected`).
"""

from typing import ClassVar, Literal

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
from kvrelay.router.policies.selection import (
    DECODE_STREAM,
    IndependentChoice,
    RankedRows,
    best_rows,
    positions,
    rank_rows,
    two_by_two,
)


class SglangOptions(PolicyOptions):
    """cache_threshold: share of the prompt. balance_abs_threshold: requests; balance_rel_threshold: times the least
    load.
    """

    cache_threshold: float = Field(0.3, ge=0, le=1)
    balance_abs_threshold: int = Field(64, ge=0)
    balance_rel_threshold: float = Field(1.5, ge=1)
    decode: Literal["cache_aware", "power_of_two"] = "cache_aware"


class Sglang(IndependentChoice):
    """The worker with the longest prefix, guarded against uneven load."""

    name: ClassVar[str] = "sglang"
    term_names: ClassVar[tuple[str, ...]] = ("prefill_matched", "prefill_requests", "decode_matched", "decode_requests")

    def __init__(self, options: Options) -> None:
        self._options = parse_options(SglangOptions, self.name, options)

    def rank_prefill(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        rows, score = self._cache_aware(context, table)
        return rank_rows(rows, score, (_matched(context, table), table.sequences, 0.0, 0.0))

    def rank_decode(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        if self._options.decode == "cache_aware":
            return self.rank_local(context, table)
        rows = two_by_two(context, table.sequences, DECODE_STREAM)
        return rank_rows(rows, positions(rows, len(table)), (0.0, 0.0, _matched(context, table), table.sequences))

    def rank_local(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        rows, score = self._cache_aware(context, table)
        return rank_rows(rows, score, (0.0, 0.0, _matched(context, table), table.sequences))

    def _cache_aware(self, context: RoutingContext, table: WorkerTable) -> tuple[Ints, Floats | Ints]:
        """The best rows, best first, and the score that orders them: requests, or minus the share matched."""
        load, matched = table.sequences, _matched(context, table)
        if self._is_uneven(load) or matched.max() <= self._options.cache_threshold:
            return best_rows(load, table.turn), load
        return best_rows(-matched, np.arange(len(table))), -matched

    def _is_uneven(self, load: Ints) -> bool:
        most, least = int(load.max()), int(load.min())
        options = self._options
        return most - least > options.balance_abs_threshold and most > least * options.balance_rel_threshold


def _matched(context: RoutingContext, table: WorkerTable) -> Floats:
    return table.expected / context.request.num_tokens
