"""Chance decides. Pure.

Source: what every load balancer has; Dynamo's router mode `random` and SGLang's policy `random` among them.
"""

from typing import ClassVar

from kvrelay.router.policies.base import Ask, Options, Side
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

    def prefill(self, ask: Ask, side: Side) -> Ranked:
        keys = draws(ask.draw, len(side), PREFILL_STREAM)
        drawn = unit(keys)
        return ranked(best_rows(drawn, keys), drawn, (drawn, 0.0))

    def decode(self, ask: Ask, side: Side) -> Ranked:
        keys = draws(ask.draw, len(side), DECODE_STREAM)
        drawn = unit(keys)
        return ranked(best_rows(drawn, keys), drawn, (0.0, drawn))

    def alone(self, ask: Ask, side: Side) -> Ranked:
        return self.decode(ask, side)
