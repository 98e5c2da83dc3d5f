"""What the planner has learnt, as bytes, and where it is kept: with the registry's actor, which outlives Serve's controller.

The policy lives in Serve's controller, and Serve does not keep a policy's state when that restarts. So the policy tells the registry at
every look what it knows, and asks for it when it begins. Times are durations (seconds before the moment of keeping), and the registry
says how long it has kept them: two processes' clocks need not agree. Lost only if both go within a look.
"""

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from kvrelay.cluster.autoscaling.feed import FeedState
from kvrelay.cluster.autoscaling.retirement import RetiringState
from kvrelay.cluster.autoscaling.worker_model import LearntState
from kvrelay.router.planning.planner import PlannerState

logger = logging.getLogger("ray.serve")  # it runs in Serve's controller

VERSION = 1
NAME = "planner"  # under which the registry keeps it


@dataclass(frozen=True, slots=True)
class Memory:
    """All that the policy knows. Not the counts: Serve keeps those."""

    planner: PlannerState | None  # None: it has not decided yet
    feed: FeedState
    learnt: LearntState
    retiring: dict[str, RetiringState]  # by role
    version: int = VERSION


def encoded(memory: Memory) -> bytes:
    return msgspec.msgpack.encode(memory)


def decoded(data: bytes) -> Memory | None:
    """None: it was not written by this version."""
    try:
        memory = msgspec.msgpack.decode(data, type=Memory)
    except msgspec.DecodeError as error:  # another version's fields, too
        logger.warning("kvrelay planner: what was kept cannot be read, so it learns anew: %s", error)
        return None
    return memory if memory.version == VERSION else None


@dataclass(frozen=True, slots=True)
class Kept:
    """What was kept, and for how long; None: nothing."""

    data: bytes | None
    age_s: float = 0.0


class Keeper(Protocol):
    """Whoever keeps the bytes."""

    def keep(self, data: bytes) -> None: ...

    def recall(self) -> Kept | None:
        """None: it has not answered yet; ask again."""
        ...


class RegistryKeeper:
    """The registry's actor. It is told without waiting, and asked until it answers."""

    def __init__(self) -> None:
        self._asked: Any = None

    def keep(self, data: bytes) -> None:
        if (registry := _registry()) is not None:
            registry.keep.remote(NAME, data)

    def recall(self) -> Kept | None:
        import ray

        try:
            if self._asked is None:
                registry = _registry()
                if registry is None:
                    return Kept(None)
                self._asked = registry.kept.remote(NAME)
            ready, _ = ray.wait([self._asked], timeout=0)
            if not ready:
                return None
            found = ray.get(ready[0])
        except ray.exceptions.RayError as error:
            logger.warning("kvrelay planner: the registry does not say what was learnt before: %s", error)
            return Kept(None)
        return Kept(*found) if found is not None else Kept(None)


def _registry() -> Any:
    """Its handle; None: there is none."""
    import ray

    from kvrelay.cluster.registry.actor import NAMESPACE, REGISTRY_NAME

    try:
        return ray.get_actor(REGISTRY_NAME, namespace=NAMESPACE)
    except (ValueError, ray.exceptions.RayError):
        return None
