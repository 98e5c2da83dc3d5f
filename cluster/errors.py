"""Errors of the cluster commands: one clear line each, shown without a traceback."""

from kvrelay.errors import KvrelayError


class ClusterError(KvrelayError):
    """The cluster cannot be started, reached or changed; the message says why and what to do."""


class WorkerRetired(KvrelayError):
    """The worker has finished and closed because there are to be fewer; no fault. What Serve is told so that it takes it away."""

    def __init__(self, worker_id: str) -> None:
        super().__init__(worker_id)
        self.worker_id = worker_id

    def __str__(self) -> str:
        return f"worker {self.worker_id} has retired: the planner wants fewer"
