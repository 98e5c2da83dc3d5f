"""Pure rules of the cluster folder: cores, autoscaling, the Serve config, flags, notes of running clusters."""

import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from kvrelay.cluster.commands import doctor
from kvrelay.cluster.commands.settings_flags import settings_from_flags
from kvrelay.cluster.commands.status import _serve_status, render
from kvrelay.cluster.deployments.cores import CoreLease, acquire_cores, fair_share
from kvrelay.cluster.deployments.serve_config import planned_workers, scaled, serve_config
from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.launch import endpoints as state_file
from kvrelay.cluster.launch.dashboard import keep_ray_token_private
from kvrelay.cluster.launch.endpoints import endpoints, other_clusters
from kvrelay.cluster.launch.http_json import server_root
from kvrelay.cluster.launch.rollout import missing, progress
from kvrelay.config import Settings
from kvrelay.errors import ConfigError
from kvrelay.machine import Core

pytestmark = pytest.mark.pure


Lease = Callable[[tuple[int, ...], int], CoreLease]


@pytest.fixture
def lease(tmp_path: Path) -> Iterator[Lease]:
    """Takes cores as different workers would; gives all back in the end."""
    with ExitStack() as stack:

        def take(cpus: tuple[int, ...], want: int) -> CoreLease:
            taken = acquire_cores(tmp_path, [Core(cpu, (cpu,)) for cpu in cpus], want)
            stack.callback(taken.release)
            return taken

        yield take


def test_workers_get_disjoint_cores_while_there_are_enough(lease: Lease):
    assert [lease((0, 1, 2, 3), 2).cpus for _ in range(2)] == [(0, 1), (2, 3)]


def test_with_too_few_cores_the_least_shared_is_taken(lease: Lease):
    assert [lease((0, 1), 1).cpus for _ in range(4)] == [(0,), (1,), (0,), (1,)]


def test_released_cores_are_given_again_and_releasing_twice_is_harmless(lease: Lease):
    first, second = lease((0, 1), 1), lease((0, 1), 1)
    second.release()
    second.release()
    assert (first.cpus, lease((0, 1), 1).cpus) == ((0,), (1,))


def test_nobody_gets_more_cores_than_there_are(lease: Lease):
    assert lease((4, 5), 9).cpus == (4, 5)


@pytest.mark.parametrize(("cores", "workers", "share"), [(2, 2, 1), (16, 2, 8), (2, 5, 1), (8, 3, 2), (4, 0, 4)])
def test_a_fair_share_is_never_nothing(cores: int, workers: int, share: int):
    assert fair_share(cores, workers) == share


def running(**deployments: dict[str, object]) -> dict[str, object]:
    return {"applications": {"kvrelay": {"deployments": deployments}}}


def test_cores_are_planned_for_what_serve_means_to_run_whoever_said_so():
    now = running(
        ingress={"target_num_replicas": 4}, prefill={"target_num_replicas": 2}, decode={"target_num_replicas": 3}
    )
    assert planned_workers(now, "kvrelay") == 5
    assert planned_workers(running(decode={"target_num_replicas": 1}), "kvrelay") == 1
    assert planned_workers(now, "another") == planned_workers({}, "kvrelay") == 0


def test_workers_that_are_scaled_by_load_are_planned_at_their_most():
    most = {"target_num_replicas": 1, "deployment_config": {"autoscaling_config": {"max_replicas": 3}}}
    fixed = {"target_num_replicas": 2, "deployment_config": {"autoscaling_config": None}}
    assert planned_workers(running(prefill=most, decode=fixed), "kvrelay") == 5


def test_five_workers_that_start_together_share_no_core_and_leave_none_to_one_alone(lease: Lease):
    cores = tuple(range(16))
    five = running(prefill={"target_num_replicas": 2}, decode={"target_num_replicas": 3})
    taken = [lease(cores, fair_share(16, planned_workers(five, "kvrelay"))).cores for _ in range(5)]
    assert sum(map(len, taken)) == len({core for held in taken for core in held}) == 15


def test_workers_that_are_added_take_free_cores_while_there_are_some(lease: Lease):
    cores = tuple(range(8))
    first = [lease(cores, 2).cpus for _ in range(2)]  # cores_per_worker 2
    assert (first, lease(cores, 2).cpus, lease(cores, 2).cpus) == ([(0, 1), (2, 3)], (4, 5), (6, 7))
    assert lease(cores, 2).cpus == (0, 1)


def details(settings: Settings) -> dict[str, object]:
    config = serve_config(settings, http_port=9)["applications"][0]
    deployments = {entry["name"]: {} for entry in config["deployments"]}
    app = {"deployed_app_config": config, "deployments": deployments}
    return {"applications": {"kvrelay": app}, "http_options": {"host": "127.0.0.1", "port": 9}}


def test_the_deployed_config_and_its_replicas_hold_no_secret():
    settings = Settings.model_validate({"serve": {"api_key": "k3y", "port": 9000}, "cluster": {"secret": "s3cret"}})
    config = serve_config(settings, http_port=9)
    assert config["applications"][0]["args"] == {"serve": {"port": 9000}, "cluster": {}}
    assert "k3y" not in json.dumps(config) and "s3cret" not in json.dumps(config)


def test_scaling_changes_counts_and_nothing_else():
    before = details(Settings())
    after = scaled(before, {"decode": 3})
    counts = {entry["name"]: entry["num_replicas"] for entry in after["applications"][0]["deployments"]}
    assert counts == {"ingress": 1, "prefill": 1, "decode": 3}
    assert after["applications"][0]["args"] == before["applications"]["kvrelay"]["deployed_app_config"]["args"]  # type: ignore[index]
    assert after["http_options"] == {"host": "127.0.0.1", "port": 9}
    assert scaled(before, {"decode": 1})["applications"][0] == before["applications"]["kvrelay"]["deployed_app_config"]  # type: ignore[index]


def test_scaling_keeps_other_applications_and_replaces_autoscaling():
    before = details(Settings())
    other = {"name": "other", "import_path": "other:app"}
    before["applications"]["other"] = {"deployed_app_config": other}  # type: ignore[index]
    before["applications"]["kvrelay"]["deployed_app_config"]["deployments"][1]["autoscaling_config"] = {}  # type: ignore[index]
    after = scaled(before, {"prefill": 2})
    assert other in after["applications"]
    entry = next(entry for entry in after["applications"][0]["deployments"] if entry["name"] == "prefill")
    assert entry == {"name": "prefill", "num_replicas": 2}


def test_scaling_what_is_not_there_is_refused():
    with pytest.raises(ClusterError, match="not deployed"):
        scaled({"applications": {}}, {"decode": 2})
    aggregated = details(Settings.model_validate({"cluster": {"prefill": 0}}))
    with pytest.raises(ClusterError, match="started without prefill"):
        scaled(aggregated, {"prefill": 1})


def test_flags_win_over_the_file_and_pairs_over_flags(tmp_path: Path):
    file = tmp_path / "f.yaml"
    file.write_text("engine: {token_budget: 64, kv_memory: 1GiB}\ncluster: {decode: 3}\n")
    flags = {"engine": {"kv_memory": "2GiB"}, "cluster": {"prefill": 2, "decode": None}}
    settings = settings_from_flags(
        file, flags, ["engine.token_budget=128", "model.max_model_len=512", "prefill.block_size=32"]
    )
    assert (settings.engine.token_budget, settings.engine.kv_memory, settings.prefill.block_size) == (128, 2 << 30, 32)
    assert (settings.cluster.prefill, settings.cluster.decode, settings.model.max_model_len) == (2, 3, 512)


def test_a_malformed_pair_is_told_how_to_write_it():
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        settings_from_flags(None, {}, ["token_budget=1"])


@pytest.mark.parametrize("value", ["[1", "a: b: c", "!!python/object:os.system x", "\x00"])
def test_a_value_that_is_no_yaml_is_told_in_one_line_with_its_key(value: str):
    with pytest.raises(ConfigError) as caught:
        settings_from_flags(None, {}, [f"engine.kv_memory={value}"])
    assert "--set engine.kv_memory=" in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_models_path_becomes_absolute_and_a_hub_id_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert settings_from_flags(None, {"model": {"source": "m"}}, []).model.source == str(tmp_path / "m")
    assert settings_from_flags(None, {"model": {"source": "org/name"}}, []).model.source == "org/name"


def test_notes_of_running_clusters_are_found_and_those_of_dead_ones_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    mine = state_file.RunningCluster(os.getpid(), "http://a", "http://d", "m")
    path = state_file.note(mine)
    dead = path.with_name("dead.json")
    dead.write_text(json.dumps({"pid": 2**22 + 1, "api_url": "x", "dashboard_url": "y", "model": "z"}))
    (path.parent / "junk.json").write_text("{")
    assert state_file.running() == [mine]
    assert not dead.exists()
    path.unlink()
    assert state_file.running() == []


def test_a_cluster_is_chosen_by_either_of_its_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    monkeypatch.setattr(state_file, "_accepts", lambda url: True)

    def chosen(url: str | None, address: str | None) -> tuple[str, str]:
        cluster = endpoints(url, address)
        return cluster.api_url, cluster.dashboard.url

    for age_s, (pid, name) in enumerate([(os.getpid(), "new"), (os.getppid(), "old")]):
        path = state_file.note(state_file.RunningCluster(pid, f"http://{name}", f"http://{name}-d", "m"))
        os.utime(path, (1e9 - age_s, 1e9 - age_s))
    assert chosen(None, None) == ("http://new", "http://new-d")
    assert chosen("http://old/v1/", None) == chosen(None, "http://old-d/") == ("http://old", "http://old-d")
    assert chosen("http://far", None) == ("http://far", "http://127.0.0.1:8265")
    assert chosen("http://far", "far-d") == ("http://far", "http://far-d:8265")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "old-d")
    assert chosen("http://new", None) == ("http://new", "http://new-d")
    assert chosen("http://far", None) == ("http://far", "http://old-d:8265")
    assert other_clusters("http://new") == "also running here: http://old (choose with --url)"


@pytest.mark.parametrize(
    ("text", "root"),
    [
        ("http://a:8000/v1", "http://a:8000"),
        ("localhost:8000", "http://localhost:8000"),
        ("127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("https://host/prefix/v1", "https://host/prefix"),
        ("foo", "http://foo"),
    ],
)
def test_a_servers_address_is_understood_as_users_write_it(text: str, root: str):
    assert server_root(text) == root


@pytest.mark.parametrize(
    "text",
    ["", "http://", "ftp://a", "a b", "http://a:x", "a:99999", "a:0", "[::1", "/v1", "?", "a\x00", "file:///etc"],
)
def test_what_is_no_address_is_refused_by_name(text: str):
    with pytest.raises(ConfigError) as caught:
        server_root(text)
    assert repr(text) in str(caught.value)


def down(error: str) -> dict[str, object]:
    return {"worker_id": "decode-8f3a0b1c", "role": "decode", "pid": 123456, "is_up": False, "error": error}


def up(index: int) -> dict[str, object]:
    load = {"running": 3, "waiting": 2, "used_blocks": 111, "cached_blocks": 222, "total_blocks": 7777,
            "kv_bytes": 123 << 20, "transport": "shm",
            "queued_tokens": 523, "receiving": 4, "held": 6, "swapped": 8, "step_s": 0.0125, "prefix_hit_tokens": 3,
            "prefix_query_tokens": 4, "preemptions": 71, "kv_refused": {"checksum": 2}}  # fmt: skip
    return {"worker_id": f"prefill-{index:08d}", "role": "prefill", "pid": 654321, "is_up": True, "load": load}


def test_a_dead_worker_leaves_the_table_readable_at_80_columns():
    why = "worker decode-8f3a0b1c: [Errno 111] Connect call failed ('127.0.0.1', 40001), and much more than that"
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(render({"workers": [up(1), down(why)], "serve": {"error": "[/red] does not answer"}}))
    text = console.export_text()
    row = next(line for line in text.splitlines() if "prefill-00000001" in line)
    assert all(part in row for part in ("654321", "111/222/7777", "shm", "123.0 MiB"))
    assert "down" in next(line for line in text.splitlines() if "123456" in line)
    assert why in " ".join(text.split()) and "[/red] does not answer" in text


@pytest.mark.parametrize("planned", [True, False])
def test_status_says_why_the_planner_has_not_more_workers_while_there_is_a_planner(planned: bool):
    why = "prefill stays at 2: 1 more had no place in the cluster for 60 s"
    config = {"autoscaling_policy": {}} if planned else {}
    app = {"status": "RUNNING", "deployed_app_config": config}
    cluster: Any = SimpleNamespace(app_name="kvrelay", dashboard=SimpleNamespace(application=lambda name: app))
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(render({"serve": _serve_status(cluster), "workers": [], "planner": [why]}))
    assert (why in " ".join(console.export_text().split())) is planned


def pair(source: str, target: str, speed: float = 0.0, verdict: str = "ok") -> dict[str, object]:
    path = {
        "path": "shm",
        "why": "same host",
        "is_chosen": True,
        "bytes_per_s": speed,
        "latency_s": 1e-5,
        "problem": "",
    }
    other = {**path, "path": "tcp", "is_chosen": False, "bytes_per_s": 0.0, "problem": "connecting timed out"}
    misfit = {"reason": "fingerprint", "detail": "dtype: [a] != [b]", "remedy": "the same [dtype] for both"}
    told = misfit if verdict == "incompatible" else {"reason": "", "detail": "", "remedy": ""}
    return {"source": source, "target": target, "verdict": verdict, "line": "l", "paths": [path, other], **told}


def test_status_shows_the_path_of_a_workers_pairs_and_the_speed_of_the_slowest_at_80_columns():
    pairs = [pair("prefill-00000001", "d1", 5.2e9), pair("prefill-00000001", "d2", 4.1e9)]
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(render({"workers": [up(1)], "pairs": pairs}))
    row, queues = (line for line in console.export_text().splitlines() if "prefill-00000001" in line)
    assert "shm 4.1 GB/s" in row and "123.0 MiB" in row
    assert all(part in queues for part in ("523", "4/6/8", "12.5", "75%", "71", "checksum 2"))
    console.print(
        render({"workers": [up(1)], "pairs": [*pairs, pair("prefill-00000001", "d3", verdict="incompatible")]})
    )
    assert "incompatible" in console.export_text()


def test_the_doctors_table_names_path_speed_the_others_problems_and_the_remedy():
    misfit = pair("p1", "d2", verdict="incompatible") | {"paths": []}
    view = {"pairs": [pair("prefill-00000001", "decode-00000001", 5.2e9), misfit], "rejected": ["d3 is rejected"]}
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(doctor.render(view))
    text = console.export_text()
    first, other = (line for line in text.splitlines() if "shm" in line or "tcp" in line)
    assert all(part in first for part in ("prefill-00000001", "ok", "▸ shm", "5.20", "10", "same host"))
    assert "→ decode-00000001" in other and "connecting timed out" in other and "▸" not in other
    assert "incompatible" in text and "fingerprint: dtype: [a] != [b]" in " ".join(text.split())
    assert doctor.incompatible(view) == ["l", "d3 is rejected"] and doctor.summary(view) == "1 ok, 1 incompatible"


UNPLACED = (
    "Deployment 'decode' in application 'kvrelay' has 1 replicas that have taken more than 10s to be scheduled. "
    'Resources required for each replica: {"CPU": 4.0, "GPU": 1.0}, total resources available: {"CPU": 1.7}. '
    "Use `ray status` for more details."
)


def test_what_a_replica_lacks_is_read_out_of_serves_message():
    assert missing(UNPLACED) == "a replica needs 4 CPU (free: 1.7), 1 GPU (free: 0)"
    assert missing(UNPLACED.replace("4.0", "1.0").replace(', "GPU": 1.0', "")) is None  # it has its place by now
    assert missing("") is None and missing("2 replicas have taken more than 10s to initialize.") is None
    replicas = [{"state": "RUNNING"}, {"state": "STARTING"}, {"state": "STARTING"}]
    deployment = {"replicas": replicas, "message": UNPLACED}
    assert progress(deployment).startswith("1 of 3 running, a replica needs 4 CPU")


def test_rays_token_is_made_for_this_user_alone_and_never_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    token = tmp_path / ".ray" / "auth_token"
    keep_ray_token_private()
    made = token.read_text()
    assert len(made) == 64 and token.stat().st_mode & 0o777 == 0o600
    keep_ray_token_private()
    assert token.read_text() == made
    token.unlink()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    keep_ray_token_private()
    assert not token.exists()
