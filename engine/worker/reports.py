"""What a worker reports to the ingresses that subscribed: KV events, its load, and what other ingresses assigned to
it.
"""

import asyncio
from collections.abc import Callable

import msgspec

from kvrelay.engine.step.config import StepResult
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.load_sharing import AssignedShares
from kvrelay.engine.worker.requests import IngressLink
from kvrelay.engine.worker.thread import EngineThread
from kvrelay.kvcache.tiers.events import parts_of
from kvrelay.pacing import Paced
from kvrelay.plane.messages import Assigned, KvSnapshot, LoadReport

HEARTBEAT_S = 2.0


class EngineReports:
    """Made on the worker's loop once the engine is there; reports from then on until aclose().

    Args:
        load: the first load report.
        completed: adds to a load report what the engine does not know.
        changes: what else subscribers receive with a heartbeat; None: nothing changed.
        share_load_s: least time between two reports of what other ingresses assigned.
    """

    def __init__(
        self,
        thread: EngineThread,
        load: LoadReport,
        *,
        completed: Callable[[LoadReport], LoadReport],
        changes: Callable[[], msgspec.Struct | None],
        share_load_s: float,
    ) -> None:
        self._thread, self._load, self._completed, self._changes = thread, load, completed, changes
        self._loop = loop = asyncio.get_running_loop()
        self._links: set[IngressLink] = set()  # connected
        self._subscribers: set[IngressLink] = set()
        self._assigned: AssignedShares[IngressLink] = AssignedShares()
        self._share = Paced(self._send_assigned, share_load_s, now=loop.time, after=loop.call_later)
        self._heartbeat = asyncio.create_task(self._beat(), name="heartbeat")

    async def aclose(self) -> None:
        self._heartbeat.cancel()
        await asyncio.gather(self._heartbeat, return_exceptions=True)

    def load(self) -> LoadReport:
        """The last load report, completed."""
        return self._completed(self._load)

    def retry_after_s(self) -> float:
        """When a refused request may try again: about when today's queue has been computed."""
        return max(1.0, self._load.queued_tokens / max(self._load.prefill_tokens_per_s, 100.0))

    def connect(self, link: IngressLink) -> None:
        """It may subscribe from now on."""
        self._links.add(link)

    def disconnect(self, link: IngressLink) -> None:
        """It receives nothing more, and what it had assigned no longer counts."""
        self._links.discard(link)
        self._subscribers.discard(link)
        link.stop_parts()
        self._assigned.leave(link)
        self._share.request()

    def subscribe(self, link: IngressLink) -> None:
        """Send the snapshot's first part, then events in the engine's order; the other parts come between them."""

        def begin(snapshot: KvSnapshot) -> None:
            if link in self._links:
                parts = parts_of(snapshot)
                link.send(next(parts))
                link.send_parts(parts)
                link.send(self.load())
                self._subscribers.add(link)
                self._assigned.join(link)
                self._share.request()

        def snap(engine: Engine) -> None:
            snapshot = engine.reports.snapshot()
            self._loop.call_soon_threadsafe(begin, snapshot)

        self._subscribers.discard(link)
        self._thread.post(snap)

    def assign(self, link: IngressLink, share: Assigned) -> None:
        """This is what `link` has assigned to the worker now."""
        if self._assigned.hear(link, share):
            self._share.request()

    def publish(self, result: StepResult) -> None:
        """A step's events and load."""
        if result.load is not None:
            self._load = result.load
        if not self._subscribers or not (result.events or result.load):
            return
        load = self.load() if result.load else None
        for link in self._subscribers:
            if result.events is not None:
                link.send(result.events)
            if load is not None:
                link.send(load)

    def _send_assigned(self) -> None:
        for link, others in self._assigned.take_changes():
            link.send(others)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            changes = self._changes()
            for link in self._subscribers:
                link.send(self.load())
                if changes is not None:
                    link.send(changes)
