"""Waiting for a deployment, with Serve's answers made up: what is reported, and what ends it."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.launch import rollout
from kvrelay.cluster.launch.rollout import PLACE_S, failure, progress, wait_until_running

UNPLACED = 'Resources required for each replica: {"CPU": 4.0}, total resources available: {"CPU": 2.0}.'
TRACEBACK = """The deployment failed to start 3 times in a row.
Traceback (most recent call last):
  File "worker.py", line 3, in __init__
kvrelay.errors.ModelNotFound: model 'org/nam': the hub did not return it
Error: something of Ray's own"""


def app(status: str, message: str = "", *states: str) -> dict[str, Any]:
    """Serve's details of an application with one decode deployment."""
    replicas = [{"replica_id": f"r{index}", "state": state} for index, state in enumerate(states or ("STARTING",))]
    decode = {"message": message, "target_num_replicas": len(replicas), "replicas": replicas}
    return {"name": "kvrelay", "status": status, "message": "", "deployments": {"decode": decode}}


class Dashboard:
    """Answers one application after the other, `step_s` of the made-up clock apart."""

    def __init__(self, answers: Iterable[dict[str, Any]], step_s: float) -> None:
        self._answers, self._step_s, self.now_s = iter(answers), step_s, 0.0

    def application(self, name: str) -> dict[str, Any]:
        self.now_s += self._step_s
        return next(self._answers)

    def latest_lines(self, app_name: str, deployment: str, replica_ids: list[str]) -> dict[str, str]:
        return dict.fromkeys(replica_ids, f"downloading {deployment} 40 % (10.0.0.3)")


def waited(monkeypatch: pytest.MonkeyPatch, answers: Iterable[dict[str, Any]], step_s: float, **limits: Any) -> Any:
    """The reports while Serve answers so."""
    dashboard: Any = Dashboard(answers, step_s)
    clock = SimpleNamespace(monotonic=lambda: dashboard.now_s, sleep=lambda duration_s: None)
    monkeypatch.setattr(rollout, "time", clock)
    reports: list[str] = []
    wait_until_running(dashboard, lambda part, state: reports.append(f"{part} {state}"), **limits)
    return reports


def test_a_replica_that_waits_for_its_place_is_reported_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch):
    answers = [app("DEPLOYING"), app("DEPLOYING", UNPLACED), app("RUNNING")]
    assert waited(monkeypatch, answers, 0.5)[1] == "decode 0 of 1 running, a replica needs 4 CPU (free: 2)"


def test_starting_replicas_are_reported_with_what_they_log_and_where(monkeypatch: pytest.MonkeyPatch):
    answers = [app("DEPLOYING", "", "STARTING", "STARTING", "RUNNING")] * 4 + [app("RUNNING", "", "RUNNING")]
    reports = waited(monkeypatch, answers, 1.0)
    assert reports[0] == "decode 1 of 3 running"
    assert reports[3] == "decode 1 of 3 running; downloading decode 40 % (10.0.0.3)"
    assert reports[-1] == "decode 1 of 1 running"


def test_a_replica_without_a_place_ends_the_start_of_a_ray_of_our_own_only(monkeypatch: pytest.MonkeyPatch):
    answers = [app("DEPLOYING", UNPLACED)] * 100
    with pytest.raises(ClusterError, match=r"no place for every replica: decode .* needs 4 CPU \(free: 2\)"):
        waited(monkeypatch, answers, 10.0, place_s=PLACE_S)
    assert waited(monkeypatch, [*answers, app("RUNNING")], 10.0)  # elsewhere the cluster may grow


def test_a_start_that_never_ends_fails_with_how_far_it_is(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ClusterError, match="not running after 1800 s: decode 0 of 1 running"):
        waited(monkeypatch, [app("DEPLOYING")] * 100, 100.0)


def test_an_unhealthy_application_has_a_minute_to_recover(monkeypatch: pytest.MonkeyPatch):
    assert waited(monkeypatch, [app("UNHEALTHY"), app("UNHEALTHY"), app("RUNNING")], 20.0)
    with pytest.raises(ClusterError, match="did not start"):
        waited(monkeypatch, [app("UNHEALTHY")] * 10, 20.0)


def test_with_counts_it_waits_for_these_and_no_others(monkeypatch: pytest.MonkeyPatch):
    running = [app("RUNNING", "", *["RUNNING"] * count) for count in (1, 3, 2, 2)]
    running[2]["deployments"]["decode"]["replicas"].append({"replica_id": "r9", "state": "STOPPING"})
    assert len(waited(monkeypatch, running, 1.0, counts={"decode": 2})) == 4
    with pytest.raises(ClusterError, match="not running after 1800 s: decode 1 of 1 running"):
        waited(monkeypatch, [app("RUNNING", "", "RUNNING")] * 100, 100.0, counts={"decode": 2})


def test_a_failure_is_the_one_line_of_ours_in_serves_traceback(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ClusterError, match=r"^ModelNotFound: model 'org/nam': the hub did not return it$"):
        waited(monkeypatch, [app("DEPLOYING", TRACEBACK), app("DEPLOY_FAILED", TRACEBACK)], 1.0)
    assert progress(app("DEPLOYING", TRACEBACK)["deployments"]["decode"]).startswith("0 of 1 running, ModelNotFound: ")
    assert failure({"message": "first\nlast\n", "deployments": {}}) == "last"
    assert failure({"deployments": {}}) == "the application did not start"
