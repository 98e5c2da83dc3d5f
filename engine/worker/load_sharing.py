"""What each ingress has assigned to one worker: the worker adds it up and sends each ingress the sum of the others.

Ingresses share their load through the workers that it is on: no connection more, nothing in the middle that could fail,
and a worker reports only its own. Sums travel, not requests: a message that is lost or late is made good by the next
one. Pure: never imports a socket or a clock.
"""

from typing import Generic, TypeVar

from kvrelay.plane.messages import Assigned, AssignedByOthers

P = TypeVar("P")
Numbers = tuple[int, int, int, int]
"""Tokens, prompts, sequences, blocks."""
_NOTHING: Numbers = (0, 0, 0, 0)
_MOST = 1 << 40


class AssignedShares(Generic[P]):
    """The ingresses that listen, and their sums. `P`: an ingress's connection."""

    def __init__(self) -> None:
        self._shares: dict[P, Numbers | None] = {}  # None: it has not said
        self._total: Numbers = _NOTHING
        self._num_silent = 0
        self._sent: dict[P, AssignedByOthers] = {}

    def join(self, peer: P) -> None:
        """It listens from now on. Idempotent: what it has said stays."""
        if peer not in self._shares:
            self._shares[peer] = None
            self._num_silent += 1

    def leave(self, peer: P) -> None:
        """It is gone, and so is what it had assigned. Idempotent."""
        if peer in self._shares:
            self._put(peer, None)
            del self._shares[peer]
            self._num_silent -= 1
            self._sent.pop(peer, None)

    def hear(self, peer: P, share: Assigned) -> bool:
        """Its sums are these from now on. False: it does not listen, so it does not count."""
        if peer not in self._shares:
            return False
        self._put(peer, _numbers(share))
        return True

    def _put(self, peer: P, share: Numbers | None) -> None:
        before = self._shares[peer]
        self._num_silent += (share is None) - (before is None)
        self._total = _plus(_minus(self._total, before or _NOTHING), share or _NOTHING)
        self._shares[peer] = share

    def take_changes(self) -> list[tuple[P, AssignedByOthers]]:
        """(ingress, sum of the others) where that has changed since it was last sent."""
        changes = []
        num_others, sent = len(self._shares) - 1, self._sent
        for peer, own in self._shares.items():
            is_complete = self._num_silent == (own is None)
            others = AssignedByOthers(num_others, is_complete, *_minus(self._total, own or _NOTHING))
            if sent.get(peer, _ALONE) != others:
                sent[peer] = others
                changes.append((peer, others))
        return changes


_ALONE = AssignedByOthers(0, True)


def _numbers(share: Assigned) -> Numbers:
    """What may be added up whatever a peer says."""
    return (
        min(max(0, share.tokens), _MOST), min(max(0, share.prompts), _MOST), min(max(0, share.sequences), _MOST),
        min(max(0, share.blocks), _MOST),
    )  # fmt: skip


def _plus(one: Numbers, other: Numbers) -> Numbers:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3]


def _minus(one: Numbers, other: Numbers) -> Numbers:
    return one[0] - other[0], one[1] - other[1], one[2] - other[2], one[3] - other[3]
