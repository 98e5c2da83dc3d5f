"""The rows of a tier below the pool: which is in which state, and how many hold it. Pure."""

from collections.abc import Mapping

from kvrelay.types import BlockHash


class TierRows:
    """Which row is in which state, and how many hold it. Others only read its fields.

    A row is free, reserved (handed out and being written; not matchable yet), cached (holds the block of an entry), or
    leaving (its entry was discarded while the row was held; free when the last hold ends).
    """

    def __init__(self, num_rows: int) -> None:
        if num_rows < 1:
            raise ValueError(f"a tier needs at least one row, not {num_rows}")
        self.num_rows = num_rows
        self.free: dict[int, None] = dict.fromkeys(range(num_rows - 1, -1, -1))
        self.reserved: dict[int, str] = {}  # row -> tenant
        self.leaving: set[int] = set()
        self.holds: dict[int, int] = {}  # row -> number of holders
        self._digests: list[BlockHash | None] = [None] * num_rows

    def reserve(self, count: int, tenant: str) -> list[int]:
        """Reserve `count` of the free rows; the caller knows that there are enough."""
        rows = [self.free.popitem()[0] for _ in range(count)]
        self.reserved.update(dict.fromkeys(rows, tenant))
        return rows

    def take(self, row: int, tenant: str) -> None:
        """Reserve this free row."""
        del self.free[row]
        self.reserved[row] = tenant

    def cancel(self, row: int) -> str:
        """A reserved row is free again; returns its tenant."""
        self.free[row] = None
        return self.reserved.pop(row)

    def fill(self, row: int, digest: BlockHash) -> str:
        """A reserved row now holds this block; returns its tenant."""
        self._digests[row] = digest
        return self.reserved.pop(row)

    def clear(self, row: int) -> None:
        """The entry of this cached row is gone."""
        self._digests[row] = None
        if row in self.holds:
            self.leaving.add(row)
        else:
            self.free[row] = None

    def hold(self, row: int) -> None:
        """One holder more."""
        self.holds[row] = self.holds.get(row, 0) + 1

    def unhold(self, row: int) -> BlockHash | None:
        """One holder less. Returns the block of a cached row without any holder left."""
        self.holds[row] -= 1
        if self.holds[row]:
            return None
        del self.holds[row]
        digest = self._digests[row]
        if digest is None:
            self.leaving.remove(row)
            self.free[row] = None
        return digest

    def check(self, entries: Mapping[BlockHash, int]) -> None:
        """Raise AssertionError unless every row is in exactly one state. `entries`: the row of each cached block."""
        cached = set(entries.values())
        states = (set(self.free), set(self.reserved), cached, self.leaving)
        assert sum(map(len, states)) == self.num_rows, "a row is lost or in two states"
        assert set().union(*states) == set(range(self.num_rows)), "a row is lost"
        assert len(cached) == len(entries), "two entries share a row"
        found = {digest: row for row, digest in enumerate(self._digests) if digest is not None}
        assert found == entries, "rows and entries disagree"
        assert self.holds.keys() <= cached | self.leaving, "a row without content is held"
        assert self.leaving <= self.holds.keys(), "a leaving row has no holder"
