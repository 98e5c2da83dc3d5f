"""Entries that are pinned until a time. Pure."""

import heapq

from kvrelay.types import BlockHash


class TimedPins:
    """At most `limit` pinned hashes, each until a time in seconds."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._until: dict[BlockHash, float] = {}
        self._ends: list[tuple[float, BlockHash]] = []

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, digest: BlockHash) -> bool:
        return digest in self._until

    def add(self, digest: BlockHash, until_s: float) -> bool:
        """Pin a hash, or extend its pin; a pin never gets shorter. False: the limit is reached."""
        end_s = self._until.get(digest)
        if end_s is None and len(self._until) >= self.limit:
            return False
        if end_s is None or until_s > end_s:
            self._until[digest] = until_s
            heapq.heappush(self._ends, (until_s, digest))
            self._sweep()
        return True

    def remove(self, digest: BlockHash) -> bool:
        """End a pin; whether there was one."""
        return self._until.pop(digest, None) is not None

    def expire(self, now_s: float) -> list[BlockHash]:
        """End and return the pins whose time has come."""
        ended: list[BlockHash] = []
        while self._ends and self._ends[0][0] <= now_s:
            end_s, digest = heapq.heappop(self._ends)
            if self._until.get(digest) == end_s:
                del self._until[digest]
                ended.append(digest)
        return ended

    def _sweep(self) -> None:
        """Extended pins leave stale ends behind: drop those when they outnumber the pins."""
        if len(self._ends) > 2 * len(self._until) + 64:
            self._ends = [(end_s, digest) for digest, end_s in self._until.items()]
            heapq.heapify(self._ends)
