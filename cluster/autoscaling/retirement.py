"""Which workers are given up when there are to be fewer, and what becomes of them until they are gone. Pure.

A worker that retires gets nothing new, finishes what it has (transfers and blocks that are held for them included), closes, and ends
its actor; Serve's next health check finds it gone and takes it away, and the count is lowered in the same moment. Left to itself, Serve
would stop the newest replica of the emptiest node, whatever it holds.
"""

from collections.abc import Iterable
from dataclasses import dataclass

GRACE_S = 60.0  # beyond its drain, for closing and for Serve to notice


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that could be given up."""

    worker_id: str
    sequences: float  # that it has in hand
    context_tokens: float  # of those
    cached_tokens: float  # in its pool, in use by nobody or not
    hit_share: float  # of prompt tokens there, lately
    alone_share: float = 1.0  # of its blocks that nobody else has; 1.0 where nobody knows

    @property
    def loss_tokens(self) -> float:
        """Tokens that would be computed again, about: of sequences that outlast the drain, of hits that others cannot give.

        Half of the sequences in hand are taken to outlast it; a cached token is missed as often as a prompt's token hits.
        """
        return self.context_tokens / 2 + self.cached_tokens * self.hit_share * self.alone_share


def victims(candidates: Iterable[Candidate], count: int) -> tuple[str, ...]:
    """The `count` workers with the least to lose."""
    order = sorted(candidates, key=lambda one: (one.loss_tokens, one.sequences, one.worker_id))
    return tuple(one.worker_id for one in order[: max(count, 0)])


@dataclass(frozen=True, slots=True)
class RetiringState:
    """Who retires, each with the seconds that it may still take; and who has taken too long."""

    left_s: dict[str, float]
    late: tuple[str, ...]


class Retiring:
    """Those of one role who have been asked to go, and until when they may take."""

    def __init__(self, drain_s: float) -> None:
        self._drain_s = drain_s
        self._until_s: dict[str, float] = {}
        self._late: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._until_s)

    def state(self, now_s: float) -> RetiringState:
        """To go on from elsewhere: who has been asked to go is not to be taken for one who stays."""
        left_s = {name: until_s - now_s for name, until_s in self._until_s.items()}
        return RetiringState(left_s, tuple(sorted(self._late)))

    def resume(self, state: RetiringState, now_s: float) -> None:
        self._until_s = {name: now_s + left_s for name, left_s in state.left_s.items()}
        self._late = set(state.late)

    def replicas(self, wanted: int, running: dict[str, Candidate], now_s: float) -> int:
        """How many replicas Serve is to have now, for `wanted` that take requests.

        `running`: by id, retiring ones included. Replicas that only start are given up at once: they hold nothing, and Serve stops
        them first. Of the running ones the victims retire, and count until they are gone. One who does not go in time counts no more,
        so that Serve stops one by its own choice.
        """
        self._late = {name for name in self._late if name in running}
        self._late |= {name for name, until_s in self._until_s.items() if name in running and now_s >= until_s}
        self._until_s = {
            name: until_s for name, until_s in self._until_s.items() if name in running and name not in self._late
        }
        staying = [one for name, one in running.items() if name not in self._until_s and name not in self._late]
        for name in victims(staying, len(staying) - wanted):
            self._until_s[name] = now_s + self._drain_s + GRACE_S
        return wanted + len(self._until_s)
