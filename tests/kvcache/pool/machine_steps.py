"""How many steps the random lives of the KV cache and of the scheduler take, and the proof that they were taken.

`tests/scale.py` says which share of them a run takes; KVRELAY_MACHINE_SEED is the first seed (default 0).
"""

import os
from collections import Counter
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.scale import scaled

LEAST = 200_000  # of the KV cache in all, and of the scheduler
STEPS = {"pool": 24_000, "index": 56_000, "tiers": 140_000, "scheduler": 200_000}
SEED = int(os.environ.get("KVRELAY_MACHINE_SEED", "0"))

taken: Counter[str] = Counter()


def steps_of(name: str) -> int:
    """What this machine is to take."""
    return scaled(STEPS[name])


def live(
    name: str,
    machine: type[RuleBasedStateMachine],
    *,
    examples: int,
    rules_each: int,
    has_seen_all: Callable[[], bool] = lambda: True,
) -> None:
    """Run it with one seed after the other until it has counted this run's steps and has seen all that it must see,
    at most all of its steps.
    """
    before = taken[name]

    def is_done() -> bool:
        count = taken[name] - before
        return count >= max(STEPS[name], steps_of(name)) or (count >= steps_of(name) and has_seen_all())

    run_until(is_done, machine, examples=examples, rules_each=rules_each)
    print(f"{name}: {taken[name] - before} steps")


def run_until(
    is_done: Callable[[], bool],
    machine: type[RuleBasedStateMachine],
    *,
    examples: int,
    rules_each: int,
    is_shrunk: bool = True,
) -> None:
    """`is_shrunk`: a failure is made as small as it can be, which takes minutes: not for those that are wanted."""
    chosen = settings(
        max_examples=examples,
        stateful_step_count=rules_each,
        deadline=None,
        database=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=is_shrunk,
        phases=[Phase.generate, Phase.shrink] if is_shrunk else [Phase.generate],
    )
    number = SEED
    while not is_done():
        run_state_machine_as_test(seed(number)(type(machine.__name__, (machine,), {})), settings=chosen)
        number += 1
