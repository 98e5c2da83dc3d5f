"""Errors of the cluster's commands: the command line prints each as one line, without a traceback."""

from kvrelay.errors import KvrelayError


class ClusterError(KvrelayError):
    """The cluster cannot be started, reached or changed; the message gives the reason and the remedy."""


class ServerUnreachable(ClusterError):
    """No server answers at an address."""


class VersionMismatch(ClusterError):
    """Hosts of one cluster have different versions of kvrelay."""


class RequestRefused(ClusterError):
    """A server answers with an error. `status`: HTTP's."""

    def __init__(self, url: str, message: str, status: int) -> None:
        super().__init__(url, message, status)
        self.url, self.message, self.status = url, message, status

    def __str__(self) -> str:
        return f"{self.url}: {self.message}"


class WorkerRetired(KvrelayError):
    """The worker has finished and closed because the planner wants fewer: no fault. Serve then removes its replica."""

    def __init__(self, worker_id: str) -> None:
        super().__init__(worker_id)
        self.worker_id = worker_id

    def __str__(self) -> str:
        return f"worker {self.worker_id} has retired: the planner wants fewer"
