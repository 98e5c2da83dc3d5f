"""A rotation of the cluster's authority, in steps: each is taken once every live process has confirmed the one before.

    number   issues   trusted      why no connection is refused
    3n       old      old
    3n + 1   old      old, new     at once: both kinds of processes show the old one
    3n + 2   new      old, new     every process trusts the new one
    3n + 3   new      new          every process shows the new one

Pure; the registry's actor holds it (authorities.py). Times are seconds of the registry's own clock, passed in.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvrelay.cluster.registry.members import HEARTBEAT_S, TIMEOUT_S
from kvrelay.plane.tls import Authorities

STEPS = 3
LINGER_S = 6.0  # between steps: longer than a handshake may take (5 s), so none that has begun meets the next step


@dataclass(frozen=True, slots=True)
class HeldAuthorities:
    """What one process holds. `number`: of the Authorities that it took last; -1: it has taken none yet."""

    host: str
    number: int = -1
    authority: str = ""  # its digest
    expires: str = ""  # when the certificate that it took with them does, as an ISO date
    problem: str = ""  # the operator's files that it could not take: it goes on with what it had


@dataclass(frozen=True, slots=True)
class RotationReport:
    """How far it is. `processes`: what each live one holds, by name. `waiting_for`: those that have not confirmed."""

    number: int
    processes: Mapping[str, HeldAuthorities]
    waiting_for: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Process:
    held: HeldAuthorities
    since_s: float
    seen_s: float


class Rotation:
    """The cluster's authorities, and which live processes hold them. A process that is silent for the timeout is gone;
    no step is taken for so long after the start of the registry, when it may not know all of them yet, nor after it has
    heard none for two heartbeats: it was stopped, not they.
    """

    def __init__(self, authorities: Authorities, started_s: float) -> None:
        self.authorities, self._started_s, self._heard_s = authorities, started_s, started_s
        self._processes: dict[str, _Process] = {}

    @property
    def is_under_way(self) -> bool:
        return self.authorities.number % STEPS != 0

    def confirm(self, process: str, held: HeldAuthorities, now_s: float) -> None:
        """The process is alive and holds this."""
        if now_s - self._heard_s > 2 * HEARTBEAT_S:
            self._started_s = now_s
        self._heard_s, before = now_s, self._processes.get(process)
        is_same = before is not None and before.held.number == held.number
        self._processes[process] = _Process(held, before.since_s if before and is_same else now_s, now_s)

    def first_step(self, salt: bytes) -> Authorities | None:
        """Begin a rotation to the authority with this salt; None: one is under way."""
        now = self.authorities
        if self.is_under_way:
            return None
        return Authorities(now.number + 1, now.issuing, (now.issuing, salt))

    def read_again(self) -> Authorities:
        """Have every process read the operator's files again: the same authorities under a new number."""
        return replace(self.authorities, number=self.authorities.number + STEPS)

    def next_step(self, now_s: float) -> Authorities | None:
        """The step that is due; None: there is none, or not yet."""
        live = self._live(now_s).values()
        number, trusted = self.authorities.number, self.authorities.trusted
        is_confirmed = all(one.held.number == number and now_s - one.since_s >= LINGER_S for one in live)
        if not self.is_under_way or now_s - self._started_s < TIMEOUT_S or not is_confirmed:
            return None
        new = trusted[-1]
        return Authorities(number + 1, new, trusted if number % STEPS == 1 else (new,))

    def report(self, now_s: float) -> RotationReport:
        """What is shown of it."""
        live = {name: one.held for name, one in sorted(self._live(now_s).items())}
        number = self.authorities.number
        return RotationReport(number, live, tuple(name for name, held in live.items() if held.number != number))

    def _live(self, now_s: float) -> dict[str, _Process]:
        self._processes = {name: one for name, one in self._processes.items() if now_s - one.seen_s <= TIMEOUT_S}
        return self._processes
