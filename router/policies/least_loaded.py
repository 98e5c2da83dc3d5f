"""The least loaded worker. Pure.

Source: vLLM, examples/online_serving/disaggregated_serving/disagg_proxy_demo.py (commit 03a7284),
`LoadBalancedScheduler`, its default: the prefill instance with the least prompt text, the decode instance with the
fewest requests (`by: tokens`); Dynamo's router mode `least-loaded`: the fewest requests in both pools (`by: requests`).
"""

from typing import ClassVar, Literal

from kvrelay.router.policies.base import Options, RoutingContext, WorkerTable
from kvrelay.router.policies.options import PolicyOptions, parse_options
from kvrelay.router.policies.selection import IndependentChoice, RankedRows, best_rows, rank_rows


class LeastLoadedOptions(PolicyOptions):
    """by: the unit of a prefill worker's load; a decode worker's is its requests."""

    by: Literal["tokens", "requests"] = "tokens"


class LeastLoaded(IndependentChoice):
    """The lowest load; ties go to the least recently chosen worker."""

    name: ClassVar[str] = "least_loaded"
    term_names: ClassVar[tuple[str, ...]] = ("prefill_load", "decode_load")

    def __init__(self, options: Options) -> None:
        self._by = parse_options(LeastLoadedOptions, self.name, options).by

    def rank_prefill(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        load = table.queued_tokens if self._by == "tokens" else table.sequences
        return rank_rows(best_rows(load, table.turn), load, (load, 0.0))

    def rank_decode(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        return rank_rows(best_rows(table.sequences, table.turn), table.sequences, (0.0, table.sequences))
