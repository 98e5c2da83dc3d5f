"""Which workers retire when fewer are wanted, and how they count until they are gone. Pure.

A retiring worker gets no new requests, finishes what it has (transfers and leased blocks included), closes, and ends
its actor; Serve's next health check removes the replica, and the count is lowered in the same moment. Serve alone would
stop the newest replica of the emptiest node, whatever it holds.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

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

    @property
    def loss_tokens(self) -> float:
        """Tokens that would be computed again, roughly: of sequences that outlast the drain, and of hits only this
        worker can serve.

        Assumes that half of the sequences outlast it, and that a cached token is missed as often as a prompt token
        hits.
        """
        return self.context_tokens / 2 + self.cached_tokens * self.hit_share * self.alone_share


def victims(candidates: Iterable[RetirementCandidate], count: int) -> tuple[str, ...]:
    """The `count` workers with the least to lose."""
    order = sorted(candidates, key=lambda one: (one.loss_tokens, one.sequences, one.worker_id))
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

    def replicas(self, wanted: int, running: dict[str, RetirementCandidate], now_s: float) -> int:
        """How many replicas Serve should have now, for `wanted` that accept requests.

        `running`: by id, retiring ones included. Replicas that are still starting go at once: they hold nothing, and
        Serve stops them first. Of the running ones the victims retire, and count until they are gone. An overdue worker
        no longer counts, so that Serve stops one by its own choice.
        """
        self.overdue = {name for name in self.overdue if name in running}
        self.overdue |= {name for name, until_s in self.until_s.items() if name in running and now_s >= until_s}
        self.until_s = {
            name: until_s for name, until_s in self.until_s.items() if name in running and name not in self.overdue
        }
        staying = [one for name, one in running.items() if name not in self.until_s and name not in self.overdue]
        for name in victims(staying, len(staying) - wanted):
            self.until_s[name] = now_s + self.drain_s + GRACE_S
        return wanted + len(self.until_s)
