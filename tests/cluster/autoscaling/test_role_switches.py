"""The policy has workers change their roles: what Serve counts, what workers report, and what is ordered agree."""

from typing import Any

import pytest

from kvrelay.cluster.autoscaling import feed
from kvrelay.cluster.autoscaling.policies import PlannerPolicy
from kvrelay.types import Role
from tests.cluster.autoscaling.test_planner_policy import Context, World, stats

pytestmark = pytest.mark.pure

P, D = Role.PREFILL, Role.DECODE


class SwitchingWorld(World):
    """Its workers take the role that they are ordered to, at the next tick; prompts or outputs are what comes."""

    def __init__(self, policy: PlannerPolicy, **counts: int) -> None:
        self.roles: dict[str, Role] = {}  # of those that have switched
        self.stuck: set[str] = set()  # that report to be changing for ever
        self.switches = 0
        super().__init__(policy, **counts)

    def take(self, policy: PlannerPolicy) -> None:
        super().take(policy)
        policy._change_roles = self.ordered.update  # type: ignore[method-assign, assignment]

    @property
    def ordered(self) -> dict[str, Role]:
        return self.__dict__.setdefault("_ordered", {})

    def report(self, name: str) -> dict[str, float]:
        home = P if name.startswith("p") else D
        role = self.roles.get(f"{home}-{name}", home)
        bits = 0.0 if f"{home}-{name}" in self.stuck else feed.ROLE_BITS[role]
        return super().report(name) | {feed.ROLES: bits}

    def tick(self, rate: float, seconds: float = 10.0) -> dict[str, int]:
        for name, role in self.ordered.items():
            self.switches += self.roles.get(name, name.partition("-")[0]) != role
            self.roles[name] = role
        self.ordered.clear()
        return super().tick(rate, seconds)

    def counts(self) -> tuple[int, int]:
        """Workers by role now."""
        now = [self.roles.get(f"{home}-{name}", home) for home, names in self.workers.items() for name in names]
        return now.count(P), now.count(D)


def few_prefills(**settings: Any) -> SwitchingWorld:
    """Four decode workers and one prefill worker, and prompts that need more of those."""
    return SwitchingWorld(PlannerPolicy(scale_down_delay_s=600.0, ttft_s=1.0, **settings), decode=4)


def test_a_role_that_needs_more_takes_what_the_other_has_to_spare_and_no_process_is_started():
    world = few_prefills()
    for _ in range(8):
        replicas = world.tick(9.0)
    assert world.switches >= 1 and world.counts()[0] > 1
    assert replicas == {"prefill": 1, "decode": 4} and world.fresh == 100
    control = few_prefills(switch_roles=False)
    for _ in range(8):
        control.tick(9.0)
    assert control.switches == 0 and len(control.workers["prefill"]) > 1 and len(control.workers["decode"]) == 4


def test_a_switched_worker_that_serve_replaces_is_corrected_without_a_change_of_counts():
    world = few_prefills()
    for _ in range(8):
        world.tick(9.0)
    before, switched = world.counts(), [name for name in world.roles if world.roles[name] is P]
    gone = switched[0].partition("-")[2]
    world.workers["decode"][world.workers["decode"].index(gone)] = "d77"  # it crashed: another has its place
    assert world.counts() == (before[0] - 1, before[1] + 1)
    for _ in range(2):
        replicas = world.tick(9.0)
    assert world.counts() == before and replicas == {"prefill": 1, "decode": 4}


def test_an_order_outlives_the_controller_and_no_other_worker_is_asked_instead():
    world = few_prefills()
    while not world.ordered:
        world.tick(9.0)
    first = dict(world.ordered)
    world.ordered.clear()  # lost with the controller, and the registry
    world.take(PlannerPolicy(scale_down_delay_s=600.0, ttft_s=1.0))
    world.tick(9.0, seconds=0.1)
    assert world.ordered == first
    world.stuck = set(first)  # they begin to change
    world.tick(9.0, seconds=0.1)
    assert world.policy._ordered == first
    world.stuck.clear()
    world.tick(9.0, seconds=0.1)
    assert world.policy._ordered == {} and world.switches == len(first)


def test_observations_list_workers_by_their_role_now(monkeypatch):
    world = few_prefills()
    world.roles = {"decode-d1": P}
    seen: list[feed.Observation] = []
    monkeypatch.setattr(feed.Feed, "interval", lambda self, look, *_: seen.append(look))
    world.stuck = {"decode-d2"}
    world.tick(1.0)
    assert set(seen[0].prefills) == {"p0", "d1"} and set(seen[0].decodes) == {"d0", "d3"}


def test_the_role_of_a_worker_that_reports_none_is_its_deployments():
    context = Context("decode", 1, {"d0": {feed.RUNNING: 1.0}})
    assert PlannerPolicy()._roles(context) == {"decode-d0": D}
    assert feed.role_in({feed.ROLES: 3.0}, P) is D and feed.role_in({feed.ROLES: 0.0}, P) is None
    assert feed.ingress_report(stats(1))[feed.REQUESTS] == 1.0
