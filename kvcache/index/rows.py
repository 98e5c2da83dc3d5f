"""The rows of a tier: storage for one block each, in its memory or its file. Pure bookkeeping, no bytes.

A row is in exactly one state:
  free      holds nothing
  reserved  handed out and being written; not matchable yet
  cached    holds the block of an entry
  leaving   its entry was discarded while the row was held; free when the last hold ends
"""

from collections.abc import Mapping

from kvrelay.types import BlockHash


class TierRows:
    """Which row is in which state, how many hold it, and how often it was handed out."""

    def __init__(self, num_rows: int) -> None:
        if num_rows < 1:
            raise ValueError(f"a tier needs at least one row, not {num_rows}")
        self.num_rows = num_rows
        self._free: dict[int, None] = dict.fromkeys(range(num_rows - 1, -1, -1))
        self._reserved: dict[int, str] = {}  # row -> tenant
        self._leaving: set[int] = set()
        self._holds: dict[int, int] = {}  # row -> number of holders
        self._digests: list[BlockHash | None] = [None] * num_rows
        self._generations = [0] * num_rows

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_reserved(self) -> int:
        return len(self._reserved)

    @property
    def num_leaving(self) -> int:
        return len(self._leaving)

    @property
    def num_held(self) -> int:
        """Of the cached rows."""
        return len(self._holds) - len(self._leaving)

    @property
    def reserved(self) -> Mapping[int, str]:
        """The tenant of each reserved row."""
        return self._reserved

    @property
    def holds(self) -> Mapping[int, int]:
        """The number of holders of each held row."""
        return self._holds

    def generation(self, row: int) -> int:
        """How often this row was handed out: a reference with an older number is stale."""
        return self._generations[row]

    def reserve(self, count: int, tenant: str) -> list[int]:
        """Reserve `count` of the free rows; the caller knows that there are enough."""
        rows = [self._free.popitem()[0] for _ in range(count)]
        for row in rows:
            self._reserved[row] = tenant
            self._generations[row] += 1
        return rows

    def take(self, row: int, tenant: str) -> None:
        """Reserve this free row."""
        del self._free[row]
        self._reserved[row] = tenant
        self._generations[row] += 1

    def cancel(self, row: int) -> str:
        """A reserved row is free again; returns its tenant."""
        self._free[row] = None
        return self._reserved.pop(row)

    def fill(self, row: int, digest: BlockHash) -> str:
        """A reserved row now holds this block; returns its tenant."""
        self._digests[row] = digest
        return self._reserved.pop(row)

    def clear(self, row: int) -> None:
        """The entry of this cached row is gone."""
        self._digests[row] = None
        if row in self._holds:
            self._leaving.add(row)
        else:
            self._free[row] = None

    def is_held(self, row: int) -> bool:
        return row in self._holds

    def hold(self, row: int) -> None:
        """One holder more."""
        self._holds[row] = self._holds.get(row, 0) + 1

    def unhold(self, row: int) -> BlockHash | None:
        """One holder less. Returns the block of a cached row without any holder left."""
        self._holds[row] -= 1
        if self._holds[row]:
            return None
        del self._holds[row]
        digest = self._digests[row]
        if digest is None:
            self._leaving.remove(row)
            self._free[row] = None
        return digest

    def check(self, entries: Mapping[BlockHash, int]) -> None:
        """Raise AssertionError unless every row is in exactly one state. `entries`: the row of each cached block."""
        cached = set(entries.values())
        states = (set(self._free), set(self._reserved), cached, self._leaving)
        assert sum(map(len, states)) == self.num_rows, "a row is lost or in two states"
        assert set().union(*states) == set(range(self.num_rows)), "a row is lost"
        assert len(cached) == len(entries), "two entries share a row"
        found = {digest: row for row, digest in enumerate(self._digests) if digest is not None}
        assert found == entries, "rows and entries disagree"
        assert self._holds.keys() <= cached | self._leaving, "a row without content is held"
        assert self._leaving <= self._holds.keys(), "a leaving row has no holder"
