"""Round robin. Pure.

Source: vLLM, examples/online_serving/disaggregated_serving/disagg_proxy_demo.py (commit 03a7284), `--roundrobin`: one
cycle over the prefill instances, one over the decode instances; Ray Serve LLM 2.60's default
(serve/experimental/round_robin_router.py).
"""

from typing import ClassVar

import numpy as np

from kvrelay.router.policies.base import Options, RoutingContext, WorkerTable
from kvrelay.router.policies.options import PolicyOptions, parse_options
from kvrelay.router.policies.selection import IndependentChoice, RankedRows, best_rows, rank_rows


class RoundRobin(IndependentChoice):
    """The least recently chosen worker, separately for each role."""

    name: ClassVar[str] = "round_robin"
    term_names: ClassVar[tuple[str, ...]] = ("prefill_turn", "decode_turn")

    def __init__(self, options: Options) -> None:
        parse_options(PolicyOptions, self.name, options)

    def rank_prefill(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        return rank_rows(best_rows(table.turn, np.arange(len(table))), table.turn, (table.turn, 0.0))

    def rank_decode(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        return rank_rows(best_rows(table.turn, np.arange(len(table))), table.turn, (0.0, table.turn))
