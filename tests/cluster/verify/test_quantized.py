"""The rows of quantised weights: they hold on a tiny model, and each can fail."""

import pytest

from kvrelay.cluster.verify.fp8_kv import Answer
from kvrelay.cluster.verify.quantized import TOLERANCES, QuantizedRows
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from tests.cluster.verify.test_fp8_kv import verifier_of


@pytest.mark.slow
async def test_quantised_weights_give_nearly_float32s_tokens_and_always_the_same(tmp_path):
    verifier = verifier_of(tiny_checkpoint("llama", tmp_path / "llama"))
    await verifier.run_quantized("shm")
    assert [(row.name, row.note) for row in verifier.report.rows if not row.ok] == []
    assert [row.name for row in verifier.report.rows] == [
        row
        for name, most in TOLERANCES.items()
        for row in (
            f"{name} weights: aggregated = disaggregated = cached",
            f"{name} weights: within {most} deviations of float32's choice",
        )
    ]


@pytest.mark.slow
async def test_every_row_of_quantised_weights_can_fail(tmp_path, monkeypatch):
    folder = tiny_checkpoint("llama", tmp_path / "llama")
    verifier = verifier_of(folder)
    rows, turn = QuantizedRows(verifier, folder, "shm"), iter(range(10**6))
    monkeypatch.setattr("kvrelay.cluster.verify.quantized._forget", nothing_to_forget)

    async def every_other_is_wrong(cluster, case, force):
        return [5 + next(turn) % 2] * 8, 0

    verifier.tokens_of = every_other_is_wrong
    answers = await rows._same_row(None, "int4")
    await rows._tolerance_row([Answer(one.prompt, [5] * 8) for one in answers], "int4")
    assert [row.ok for row in verifier.report.rows] == [False, False]


@pytest.mark.slow
async def test_random_weights_are_given_more_room_but_not_that_of_chance(tmp_path, monkeypatch):
    folder = tiny_checkpoint("llama", tmp_path / "llama")
    verifier = verifier_of(folder)
    for gap, holds in ((1.0, True), (2.5, False)):
        monkeypatch.setattr("kvrelay.cluster.verify.quantized.gaps", lambda *_, gap=gap: [gap])
        await QuantizedRows(verifier, folder, "shm", is_random=True)._tolerance_row([], "int4")
        assert verifier.report.rows[-1].ok is holds
    assert verifier.report.rows[-1].name == "int4 weights: within 1.2 deviations of float32's choice"


async def nothing_to_forget(cluster):
    """There is no cluster."""
