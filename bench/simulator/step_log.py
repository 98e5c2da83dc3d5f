"""A worker's process that writes down its steps: what each computed, when it began, how long it took.

    python -m bench.simulator.step_log FOLDER [PROFILE]     what cluster/launch/local.py starts instead of its own
    `main`: see `spawn_worker`

FOLDER/<worker>.json has a row for each step when the worker has ended. Times are seconds of the machine's monotonic
clock, which all its processes share. A step lasts from the engine's being called to its answer; what the worker does
between two steps is not in it, but the gap between them follows from their start times.

With PROFILE, of a faster worker's steps each is drawn out to what the profile's curve says, asleep: a cluster whose
speed is known exactly, on a machine that could not hold so many workers side by side.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.cluster.launch import local
from kvrelay.cluster.profiles.fit import work_of
from kvrelay.cluster.profiles.profile import load_profile
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.service import WorkerService
from kvrelay.router.planning.speed_curve import SpeedCurve, StepWork
from kvrelay.types import Role

AT_ONCE_S = 0.005  # a step that begins so soon after another was waiting for its end


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One step of a worker."""

    began_s: float
    seconds: float
    cpu_s: float  # that the engine's own thread was on a core
    work: StepWork


def watch(engine: Engine, file: Path, curve: SpeedCurve | None = None) -> None:
    """Have every step noted from now on, and written when the engine is closed. Not for engines that look ahead.

    curve: what each step is to take, with what comes between it and the next; one that takes longer by itself stays as
    it is.
    """
    rows: list[Sequence[float]] = []
    plans: list[StepWork] = []
    schedule, step, close, run = engine.scheduler.schedule, engine.step, engine.close, engine.runner.run
    times = {"began": 0.0, "computed": 0.0, "ended": 0.0, "tail": 0.0}  # tail: from the model's run to the next step

    def noting() -> Any:
        plan = schedule()
        if plan.work:
            plans.append(work_of(plan))
        return plan

    def drawn_out(*args: Any) -> Any:
        hidden = run(*args)
        if curve is not None:
            until_s = times["began"] + curve.step_s(plans[-1]) - times["tail"]
            time.sleep(max(0.0, until_s - time.monotonic()))
        times["computed"] = time.monotonic()
        return hidden

    def timed(*on_reserved: Any) -> Any:
        plans.clear()
        cpu_s, began_s = time.thread_time(), time.monotonic()
        times["began"] = began_s
        if began_s - times["ended"] < AT_ONCE_S:
            times["tail"] = began_s - times["computed"]
        result = step(*on_reserved)
        ended_s, cpu_s = time.monotonic(), time.thread_time() - cpu_s
        if plans:
            work = plans[-1]
            times["ended"] = ended_s
            sizes = work.prompt_tokens, work.prompt_pairs, work.sequences, work.context_tokens
            rows.append((began_s, ended_s - began_s, cpu_s, *sizes))
        return result

    def written() -> None:
        file.write_text(json.dumps(rows))
        close()

    engine.scheduler.schedule = noting  # type: ignore[method-assign]
    engine.step = timed  # type: ignore[method-assign]
    engine.runner.run = drawn_out  # type: ignore[method-assign]
    engine.close = written  # type: ignore[method-assign]


def read_steps(file: Path) -> list[LoggedStep]:
    """What `watch` wrote, in order."""
    rows = json.loads(file.read_text())
    return [LoggedStep(began_s, seconds, cpu_s, StepWork(*work)) for began_s, seconds, cpu_s, *work in rows]


def main() -> int:
    folder, *profiles = map(Path, sys.argv[1:])
    profile = load_profile(profiles[0]) if profiles else None
    build = WorkerService.build_engine

    def watched(self: WorkerService) -> Engine:
        engine = build(self)
        curve = None if profile is None else profile.prefill if self.role is Role.PREFILL else profile.decode
        watch(engine, folder / f"{self.worker_id}.json", curve)
        return engine

    WorkerService.build_engine = watched  # type: ignore[method-assign]
    return local.main()


if __name__ == "__main__":
    sys.exit(main())
