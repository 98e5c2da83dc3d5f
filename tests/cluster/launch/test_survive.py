"""One part after the other of a `kvrelay serve` is killed under load; bench/serving/survive.py has the whole table."""

import asyncio

import pytest

from bench.serving.survive import FAULTS, PROMPTS, measure
from bench.serving.survive_clusters import ServeCluster
from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint
from kvrelay.errors import ModelNotFound
from kvrelay.settings.engine import ModelSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420), pytest.mark.alone]

CLIENTS = 4
KILLED = ("registry", "Serve controller", "first ingress", "decode worker")


def test_clients_go_on_while_parts_are_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("bench.serving.survive.PROMPTS", PROMPTS[:CLIENTS])
    try:
        prepare_checkpoint(ModelSettings())
    except ModelNotFound as error:
        pytest.skip(f"the default model cannot be had here: {error}")
    faults = [fault for fault in FAULTS if fault.name in KILLED]
    with ServeCluster(ModelSettings().source) as cluster:
        rows = {row.part: row for row in asyncio.run(measure(cluster, faults, CLIENTS, settled_s=2.0))}
        left = cluster.stop()
    assert set(rows) == set(KILLED)
    for part, row in rows.items():
        assert row.requests > 0 and row.wrong == 0, row
        assert row.whole_s is not None, f"{part}: not whole again"
        if part == "first ingress":  # what it had begun to answer breaks, and nothing else
            assert row.failed == row.broken <= CLIENTS // 2, row
        else:
            assert row.failed == 0, row
    assert not left
