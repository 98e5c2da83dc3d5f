"""How many blocks admission leaves free for running sequences, so that it rarely causes preemption. Pure.

Sequences grow by a token a step and release their blocks when they end. From the lengths of recent outputs follows
how long each sequence will still run, and that gives the largest number of blocks that all of them will need at the
same time.

Source: the past-future scheduler (Gong et al., ASPLOS 2025).
"""

import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.scheduling.sequence import Sequence

_WINDOW = 256  # outputs that are remembered
_ENOUGH = 8  # outputs before they are believed
_PRIOR_TOKENS = 128  # what an output is taken for until then


class OutputLengths:
    """Tokens of the outputs that ended last."""

    def __init__(self) -> None:
        self._last: deque[int] = deque(maxlen=_WINDOW)
        self._sorted = np.zeros(0)
        self._totals = np.zeros(1)  # of the longest n
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
                self._totals = np.concatenate(([0.0], np.cumsum(self._sorted[::-1])))
                self._is_stale = False
            longer = len(self._sorted) - np.searchsorted(self._sorted, so_far, side="right")
            expected = np.where(longer > 0, self._totals[longer] / np.maximum(longer, 1), 2 * so_far)
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


class Headroom:
    """The blocks to leave free when one more sequence joins those that run.

    Args:
        share: how much of the blocks that they are expected to need is left free; 0: one block for each sequence.
    """

    def __init__(self, share: float, block_size: int, lengths: OutputLengths | None = None) -> None:
        self._share, self._block_size = share, block_size
        self.lengths = lengths or OutputLengths()
        self._longest_output = 0

    def observe_request(self, max_tokens: int) -> None:
        """A request that may have so many tokens of output has arrived."""
        self._longest_output = max(self._longest_output, max_tokens)

    def at_most(self, num_others: int) -> int:
        """An upper bound of `blocks`: as if every output became as long as any request has allowed."""
        blocks = (num_others + 1) * self._longest_output / self._block_size
        return max(num_others, math.ceil(self._share * blocks))

    def blocks(self, seq: Sequence, num_own: int, others: list[Sequence]) -> int:
        """Blocks to leave free when `seq` joins `others` with `num_own` fresh blocks."""
        if not others or not self._share:
            return len(others)
        return max(len(others), math.ceil(self._share * self.expected_growth(seq, num_own, others)))

    def expected_growth(self, seq: Sequence, num_own: int, others: list[Sequence]) -> float:
        """Blocks beyond those that they have that all of these sequences are expected to need at the same time."""
        everyone = [seq, *others]
        count = len(everyone)
        so_far = np.fromiter((one.num_output for one in everyone), np.float64, count)
        most = np.fromiter((one.max_output for one in everyone), np.float64, count)
        own = np.fromiter((len(one.blocks) - one.num_cached // self._block_size for one in everyone), np.float64, count)
        own[0] = num_own
        return growth_blocks(self.lengths.remaining(so_far, most), np.maximum(own, 0.0), self._block_size)
