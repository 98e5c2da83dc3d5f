"""Block ids of prompts that grow, as in conversations and agents. Pure."""

from collections.abc import Iterator

from kvrelay.cluster.workloads.trace import MOONCAKE_BLOCK_TOKENS


class GrowingPrompt:
    """Ids of one prompt's full blocks so far. `fresh` yields unused ids."""

    __slots__ = ("_fresh", "_full")

    def __init__(self, fresh: Iterator[int], shared: tuple[int, ...] = ()) -> None:
        """shared: ids of the blocks that it begins with, as other prompts do."""
        self._fresh, self._full = fresh, list(shared)

    def ids(self, num_tokens: int) -> tuple[int, ...]:
        """Ids of the prompt at `num_tokens` tokens. A partial block gets a new id each time, as in traces."""
        full, rest = divmod(num_tokens, MOONCAKE_BLOCK_TOKENS)
        while len(self._full) < full:
            self._full.append(next(self._fresh))
        return (*self._full[:full], next(self._fresh)) if rest else tuple(self._full[:full])

    def branch(self) -> "GrowingPrompt":
        """Another prompt that shares the blocks so far."""
        return GrowingPrompt(self._fresh, tuple(self._full))
