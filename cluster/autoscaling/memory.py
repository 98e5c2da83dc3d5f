"""What the planner has learned, as bytes, and where it is saved: with the registry's actor, which outlives Serve's
controller.

The policy runs in Serve's controller, and Serve does not keep a policy's state when the controller restarts. So the
policy saves its state with the registry at every observation and loads it when it starts. Times are Serve's, seconds
since the epoch. The state is lost only if both restart within one interval.
"""

import logging
from dataclasses import dataclass
from typing import Any

import msgspec

from kvrelay.cluster.autoscaling.feed import Feed
from kvrelay.cluster.autoscaling.retirement import Retiring
from kvrelay.cluster.autoscaling.worker_model import LearnedModel
from kvrelay.router.planning.planner import PlannerState

logger = logging.getLogger("ray.serve")  # it runs in Serve's controller

VERSION = 1
NAME = "planner"  # the registry's key of the state


@dataclass(frozen=True, slots=True)
class PlannerMemory:
    """The policy's whole state, except the counts, which Serve keeps."""

    planner: PlannerState | None  # None: it has made no decision yet
    feed: Feed
    learned: LearnedModel
    retiring: dict[str, Retiring]  # by role
    version: int = VERSION


def encoded(memory: PlannerMemory) -> bytes:
    return msgspec.msgpack.encode(memory)


def decoded(data: bytes) -> PlannerMemory | None:
    """None: nothing was saved, or another version wrote it."""
    if not data:
        return None
    try:
        memory = msgspec.msgpack.decode(data, type=PlannerMemory)
    except msgspec.DecodeError as error:  # another version's fields, too
        logger.warning("kvrelay planner: its saved state cannot be read, so it learns again: %s", error)
        return None
    return memory if memory.version == VERSION else None


class RegistryStateStore:
    """The planner's state in the registry's actor. Saving does not wait; loading is polled, so that no tick blocks."""

    def __init__(self) -> None:
        self._pending: Any = None

    def save(self, data: bytes) -> None:
        if (found := registry()) is not None:
            found.save_state.remote(NAME, data)

    def load(self) -> bytes | None:
        """What was saved, empty if nothing was; None: the registry has not answered yet, call again."""
        import ray

        try:
            if self._pending is None:
                found = registry()
                if found is None:
                    return b""
                self._pending = found.saved_state.remote(NAME)
            ready, _ = ray.wait([self._pending], timeout=0)
            return bytes(ray.get(ready[0])) if ready else None
        except ray.exceptions.RayError as error:
            logger.warning("kvrelay planner: the registry does not return the saved state: %s", error)
            return b""


def registry() -> Any:
    """The registry's handle; None: there is none."""
    import ray

    from kvrelay.cluster.registry.actor import NAMESPACE, REGISTRY_NAME

    try:
        return ray.get_actor(REGISTRY_NAME, namespace=NAMESPACE)
    except (ValueError, ray.exceptions.RayError):
        return None
