"""A cluster on hosts: where its parts may be, and what it needs."""

import pytest

from kvrelay.cluster.chaos.hosts import cluster as module
from kvrelay.cluster.chaos.hosts.cluster import ClusterOnHosts
from kvrelay.cluster.chaos.hosts.namespaces import HostError
from kvrelay.cluster.errors import ClusterError

pytestmark = pytest.mark.pure


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(module, "why_not", lambda: None)
    cluster = ClusterOnHosts(2, "tiny", settings={"engine.kv_memory": "16MiB"})
    yield cluster
    cluster.stop()


def test_a_host_has_one_worker_of_a_role_and_the_first_one_has_the_ingresses(made):
    deployments = {one["name"]: one for one in made._config()["applications"][0]["deployments"]}
    assert {deployments[role]["max_replicas_per_node"] for role in ("prefill", "decode")} == {1}
    assert "node:__internal_head__" in deployments["ingress"]["ray_actor_options"]["resources"]
    assert made._config()["applications"][0]["args"]["engine"] == {"kv_memory": 16 << 20}


@pytest.mark.parametrize(
    "shown, starts, is_up",
    [("/x/raylet/raylet --a", [], True), ("agent --raylet-name=/s/raylet", [2], True), (None, [], False)],
)
def test_ray_is_started_on_a_host_where_it_has_ended(made, monkeypatch, shown, starts, is_up):
    def run(host, *command):
        if shown is None:
            raise HostError("no answer")
        return shown

    started = []
    monkeypatch.setattr(made.hosts, "run", run)
    monkeypatch.setattr(made, "start_ray", started.append)
    assert made.keep_up(2) is is_up and started == starts


def test_where_no_hosts_can_be_made_the_reason_is_given(monkeypatch):
    monkeypatch.setattr(module, "why_not", lambda: "hosts in namespaces need root on Linux")
    with pytest.raises(ClusterError, match="--hosts: hosts in namespaces need root"):
        ClusterOnHosts(2, "tiny")


def test_there_are_as_many_hosts_as_workers_of_a_role(monkeypatch):
    monkeypatch.setattr(module, "why_not", lambda: None)
    with pytest.raises(ClusterError, match="at least 3"):
        ClusterOnHosts(2, "tiny", {"ingress": 2, "prefill": 2, "decode": 3})
