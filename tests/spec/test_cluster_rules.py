"""Pure rules of the cluster folder: cores, autoscaling, the Serve config, flags, notes of running clusters."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvrelay.cluster import state_file
from kvrelay.cluster.autoscaling import UTILISATION, by_utilisation, utilisation, wanted_replicas
from kvrelay.cluster.cores import CoreLease, acquire_cores, fair_share
from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.serve_config import scaled, serve_config
from kvrelay.cluster.settings_flags import settings_from_flags
from kvrelay.cluster.status_command import endpoints, others
from kvrelay.config import Settings
from kvrelay.errors import ConfigError

Lease = Callable[[tuple[int, ...], int], CoreLease]


@pytest.fixture
def lease(tmp_path: Path) -> Iterator[Lease]:
    """Takes cores as different workers would; gives all back in the end."""
    with ExitStack() as stack:

        def take(cores: tuple[int, ...], want: int) -> CoreLease:
            taken = acquire_cores(tmp_path, cores, want)
            stack.callback(taken.release)
            return taken

        yield take


def test_workers_get_disjoint_cores_while_there_are_enough(lease: Lease):
    assert [lease((0, 1, 2, 3), 2).cores for _ in range(2)] == [(0, 1), (2, 3)]


def test_with_too_few_cores_the_least_shared_is_taken(lease: Lease):
    assert [lease((0, 1), 1).cores for _ in range(4)] == [(0,), (1,), (0,), (1,)]


def test_released_cores_are_given_again_and_releasing_twice_is_harmless(lease: Lease):
    first, second = lease((0, 1), 1), lease((0, 1), 1)
    second.release()
    second.release()
    assert (first.cores, lease((0, 1), 1).cores) == ((0,), (1,))


def test_nobody_gets_more_cores_than_there_are(lease: Lease):
    assert lease((4, 5), 9).cores == (4, 5)


@pytest.mark.parametrize(("cores", "workers", "share"), [(2, 2, 1), (16, 2, 8), (2, 5, 1), (8, 3, 2), (4, 0, 4)])
def test_a_fair_share_is_never_nothing(cores: int, workers: int, share: int):
    assert fair_share(cores, workers) == share


def busy(**changes: float) -> float:
    idle = {"used_blocks": 0, "total_blocks": 100, "running": 0, "waiting": 0, "max_running": 10,
            "queued_tokens": 0, "tokens_per_s": 0.0}  # fmt: skip
    return utilisation(**{**idle, **changes})  # type: ignore[arg-type]


def test_utilisation_is_the_scarcest_resource():
    assert busy() == 0.0
    assert busy(used_blocks=80, running=3) == pytest.approx(0.8)
    assert busy(running=6, waiting=9) == pytest.approx(1.5)
    assert busy(queued_tokens=3000, tokens_per_s=1000.0) == pytest.approx(3.0)
    assert busy(queued_tokens=3000) == 0.0  # no speed measured yet


def test_scaling_goes_up_at_once_and_down_by_one():
    assert wanted_replicas([1.4, 1.4], 2, target=0.7) == 4
    assert wanted_replicas([0.7, 0.7], 2, target=0.7) == 2
    assert wanted_replicas([0.0, 0.0, 0.0, 0.0], 4) == 3


class Context:
    """What Serve hands to a policy, as far as ours looks."""

    capacity_adjusted_min_replicas, capacity_adjusted_max_replicas = 1, 3

    def __init__(self, current: int, busy: dict[str, float]) -> None:
        self.current_num_replicas, self.aggregated_metrics = current, {UTILISATION: busy}


def test_the_policy_stays_within_serves_bounds_and_does_nothing_blindly():
    assert by_utilisation(Context(2, {"a": 9.0, "b": 9.0})) == (3, {})
    assert by_utilisation(Context(1, {"a": 0.0})) == (1, {})
    assert by_utilisation(Context(2, {})) == (2, {})


def details(settings: Settings) -> dict[str, object]:
    config = serve_config(settings, http_port=9)["applications"][0]
    deployments = {entry["name"]: {} for entry in config["deployments"]}
    app = {"deployed_app_config": config, "deployments": deployments}
    return {"applications": {"kvrelay": app}, "http_options": {"host": "127.0.0.1", "port": 9}}


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
    settings = settings_from_flags(file, flags, ["engine.token_budget=128", "model.max_model_len=512"])
    assert (settings.engine.token_budget, settings.engine.kv_memory) == (128, "2GiB")
    assert (settings.cluster.prefill, settings.cluster.decode, settings.model.max_model_len) == (2, 3, 512)


def test_a_malformed_pair_is_told_how_to_write_it():
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        settings_from_flags(None, {}, ["token_budget=1"])


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
    state_file.forget(path)
    assert state_file.running() == []


def test_a_cluster_is_chosen_by_either_of_its_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    assert endpoints(None, None) == ("http://127.0.0.1:8000", "http://127.0.0.1:8265")
    for age_s, (pid, name) in enumerate([(os.getpid(), "new"), (os.getppid(), "old")]):
        path = state_file.note(state_file.RunningCluster(pid, f"http://{name}", f"http://{name}-d", "m"))
        os.utime(path, (1e9 - age_s, 1e9 - age_s))
    assert endpoints(None, None) == ("http://new", "http://new-d")
    assert endpoints("http://old/v1/", None) == endpoints(None, "http://old-d/") == ("http://old", "http://old-d")
    assert endpoints("http://far", None) == ("http://far", "http://127.0.0.1:8265")
    assert endpoints("http://far", "http://far-d") == ("http://far", "http://far-d")
    assert others("http://new") == "also running here: http://old (choose with --url)"
