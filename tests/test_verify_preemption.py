"""The rows about pre-emption hold on a tiny model, over the hop, and each can fail."""

import asyncio

import pytest

from kvrelay.cluster.verify import Verifier, expected_tokens
from kvrelay.cluster.verify_preemption import PreemptionRows
from kvrelay.engine.checkpoint_tiny import tiny_checkpoint
from kvrelay.engine.preemption import Way


async def verifier_of(folder):
    verifier = Verifier(folder, max_model_len=160, num_output=12, progress=lambda what: None)
    verifier.cases = [case for case in verifier.cases if case.name in ("1 token", "3 blocks", "code")]
    verifier._expected = await asyncio.to_thread(expected_tokens, folder, verifier.cases, 12)
    return verifier


@pytest.mark.slow
async def test_tokens_are_the_same_whichever_way_a_sequence_is_pre_empted(tmp_path):
    verifier = await verifier_of(tiny_checkpoint("llama", tmp_path / "llama"))
    await verifier.run_preemption("shm")
    assert [(row.name, row.note) for row in verifier.report.rows if not row.ok] == []
    assert len(verifier.report.rows) == 8


@pytest.mark.slow
async def test_a_way_that_was_not_gone_fails_its_row(tmp_path):
    folder = tiny_checkpoint("llama", tmp_path / "llama")
    verifier = await verifier_of(folder)
    rows = PreemptionRows(verifier, folder, "shm")
    async with rows._cluster(Way.RECOMPUTE, "full") as (cluster, worker):
        await rows._row(Way.SWAP, cluster, worker)
        await rows._control_row(cluster, worker)  # nothing is swapped, so nothing rots
    assert [row.ok for row in verifier.report.rows] == [False, False]
