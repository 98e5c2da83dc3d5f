"""The oracle, on tiny random models of every family and on the real one; and the oracle can fail."""

import pytest

from kvrelay.cluster.verify import TRANSPORTS, Verifier
from kvrelay.config import ModelSettings
from kvrelay.engine.checkpoint import prepare_checkpoint
from kvrelay.engine.checkpoint_tiny import TINY_CONFIGS, tiny_checkpoint
from kvrelay.errors import ModelNotFound

pytestmark = pytest.mark.slow


async def verify(folder, transports, *, max_model_len=160, num_output=8):
    verifier = Verifier(folder, max_model_len=max_model_len, num_output=num_output, progress=lambda what: None)
    return await verifier.run(transports)


def failures(report):
    return [(row.name, row.passed, row.total, row.note) for row in report.rows if not row.ok]


@pytest.mark.parametrize("family", TINY_CONFIGS)
async def test_every_family_is_the_same_however_it_is_served(family, tmp_path):
    report = await verify(tiny_checkpoint(family, tmp_path / family), ["shm"])
    assert failures(report) == []


async def test_every_transport_carries_the_same_blocks_of_the_real_model():
    try:
        folder = prepare_checkpoint(ModelSettings())
    except ModelNotFound as error:
        pytest.skip(str(error))
    report = await verify(folder, TRANSPORTS)
    assert failures(report) == []
    assert len(report.rows) == 4 + 3 * len(TRANSPORTS)


async def test_a_wrong_expectation_fails_the_report(tmp_path, monkeypatch):
    folder = tiny_checkpoint("llama", tmp_path / "llama")
    monkeypatch.setattr(
        "kvrelay.cluster.verify.expected_tokens", lambda model_dir, cases, count: [[5] * count for _ in cases]
    )
    report = await verify(folder, ["shm"])
    assert not report.ok
    assert {name for name, *_ in failures(report)} >= {"aggregated (one worker)", "disaggregated over shm"}
