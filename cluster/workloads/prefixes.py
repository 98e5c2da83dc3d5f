"""Block ids of prompts that grow: conversations and agents, whose next prompt begins with the last one. Pure."""

from collections.abc import Iterator

from kvrelay.cluster.workloads.trace import MOONCAKE_BLOCK_TOKENS


class GrowingPrompt:
    """Ids of one prompt's full blocks so far. `fresh` gives ids that nobody has."""

    __slots__ = ("_fresh", "_full")

    def __init__(self, fresh: Iterator[int], shared: tuple[int, ...] = ()) -> None:
        """`shared`: ids of the blocks that it begins with, as others do."""
        self._fresh, self._full = fresh, list(shared)

    def ids(self, num_tokens: int) -> tuple[int, ...]:
        """Of the prompt when it has so many tokens. A block that is not full yet is named anew each time, as traces do."""
        full, rest = divmod(num_tokens, MOONCAKE_BLOCK_TOKENS)
        while len(self._full) < full:
            self._full.append(next(self._fresh))
        return (*self._full[:full], next(self._fresh)) if rest else tuple(self._full[:full])

    def branch(self) -> "GrowingPrompt":
        """Another that begins alike and goes on by itself."""
        return GrowingPrompt(self._fresh, tuple(self._full))
