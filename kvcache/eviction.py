"""Eviction policies: in what order cached blocks that nobody holds are given up. Pure: no clock, no random source.

A cache (the device's prefix index, a tier) keeps a `Usage` with each entry and asks its policy for a score; among the
entries that may go now (not held, not pinned, no cached continuation) the lowest score goes first. A score is asked for
when an entry becomes evictable and holds until the entry is used again, so a policy is a few lines.
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


class Policy(Protocol):
    """One policy's state for one cache."""

    name: str

    def inserted(self, usage: Usage, now_s: float) -> None:
        """The entry is cached from now on."""

    def used(self, usage: Usage, now_s: float) -> None:
        """A request matched it; `hits` and `used_s` are up to date."""

    def evicted(self, usage: Usage, now_s: float) -> None:
        """It was given up for want of room."""

    def score(self, usage: Usage, now_s: float) -> float:
        """The lowest goes first."""


class Lru:
    """Least recently used first."""

    name = "lru"

    def inserted(self, usage: Usage, now_s: float) -> None:
        """Nothing to note."""

    def used(self, usage: Usage, now_s: float) -> None:
        """Nothing to note: `used_s` is all."""

    def evicted(self, usage: Usage, now_s: float) -> None:
        """Nothing to note."""

    def score(self, usage: Usage, now_s: float) -> float:
        return usage.used_s


def make_policy(name: str, capacity_blocks: int) -> Policy:
    """wip"""
    return Lru()
