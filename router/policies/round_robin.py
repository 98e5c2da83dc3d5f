"""Whoever was chosen longest ago. Pure.

Source: vLLM, examples/online_serving/disaggregated_serving/disagg_proxy_demo.py (commit 03a7284), `--roundrobin`: one cycle over
the prefill instances, one over the decode instances; Ray Serve LLM 2.60's default (serve/experimental/round_robin_router.py).
"""

from typing import ClassVar

import numpy as np

from kvrelay.router.policies.base import Options, RoutingContext, WorkerTable
from kvrelay.router.policies.checked import Checked, checked
from kvrelay.router.policies.picking import Ranked, TwoChoices, best_rows, ranked


class RoundRobin(TwoChoices):
    """In turn, each role for itself."""

    name: ClassVar[str] = "round_robin"
    term_names: ClassVar[tuple[str, ...]] = ("prefill_turn", "decode_turn")

    def __init__(self, options: Options) -> None:
        checked(Checked, self.name, options)

    def prefill(self, context: RoutingContext, table: WorkerTable) -> Ranked:
        return ranked(best_rows(table.turn, np.arange(len(table))), table.turn, (table.turn, 0.0))

    def decode(self, context: RoutingContext, table: WorkerTable) -> Ranked:
        return ranked(best_rows(table.turn, np.arange(len(table))), table.turn, (0.0, table.turn))

    def alone(self, context: RoutingContext, table: WorkerTable) -> Ranked:
        return self.decode(context, table)
