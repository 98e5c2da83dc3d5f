"""Autoscaling on a real cluster: `kvrelay serve`, Ray Serve's controller with the planner in it, real workers.

The phases and what must hold of them are the bench's (bench/planner/live.py), which lasts longer.
"""

import tempfile
from pathlib import Path

import pytest

from bench.planner.live import ROLES, autoscaled, rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420), pytest.mark.alone]


@pytest.mark.parametrize("switch_roles", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_prefill_heavy_and_then_a_decode_heavy_load_move_the_right_counts_up_and_down_again(switch_roles: bool):
    with tempfile.TemporaryDirectory(prefix="kva", dir="/tmp") as folder:  # short: Ray's socket paths have a limit
        run = autoscaled(Path(folder), hold_s=10.0, least_s=0.0, switch_roles=switch_roles)
    assert run.problems() == [], rows(run)
    assert len(run.load.records) > 100 and len(run.begins) == 3
    up_and_down = [[run.changes(index, role) for index in range(3)] for role in range(len(ROLES))]
    assert up_and_down == [[1, 1, 0], [0, 1, 1]], rows(run)
    if switch_roles:  # the second decode worker was a prefill worker: no fourth process
        assert len(run.names) == 3, run.names


@pytest.mark.long  # test_planner_policy.py has the counts, and the test above the cluster
def test_workers_that_do_both_are_one_count_that_moves_up_and_down_again():
    with tempfile.TemporaryDirectory(prefix="kva", dir="/tmp") as folder:
        run = autoscaled(Path(folder), hold_s=10.0, least_s=0.0, aggregated=True)
    assert run.problems() == [], rows(run)
    assert [[run.changes(index, role) for index in range(2)] for role in range(len(ROLES))] == [[0, 0], [1, 1]]
