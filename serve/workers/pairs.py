"""Between which workers KV can travel: which pair is probed next, what was found, and what follows for routing.

`PairBook` decides and is pure: times are arguments. `PairWatch` sends its probes over the ingress's links. Addresses
are those that decode workers announced. Imports no HTTP.
"""

import asyncio
import contextlib
import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from kvrelay.errors import ConnectionLost
from kvrelay.plane import messages as wire
from kvrelay.plane.reports import PairReport, PathReport, WorkerInfo
from kvrelay.types import BOTH, Role, sides

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S, LAST_BACKOFF_S = 1.0, 60.0
ANSWER_S = 75.0  # a prefill worker gives up on a pair before that
INCOMPATIBLE_REASONS = frozenset({"fingerprint", "transport", "checksum", "bad_mac", "malformed"})
"""Reasons of kvtransfer.tickets that a retry does not fix: they name a setting, and have a remedy."""


class Verdict(enum.StrEnum):
    OK = "ok"
    INCOMPATIBLE = "incompatible"  # never chosen; the operator has to act
    FAILING = "failing"  # lost, overdue or refused: retried, and used meanwhile
    UNKNOWN = "unknown"  # not reported yet: used like any other


@dataclass(slots=True)
class WorkerPair:
    """One prefill worker and one decode worker that are both connected."""

    source: WorkerInfo
    target: WorkerInfo
    report: PairReport | None = None
    failures: int = 0  # in a row
    asked_s: float | None = None  # while an answer is due
    next_s: float = 0.0  # when to ask (again); infinite: no need
    is_probe_wanted: bool = False
    is_demanded: bool = False  # by `measure_all`, and not yet reported

    @property
    def key(self) -> tuple[str, str]:
        return self.source.worker_id, self.target.worker_id

    @property
    def verdict(self) -> Verdict:
        report = self.report
        if report is None:
            return Verdict.UNKNOWN
        if not report.ok:
            return Verdict.INCOMPATIBLE if report.reason in INCOMPATIBLE_REASONS else Verdict.FAILING
        return Verdict.FAILING if report.paths and all(path.problem for path in report.paths) else Verdict.OK

    @property
    def path(self) -> PathReport | None:
        """The one that the next read takes."""
        paths = self.report.paths if self.report is not None and self.report.ok else []
        return next((path for path in paths if path.is_chosen), None)

    def line(self) -> str:
        """What is wrong, between which workers, and the remedy."""
        report = self.report
        if report is None:
            return f"{self.source.worker_id} -> {self.target.worker_id}: no report yet"
        if report.ok:
            why = "; ".join(f"{path.path}: {path.problem}" for path in report.paths if path.problem)
        else:
            why = f"{report.reason}: {report.detail}"
        line = f"{report.source} -> {report.target}: {why}"
        return f"{line} ({report.remedy})" if report.remedy else line


class PairBook:
    """Every pair of connected workers. No worker is probed in two pairs at once: they would share its bandwidth."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerInfo] = {}
        self._pairs: dict[tuple[str, str], WorkerPair] = {}
        self._rejected: dict[str, tuple[str, str]] = {}  # role, and why

    # ---- membership

    def worker_up(self, info: WorkerInfo, now_s: float) -> None:
        """Pair it with every worker of the other role. A worker that restarted or reconnected starts over."""
        self.worker_down(info.worker_id)
        for other in self._workers.values():
            for source, target in ((info, other), (other, info)):
                is_pair = Role.PREFILL in sides(source.role) and Role.DECODE in sides(target.role)
                if is_pair and target.kv_port:
                    pair = WorkerPair(source, target, next_s=now_s)
                    self._pairs[pair.key] = pair
        self._workers[info.worker_id] = info

    def role_changed(self, info: WorkerInfo, now_s: float) -> None:
        """Pairs that its role now makes no more end, new ones are probed, and the others keep their reports."""
        known = self._pairs
        self.worker_up(info, now_s)
        self._pairs |= {key: pair for key, pair in known.items() if key in self._pairs}

    def worker_down(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)
        self._rejected.pop(worker_id, None)
        self._pairs = {key: pair for key, pair in self._pairs.items() if worker_id not in key}

    def reject(self, info: WorkerInfo, why: str) -> None:
        """A member that this ingress cannot work with."""
        self.worker_down(info.worker_id)
        self._rejected[info.worker_id] = info.role, why

    # ---- probes and reports

    def due(self, now_s: float) -> list[WorkerPair]:
        """The pairs to probe now; they count as asked."""
        for pair in self._pairs.values():
            if pair.asked_s is not None and now_s - pair.asked_s >= ANSWER_S:
                self.fail(pair, f"{pair.source.worker_id} did not answer within {ANSWER_S:g} s", now_s)
        busy = {worker_id for pair in self._pairs.values() if pair.asked_s is not None for worker_id in pair.key}
        asked: list[WorkerPair] = []
        for pair in sorted(self._pairs.values(), key=lambda pair: pair.next_s):
            if pair.asked_s is None and pair.next_s <= now_s and busy.isdisjoint(pair.key):
                busy.update(pair.key)
                pair.asked_s = now_s
                asked.append(pair)
        return asked

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until `due` may have something new without any report; None: never."""
        times = [
            pair.next_s if pair.asked_s is None else pair.asked_s + ANSWER_S
            for pair in self._pairs.values()
            if pair.asked_s is not None or (now_s < pair.next_s < float("inf"))
        ]
        return max(0.0, min(times) - now_s) if times else None

    def answered(self, report: PairReport, now_s: float) -> WorkerPair | None:
        """Apply a prefill worker's report; None when the pair is no more. One that is not OK is probed again."""
        pair = self._pairs.get((report.source, report.target))
        if pair is None or pair.target.epoch != report.target_epoch:
            return None
        was_incompatible, before = pair.verdict is Verdict.INCOMPATIBLE, pair.report
        pair.report, pair.asked_s, pair.is_probe_wanted, pair.is_demanded = report, None, False, False
        if was_incompatible and pair.verdict is Verdict.FAILING:
            pair.report = before  # that it could not be probed does not make it compatible
        if pair.verdict is Verdict.OK:
            pair.failures, pair.next_s = 0, float("inf")
        else:
            pair.next_s = now_s + min(FIRST_BACKOFF_S * 2**pair.failures, LAST_BACKOFF_S)
            pair.failures = min(pair.failures + 1, 16)
            pair.is_probe_wanted = report.ok  # it is connected: only a new measurement shows that its paths work
        return pair

    def fail(self, pair: WorkerPair, why: str, now_s: float) -> None:
        """The pair could not be probed."""
        source, target = pair.key
        report = PairReport(
            source=source, target=target, target_epoch=pair.target.epoch, ok=False, reason="lost", detail=why
        )
        self.answered(report, now_s)

    def seen(self, report: PairReport) -> None:
        """Apply a decode worker's report of its paths: fresher than the probe, but no verdict on a pair."""
        pair = self._pairs.get((report.source, report.target))
        if pair is not None and pair.report is not None and pair.report.ok and pair.target.epoch == report.target_epoch:
            pair.report = msgspec.structs.replace(pair.report, paths=report.paths)

    def measure_all(self, now_s: float) -> None:
        """Measure every pair again, except those that are being probed."""
        for pair in self._pairs.values():
            if pair.asked_s is None:
                pair.next_s, pair.is_probe_wanted, pair.is_demanded = now_s, True, True

    # ---- what follows

    @property
    def pairs(self) -> list[WorkerPair]:
        return [self._pairs[key] for key in sorted(self._pairs)]

    def incompatible_pairs(self) -> dict[tuple[str, str], str]:
        """The pairs that must not be chosen, and why."""
        return {key: pair.line() for key, pair in self._pairs.items() if pair.verdict is Verdict.INCOMPATIBLE}

    def is_settled(self) -> bool:
        """Whether every pair has been reported on, since the last `measure_all` if there was one."""
        return all(pair.report is not None and not pair.is_demanded for pair in self._pairs.values())

    def blocked(self) -> str | None:
        """Why nothing may be served though workers of both roles are members: no pair is compatible, or none formed.

        Without this check the decode workers would silently compute every prompt themselves.
        """
        incompatible, needs_pair = self.incompatible_pairs(), all(one.role != BOTH for one in self._workers.values())
        if incompatible and len(incompatible) == len(self._pairs) and needs_pair:
            return "; ".join(incompatible.values())
        has_prefill = any(Role.PREFILL in sides(info.role) for info in self._workers.values())
        return None if has_prefill else "; ".join(self.rejected(Role.PREFILL)) or None

    def rejected(self, role: str | None = None) -> list[str]:
        """The members of this role, or of any, that this ingress cannot work with, and why."""
        known = self._rejected.items()
        return [f"{worker_id} is rejected: {why}" for worker_id, (own, why) in known if role in (None, own)]

    def view(self) -> dict[str, Any]:
        """For GET /kvrelay/pairs and `kvrelay doctor`."""
        roles = [side for info in self._workers.values() for side in sides(info.role)]
        return {
            "prefill": roles.count(Role.PREFILL),
            "decode": roles.count(Role.DECODE),
            "rejected": self.rejected(),
            "is_settled": self.is_settled(),
            "pairs": [_view(pair) for pair in self.pairs],
        }


def _view(pair: WorkerPair) -> dict[str, Any]:
    source, target = pair.key
    report = pair.report or PairReport(source=source, target=target, target_epoch=pair.target.epoch, ok=False)
    plain = {name: getattr(report, name) for name in ("source", "target", "reason", "detail", "remedy")}
    line, paths = "" if pair.verdict is Verdict.OK else pair.line(), map(msgspec.structs.asdict, report.paths)
    return {**plain, "verdict": str(pair.verdict), "line": line, "paths": list(paths)}


class PairWatch:
    """Keeps a PairBook up to date while it runs. Lives on the ingress's loop."""

    def __init__(
        self, send: Callable[[str, wire.ToWorker], object], on_change: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        """`send` raises ConnectionLost; `on_change` is called after every report."""
        self.book = PairBook()
        self._send, self._on_change, self._clock = send, on_change, clock
        self._changed = asyncio.Event()

    def answered(self, report: PairReport) -> None:
        """A prefill worker's report."""
        before = {pair.key: pair.verdict for pair in self.book.pairs}
        pair = self.book.answered(report, self._clock())
        if pair is not None and pair.verdict is not before[pair.key]:
            log = logger.info if pair.verdict is Verdict.OK else logger.warning
            log("KV %s", _summary(pair))
        self.notify()

    def notify(self) -> None:
        """The book has changed."""
        self._changed.set()
        self._on_change()

    async def run(self) -> None:
        """Probe pairs until it is cancelled."""
        while True:
            self._changed.clear()
            while pairs := self.book.due(self._clock()):  # a pair that cannot be probed frees its workers for another
                for pair in pairs:
                    self._send_query(pair)
                self._on_change()  # some may have failed immediately
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.book.wait_s(self._clock())):
                    await self._changed.wait()

    def _send_query(self, pair: WorkerPair) -> None:
        target = pair.target
        question = wire.Pair(
            worker_id=target.worker_id,
            epoch=target.epoch,
            host=target.host,
            kv_port=target.kv_port,
            is_probe=pair.is_probe_wanted,
        )
        try:
            self._send(pair.source.worker_id, question)
        except ConnectionLost as error:
            self.book.fail(pair, str(error), self._clock())


def _summary(pair: WorkerPair) -> str:
    path = pair.path
    if pair.verdict is not Verdict.OK:
        return pair.line()
    how = f"over {path.path}, {path.bytes_per_s / 1e9:.1f} GB/s" if path is not None else "over no path yet"
    return f"{pair.source.worker_id} -> {pair.target.worker_id}: {how}"
