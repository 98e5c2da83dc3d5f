"""What an eviction policy is, and what it knows of what is cached. Pure: no clock, no random source.

A cache (the device's prefix index, a tier) keeps a `Usage` with each entry and asks its policy for a score; among the
entries that may go now (not held, not pinned, no cached continuation) the lowest score goes first. A score is asked for
when an entry becomes evictable and holds until the entry is used again or the policy's `num_revisions` grows, so a
policy is a few lines.
"""

from dataclasses import dataclass
from typing import Protocol

from kvrelay.types import BlockHash


@dataclass(slots=True, eq=False)
class Usage:
    """What a policy knows of an entry: a run of blocks that came and are used together. Times are the caller's clock."""

    digest: BlockHash  # of its last block
    num_blocks: int
    end_tokens: int  # tokens from the prompt's beginning to its end: what recomputing it has to attend to
    inserted_s: float
    used_s: float
    hits: int = 0  # matches since it was inserted
    rank: float = 0.0  # a policy's own note
    segment: int = 0  # a policy's own note
    above: "Usage | None" = None  # the entry that it continues, if that was here too when it came
    note: object = None  # a policy's own note

    def copy(self) -> "Usage":
        """The same for another entry. Written out: dataclasses.replace takes five times as long."""
        return Usage(
            self.digest, self.num_blocks, self.end_tokens, self.inserted_s, self.used_s, self.hits, self.rank, self.segment,
            self.above, self.note,
        )  # fmt: skip


class Policy(Protocol):
    """One policy's state for one cache."""

    name: str
    num_revisions: int  # grows when scores given before are out of date: the cache asks again for what may go

    def inserted(self, usage: Usage, now_s: float) -> None:
        """The entry is cached from now on. Entries of one request come in the order of its prompt."""

    def used(self, usage: Usage, now_s: float) -> None:
        """A request matched it; `hits` and `used_s` are up to date."""

    def evicted(self, usage: Usage, now_s: float) -> None:
        """It is not cached any more: given up for want of room, or discarded."""

    def score(self, usage: Usage, now_s: float) -> float:
        """The lowest goes first."""
