"""What each ingress has assigned to one worker: the worker adds it up and sends each ingress the sum of the others.

Ingresses share their load through the workers that it is on: no connection more, nothing in the middle that could fail,
and a worker reports only its own. Sums travel, not requests: a message that is lost or late is made good by the next
one. Pure: never imports a socket or a clock.
"""

from typing import Generic, TypeVar

from kvrelay.plane.messages import Assigned
from kvrelay.plane.reports import AssignedByOthers

P = TypeVar("P")
Numbers = tuple[int, int, int, int]
"""Tokens, prompts, sequences, blocks."""
_NOTHING: Numbers = (0, 0, 0, 0)
_MOST = 1 << 40


class AssignedShares(Generic[P]):
    """The ingresses that listen, and their sums. `P`: an ingress's connection."""

    def __init__(self) -> None:
        self._shares: dict[P, Numbers | None] = {}  # None: it has not reported yet
        self._sent: dict[P, AssignedByOthers] = {}

    def join(self, peer: P) -> None:
        """It listens from now on. Idempotent: what it has reported stays."""
        self._shares.setdefault(peer, None)

    def leave(self, peer: P) -> None:
        """It is gone, and so is what it had assigned. Idempotent."""
        self._shares.pop(peer, None)
        self._sent.pop(peer, None)

    def hear(self, peer: P, share: Assigned) -> bool:
        """Its sums are these from now on. False: it does not listen, so it does not count."""
        if peer not in self._shares:
            return False
        numbers = (share.tokens, share.prompts, share.sequences, share.blocks)
        tokens, prompts, sequences, blocks = (min(max(0, number), _MOST) for number in numbers)  # whatever a peer says
        self._shares[peer] = (tokens, prompts, sequences, blocks)
        return True

    def total(self) -> Numbers:
        """What all of them have assigned."""
        columns = zip(_NOTHING, *filter(None, self._shares.values()), strict=True)
        tokens, prompts, sequences, blocks = map(sum, columns)
        return tokens, prompts, sequences, blocks

    def take_changes(self) -> list[tuple[P, AssignedByOthers]]:
        """(ingress, sum of the others) where that has changed since it was last sent."""
        changes, total, shares = [], self.total(), self._shares
        num_silent = sum(share is None for share in shares.values())
        for peer, own in shares.items():
            less = own or _NOTHING
            others = AssignedByOthers(
                len(shares) - 1,
                num_silent == (own is None),
                total[0] - less[0],
                total[1] - less[1],
                total[2] - less[2],
                total[3] - less[3],
            )
            if self._sent.get(peer, _ALONE) != others:
                self._sent[peer] = others
                changes.append((peer, others))
        return changes


_ALONE = AssignedByOthers(0, True)
