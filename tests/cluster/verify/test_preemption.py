"""The rows about pre-emption hold on a tiny model, over the hop, and each can fail."""

import asyncio
from types import SimpleNamespace

import pytest

from kvrelay.cluster.verify.oracle import Verifier, expected_tokens
from kvrelay.cluster.verify.preemption import PreemptionRows
from kvrelay.cluster.verify.rows import Row
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.engine.scheduling.preemption_policy import PreemptionMode
from kvrelay.plane.messages import LoadReport


async def verifier_of(folder):
    verifier = Verifier(folder, max_model_len=160, num_output=12, progress=lambda what: None)
    verifier.cases = [case for case in verifier.cases if case.name in ("1 token", "3 blocks")]
    verifier._expected = await asyncio.to_thread(expected_tokens, folder, verifier.cases, 12)
    return verifier


@pytest.mark.slow
async def test_tokens_are_the_same_whichever_way_a_sequence_is_pre_empted(tmp_path):
    verifier = await verifier_of(tiny_checkpoint("llama", tmp_path / "llama"))
    await verifier.run_preemption("shm")
    assert [(row.name, row.note) for row in verifier.report.rows if not row.ok] == []
    assert len(verifier.report.rows) == 8


class Served:
    """A verifier's stand-in: every answer is the expected one."""

    def __init__(self):
        self.cases, self.rows = [SimpleNamespace(name="3 blocks")], []

    def add_row(self, name):
        self.rows.append(Row(name))
        return self.rows[-1]

    def expected(self, index):
        return [5, 6, 7]

    async def tokens_of(self, cluster, case, force):
        return [5, 6, 7], 0


class Idle:
    """A worker's thread whose engine pre-empts nobody."""

    def __init__(self, **figures):
        self.engine = SimpleNamespace(
            scheduler=SimpleNamespace(schedule=None, running=[]), load=lambda: LoadReport(seq=1, **figures)
        )

    async def call(self, action):
        return action(self.engine)


@pytest.mark.parametrize("figures", [{}, {"preempted": {"swap": 1}}])
async def test_a_row_without_pre_emption_or_without_damage_fails_however_right_the_tokens_are(tmp_path, figures):
    served, worker = Served(), SimpleNamespace(thread=Idle(**figures))
    rows = PreemptionRows(served, tmp_path, "shm")
    await rows._row(PreemptionMode.SWAP, None, worker)
    await rows._rotten_row(None, worker)
    await rows._control_row(None, worker)
    assert [row.ok for row in served.rows] == [False, False, False]
