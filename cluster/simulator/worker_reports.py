"""What a worker reports to ingresses.

Cache events, load reports, heartbeats, and what other ingresses have assigned.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

from kvrelay.cluster.simulator.clock import Clock, Event
from kvrelay.engine.worker.load_sharing import AssignedShares
from kvrelay.pacing import Paced
from kvrelay.plane.messages import SHARE_LOAD_S, Assigned
from kvrelay.plane.reports import AssignedByOthers, KvEvents, LoadReport

HEARTBEAT_S = 2.0


class LoadSubscriber(Protocol):
    """An ingress, to which workers report, which know nothing else of it. `worker` is the SimulatedWorker. Calls come
    when the message has arrived.
    """

    def receive_update(self, worker: Any, events: KvEvents | None, load: LoadReport | None) -> None: ...
    def receive_others(self, worker: Any, others: AssignedByOthers) -> None: ...


class WorkerReports:
    """The subscribers of one worker, and when they get what. Its 14 attributes are mostly the constructor's delays.

    Args:
        worker: what subscribers know the worker by.
        message_s: how long a message takes. report_s: time between load reports of a busy worker, at least.
        measure: makes a load report.
        on_heartbeat: called with each heartbeat.
    """

    def __init__(
        self,
        worker: object,
        clock: Clock,
        *,
        message_s: float,
        report_s: float,
        measure: Callable[[], LoadReport],
        on_heartbeat: Callable[[], object],
    ) -> None:
        self._worker, self._clock, self._message_s, self._report_s = worker, clock, message_s, report_s
        self._measure, self._on_heartbeat = measure, on_heartbeat
        self.subscribers: dict[LoadSubscriber, None] = {}
        self._assigned: AssignedShares[LoadSubscriber] = AssignedShares()
        self._sharing = Paced(self._send_others, SHARE_LOAD_S, now=clock.time, after=clock.after)
        self._load: LoadReport | None = None
        self._reported_s = -math.inf
        self._is_open = self._is_running = True
        self._beat: Event = clock.after(HEARTBEAT_S, self._heartbeat)

    def send(self, call: Callable[..., object], *args: Any) -> None:
        self._clock.after(self._message_s, call, *args)

    def subscribe(self, subscriber: LoadSubscriber) -> None:
        self.subscribers[subscriber] = None
        self._assigned.join(subscriber)
        self._sharing.request()

    def unsubscribe(self, subscriber: LoadSubscriber) -> None:
        self.subscribers.pop(subscriber, None)
        self._assigned.leave(subscriber)
        self._sharing.request()

    def publish(self, events: KvEvents | None, *, is_idle: bool) -> None:
        is_due = is_idle or self._clock.now_s - self._reported_s >= self._report_s
        load = self.load() if is_due else None
        if events is not None or load is not None:
            self._send_all(events, load)

    def _send_all(self, events: KvEvents | None, load: LoadReport | None) -> None:
        for subscriber in self.subscribers:
            self.send(subscriber.receive_update, self._worker, events, load)

    def load(self) -> LoadReport:
        """A load report as of now, which counts as sent."""
        load = self._load = self._measure()
        self._reported_s = self._clock.now_s
        return load

    @property
    def last_load(self) -> LoadReport:
        return self._load or self.load()

    def _heartbeat(self) -> None:
        if self._is_running:
            self._send_all(None, self.last_load)
            self._on_heartbeat()
        self._beat = self._clock.after(HEARTBEAT_S, self._heartbeat)

    def receive_assigned(self, subscriber: LoadSubscriber, share: Assigned) -> None:
        if self._is_open and self._assigned.hear(subscriber, share):
            self._sharing.request()

    def _send_others(self) -> None:
        if self._is_open and self._is_running:
            for subscriber, others in self._assigned.take_changes():
                self.send(subscriber.receive_others, self._worker, others)

    # ---- faults

    def freeze(self) -> None:
        self._is_running = False

    def resume(self) -> None:
        self._is_running = True
        self._sharing.request()

    def close(self) -> None:
        """Send nothing, ever."""
        self._is_open = False
        self._beat.cancel()
        self.subscribers.clear()
