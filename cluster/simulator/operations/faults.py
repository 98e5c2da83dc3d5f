"""A scenario's faults: when they happen, and how ingresses learn of them.

A crashed worker's connections end, and ingresses know after `detect_s`. A frozen worker keeps its connections and sends
nothing; ingresses drop it after `freeze_limit_s`. A worker that returns after a crash has an empty cache and a new
epoch.
"""

from kvrelay.cluster.simulator.operations.fleet import SimulatedCluster
from kvrelay.cluster.simulator.scenario import Fault
from kvrelay.cluster.simulator.worker import SimulatedWorker


class FaultInjector:
    """Applies the scenario's faults. `happened` counts them by kind."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self.happened: dict[str, int] = {}

    def start(self) -> None:
        for fault in self._cluster.scenario.faults:
            self._cluster.clock.at(fault.at_s, self._begin, fault)

    def _begin(self, fault: Fault) -> None:
        if fault.kind == "ingress_restart":
            self._cluster.ingresses[int(fault.target[1:])].restart()
            self._count(fault)
            return
        worker = next((one for one in self._cluster.live_workers() if one.worker_id == fault.target), None)
        if worker is None:
            return  # it is already down
        self._count(fault)
        if fault.kind == "crash":
            self._crash(worker, fault)
        elif fault.kind == "freeze":
            self._freeze(worker, fault)
        elif fault.kind == "slow":
            worker.steps.slowness = 1 / fault.share
            self._later(fault, worker.steps.recover_speed)
        else:
            self._cluster.network.set_speed(worker.node_id, fault.share)
            self._later(fault, self._cluster.network.set_speed, worker.node_id, 1.0)

    def _count(self, fault: Fault) -> None:
        self.happened[fault.kind] = self.happened.get(fault.kind, 0) + 1

    def _later(self, fault: Fault, call: object, *args: object) -> None:
        if fault.for_s is not None:
            assert callable(call)
            self._cluster.clock.after(fault.for_s, call, *args)

    def _crash(self, worker: SimulatedWorker, fault: Fault) -> None:
        worker.stop()
        for ingress in self._cluster.ingresses:
            ingress.stop_flows(worker)
            self._cluster.clock.after(self._cluster.scenario.detect_s, ingress.worker_gone, worker)
        self._later(fault, self._cluster.start_worker, worker.worker_id, worker.role, worker.node_id)

    def _freeze(self, worker: SimulatedWorker, fault: Fault) -> None:
        worker.freeze()
        self._later(fault, self._thaw, worker)
        self._cluster.clock.after(self._cluster.scenario.freeze_limit_s, self._drop, worker, worker.num_freezes)

    def _drop(self, worker: SimulatedWorker, freeze: int) -> None:
        """It has sent nothing for too long."""
        if worker.is_frozen and worker.num_freezes == freeze:
            for ingress in self._cluster.ingresses:
                ingress.stop_flows(worker)
                ingress.worker_gone(worker)

    def _thaw(self, worker: SimulatedWorker) -> None:
        """It resumes; ingresses that had dropped it connect to it again, and what they had sent is aborted."""
        if not worker.is_alive:
            return
        for ingress in self._cluster.ingresses:
            if not ingress.links.is_connected(worker):
                worker.unsubscribe(ingress.links)
                worker.abort_all(ingress.links)
                ingress.worker_up(worker)
        worker.thaw()
