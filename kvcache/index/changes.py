"""What became matchable and what ceased to be, since somebody last asked. Pure.

Kept as runs of hashes in the order of events, so that noting a prompt's blocks costs one copy; netted when read, or
when the runs have grown past what netting could leave.
"""

import struct
from dataclasses import dataclass
from itertools import chain

from kvrelay.hashing import HASH_BYTES
from kvrelay.types import BlockHash

_HASH = struct.Struct(f"{HASH_BYTES}s")


@dataclass(frozen=True, slots=True)
class CacheChange:
    """Hashes that became matchable and that ceased to be, since the last drain, in order of neither."""

    stored: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]


class ChangeLog:
    """Gathers changes of one index. Bounded: `limit` hashes and what netting leaves."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._runs: list[tuple[bool, bytes]] = []
        self._size = 0  # hashes in the runs
        self._stored: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}

    def stored(self, run: bytes) -> None:
        """The hashes in this run of bytes can be matched from now on."""
        self._runs.append((True, run))
        self._size += len(run) // HASH_BYTES
        if self._size > self._limit:
            self._net()

    def removed(self, run: bytes) -> None:
        """They no longer can."""
        self._runs.append((False, run))
        self._size += len(run) // HASH_BYTES
        if self._size > self._limit:
            self._net()

    def _net(self) -> None:
        for is_stored, run in self._runs:
            gained, lost = (self._stored, self._removed) if is_stored else (self._removed, self._stored)
            digests = list(chain.from_iterable(_HASH.iter_unpack(run)))
            if not lost or lost.keys().isdisjoint(digests):  # as nearly always
                gained.update(dict.fromkeys(digests))
                continue
            for digest in digests:
                if digest in lost:  # it is again as it was when last told
                    del lost[digest]
                else:
                    gained[digest] = None
        self._runs.clear()
        self._size = 0

    @property
    def has_news(self) -> bool:
        """Whether something may have changed since the last drain."""
        return bool(self._runs or self._stored or self._removed)

    def drain(self) -> CacheChange | None:
        """What changed since the last call, or None."""
        self._net()
        if not self._stored and not self._removed:
            return None
        change = CacheChange(tuple(self._stored), tuple(self._removed))
        self._stored.clear()
        self._removed.clear()
        return change
