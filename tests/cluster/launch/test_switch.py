"""Another model and other code take over under load: no request fails, and no answer mixes the old with the new."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bench.serving.rolling.__main__ import ChangingCode, ChangingModel, measure
from kvrelay.cluster.deployments.serve_config import applications
from kvrelay.cluster.launch.dashboard import RayDashboard
from kvrelay.cluster.launch.http_json import request_json
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setattr("bench.serving.rolling.__main__.BEFORE_S", 1.0)
    monkeypatch.setattr("bench.serving.rolling.__main__.AFTER_S", 2.0)
    return str(tiny_checkpoint("llama", tmp_path / "old"))


def served(url: str) -> list[Any]:
    return [card["id"] for card in request_json("GET", f"{url}/v1/models", timeout_s=10.0)["data"]]


def test_a_model_takes_over_without_a_failed_or_wrong_answer(old: str):
    with ChangingModel(old) as cluster:
        row = asyncio.run(measure("model", cluster, 3))
        assert served(cluster.url) == ["new", "old"]
        assert list(applications(RayDashboard(cluster.dashboard_url).details())) == ["next"]
    assert (row.failed, row.wrong, row.first_failure) == (0, 0, "")
    assert row.requests > 3


@pytest.mark.long  # the test above switches, too, and test_rolling.py deploys in place
def test_a_new_version_replaces_the_old_one_without_a_failed_or_wrong_answer(old: str):
    with ChangingCode(old) as cluster:
        row = asyncio.run(measure("code", cluster, 3))
        assert cluster.version() == cluster.VERSION
    assert (row.failed, row.wrong, row.first_failure) == (0, 0, "")
    assert row.requests > 3
