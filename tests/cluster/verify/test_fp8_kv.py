"""The rows of fp8 KV: they hold on a tiny model, and each can fail."""

import pytest

from kvrelay.cluster.verify.fp8_kv import TOLERANCE, Answer, Fp8Rows, gaps
from kvrelay.cluster.verify.oracle import Verifier
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint


def verifier_of(folder):
    """With the first prompts only, which end with or around a block."""
    verifier = Verifier(folder, max_model_len=160, num_output=8, progress=lambda what: None)
    verifier.cases = verifier.cases[:3]
    return verifier


@pytest.mark.slow
async def test_fp8_gives_nearly_float32s_tokens_and_always_the_same(tmp_path):
    verifier = verifier_of(tiny_checkpoint("llama", tmp_path / "llama"))
    await verifier.run_fp8("shm")
    assert [(row.name, row.note) for row in verifier.report.rows if not row.ok] == []
    assert [row.name.removeprefix("fp8 KV") for row in verifier.report.rows] == [
        ": aggregated = disaggregated = cached",
        ": flipped bit of a scale refused",
        f": within {TOLERANCE} deviations of float32's choice",
        ", checks off: wrong scales leave the tolerance",
        ", checks off: a flipped exponent bit leaves the tolerance",
    ]


@pytest.mark.slow
async def test_every_row_of_fp8_can_fail(tmp_path):
    folder = tiny_checkpoint("llama", tmp_path / "llama")
    verifier = verifier_of(folder)
    rows = Fp8Rows(verifier, folder, "shm")
    async with rows._cluster("full") as cluster:
        answers = await rows._same_row(cluster)
        assert verifier.report.rows[-1].ok
        tokens_of, turn = verifier.tokens_of, iter(range(10**6))

        async def every_other_is_wrong(*arguments):
            tokens, cached = await tokens_of(*arguments)
            return [token + 1 for token in tokens] if next(turn) % 2 else tokens, cached

        verifier.tokens_of = every_other_is_wrong
        await rows._same_row(cluster)
        verifier.tokens_of = tokens_of
        await rows._control_row(cluster, "nothing is changed", lambda scales: None)
    await rows._tolerance_row([Answer(one.prompt, [5] * 8) for one in answers])
    assert [row.ok for row in verifier.report.rows] == [True, False, False, False]


def test_a_gap_is_in_deviations_of_the_logits_and_nothing_for_the_best(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    folder = tiny_checkpoint("qwen3", tmp_path / "qwen3")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = [5, 17, 200, 31]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    order = logits.argsort(descending=True).tolist()
    best, third = gaps(folder, [Answer(prompt, [order[0]]), Answer(prompt, [order[2]])])
    assert best == 0.0
    assert third == pytest.approx(float((logits[order[0]] - logits[order[2]]) / logits.std()), rel=1e-4)
