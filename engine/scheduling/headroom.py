"""How many blocks to leave free for what is running, so that admitting one more rarely pre-empts another. Pure.

Sequences grow by a token a step and give their blocks back when they end. From the lengths of late outputs follows how long
each will still run, and from that the largest number of blocks that they will need at once.

Source: the past-future scheduler (Gong et al., ASPLOS 2025).
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

_WINDOW = 256  # outputs that are remembered
_ENOUGH = 8  # outputs before they are believed
_PRIOR_TOKENS = 128  # what an output is taken for until then


class OutputLengths:
    """Tokens of the outputs that ended last."""

    def __init__(self) -> None:
        self._last: deque[int] = deque(maxlen=_WINDOW)
        self._sorted = np.zeros(0)
        self._sums = np.zeros(1)  # of the longest n
        self._is_stale = False
        self._sum = 0

    def observe(self, num_output: int) -> None:
        """An output ended by itself after so many tokens."""
        self._sum += num_output - (self._last[0] if len(self._last) == _WINDOW else 0)
        self._last.append(num_output)
        self._is_stale = True

    @property
    def mean_tokens(self) -> float:
        """0: too few have ended."""
        return self._sum / len(self._last) if len(self._last) >= _ENOUGH else 0.0

    def remaining(self, so_far: NDArray[np.float64], most: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tokens that outputs of so many tokens will still have, on the average; with `most` as the limit of each.

        Those that are longer than all that was seen are taken to have come half-way.
        """
        if len(self._last) < _ENOUGH:
            expected = np.maximum(_PRIOR_TOKENS, 2 * so_far)
        else:
            if self._is_stale:
                self._sorted = np.sort(np.asarray(self._last, np.float64))
                self._sums = np.concatenate(([0.0], np.cumsum(self._sorted[::-1])))
                self._is_stale = False
            longer = len(self._sorted) - np.searchsorted(self._sorted, so_far, side="right")
            expected = np.where(longer > 0, self._sums[longer] / np.maximum(longer, 1), 2 * so_far)
        return np.asarray(np.clip(np.minimum(expected, most) - so_far, 0.0, None))


def growth_blocks(remaining: NDArray[np.float64], own_blocks: NDArray[np.float64], block_size: int) -> float:
    """The most blocks, beyond those that they have now, that these sequences will need at once.

    remaining: tokens each will still have. own_blocks: those that become free when it ends.
    """
    order = np.argsort(-remaining, kind="stable")
    left, own = remaining[order], own_blocks[order]
    alive = np.arange(1, len(left) + 1)  # when the i-th longest is about to end, so many still run
    freed = own.sum() - np.cumsum(own)  # by those that ended before
    need = alive * left / block_size - freed
    return float(max(0.0, need.max(initial=0.0)))
