"""Chance decides. Pure.

Source: what every load balancer has; Dynamo's router mode `random` and SGLang's policy `random` among them.
"""

from typing import ClassVar

from kvrelay.router.policies.base import Options, PolicyOptions, RoutingContext, WorkerTable, parse_options
from kvrelay.router.policies.selection import (
    DECODE_STREAM,
    PREFILL_STREAM,
    IndependentChoice,
    RankedRows,
    best_rows,
    draws,
    rank_rows,
    unit,
)


class RandomChoice(IndependentChoice):
    """Any worker is as likely as any other."""

    name: ClassVar[str] = "random"
    term_names: ClassVar[tuple[str, ...]] = ("prefill_draw", "decode_draw")

    def __init__(self, options: Options) -> None:
        parse_options(PolicyOptions, self.name, options)

    def rank_prefill(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        keys = draws(context.draw, len(table), PREFILL_STREAM)
        drawn = unit(keys)
        return rank_rows(best_rows(drawn, keys), drawn, (drawn, 0.0))

    def rank_decode(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        keys = draws(context.draw, len(table), DECODE_STREAM)
        drawn = unit(keys)
        return rank_rows(best_rows(drawn, keys), drawn, (0.0, drawn))

    def rank_local(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        return self.rank_decode(context, table)
