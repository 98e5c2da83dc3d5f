"""`ray drain-node` takes one of two hosts away under load, the one with the registry, behind configs/haproxy.cfg."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.serving.rolling.__main__ import DrainedHosts, SpotHosts, measure
from kvrelay.cluster.chaos.hosts.namespaces import why_not
from kvrelay.cluster.launch.dashboard import RayDashboard
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]

CLIENTS = 3


@pytest.fixture
def model() -> Iterator[str]:
    if why := why_not():
        pytest.skip(f"no hosts here: {why}")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # each host has a /tmp of its own
        yield str(tiny_checkpoint("llama", Path(folder) / "model"))


# with the longer deadline replacements start first; with the shorter one Serve stops the host's replicas at once
@pytest.mark.long  # test_draining.py drains a node without clients, tests/cluster/launch what clients see
@pytest.mark.parametrize("kind", [SpotHosts, DrainedHosts])
def test_a_drained_node_fails_no_request_and_changes_no_answer(
    model: str, monkeypatch: pytest.MonkeyPatch, kind: type[DrainedHosts]
):
    monkeypatch.setattr("bench.serving.rolling.__main__.BEFORE_S", 2.0)
    with kind(model) as cluster:
        ingress_hosts = cluster.ingress_hosts()
        before = {node["node_id"] for node in RayDashboard(cluster.dashboard_url).nodes()}
        row = asyncio.run(measure("node", cluster, CLIENTS))
        after = {node["node_id"] for node in RayDashboard(cluster.dashboard_url).nodes()}
    assert len(before) == 3 and len(after) == 2 and after < before
    assert (len(ingress_hosts), row.ingresses) == (2, 2)
    assert (row.failed, row.wrong, row.first_failure) == (0, 0, "")
    assert row.requests > CLIENTS
