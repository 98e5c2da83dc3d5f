"""`ray up` on two hosts and a third that joins: deployed, verified over HTTP, scaled, and through faults."""

import pytest

from tests.hosts.hosts import Hosts
from tests.hosts.ray_hosts import RayHosts
from tests.hosts.scenario import run
from tests.hosts.traces import traces
from tests.scale import SCALE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(900),
    pytest.mark.skipif(SCALE < 1, reason="takes 5 to 8 minutes: make test-all ARGS=tests/hosts runs it"),
]


def test_a_cluster_on_several_hosts_serves_the_same_tokens_through_faults_and_ends_clean(tmp_path):
    with Hosts(3) as hosts:
        scenario = run(RayHosts(hosts, tmp_path / "laptop"), tmp_path)
    print(scenario.table())
    assert traces(hosts) == []
