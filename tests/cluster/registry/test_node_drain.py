"""`ray drain-node` takes one of two hosts away under load, the one with the registry."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.serving.rolling.__main__ import DrainedHosts, measure
from kvrelay.cluster.chaos.hosts.namespaces import why_not
from kvrelay.cluster.launch.dashboard import RayDashboard
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]

CLIENTS = 3


@pytest.fixture
def model() -> Iterator[str]:
    if why := why_not():
        pytest.skip(why)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # each host has a /tmp of its own
        yield str(tiny_checkpoint("llama", Path(folder) / "model"))


def test_a_drained_node_fails_no_request_and_changes_no_answer(model: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("bench.serving.rolling.__main__.BEFORE_S", 2.0)
    with DrainedHosts(model) as cluster:
        before = {node["node_id"] for node in RayDashboard(cluster.dashboard_url).nodes()}
        row = asyncio.run(measure("node", cluster, CLIENTS))
        after = {node["node_id"] for node in RayDashboard(cluster.dashboard_url).nodes()}
    assert len(before) == 3 and len(after) == 2 and after < before
    assert (row.failed, row.wrong, row.first_failure) == (0, 0, "")
    assert row.requests > CLIENTS
