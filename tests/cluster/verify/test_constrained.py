"""The oracle of constrained rows: what it generates keeps to the constraints, and a row can fail."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvrelay.cluster.verify import constrained
from kvrelay.cluster.verify.constrained_oracle import Oracle, after_thinking
from kvrelay.cluster.verify.rows import run_setup
from kvrelay.cluster.verify.verifier import Verifier
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.plane.messages import GrammarSpec, Sampling, Thinking
from kvrelay.serve.text.tokenizer import Tokenizer

PROMPT = [(37 * at + 11) % 250 + 3 for at in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def oracle(folder) -> Oracle:
    return Oracle(folder)


def test_a_schema_decides_the_text_and_its_end(folder, oracle):
    schema = {"properties": {"ü": {"enum": ["🙂", 7]}}, "required": ["ü"], "additionalProperties": False}
    spec = GrammarSpec("json_schema", json.dumps({"type": "object", **schema}))
    tokens = oracle.expected(PROMPT, Sampling(max_tokens=200, grammar=spec))
    assert tokens[-1] in oracle.eos_ids
    assert json.loads(Tokenizer(folder).decode(tokens)) in ({"ü": "🙂"}, {"ü": 7})
    assert oracle.permits(spec, tokens)
    assert not oracle.permits(spec, [*tokens[:-2], tokens[0], tokens[-1]])


def test_bans_and_biases_change_the_output_and_hold(oracle):
    plain = oracle.expected(PROMPT, Sampling(max_tokens=12, ignore_eos=True))
    banned = (tuple(plain[:1]), tuple(plain[4:6]))
    tokens = oracle.expected(PROMPT, Sampling(max_tokens=12, ignore_eos=True, bad_words=banned))
    assert plain[0] not in tokens
    pairs = list(itertools.pairwise(tokens))
    assert banned[1] not in pairs
    one = next(token for token in range(3, 250) if token not in plain)
    assert oracle.expected(PROMPT, Sampling(max_tokens=3, logit_bias={one: 100.0})) == [one] * 3
    listed = (5, 6, 9)
    tokens = oracle.expected(PROMPT, Sampling(max_tokens=12, ignore_eos=True, allowed_token_ids=listed))
    assert set(tokens) <= set(listed)


@pytest.mark.pure
def test_reasoning_is_free_until_its_budget_is_spent_and_bound_after_it():
    bound = torch.zeros(20, dtype=torch.bool)
    rule = after_thinking(Thinking(start=(1,), end=(8, 9, 10), is_open=True, budget=2), lambda output: bound, 20)
    allowed = lambda *output: rule(output).nonzero().ravel().tolist()  # noqa: E731
    assert rule(()) is None and rule((5,)) is None
    assert allowed(5, 6) == [8] and allowed(5, 6, 8) == [9] and allowed(5, 6, 8, 9) == [10]
    assert allowed(5, 8) == [9], "the model began the marker itself"
    assert rule((5, 6, 8, 9, 10)) is bound and rule((8, 9, 10)) is bound


@pytest.mark.slow
async def test_quick_rows_hold_and_a_wrong_expectation_fails_them(folder):
    verifier = Verifier(folder, max_model_len=192, num_output=8)
    (setup,) = constrained.quick(verifier, "shm")
    await run_setup(verifier, setup)
    assert [(row.name, row.note) for row in verifier.report.rows if not row.ok] == []
    verifier.report.rows.clear()

    async def wrong(verifier, cluster):
        await setup.prepare(verifier, cluster)
        verifier.expected[setup.prompts[1].name][-1] ^= 1

    await run_setup(verifier, replace(setup, prepare=wrong, rows=setup.rows[:1]))
    (row,) = verifier.report.rows
    assert row.passed == row.total - 1 and "differs" in row.note
