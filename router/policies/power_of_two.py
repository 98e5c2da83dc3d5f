"""The less loaded of two workers that chance names. Pure.

Source: Ray 2.60, serve/_private/request_router/pow_2_router.py: two replicas at random, the one with fewer requests under way,
the first where they are equal; when neither accepts, two others. SGLang's policy of that name compares tokens where it knows them.
"""

from typing import ClassVar, Literal

import numpy as np

from kvrelay.router.policies.base import Floats, Ints, Options, RoutingContext, WorkerTable
from kvrelay.router.policies.checked import Checked, checked
from kvrelay.router.policies.picking import (
    DECODE_STREAM,
    PREFILL_STREAM,
    Ranked,
    TwoChoices,
    best_rows,
    draws,
    ranked,
)


class PowerOfTwoOptions(Checked):
    """by: what a prefill worker's load is counted in; a decode worker's is always its requests."""

    by: Literal["requests", "tokens"] = "requests"


class PowerOfTwo(TwoChoices):
    """Two at random, then two others, and so on; of each two the one with less load first."""

    name: ClassVar[str] = "power_of_two"
    term_names: ClassVar[tuple[str, ...]] = ("prefill_place", "decode_place")

    def __init__(self, options: Options) -> None:
        self._by = checked(PowerOfTwoOptions, self.name, options).by

    def prefill(self, context: RoutingContext, table: WorkerTable) -> Ranked:
        load = table.queued_tokens if self._by == "tokens" else table.sequences
        rows = two_by_two(context, load, PREFILL_STREAM)
        place = places(rows, len(table))
        return ranked(rows, place, (place, 0.0))

    def decode(self, context: RoutingContext, table: WorkerTable) -> Ranked:
        rows = two_by_two(context, table.sequences, DECODE_STREAM)
        place = places(rows, len(table))
        return ranked(rows, place, (0.0, place))

    def alone(self, context: RoutingContext, table: WorkerTable) -> Ranked:
        return self.decode(context, table)


def two_by_two(context: RoutingContext, load: Ints, stream: int) -> Ints:
    """Rows in an order of chance, of each two the less loaded first."""
    keys = draws(context.draw, len(load), stream)
    rows = best_rows(keys, keys)
    whole = len(rows) // 2 * 2
    first, second = rows[:whole:2], rows[1:whole:2]
    is_swapped = load[second] < load[first]
    rows[:whole:2], rows[1:whole:2] = np.where(is_swapped, second, first), np.where(is_swapped, first, second)
    return rows


def places(rows: Ints, count: int) -> Floats:
    """The place of each row of a side among `rows`; infinite for those that are not."""
    place = np.full(count, np.inf)
    place[rows] = np.arange(len(rows))
    return place
