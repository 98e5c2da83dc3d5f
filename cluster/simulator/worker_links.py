"""An ingress's side of its workers in virtual time: the Router, and the messages that keep it up to date."""

from collections.abc import Callable
from typing import Any

from kvrelay.cluster.simulator.scenario import World
from kvrelay.cluster.simulator.worker import SimulatedWorker
from kvrelay.pacing import Paced
from kvrelay.plane.messages import SHARE_LOAD_S
from kvrelay.plane.reports import AssignedByOthers, KvEvents, KvSnapshot, LoadReport
from kvrelay.router.decision.router import Router


class WorkerLinks:
    """The Router of one ingress and the workers that report to it."""

    def __init__(self, world: World, load_changed: Callable[[], object]) -> None:
        """load_changed: is called after what a worker reports may let a deferred request go."""
        self._clock, self._world, self._load_changed = world.clock, world, load_changed
        self.router = self._new_router()
        self.members: dict[str, SimulatedWorker] = {}
        self._has_others = False
        self._sharing = Paced(self._share_assigned, SHARE_LOAD_S, now=self._clock.time, after=self._clock.after)

    def _new_router(self) -> Router:
        settings, size = self._world.settings, self._world.profile.block_size
        max_waiting = settings.engine.max_waiting
        return Router(settings.router, tokens_per_hash=size, max_waiting=max_waiting, slo=settings.slo)

    def send(self, call: Callable[..., object], *args: Any) -> None:
        self._clock.after(self._world.scenario.message_s, call, *args)

    # ---- membership

    def is_connected(self, worker: SimulatedWorker) -> bool:
        return self.members.get(worker.worker_id) is worker

    def add(self, worker: SimulatedWorker) -> None:
        self.members[worker.worker_id] = worker
        self.router.worker_up(worker.info)
        self._subscribe(worker)

    def restart(self) -> None:
        """Begin with an empty Router and connect to every worker again."""
        self.router = self._new_router()
        for worker in self.members.values():
            worker.unsubscribe(self)
            if worker.is_alive and not worker.is_draining:
                self.router.worker_up(worker.info)
                self._subscribe(worker)

    def _takes_requests(self, worker: SimulatedWorker) -> bool:
        return self.is_connected(worker) and not worker.is_draining

    # ---- reports

    def _subscribe(self, worker: SimulatedWorker) -> None:
        self.send(self._subscribed, worker)

    def _subscribed(self, worker: SimulatedWorker) -> None:
        if not worker.is_alive or worker.is_draining:
            return
        snapshot, load = worker.subscribe(self)
        self.send(self._receive_snapshot, worker, snapshot, load)

    def _receive_snapshot(self, worker: SimulatedWorker, snapshot: KvSnapshot, load: LoadReport) -> None:
        if self._takes_requests(worker):
            self.router.apply_snapshot(worker.worker_id, snapshot)
            self.router.apply_load(worker.worker_id, load, self._clock.now_s)

    def receive_update(self, worker: SimulatedWorker, events: KvEvents | None, load: LoadReport | None) -> None:
        """Apply cache events and a load report; events with a gap lead to a new subscription."""
        if not self._takes_requests(worker):
            return
        if events is not None and not self.router.apply_events(worker.worker_id, events):
            self._subscribe(worker)
        if load is not None:
            self.router.apply_load(worker.worker_id, load, self._clock.now_s)
            self._load_changed()

    # ---- load that ingresses share through the workers

    def receive_others(self, worker: SimulatedWorker, others: AssignedByOthers) -> None:
        if self.is_connected(worker):
            self._has_others |= others.num_others > 0
            self.router.apply_others(worker.worker_id, others)
            self.assigned_changed()

    def assigned_changed(self) -> None:
        """Report this ingress's assignments soon, where there are other ingresses."""
        if self._has_others:
            self._sharing.request()

    def _share_assigned(self) -> None:
        for worker_id, share in self.router.take_assigned():
            self.send(self.members[worker_id].receive_assigned, self, share)
