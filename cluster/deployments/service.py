"""Puts a worker together: the engine's service, and both ends of the KV plane."""

from functools import partial

from kvrelay.decode.worker import start_target
from kvrelay.engine.worker.build import WorkerOptions
from kvrelay.engine.worker.role import EndStarters
from kvrelay.engine.worker.service import WorkerService
from kvrelay.prefill.worker import Announcements, start_source
from kvrelay.types import Role


def worker_service(options: WorkerOptions, role: Role) -> WorkerService:
    """A worker with the settings of this role, which it begins with; not started."""
    announcements = Announcements()
    source = partial(start_source, announcements, is_eager=role is Role.PREFILL)
    return WorkerService(options, role, EndStarters(source, start_target, announcements.on_layers))
