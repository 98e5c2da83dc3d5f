"""The rows of fp8 KV and quantised weights: they hold on a tiny model, and each can fail."""

from functools import partial

import pytest

from kvrelay.cluster.verify import dtypes
from kvrelay.cluster.verify.dtypes import (
    FP8_KV,
    OF_RANDOM_WEIGHTS,
    WEIGHTS,
    leaves_tolerance,
    near,
    same_on_every_path,
    within_tolerance,
)
from kvrelay.cluster.verify.prompts import logit_gaps
from kvrelay.cluster.verify.rows import OwnRows, run_row, run_setup
from kvrelay.cluster.verify.verifier import ServedAnswer, Verifier
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint


def verifier_of(folder):
    """With the first prompts only, which end with or around a block."""
    verifier = Verifier(folder, max_model_len=160, num_output=8)
    verifier.prompts = verifier.prompts[:3]
    return verifier


def failures(verifier):
    return [(row.name, row.note) for row in verifier.report.rows if not row.ok]


@pytest.mark.slow
async def test_fp8_gives_nearly_float32s_tokens_and_always_the_same(tmp_path):
    verifier = verifier_of(tiny_checkpoint("llama", tmp_path / "llama"))
    for setup in near("shm", FP8_KV):
        await run_setup(verifier, setup)
    assert failures(verifier) == []
    assert [row.name.removeprefix("fp8 KV") for row in verifier.report.rows] == [
        ": aggregated = disaggregated = cached",
        ": flipped bit of a scale refused",
        f": within {FP8_KV.tolerance} deviations of float32's choice",
        ", checks off: wrong scales leave the tolerance",
        ", checks off: a flipped exponent bit leaves the tolerance",
    ]


@pytest.mark.slow
async def test_quantised_weights_give_nearly_float32s_tokens_and_always_the_same(tmp_path):
    verifier = verifier_of(tiny_checkpoint("llama", tmp_path / "llama"))
    for setup in [setup for variant in WEIGHTS for setup in near("shm", variant)]:
        await run_setup(verifier, setup)
    assert failures(verifier) == []
    assert [row.name for row in verifier.report.rows] == [
        f"{variant.name}: {what}"
        for variant in WEIGHTS
        for what in (
            "aggregated = disaggregated = cached",
            f"within {variant.tolerance} deviations of float32's choice",
        )
    ]


@pytest.mark.slow
async def test_every_row_of_fp8_can_fail(tmp_path):
    verifier = verifier_of(tiny_checkpoint("llama", tmp_path / "llama"))
    async with verifier.cluster("shm", overrides=FP8_KV.overrides) as cluster:
        answers = []
        same = OwnRows(("same",), partial(same_on_every_path, answers))
        await run_row(verifier, cluster, same)
        assert verifier.report.rows[-1].ok
        serve, turn = verifier.serve, iter(range(10**6))

        async def every_third_is_wrong(*arguments):
            answer = await serve(*arguments)
            answer.choices = [[token + (next(turn) % 3 == 2) for token in answer.tokens[:1]]]
            return answer

        verifier.serve = every_third_is_wrong
        await run_row(verifier, cluster, OwnRows(("not the same",), partial(same_on_every_path, [])))
        verifier.serve = serve
        row = leaves_tolerance(FP8_KV, "nothing changed", lambda region, layout: None, None)
        await run_row(verifier, cluster, row, verifier.prompts)
    random = [ServedAnswer(answer.prompt, "", [[5] * 8], [[]]) for answer in answers]
    for variant in (FP8_KV, WEIGHTS[1]):
        within = partial(within_tolerance, variant, variant.tolerance, random)
        await run_row(verifier, None, OwnRows(("within",), within))
    assert [row.ok for row in verifier.report.rows] == [True, False, False, False, False]


@pytest.mark.slow
async def test_random_weights_are_given_more_room_but_not_that_of_chance(tmp_path, monkeypatch):
    verifier = verifier_of(tiny_checkpoint("llama", tmp_path / "llama"))
    (setup,) = near("shm", WEIGHTS[1], slack=OF_RANDOM_WEIGHTS)
    within = setup.rows[-1]
    for gap, holds in ((1.0, True), (2.5, False)):
        monkeypatch.setattr(dtypes, "logit_gaps", lambda *_, gap=gap: [gap])
        await run_row(verifier, None, within)
        assert verifier.report.rows[-1].ok is holds
    assert verifier.report.rows[-1].name == "int4 weights: within 1.2 deviations of float32's choice"


def test_a_gap_is_in_deviations_of_the_logits_and_nothing_for_the_best(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    folder = tiny_checkpoint("qwen3", tmp_path / "qwen3")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = [5, 17, 200, 31]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    order = logits.argsort(descending=True).tolist()
    best, third = logit_gaps(folder, [prompt, prompt], [[order[0]], [order[2]]])
    assert best == 0.0
    assert third == pytest.approx(float((logits[order[0]] - logits[order[2]]) / logits.std()), rel=1e-4)
