"""The contract of an eviction policy, and the record that a policy sees of each cached entry. Pure: no clock, no
random source.

A cache (the device's prefix index, or a tier) keeps an `EntryUsage` with each entry and asks its policy for a score.
Among the entries that may be evicted now (not held, not pinned, without a cached continuation) the lowest score goes
first. The cache asks for a score when an entry becomes evictable; the score holds until the entry is used again or
the policy's `num_revisions` grows.
"""

from dataclasses import dataclass
from typing import Protocol

from kvrelay.types import BlockHash


@dataclass(slots=True, eq=False)
class EntryUsage:
    """One entry: a run of blocks that are inserted and used together. Times are the caller's clock, in seconds."""

    digest: BlockHash  # of its last block
    num_blocks: int
    end_tokens: int  # tokens from the prompt's beginning to the entry's end
    inserted_s: float
    used_s: float
    hits: int = 0  # matches since it was inserted
    rank: float = 0.0  # for the policy's own use
    above: "EntryUsage | None" = None  # the entry that this one continues, if it was cached at insertion
    note: object = None  # for the policy's own use

    def copy(self) -> "EntryUsage":
        """The same values for another entry. Written out: dataclasses.replace takes five times as long."""
        return EntryUsage(
            self.digest,
            self.num_blocks,
            self.end_tokens,
            self.inserted_s,
            self.used_s,
            self.hits,
            self.rank,
            self.above,
            self.note,
        )


class EvictionPolicy(Protocol):
    """One policy's state for one cache."""

    name: str
    num_revisions: int  # grows when earlier scores are out of date: the cache then asks again

    def inserted(self, usage: EntryUsage, now_s: float) -> None:
        """The entry is cached from now on. Entries of one request arrive in prompt order."""

    def used(self, usage: EntryUsage, now_s: float) -> None:
        """A request matched the entry; `hits` and `used_s` are up to date."""

    def evicted(self, usage: EntryUsage, now_s: float) -> None:
        """The entry is no longer cached: evicted for room, or discarded."""

    def score(self, usage: EntryUsage, now_s: float) -> float:
        """The entry with the lowest score is evicted first."""
