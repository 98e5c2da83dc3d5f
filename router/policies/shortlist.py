"""The lowest few of many scores, without sorting all of them. Pure."""

import numpy as np

from kvrelay.router.policies.base import Floats, Ints

UNIT = 1e-6
"""Scores that differ by less are equal; a microsecond for scores in seconds."""


def whole_units(score: Floats) -> Floats:
    """Scores rounded to whole units, so that two sums of the same terms tie."""
    return np.rint(score * (1 / UNIT))


def cheapest(score: Floats, turn: Ints, most: int) -> Ints:
    """Rows of the `most` lowest scores in seconds, unordered; ties go to the lowest turn, then to the first row."""
    if len(score) <= most:
        return np.arange(len(score))
    limit = np.partition(score, most - 1)[most - 1]
    near = np.flatnonzero(score <= limit + 2 * UNIT)  # the lower ones, and all that may tie
    return near if len(near) == most else _lowest(whole_units(score[near]), near, most, turn)


def _lowest(key: Floats | Ints, rows: Ints, most: int, then: Ints | None) -> Ints:
    """The `most` of `rows` with the lowest `key` (one for each of them); ties by `then` (indexed by row)."""
    limit = np.partition(key, most - 1)[most - 1]
    tied = rows[key == limit]
    lower = rows[key < limit]
    room = most - len(lower)
    if len(tied) > room:
        tied = tied[:room] if then is None else _lowest(then[tied], tied, room, None)
    return np.concatenate((lower, tied))
