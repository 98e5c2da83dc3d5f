"""Which workers no longer answer: pinged, suspected, lost.

`Liveness` decides and is pure: times are arguments. `LivenessWatch` pings over the ingress's links, and drops those of
lost workers. A worker that does not answer is frozen, or its host is out of reach: a dead process ends its connections
at once. Imports no HTTP.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvrelay.errors import ConnectionLost
from kvrelay.plane import messages as wire
from kvrelay.router.decision.router import Router
from kvrelay.serve.workers.worker_link import Links, WorkerLink
from kvrelay.types import Role, sides

logger = logging.getLogger(__name__)

CHECK_S = 0.1
QUIET_S = 0.25
"""A worker that holds a sequence and has sent nothing for so long is pinged."""
SUSPECTED_S = 0.5
"""With a ping unanswered for so long it gets nothing new."""
LOST_S = 1.0
"""After so long, or SLOWEST_FACTOR times its slowest recent answer, its sequences go on elsewhere."""
SLOWEST_FACTOR, RECENT_S = 3.0, 30.0
LONGEST_S = 5.0
"""The most that slow answers put LOST_S off, and what holds while most workers are silent."""

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Peer:
    """A connected worker: when its last message came, whether it holds a sequence of this ingress, and its sides."""

    heard_s: float
    is_holding: bool
    sides: tuple[Role, ...]


@dataclass(slots=True)
class _Pulse:
    pinged_s: float | None = None  # while the answer is due
    waited_s: float = 0.0  # for the answer, at the last check
    slowest_s: float = 0.0  # recent answer
    slowest_at_s: float = 0.0

    def answered(self, now_s: float) -> None:
        if self.waited_s >= self.slowest_s or now_s - self.slowest_at_s > RECENT_S:
            self.slowest_s, self.slowest_at_s = self.waited_s, now_s
        self.pinged_s, self.waited_s = None, 0.0

    def limit_s(self, now_s: float) -> float:
        slowest_s = self.slowest_s if now_s - self.slowest_at_s <= RECENT_S else 0.0
        return min(max(LOST_S, SLOWEST_FACTOR * slowest_s), LONGEST_S)


@dataclass(slots=True)
class Verdicts(Generic[K]):
    """What follows from one check."""

    to_ping: list[K] = field(default_factory=list)
    suspected: set[K] = field(default_factory=set)
    lost: dict[K, float] = field(default_factory=dict)  # with the seconds that it has not answered for


class Liveness(Generic[K]):
    """What is known of each worker's answers. `check` is to be called every CHECK_S.

    Time by which a check is late does not count against the workers: this process did not run then. A worker is lost
    only while another one can go on with its sequences: else they wait for it.
    """

    def __init__(self) -> None:
        self._pulses: dict[K, _Pulse] = {}
        self._checked_s: float | None = None

    def check(self, peers: Mapping[K, Peer], now_s: float) -> Verdicts[K]:
        """The connected workers now. A lost one is reported again until it is no longer among them."""
        late_s = 0.0 if self._checked_s is None else max(0.0, now_s - self._checked_s - 2 * CHECK_S)
        self._checked_s = now_s
        self._pulses = {key: self._pulses.get(key) or _Pulse() for key in peers}
        verdicts, overdue = Verdicts[K](), dict[K, float]()
        for key, peer in peers.items():
            pulse = self._pulses[key]
            if pulse.pinged_s is not None and peer.heard_s >= pulse.pinged_s:
                pulse.answered(now_s)
            if pulse.pinged_s is None:
                if peer.is_holding and now_s - peer.heard_s >= QUIET_S:
                    pulse.pinged_s = now_s
                    verdicts.to_ping.append(key)
                continue
            pulse.pinged_s += late_s
            pulse.waited_s = now_s - pulse.pinged_s
            if pulse.waited_s >= SUSPECTED_S:
                verdicts.suspected.add(key)
            if peer.is_holding and pulse.waited_s >= pulse.limit_s(now_s):
                overdue[key] = pulse.waited_s
        are_most = 2 * len(verdicts.suspected) > len(peers)  # then it is rather this host, or its network
        for key, waited_s in overdue.items():
            if (not are_most or waited_s >= LONGEST_S) and self._has_substitute(key, peers, verdicts.suspected):
                verdicts.lost[key] = waited_s
        return verdicts

    @staticmethod
    def _has_substitute(key: K, peers: Mapping[K, Peer], suspected: set[K]) -> bool:
        """Whether another worker answers that can decode: it can compute a prompt, too."""
        return any(
            Role.DECODE in peer.sides for other, peer in peers.items() if other != key and other not in suspected
        )


class LivenessWatch:
    """Checks the links while `run` runs. Lives on the ingress's loop."""

    def __init__(self, links: Links, router: Router, on_change: Callable[[], None]) -> None:
        """`on_change` is called when other workers than before are suspected."""
        self._links, self._router, self._on_change = links, router, on_change
        self._liveness = Liveness[WorkerLink]()
        self._suspected: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Check until it is cancelled."""
        while True:
            if not self._links.submissions and not self._suspected:  # nothing to wait for
                self._links.has_opened.clear()
                await self._links.has_opened.wait()
            await asyncio.sleep(CHECK_S)
            self.check()

    def check(self) -> None:
        """Ping quiet workers, keep new requests from those that do not answer, and drop those that are lost."""
        holders = self._links.holders()
        peers = {
            link: Peer(link.heard_s, link in holders, sides(link.info.role))
            for link in [*self._links.members(), *self._links.retired()]
            if link.info is not None
        }
        verdicts = self._liveness.check(peers, time.monotonic())
        for link in verdicts.to_ping:
            with contextlib.suppress(ConnectionLost):
                link.send(wire.Ping())
        suspected = frozenset(link.worker_id for link in verdicts.suspected if self._links.is_member(link))
        if suspected != self._suspected:
            if new := suspected - self._suspected:
                logger.info("no answer from %s: it gets nothing new meanwhile", ", ".join(sorted(new)))
            self._suspected = suspected
            self._router.set_suspected(suspected)
            self._on_change()
        for link, waited_s in verdicts.lost.items():
            link.drop(f"no answer for {waited_s:.1f} s")
