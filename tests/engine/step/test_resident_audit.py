"""A bit that flips in the pool: the engine finds it and computes the block again; unaudited the answer is wrong."""

import math

import pytest
import torch

from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.engine.step.engine import Engine
from kvrelay.kernels.select import select_backend
from kvrelay.kvcache.pool import resident_audit
from tests.engine.step.test_engine import drain, prompt_of, request, tokens
from tests.engine.tiny import greedy_oracle, tiny_llama

PROMPT = prompt_of(50)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def engine(folder) -> Engine:
    return load_engine(folder, select_backend("cpu", "cpu", 1), torch.float32, EngineConfig(block_size=8))


def served(engine: Engine, name: str) -> list[int]:
    engine.add(request(name, PROMPT))
    return tokens(drain(engine)[name])


def flip(engine: Engine) -> None:
    """A high bit of the exponents in three of the prompt's blocks."""
    engine.cache.storage.tensor[1:4].view(torch.int32).bitwise_xor_(1 << 29)


def changed(engine: Engine) -> int:
    return sum(one.corrupt_blocks for one in engine.reports.load().tiers if one.tier == "pool")


@pytest.mark.parametrize("is_audited", [True, False])
def test_a_flipped_bit_in_a_cached_block_is_found_by_the_sweep_and_changes_the_answer_without_it(
    engine, folder, monkeypatch, is_audited
):
    monkeypatch.setattr(resident_audit, "PERIOD_S", 0.0 if is_audited else math.inf)
    expected = greedy_oracle(folder)(PROMPT, 12)
    assert served(engine, "cold") == expected
    engine.step()
    flip(engine)
    assert (served(engine, "warm") == expected) is is_audited
    assert (changed(engine) > 0) is is_audited
    engine.check()
