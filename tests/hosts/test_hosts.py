"""`ray up` on two hosts and a third that joins: deployed, verified over HTTP, scaled, and through faults."""

import pytest

from kvrelay.cluster.chaos.hosts.namespaces import Hosts
from tests.hosts.ray_hosts import RayHosts
from tests.hosts.scenario import run
from tests.hosts.traces import traces

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]


def test_a_cluster_on_several_hosts_serves_the_same_tokens_through_faults_and_ends_clean(tmp_path):
    with Hosts(3) as hosts:
        scenario = run(RayHosts(hosts, tmp_path / "laptop"), tmp_path)
    print(scenario.table())
    assert traces(hosts) == []
