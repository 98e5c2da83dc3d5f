"""For rows of `kvrelay verify`: a worker's scheduler that waits until a whole load is here, and tells every step that it planned.

What is in one line, or in one batch, then does not depend on how fast requests arrive.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvrelay.engine.scheduling.scheduler import Scheduler, StepPlan
from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.service import WorkerService

Ready = Callable[[Scheduler], bool]
Damage = Callable[[Engine, StepPlan], None]


@contextmanager
def held_back(
    worker: WorkerService, ready: Ready, *, grants: bool = True, damage: Damage | None = None
) -> Iterator[list[StepPlan]]:
    """Nothing is begun until `ready` was true once; yields the plans since.

    grants: reservations are given meanwhile. damage: done to the engine before each step is computed.
    """
    engine = worker.thread.engine
    assert engine is not None
    scheduler, plans, is_open = engine.scheduler, list[StepPlan](), False
    schedule, grant = scheduler.schedule, scheduler.grant_reservations

    def may_begin() -> bool:
        nonlocal is_open
        is_open = is_open or ready(scheduler)
        return is_open

    def held_schedule() -> StepPlan:
        if not may_begin():
            return StepPlan((), 0, ())
        plan = schedule()
        plans.append(plan)
        if damage is not None:
            damage(engine, plan)
        return plan

    def held_grant() -> list[Sequence]:
        return grant() if grants or may_begin() else []

    scheduler.schedule, scheduler.grant_reservations = held_schedule, held_grant  # type: ignore[method-assign]
    try:
        yield plans
    finally:
        scheduler.schedule, scheduler.grant_reservations = schedule, grant  # type: ignore[method-assign]


def in_line(count: int) -> Ready:
    """So many sequences wait for their turn."""
    return lambda scheduler: len(scheduler.waiting) + len(scheduler.reserving) == count
