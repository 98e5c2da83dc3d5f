"""What each ingress has assigned to one worker: the worker adds it up, and tells each of them what the others have.

Ingresses share their load through the workers that it is on: no connection more, nothing in the middle that could fail, and a
worker tells only of itself. Sums travel, not requests: a message that is lost or late is made good by the next one. Pure: never
imports a socket or a clock.
"""

from typing import Generic, TypeVar

from kvrelay.wire import Assigned, AssignedByOthers

P = TypeVar("P")
_NOTHING = Assigned()
_MOST = 1 << 40


class AssignedShares(Generic[P]):
    """The ingresses that listen, and their sums. `P`: an ingress's connection."""

    def __init__(self) -> None:
        self._shares: dict[P, Assigned | None] = {}  # None: it has not said
        self._told: dict[P, AssignedByOthers] = {}

    def join(self, peer: P) -> None:
        """It listens from now on. Idempotent: what it has said stays."""
        self._shares.setdefault(peer, None)

    def leave(self, peer: P) -> None:
        """It is gone, and so is what it had assigned. Idempotent."""
        self._shares.pop(peer, None)
        self._told.pop(peer, None)

    def hear(self, peer: P, share: Assigned) -> bool:
        """Its sums are these from now on. False: it does not listen, so it does not count."""
        if peer not in self._shares:
            return False
        self._shares[peer] = share
        return True

    def take_news(self) -> list[tuple[P, AssignedByOthers]]:
        """Whom to tell what: those of whose others something has changed since they were last told."""
        said = [share for share in self._shares.values() if share is not None]
        total = [sum(column) for column in zip(*map(_numbers, said), strict=True)] or list(_numbers(_NOTHING))
        num_silent = len(self._shares) - len(said)
        news = []
        for peer, own in self._shares.items():
            others = AssignedByOthers(
                len(self._shares) - 1, num_silent == (own is None),
                *(both - one for both, one in zip(total, _numbers(own or _NOTHING), strict=True)),
            )  # fmt: skip
            if self._told.get(peer, _ALONE) != others:
                self._told[peer] = others
                news.append((peer, others))
        return news


_ALONE = AssignedByOthers(0, True)


def _numbers(share: Assigned) -> tuple[int, ...]:
    """What may be added up whatever a peer says."""
    given = (share.tokens, share.prompts, share.sequences, share.blocks)
    return tuple(min(max(0, number), _MOST) for number in given)
