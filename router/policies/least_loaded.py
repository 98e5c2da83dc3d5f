"""Whoever has least to do. Pure.

Source: vLLM, examples/online_serving/disaggregated_serving/disagg_proxy_demo.py (commit 03a7284), `LoadBalancedScheduler`, its
default: the prefill instance with the least prompt text, the decode instance with the fewest requests (`by: tokens`); Dynamo's
router mode `least-loaded`: the fewest requests in both pools (`by: requests`).
"""

from typing import ClassVar, Literal

from kvrelay.router.policies.base import Options, RoutingContext, WorkerTable
from kvrelay.router.policies.checked import Checked, checked
from kvrelay.router.policies.picking import Ranked, TwoChoices, best_rows, ranked


class LeastLoadedOptions(Checked):
    """by: what a prefill worker's load is counted in."""

    by: Literal["tokens", "requests"] = "tokens"


class LeastLoaded(TwoChoices):
    """The least load; equal ones in turn."""

    name: ClassVar[str] = "least_loaded"
    term_names: ClassVar[tuple[str, ...]] = ("prefill_load", "decode_load")

    def __init__(self, options: Options) -> None:
        self._by = checked(LeastLoadedOptions, self.name, options).by

    def prefill(self, context: RoutingContext, table: WorkerTable) -> Ranked:
        load = table.queued_tokens if self._by == "tokens" else table.sequences
        return ranked(best_rows(load, table.turn), load, (load, 0.0))

    def decode(self, context: RoutingContext, table: WorkerTable) -> Ranked:
        return ranked(best_rows(table.sequences, table.turn), table.sequences, (0.0, table.sequences))

    def alone(self, context: RoutingContext, table: WorkerTable) -> Ranked:
        return self.decode(context, table)
