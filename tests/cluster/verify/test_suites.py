"""Every suite of rows holds on a tiny model; and what they serve is what they mean to."""

import pytest

from kvrelay.cluster.verify import suites
from kvrelay.cluster.verify.groups import groups
from kvrelay.cluster.verify.moves import moves
from kvrelay.cluster.verify.prompts import VerifyPrompt, repeating_prompts, shared_prompts, unlike_prompts
from kvrelay.cluster.verify.rows import run_setup
from kvrelay.cluster.verify.suites import ARRIVAL_ORDER, LONG, RANKED_LOAD, RANKED_ORDER, SHORT
from kvrelay.cluster.verify.verifier import Verifier
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.kernels.cpu.backend import CpuBackend

PROMPTS = [VerifyPrompt("long", [7 * i % 97 + 3 for i in range(200)])]


def verifier_of(tmp_path, names=None, *, num_output=12):
    folder = tiny_checkpoint("llama", tmp_path / "llama")
    verifier = Verifier(folder, max_model_len=160, num_output=num_output)
    verifier.prompts = [prompt for prompt in verifier.prompts if names is None or prompt.name in names]
    return verifier


async def report_of(verifier, setups):
    for setup in setups:
        await run_setup(verifier, setup)
    assert [(row.name, row.passed, row.total, row.note) for row in verifier.report.rows if not row.ok] == []
    return [row.name for row in verifier.report.rows]


@pytest.mark.slow
async def test_kv_from_every_tier_is_the_same_and_what_changed_there_is_not_served(tmp_path):
    verifier = verifier_of(tmp_path, num_output=8)
    assert len(await report_of(verifier, suites.tiers(tmp_path, verifier.kv_bytes))) == 10


@pytest.mark.slow
async def test_groups_are_the_same_disaggregated_and_on_one_worker(tmp_path):
    verifier = verifier_of(tmp_path, num_output=8)
    assert len(await report_of(verifier, groups("shm"))) == 7


@pytest.mark.slow
async def test_tokens_are_the_same_however_a_sequence_is_preempted(tmp_path):
    verifier = verifier_of(tmp_path, ("1 token", "3 blocks"))
    assert len(await report_of(verifier, suites.preemption("shm"))) == 8


@pytest.mark.slow
async def test_tokens_are_the_same_when_a_sequence_moves_in_the_middle_of_its_output(tmp_path):
    verifier = verifier_of(tmp_path, ("1 token", "3 blocks", "several chunks"))
    assert len(await report_of(verifier, moves("shm"))) == 5


@pytest.mark.slow
async def test_queue_order_and_mixed_steps_change_no_token(tmp_path):
    verifier = verifier_of(tmp_path, (*ARRIVAL_ORDER, *SHORT, LONG))
    setups = suites.queue_order(verifier, "shm") + suites.mixed_batches(verifier, "shm")
    assert len(await report_of(verifier, setups)) == 5 + 5


@pytest.mark.slow
async def test_requests_that_share_a_prefix_get_hugging_faces_tokens(tmp_path):
    verifier = verifier_of(tmp_path)
    num_rows = 3 if CpuBackend(1).compiled_kernels is not None else 2
    assert len(await report_of(verifier, suites.cascade(verifier, "shm"))) == num_rows


@pytest.mark.slow
async def test_text_that_repeats_gets_hugging_faces_tokens(tmp_path):
    verifier = verifier_of(tmp_path, num_output=24)
    assert await report_of(verifier, suites.speculation(verifier, "shm")) == [
        f"{kind}{what}"
        for kind in ("speculation", "draft model")
        for what in (" disaggregated", " on one worker", ": accepting every draft changes the answers")
    ]


@pytest.mark.slow
async def test_changed_kv_with_checks_off_that_changes_nothing_is_undetected_and_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(suites, "FLIPPED_BIT", suites.steer.in_flight(lambda region, layout: None))
    verifier = verifier_of(tmp_path, ("one block",))
    checked, _, unchecked = suites.paths(["shm"])
    for setup in (checked, unchecked):
        await run_setup(verifier, setup)
    failed = [row.name for row in verifier.report.rows if not row.ok]
    assert {"flipped bit refused (shm)", "flipped bit with checks off changes the answer"} <= set(failed)


def test_prompts_share_whole_blocks_and_no_more_or_nothing():
    first, *others = shared_prompts(PROMPTS, 150)
    length = len(first.token_ids) - 1
    assert length % 16 == 0 and all(prompt.token_ids[:length] == first.token_ids[:length] for prompt in others)
    assert len({tuple(prompt.token_ids[length:]) for prompt in others}) == len(others)
    assert max(len(prompt.token_ids) for prompt in others) <= 150
    unlike = unlike_prompts(PROMPTS, 150)
    assert len({tuple(prompt.token_ids[:16]) for prompt in unlike}) == len(unlike)


def test_prompts_repeat_themselves_and_are_no_longer_than_may_be():
    for prompt, period in zip(repeating_prompts(PROMPTS, 50), (1, 3, 7, 20), strict=True):
        assert len(prompt.token_ids) == 50 and prompt.token_ids[period:] == prompt.token_ids[:-period]


def test_the_ranked_load_has_every_kind_of_rank():
    ranks = RANKED_LOAD.values()
    assert {rank.get("priority", 0) for rank in ranks} == {-4, 0, 3}
    assert len({rank.get("tenant") for rank in ranks}) == 3 and any(rank.get("deadline_s") for rank in ranks)
    assert ARRIVAL_ORDER != RANKED_ORDER and sorted(ARRIVAL_ORDER) == sorted(RANKED_ORDER)
