"""A setting is changed by `kvrelay deploy` on a cluster with one worker of each role, under load."""

import asyncio

import pytest

from bench.serving.rolling.__main__ import ChangingRay, measure
from bench.serving.survive import PROMPTS
from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint
from kvrelay.errors import ModelNotFound
from kvrelay.settings.engine import ModelSettings

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(420)]

CLIENTS = 3


def test_a_changed_setting_fails_no_request_and_changes_no_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("bench.serving.rolling.__main__.BEFORE_S", 2.0)
    monkeypatch.setattr("bench.serving.survive.PROMPTS", PROMPTS[:CLIENTS])
    try:
        prepare_checkpoint(ModelSettings())
    except ModelNotFound as error:
        pytest.skip(f"the default model cannot be had here: {error}")
    with ChangingRay(ModelSettings().source) as cluster:
        before = {one["replica_id"] for one in cluster.replicas()}
        row = asyncio.run(measure("setting", cluster, CLIENTS))
        after = {one["replica_id"] for one in cluster.replicas()}
    assert len(before) == len(after) == 3 and not before & after
    assert (row.failed, row.wrong, row.first_failure) == (0, 0, "")
    assert row.requests > 3
