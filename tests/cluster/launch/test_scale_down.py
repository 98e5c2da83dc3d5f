"""`kvrelay scale` with fewer workers: those that cost least leave, and Serve's counts follow them."""

import copy
from typing import Any

import pytest

from kvrelay.cluster.deployments.serve_config import IMPORT_PATH
from kvrelay.cluster.launch import scale_down as module
from kvrelay.cluster.launch.scale_down import leaving_workers, scale_down

pytestmark = pytest.mark.pure


def worker(name: str, *, running: int = 0, used: int = 0, cached: int = 0, hits: int = 0) -> dict[str, Any]:
    """As `kvrelay status --json` lists it."""
    load = {"running": running, "used_blocks": used, "cached_blocks": cached, "prefix_hit_tokens": hits}
    info = {"block_size": 16, "kv_bytes_per_token": 1 << 16}
    return {"worker_id": name, "info": info, "load": load | {"prefix_query_tokens": 100}}


BUSY, IDLE, WARM = (
    worker("decode-busy", running=9, used=400),
    worker("decode-idle", running=1, used=10),
    worker("decode-warm", cached=300, hits=90),
)


class MadeUpServe:
    """Serve with its dashboard: it starts what is missing, stops what is too much, and lists both."""

    def __init__(self, decode: list[str], policy: bool = False) -> None:
        self.running, self.num_started, self.num_chosen = list(decode), 0, 0
        self.entry: dict[str, Any] = {"name": "kvrelay", "import_path": IMPORT_PATH, "deployments": []}
        if policy:
            self.entry["autoscaling_policy"] = {"policy_function": "x"}
        self.targets = [len(decode)]

    def details(self) -> dict[str, Any]:
        replicas = [{"replica_id": one, "state": "RUNNING"} for one in self.running]
        replicas += [{"replica_id": f"new{n}", "state": "STARTING"} for n in range(self.targets[-1] - len(replicas))]
        self.num_started += self.targets[-1] - len(self.running)
        deployments = {"decode": {"replicas": replicas, "target_num_replicas": self.targets[-1]}}
        app = {"deployments": deployments, "deployed_app_config": copy.deepcopy(self.entry)}
        return {"applications": {"kvrelay": app}}

    def deploy(self, config: dict[str, Any]) -> None:
        (self.entry,) = config["applications"]
        (decode,) = self.entry["deployments"]
        self.targets.append(decode["num_replicas"])
        while len(self.running) > self.targets[-1]:
            self.num_chosen += 1
            self.running.pop()


@pytest.fixture
def no_waiting(monkeypatch):
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(module.time, "sleep", sleep)
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_those_with_the_fewest_bytes_to_move_leave():
    details = MadeUpServe(["busy", "idle", "warm", "mute"]).details()
    workers = {one["worker_id"]: one for one in (BUSY, IDLE, WARM)}
    assert leaving_workers(details, workers, {"decode": 3}) == ["decode-mute"]  # it does not even answer
    assert leaving_workers(details, workers, {"decode": 1}) == ["decode-mute", "decode-idle", "decode-warm"]
    assert leaving_workers(details, workers, {"decode": 6}) == []


def test_counts_follow_the_workers_that_leave_and_serve_stops_none_of_its_own_choice(no_waiting):
    serve, asked, said = MadeUpServe(["busy", "idle", "warm"], policy=True), [], []

    def retire(names):
        asked.append(list(names))
        if len(asked) == 2:
            serve.running.remove("idle")
        elif len(asked) == 3:
            serve.running.remove("warm")
        return 60.0

    scale_down(serve, lambda: [BUSY, IDLE, WARM], {"decode": 1}, retire, said.append)
    assert asked == [["decode-idle", "decode-warm"]] * 2 + [["decode-warm"]]
    assert serve.targets == [3, 3, 2, 1] and serve.running == ["busy"] and not serve.num_chosen
    assert "autoscaling_policy" not in serve.entry  # from the first change on
    assert said[0] == "decode-idle: 1 sequence moves, 10.0 MiB" and said[1] == "decode-warm: nothing runs there"
    assert said[2].startswith("decode-idle has left after") and said[3].startswith("decode-warm has left after")


def test_a_worker_that_does_not_leave_is_left_to_serve(no_waiting):
    serve, said = MadeUpServe(["busy", "idle"]), []
    scale_down(serve, lambda: [BUSY, IDLE], {"decode": 1}, lambda names: 5.0, said.append)
    assert said[-1] == "decode-idle has not left in time: Ray Serve stops a worker"
    assert no_waiting[0] == pytest.approx(65.0, abs=1.0)


def test_more_workers_are_no_affair_of_the_workers(no_waiting):
    serve = MadeUpServe(["busy"])
    scale_down(serve, lambda: [BUSY], {"decode": 3}, lambda names: pytest.fail("nobody retires"), print)
    assert serve.targets == [1]
