"""The 16-bit oracle on tiny random models; and that it can fail, in each of its parts."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from kvrelay.cluster.verify import cli
from kvrelay.cluster.verify.closeness import DtypeError, dtype_error, on_same_tokens
from kvrelay.cluster.verify.dtypes import (
    LAYER_FACTORS,
    THETA_FACTOR,
    changed_copy,
    scale_first_layer,
    scale_rotary_base,
)
from kvrelay.cluster.verify.parity import setups
from kvrelay.cluster.verify.prompts import expected_tokens, log_probabilities
from kvrelay.cluster.verify.rows import run_setup
from kvrelay.cluster.verify.suites import paths
from kvrelay.cluster.verify.verifier import Verifier, tiny_model
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.kernels.cpu.backend import CpuBackend
from kvrelay.kernels.oracle.reference import ReferenceBackend

THEIRS = DtypeError(rms=0.02, worst=0.2, surprise=0.001, spread=0.02, agreement=0.98, num_positions=400)


def failures(report):
    return [(row.name, row.passed, row.total, row.note) for row in report.rows if not row.ok]


@pytest.mark.slow
async def test_a_float16_model_is_the_reference_in_every_way(tmp_path):
    folder = tiny_model("qwen3", tmp_path / "model", is_wide=True)
    verifier = Verifier(folder, max_model_len=384, num_output=8, dtype="float16")
    for one, setup in setups(verifier, ["shm"], tmp_path):
        await run_setup(one, setup)
    assert failures(verifier.report) == []


@pytest.mark.slow
async def test_tokens_of_every_way_are_one_workers_and_another_expectation_fails(tmp_path):
    folder = tiny_checkpoint("llama", tmp_path / "model")
    verifier = Verifier(folder, max_model_len=160, num_output=6, dtype="bfloat16")
    if not CpuBackend(1).is_batch_invariant(torch.bfloat16):
        pytest.skip("this processor's bfloat16 products depend on the batch")
    for setup in paths(["shm"]):
        await run_setup(verifier, setup)
    assert failures(verifier.report) == []
    assert len(verifier.report.rows) == 8
    assert [len(tokens) for tokens in verifier.expected.values()] == [6] * len(verifier.prompts)
    fp32 = expected_tokens(folder, verifier.prompts, 6)
    assert list(verifier.expected.values()) != fp32  # bfloat16 is another model


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"rms": 0.041}, "log-probabilities"),
        ({"rms": float("nan")}, "log-probabilities"),
        ({"surprise": 0.0051}, "perplexity"),
        ({"surprise": -0.0051}, "perplexity"),
        ({"agreement": 0.94}, "best token"),
    ],
)
def test_each_bound_can_be_missed(changed, says):
    assert THEIRS.excess(THEIRS) == []
    (found,) = dataclasses.replace(THEIRS, **changed).excess(THEIRS)
    assert says in found


def test_how_far_off_a_model_is():
    exact = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=torch.float64).log()
    said = on_same_tokens(exact, [7, 1, 2], top=2)
    tokens, logprobs = said
    assert tokens.tolist() == [[1, 0, 1], [2, 2, 0]]
    assert dtype_error([said], exact) == DtypeError(0.0, 0.0, -0.0, 0.0, 1.0, 2)
    found = dtype_error([(tokens, logprobs - 0.1)], exact)
    assert (found.rms, found.worst, found.surprise) == pytest.approx((0.1, 0.1, 0.1))
    other = dtype_error([(tokens[:, [0, 2, 1]], logprobs[:, [0, 2, 1]])], exact)
    assert other.rms == 0.0 and other.agreement == 0.0


def test_a_changed_copy_model_differs_in_what_was_changed_copy_alone(tmp_path):
    plain = tiny_checkpoint("gemma3", tmp_path / "plain")
    base = changed_copy(plain, tmp_path / "base", scale_rotary_base)
    layer = changed_copy(plain, tmp_path / "layer", lambda folder: scale_first_layer(folder, LAYER_FACTORS["float16"]))
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (plain, base))
    parameters = before["rope_parameters"]
    assert {kind: one["rope_theta"] for kind, one in after["rope_parameters"].items()} == {
        kind: one["rope_theta"] * THETA_FACTOR for kind, one in parameters.items()
    }
    weights, scaled = (load_file(folder / "model.safetensors") for folder in (plain, layer))
    changed = {name for name in weights if not torch.equal(weights[name], scaled[name])}
    assert changed and all(".layers.0." in name and weights[name].dim() == 2 for name in changed)
    text = list(range(3, 90))
    exact, *others = (log_probabilities(folder, text) for folder in (plain, base, layer))
    assert all(dtype_error([on_same_tokens(other, text, 5)], exact).rms > 1e-3 for other in others)


def test_only_the_compiled_kernels_promise_that_rows_stand_alone(monkeypatch):
    assert CpuBackend(1).is_batch_invariant(torch.float32) is (CpuBackend(1).compiled_kernels is not None)
    assert not CpuBackend(1).is_batch_invariant(torch.float16)
    assert not ReferenceBackend("cpu").is_batch_invariant(torch.float32)
    monkeypatch.setenv("KVRELAY_NATIVE", "0")
    assert not CpuBackend(1).is_batch_invariant(torch.bfloat16)


def test_a_dtype_that_there_is_not_is_refused():
    import typer

    app = typer.Typer()
    app.command()(cli.command)
    result = CliRunner().invoke(app, ["--dtype", "float8"])
    assert result.exit_code == 2 and "bfloat16" in result.output
