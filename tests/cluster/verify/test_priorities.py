"""The rows about priorities and mixed batches hold on a tiny model, over the hop, and each can fail."""

import asyncio
from types import SimpleNamespace

import pytest

from kvrelay.cluster.verify import mixed_batches as verify_mixed
from kvrelay.cluster.verify.mixed_batches import LONG, SHORT, MixedRows
from kvrelay.cluster.verify.oracle import Verifier, expected_tokens
from kvrelay.cluster.verify.priorities import ARRIVAL, EXPECTED, LOAD, LineRows, Served
from kvrelay.cluster.verify.rows import Row
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint


async def verifier_of(folder):
    verifier = Verifier(folder, max_model_len=160, num_output=12, progress=lambda what: None)
    verifier.cases = [case for case in verifier.cases if case.name in (*ARRIVAL, *SHORT, LONG)]
    verifier._expected = await asyncio.to_thread(expected_tokens, folder, verifier.cases, 12)
    return verifier


def failures(verifier):
    return [(row.name, row.note) for row in verifier.report.rows if not row.ok]


@pytest.mark.slow
async def test_who_is_served_first_and_what_shares_a_step_changes_no_token(tmp_path):
    verifier = await verifier_of(tiny_checkpoint("llama", tmp_path / "llama"))
    await verifier.run_lines("shm")
    await verifier.run_mixed("shm")
    assert failures(verifier) == []
    assert len(verifier.report.rows) == 5 + 5


class Told:
    """A verifier's stand-in: every prompt has the same answer."""

    def __init__(self, names):
        self.cases = [SimpleNamespace(name=name, token_ids=[1] * (at + 20)) for at, name in enumerate(names)]
        self.rows = []

    def add_row(self, name):
        self.rows.append(Row(name))
        return self.rows[-1]

    def expected(self, index):
        return [5, 6, 7]


@pytest.mark.parametrize(("order", "is_ranked", "holds"), [
    (EXPECTED, True, True), (ARRIVAL, True, False), (EXPECTED, False, False), (ARRIVAL, False, True),
])  # fmt: skip
async def test_right_tokens_in_the_wrong_order_fail(order, is_ranked, holds, tmp_path):
    told = Told(ARRIVAL)
    rows = LineRows(told, tmp_path, "shm", 12)

    async def serve(*args, **kwargs):
        return Served({one.case: [5, 6, 7] for one in LOAD}, order)

    rows._serve = serve
    await rows._row(None, "a row", "remote", "reserved", is_ranked=is_ranked)
    assert told.rows[0].ok is holds
    assert sorted(EXPECTED) == sorted(ARRIVAL)


async def test_right_tokens_without_a_mixed_step_fail_and_so_does_a_control_that_changes_nothing(tmp_path):
    told = Told((*SHORT, LONG))
    rows = MixedRows(told, tmp_path, "shm")

    async def serve(cluster, force, rot=None):
        if rot is not None:
            rot.changed = {LONG, SHORT[0]}
        return [[5, 6, 7]] * 4, []

    rows._serve = serve
    await rows._row(None, "a row", "local")
    await rows._control_row(None, "local")
    assert [(row.ok, row.passed, row.total) for row in told.rows] == [(False, 4, 5), (False, 1, 3)]


def item(*, output, tokens, start):
    seq = SimpleNamespace(num_output=output, request=SimpleNamespace(num_prompt_tokens=100))
    return SimpleNamespace(seq=seq, num_tokens=tokens, start=start)


def test_a_step_is_mixed_when_it_decodes_and_computes_a_chunk_of_a_prompt():
    decode, chunk = item(output=3, tokens=1, start=102), item(output=0, tokens=30, start=64)
    last_of_prompt, anew = item(output=0, tokens=1, start=99), item(output=5, tokens=5, start=100)
    mixed = [verify_mixed.is_mixed(SimpleNamespace(work=work)) for work in
             ((decode, chunk), (decode,), (chunk,), (last_of_prompt, chunk), (decode, last_of_prompt), (decode, anew))]  # fmt: skip
    assert mixed == [True, False, False, False, False, False]


def test_the_load_of_the_row_about_lines_has_every_kind_of_standing():
    assert {one.priority for one in LOAD} == {-4, 0, 3}
    assert len({one.tenant for one in LOAD}) == 3 and any(one.deadline_s for one in LOAD)
    assert ARRIVAL != EXPECTED
