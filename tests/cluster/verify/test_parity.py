"""A device's kernels against the reference backend. Graphs, pieces and cascade attention run over a fake GPU with real
numbers, where every row holds and every fault fails the rows of the steps that it is in.
"""

# ruff: noqa: F811

import dataclasses
from contextlib import AsyncExitStack, contextmanager
from unittest import mock

import pytest
import torch

from kvrelay.cluster.verify import parity as rows_of_parity
from kvrelay.cluster.verify.closeness import WholeTexts
from kvrelay.cluster.verify.parity import Parity, rms_apart
from kvrelay.cluster.verify.prompts import VerifyPrompt, log_probabilities
from kvrelay.cluster.verify.rows import OwnRows, run_row
from kvrelay.cluster.verify.verifier import ServedAnswer, Verifier, tiny_model
from kvrelay.kernels.oracle.reference import attend
from kvrelay.plane.messages import TokenLogprob
from tests.kernels.cuda.fake_gpu import fake_gpu  # noqa: F401


@pytest.fixture(autouse=True)
def small(monkeypatch):
    from transformers import GenerationMixin  # noqa: F401 (before the fake GPU stands in for classes of torch.cuda)

    monkeypatch.setattr(rows_of_parity, "NUM_TEXTS", 1)
    monkeypatch.setattr(rows_of_parity, "SMALL", ("one block", "3 blocks", "several chunks"))


def parity_of(tmp_path, family="llama", kv_dtype="auto"):
    """Of workers on the fake GPU, whose device is the CPU."""
    folder = tiny_model(family, tmp_path / "model", is_wide=True)
    options = {"backend": "cuda", "dtype": "bfloat16", "device": "cpu:0"}
    return Parity(Verifier(folder, max_model_len=384, num_output=8, **options), tmp_path, kv_dtype)


class Served:
    """One worker, the rows that one can serve, and what came of them."""

    def __init__(self, parity, cluster, rows):
        self.parity, self.cluster = parity, cluster
        local = [row for row in rows if isinstance(row, OwnRows) or row.force == "local"]
        self.rows = {row.names[0]: row for row in local}

    @property
    def runner(self):
        return self.cluster.inside[0].thread.engine.runner

    async def result(self, name):
        await run_row(self.parity.verifier, self.cluster, self.rows[name], self.parity.prompts)
        return self.parity.verifier.report.rows[-1]

    async def all_hold(self):
        found = [await self.result(name) for name in self.rows]
        assert [(row.name, row.note) for row in found if not row.ok] == []
        return {row.name: row.note for row in found}


@pytest.fixture
async def serving(fake_gpu):
    async with AsyncExitStack() as stack:

        async def start(parity, setup):
            cluster = parity.verifier.cluster("auto", setup.checks, parity.overrides, num_prefill=0)
            return Served(parity, await stack.enter_async_context(cluster), setup.rows)

        yield start


# ---- faults: what a wrong kernel or a wrong capture would do


@contextmanager
def newest_value_lost(served):
    def attend_without(q, k, v, mask, **options):
        v = v.clone()
        v[-1] = 0
        return attend(q, k, v, mask, **options)

    with mock.patch("tests.kernels.cuda.fake_gpu.attend", attend_without):
        yield


@contextmanager
def stale(served, captures, buffer):
    """Replays read a buffer that is not filled anew."""
    graphs = getattr(served.runner, captures)._graphs
    kept = dict(graphs)
    for size, one in kept.items():
        graphs[size] = dataclasses.replace(one, **{buffer: getattr(one, buffer).clone()})
    yield
    graphs.update(kept)


@contextmanager
def merging_nothing(served):
    wrappers = served.cluster.inside[0].thread.engine.backend.paged._wrappers
    cascades = [one for one in wrappers.values() if hasattr(one, "_merge")]
    assert cascades
    with mock.patch.object(cascades[0], "_merge", lambda *states: None):
        yield


FAULTS = [
    ("eager steps", newest_value_lost, ()),
    ("decode graphs", newest_value_lost, ()),
    ("decode graphs, prompts in pieces", newest_value_lost, ()),
    ("decode graphs", stale, ("_graphs", "token_ids")),
    ("decode graphs, prompts in pieces", stale, ("_pieces", "token_ids")),
    ("decode graphs, prompts in pieces", stale, ("_pieces", "positions")),
    ("cascade, eager", merging_nothing, ()),
    ("cascade in pieces", merging_nothing, ()),
]


@pytest.mark.slow
async def test_steps_of_every_kind_hold_and_each_fault_fails_its_rows(serving, tmp_path):
    parity = parity_of(tmp_path)
    served = await serving(parity, parity.one_worker())
    notes = await served.all_hold()
    assert len(notes) == 11
    assert all(int(notes[name].split()[0]) >= 1792 for name in ("cascade, eager", "cascade in pieces"))
    for name, fault, arguments in FAULTS:
        with fault(served, *arguments):
            result = await served.result(name)
        assert not result.ok, (name, fault.__name__, result.note)
    for row in parity.controls():
        await run_row(parity.verifier, None, row)
        assert parity.verifier.report.rows[-1].ok


async def test_a_row_fails_where_its_steps_are_not_taken(serving, tmp_path):
    parity = parity_of(tmp_path)
    served = await serving(parity, parity.one_worker())
    await served.result("eager steps")
    engine = served.cluster.inside[0].thread.engine
    with mock.patch.object(engine.runner._graphs, "fits", lambda batch: False):
        result = await served.result("decode graphs")
    assert not result.ok and "no step by _graphs" in result.note
    with mock.patch("kvrelay.kernels.cuda.paged_attention.make_levels", lambda *index: None):
        result = await served.result("cascade, eager")
    assert not result.ok and result.note.startswith("0 tokens of KV not read again")


async def test_another_models_float32_is_no_reference(serving, tmp_path):
    parity = parity_of(tmp_path)
    served = await serving(parity, parity.one_worker())
    other = tiny_model("qwen3", tmp_path / "other", is_wide=True)
    parity.exact = WholeTexts(other, "cpu")
    assert not (await served.result("the reference in float32 is Hugging Face's")).ok
    assert not (await served.result("eager steps")).ok


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
async def test_experts_and_latent_attention_hold(serving, tmp_path, family):
    parity = parity_of(tmp_path, family)
    served = await serving(parity, parity.others("tiny", "auto"))
    assert {"tiny: eager steps", "tiny: control: one layer's weights a little wrong"} <= (
        await served.all_hold()
    ).keys()


@pytest.mark.slow
async def test_fp8_kv_holds_and_a_lost_value_does_not(serving, tmp_path):
    parity = parity_of(tmp_path, kv_dtype="fp8_e4m3")
    served = await serving(parity, parity.others("fp8 KV", "auto"))
    assert "fp8 KV: eager steps" in await served.all_hold()
    with newest_value_lost(served):
        assert not (await served.result("fp8 KV: eager steps")).ok


# ---- the reference, and distances


def test_the_reference_is_hugging_faces_float32(tmp_path):
    folder = tiny_model("llama", tmp_path / "model", is_wide=True)
    text = [3 + (37 * at + 11) % 250 for at in range(70)]
    reference = WholeTexts(folder, "cpu")
    expected = log_probabilities(folder, text)
    assert reference(text, 1).shape == expected.shape and reference(text, 60).shape == (10, 320)
    torch.testing.assert_close(reference(text, 1), expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(reference(text, 60), expected[59:], atol=2e-4, rtol=0)


def answer(*tokens):
    logprobs = [TokenLogprob(token, value, [(9, -1.0)]) for token, value in tokens]
    return ServedAnswer(VerifyPrompt("p", [1]), "r", [[token for token, _ in tokens]], [logprobs])


def test_answers_are_apart_by_what_both_have_up_to_the_first_other_token():
    one = answer((4, -0.5), (5, -0.5), (6, -0.5))
    assert rms_apart([one], [one]) == 0.0
    assert rms_apart([one], [answer((4, -0.9), (5, -0.5), (6, -0.5))]) == pytest.approx((0.16 / 6) ** 0.5)
    assert rms_apart([one], [answer((4, -0.9), (7, -0.5), (6, 5.0))]) == pytest.approx((0.16 / 3) ** 0.5)
