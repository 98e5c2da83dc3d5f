"""What became matchable and what ceased to be, since the last drain. Pure."""

import struct
from dataclasses import dataclass
from itertools import chain

from kvrelay.hashing import HASH_BYTES
from kvrelay.types import BlockHash

_HASH = struct.Struct(f"{HASH_BYTES}s")


@dataclass(frozen=True, slots=True)
class CacheChange:
    """Net changes since the last drain: hashes that became matchable, and that ceased to be. Unordered."""

    stored: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]


class EntryChanges:
    """Net changes of an index that adds and removes single entries."""

    def __init__(self) -> None:
        self._stored: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}

    def __bool__(self) -> bool:
        return bool(self._stored or self._removed)

    def stored(self, digest: BlockHash) -> None:
        """This hash is matchable from now on."""
        if self._removed.pop(digest, 0) == 0:  # else it is as it was at the last drain
            self._stored[digest] = None

    def removed(self, digest: BlockHash) -> None:
        """This hash is no longer matchable."""
        if self._stored.pop(digest, 0) == 0:
            self._removed[digest] = None

    def drain(self) -> CacheChange | None:
        """The net changes since the last call, or None."""
        if not self:
            return None
        change = CacheChange(tuple(self._stored), tuple(self._removed))
        self._stored.clear()
        self._removed.clear()
        return change


class ChangeLog:
    """Net changes of an index that adds and removes runs of hashes.

    Keeps the runs in order, so logging a prompt's blocks costs one append, and nets them when drained, or when they
    hold more than `limit` hashes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._runs: list[tuple[bool, bytes]] = []
        self._size = 0  # hashes in the runs
        self._stored: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}

    def stored(self, run: bytes) -> None:
        """The hashes in `run` (concatenated) are matchable from now on."""
        self._runs.append((True, run))
        self._size += len(run) // HASH_BYTES
        if self._size > self._limit:
            self._net()

    def removed(self, run: bytes) -> None:
        """The hashes in `run` are no longer matchable."""
        self._runs.append((False, run))
        self._size += len(run) // HASH_BYTES
        if self._size > self._limit:
            self._net()

    def _net(self) -> None:
        for is_stored, run in self._runs:
            gained, lost = (self._stored, self._removed) if is_stored else (self._removed, self._stored)
            digests = list(chain.from_iterable(_HASH.iter_unpack(run)))
            if not lost or lost.keys().isdisjoint(digests):  # nearly always
                gained.update(dict.fromkeys(digests))
                continue
            for digest in digests:
                if digest in lost:  # it is as it was at the last drain
                    del lost[digest]
                else:
                    gained[digest] = None
        self._runs.clear()
        self._size = 0

    def __bool__(self) -> bool:
        """Whether anything may have changed since the last drain."""
        return bool(self._runs or self._stored or self._removed)

    def drain(self) -> CacheChange | None:
        """The net changes since the last call, or None."""
        self._net()
        if not self._stored and not self._removed:
            return None
        change = CacheChange(tuple(self._stored), tuple(self._removed))
        self._stored.clear()
        self._removed.clear()
        return change
