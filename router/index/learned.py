"""What a worker without KV events probably holds: the prompts that this router sent there recently. Pure."""

from collections.abc import Iterator, Sequence
from itertools import islice


class LearnedPrefixes:
    """Hashes and when each expires, soonest first: an estimate, bounded in number and time."""

    __slots__ = ("_expiry", "_ttl_s", "limit", "since_s")

    def __init__(self, limit: int, ttl_s: float) -> None:
        self.limit, self._ttl_s = limit, ttl_s
        self._expiry: dict[bytes, float] = {}
        self.since_s: float | None = None  # when the first prompt was sent

    def __len__(self) -> int:
        return len(self._expiry)

    def note(self, chain: Sequence[bytes], now_s: float) -> list[bytes]:
        """This prompt, of at most `limit` hashes, was computed there now. Returns the hashes that exceed the limit.

        Those are the least recently used. The end of a chain goes before its beginning, as in a worker's pool.
        """
        if self.since_s is None:
            self.since_s = now_s
        expires_s = now_s + self._ttl_s
        for block_hash in reversed(chain):
            self._expiry.pop(block_hash, None)
            self._expiry[block_hash] = expires_s
        surplus = list(islice(self._expiry, max(0, len(self._expiry) - self.limit)))
        return self._forget(surplus)

    def expired(self, now_s: float) -> list[bytes]:
        """The hashes that have expired."""
        return self._forget(list(self._over(now_s)))

    def _over(self, now_s: float) -> Iterator[bytes]:
        for block_hash, expires_s in self._expiry.items():
            if expires_s > now_s:
                return
            yield block_hash

    def _forget(self, hashes: list[bytes]) -> list[bytes]:
        for block_hash in hashes:
            del self._expiry[block_hash]
        return hashes
