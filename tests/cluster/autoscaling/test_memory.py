"""What the planner has learnt outlives the process that it runs in: a real registry actor, policies in actors that are
killed.
"""

import os
import subprocess
import time
from pathlib import Path

import pytest
import ray

from kvrelay.cluster.autoscaling.policies import NAME, RegistryStateStore
from kvrelay.cluster.autoscaling.room import NOTICE
from kvrelay.cluster.autoscaling.worker_model import decoded
from kvrelay.cluster.registry.actor import connect_registry
from kvrelay.cluster.registry.members import WorkerRecord
from kvrelay.cluster.registry.names import NAMESPACE
from tests.cluster.autoscaling.test_planner_policy import PlannerPolicy, World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.alone]


@pytest.fixture(scope="module")
def registry():
    temp = Path(f"/tmp/kvp{os.getpid()}")  # short: Ray's socket paths are limited to 107 bytes
    paths = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_cpus=1,
        namespace=NAMESPACE,
        include_dashboard=False,
        _temp_dir=str(temp),
        object_store_memory=80 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
        configure_logging=False,
    )
    try:
        yield connect_registry("secret")
    finally:
        ray.shutdown()
        subprocess.run(["rm", "-rf", str(temp)], check=True)


@ray.remote(num_cpus=0)
class Controller:
    """Where the policy runs, in place of Serve's; `served`: requests before it began."""

    def __init__(self, served: int, now_s: float) -> None:
        self.world = World(PlannerPolicy(scale_down_delay_s=60.0, ttft_s=1.0), prefill=3)
        self.world.policy.store = RegistryStateStore()
        self.world.served, self.world.now_s = served, now_s

    def begin(self) -> None:
        """Tick until the registry has answered, which takes real time."""
        for _ in range(900):  # 9 s of the policy's clock, less than it waits for the registry; 90 s of real time
            self.world.tick(0.0, seconds=0.01)
            if self.world.policy.is_loaded:
                return
            time.sleep(0.1)
        raise AssertionError("the registry has not answered")

    def ticks(self, rates: list[float]) -> tuple[int, float]:
        for rate in rates:
            self.world.tick(rate)
        return self.world.served, self.world.now_s

    def level(self) -> float | None:
        """Requests per s that it has learnt of; None: nothing."""
        planner = self.world.policy.planner
        return planner.state.demand.trend.level if planner is not None else None

    def has_learnt_before(self) -> bool:
        return self.world.policy.resumed is not None


def _saved_within(registry, name: str, limit_s: float) -> bytes:
    """What the registry has saved as `name`, as soon as there is anything: nobody waits for its answer to a save."""
    deadline_s = time.monotonic() + limit_s
    while not (saved := ray.get(registry.saved_state.remote(name))) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return saved


def test_the_planner_sees_workers_that_warm_up_and_the_clusters_resources_and_leaves_its_reasons(registry):
    store = RegistryStateStore()
    ray.get(registry.heartbeat.remote(WorkerRecord("prefill-w", "prefill", "", "127.0.0.1", 0, "n", 1)))
    assert store.members() is None  # asked now
    deadline_s = time.monotonic() + 30.0
    while (members := store.members()) is None and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert members == {"prefill-w"}
    assert store.resources()["CPU"] == 1.0
    store.notice(["prefill stays at 1", "decode stays at 2"])
    assert _saved_within(registry, NOTICE, 30.0) == b"prefill stays at 1\ndecode stays at 2"


def test_a_new_controller_knows_what_the_killed_one_knew_until_the_registry_is_new_as_well(registry):
    first = Controller.remote(0, 0.0)
    ray.get(first.begin.remote())
    sums = ray.get(first.ticks.remote([12.0] * 8))
    level = ray.get(first.level.remote())
    assert level == pytest.approx(12.0, rel=0.1) and not ray.get(first.has_learnt_before.remote())
    assert decoded(_saved_within(registry, NAME, 30.0)) is not None
    ray.kill(first)

    second = Controller.remote(*sums)
    ray.get(second.begin.remote())
    assert ray.get(second.has_learnt_before.remote())
    ray.get(second.ticks.remote([12.0]))
    assert ray.get(second.level.remote()) == pytest.approx(12.0, rel=0.1)
    ray.kill(second)

    ray.kill(registry, no_restart=False)
    third = Controller.remote(*sums)
    ray.get(third.begin.remote())
    assert not ray.get(third.has_learnt_before.remote())
