"""The few least of many rows, without sorting all of them. Pure."""

import numpy as np

from kvrelay.router.policies.base import Floats, Ints

UNIT = 1e-6
"""Of a score: what differs by less is equal. Of scores in seconds, a microsecond."""


def whole_units(score: Floats) -> Floats:
    """Rounded, so that two sums of the same terms tie."""
    return np.rint(score * (1 / UNIT))


def cheapest(score: Floats, turn: Ints, most: int) -> Ints:
    """Rows of the `most` least scores, seconds, in no order; ties go to the least turn, then to the first row."""
    if len(score) <= most:
        return np.arange(len(score))
    limit = np.partition(score, most - 1)[most - 1]
    near = np.flatnonzero(score <= limit + 2 * UNIT)  # those below, and all who may tie
    return near if len(near) == most else _least(whole_units(score[near]), near, most, turn)


def _least(key: Floats | Ints, rows: Ints, most: int, then: Ints | None) -> Ints:
    """Of `rows`, those with the least `key` (one for each of them), ties by `then` (one for each row of all)."""
    limit = np.partition(key, most - 1)[most - 1]
    tied = rows[key == limit]
    below = rows[key < limit]
    room = most - len(below)
    if len(tied) > room:
        tied = tied[:room] if then is None else _least(then[tied], tied, room, None)
    return np.concatenate((below, tied))
