"""Chance decides. Pure.

Source: what every load balancer has; Dynamo's router mode `random` and SGLang's policy `random` among them.
"""

from typing import ClassVar

from kvrelay.router.policies.base import Options, RoutingContext, WorkerTable
from kvrelay.router.policies.checked import Checked, checked
from kvrelay.router.policies.picking import (
    DECODE_STREAM,
    PREFILL_STREAM,
    Ranked,
    TwoChoices,
    best_rows,
    draws,
    ranked,
    unit,
)


class RandomChoice(TwoChoices):
    """Any worker is as likely as any other."""

    name: ClassVar[str] = "random"
    term_names: ClassVar[tuple[str, ...]] = ("prefill_draw", "decode_draw")

    def __init__(self, options: Options) -> None:
        checked(Checked, self.name, options)

    def prefill(self, context: RoutingContext, table: WorkerTable) -> Ranked:
        keys = draws(context.draw, len(table), PREFILL_STREAM)
        drawn = unit(keys)
        return ranked(best_rows(drawn, keys), drawn, (drawn, 0.0))

    def decode(self, context: RoutingContext, table: WorkerTable) -> Ranked:
        keys = draws(context.draw, len(table), DECODE_STREAM)
        drawn = unit(keys)
        return ranked(best_rows(drawn, keys), drawn, (0.0, drawn))

    def alone(self, context: RoutingContext, table: WorkerTable) -> Ranked:
        return self.decode(context, table)
