"""Which workers retire when fewer are wanted, and how they count until they are gone. Pure.

A retiring worker gets no new requests; its ingresses move what it runs to other workers, with the KV. When nothing is
left it closes and ends its actor; Serve's next health check removes the replica, and the count is lowered in the same
moment. Serve alone would stop the newest replica of the emptiest node, whatever it holds.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

GRACE_S = 60.0  # after the drain: for closing, and until Serve notices


@dataclass(frozen=True, slots=True)
class RetirementCandidate:
    """A worker that could retire."""

    worker_id: str
    sequences: float  # running and waiting
    context_tokens: float  # of those
    cached_tokens: float  # in its pool, in use or not
    hit_share: float  # recent share of prompt tokens found there
    alone_share: float = 1.0  # share of its blocks that no other worker has; 1.0 where it is unknown
    kv_bytes_per_token: float = 1.0

    @property
    def move_bytes(self) -> float:
        """KV of its sequences, which moves with them."""
        return self.context_tokens * self.kv_bytes_per_token

    @property
    def cost_bytes(self) -> float:
        """What its end costs: the KV that moves, and what of its cache only this worker can serve.

        Assumes that a cached token is missed as often as a prompt token hits.
        """
        return self.move_bytes + self.cached_tokens * self.hit_share * self.alone_share * self.kv_bytes_per_token

    def line(self) -> str:
        """What is there to move, for people."""
        if not self.sequences:
            return f"{self.worker_id}: nothing runs there"
        what = "sequence moves" if self.sequences == 1 else "sequences move"
        return f"{self.worker_id}: {self.sequences:.0f} {what}, {self.move_bytes / 2**20:.1f} MiB"


def candidate_of(worker: Mapping[str, Any]) -> RetirementCandidate:
    """A worker as `kvrelay status --json` lists it; one that does not answer has nothing to lose."""
    info, load = worker.get("info") or {}, worker.get("load") or {}
    size, queried = info.get("block_size", 0), load.get("prefix_query_tokens", 0)
    return RetirementCandidate(
        worker["worker_id"],
        sequences=sum(load.get(state, 0) for state in ("running", "receiving", "held", "waiting")),
        context_tokens=load.get("used_blocks", 0) * size,
        cached_tokens=load.get("cached_blocks", 0) * size,
        hit_share=load.get("prefix_hit_tokens", 0) / queried if queried else 0.0,
        kv_bytes_per_token=info.get("kv_bytes_per_token", 1.0),
    )


def victims(candidates: Iterable[RetirementCandidate], count: int) -> tuple[str, ...]:
    """The `count` workers that cost least."""
    order = sorted(candidates, key=lambda one: (one.cost_bytes, one.sequences, one.worker_id))
    return tuple(one.worker_id for one in order[: max(count, 0)])


@dataclass(slots=True)
class Retiring:
    """One role's workers that were asked to retire."""

    drain_s: float
    until_s: dict[str, float] = field(default_factory=dict)  # the deadline of each
    overdue: set[str] = field(default_factory=set)  # those past it

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.until_s)

    def replicas(
        self, wanted: int, running: Mapping[str, RetirementCandidate], now_s: float, leaving: Collection[str]
    ) -> int:
        """How many replicas Serve should have now, for `wanted` that accept requests.

        Replicas that are still starting go at once: they hold nothing, and Serve stops them first. A running one that
        retires counts until it is gone. An overdue worker no longer counts, so that Serve stops one by its own choice.

        Args:
            running: by id, retiring ones included. leaving: of those, which retire from now on.
        """
        self.overdue = {name for name in self.overdue if name in running}
        self.overdue |= {name for name, until_s in self.until_s.items() if name in running and now_s >= until_s}
        self.until_s = {
            name: until_s for name, until_s in self.until_s.items() if name in running and name not in self.overdue
        }
        for name in leaving:
            self.until_s[name] = now_s + self.drain_s + GRACE_S
        return wanted + len(self.until_s)
