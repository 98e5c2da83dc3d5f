"""Power of two choices: the less loaded of two random workers. Pure.

Source: Ray 2.60, serve/_private/request_router/pow_2_router.py: two replicas at random, the one with fewer ongoing
requests, the first on a tie; when neither accepts, two others. SGLang's policy of that name compares tokens where it
knows them.
"""

from typing import ClassVar, Literal

import numpy as np

from kvrelay.router.policies.base import Floats, Ints, Options, RoutingContext, WorkerTable
from kvrelay.router.policies.options import PolicyOptions, parse_options
from kvrelay.router.policies.selection import (
    DECODE_STREAM,
    PREFILL_STREAM,
    IndependentChoice,
    RankedRows,
    best_rows,
    draws,
    rank_rows,
)


class PowerOfTwoOptions(PolicyOptions):
    """by: the unit of a prefill worker's load; a decode worker's is its requests."""

    by: Literal["requests", "tokens"] = "requests"


class PowerOfTwo(IndependentChoice):
    """Random pairs of workers, one after the other; of each pair the less loaded first."""

    name: ClassVar[str] = "power_of_two"
    term_names: ClassVar[tuple[str, ...]] = ("prefill_position", "decode_position")

    def __init__(self, options: Options) -> None:
        self._by = parse_options(PowerOfTwoOptions, self.name, options).by

    def rank_prefill(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        load = table.queued_tokens if self._by == "tokens" else table.sequences
        rows = two_by_two(context, load, PREFILL_STREAM)
        position = positions(rows, len(table))
        return rank_rows(rows, position, (position, 0.0))

    def rank_decode(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        rows = two_by_two(context, table.sequences, DECODE_STREAM)
        position = positions(rows, len(table))
        return rank_rows(rows, position, (0.0, position))


def two_by_two(context: RoutingContext, load: Ints, stream: int) -> Ints:
    """Rows in random order, of each two the less loaded first."""
    keys = draws(context.draw, len(load), stream)
    rows = best_rows(keys, keys)
    whole = len(rows) // 2 * 2
    first, second = rows[:whole:2], rows[1:whole:2]
    is_swapped = load[second] < load[first]
    rows[:whole:2], rows[1:whole:2] = np.where(is_swapped, second, first), np.where(is_swapped, first, second)
    return rows


def positions(rows: Ints, count: int) -> Floats:
    """The position in `rows` of each of `count` rows of a table; infinite for those that are not in it."""
    position = np.full(count, np.inf)
    position[rows] = np.arange(len(rows))
    return position
