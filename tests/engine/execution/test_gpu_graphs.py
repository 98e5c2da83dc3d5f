"""An engine over the fake GPU: with its graphs captured before the first request it gives the tokens that it gives
without.
"""

import pytest
import torch

from kvrelay.engine.checkpoints.tiny import TINY_CONFIGS, tiny_checkpoint
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.hashing import block_hashes
from kvrelay.plane.messages import Sampling, SequenceRequest
from tests.kernels.cuda.fake_gpu import fake_gpu  # noqa: F401

# ruff: noqa: F811

CONFIG = EngineConfig(block_size=16, kv_memory_bytes=1 << 20, token_budget=32, max_running=4, max_model_len=64)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("kvrelay.kernels.cuda.prefill_kernels._TOKENS", 40)
    monkeypatch.setitem(TINY_CONFIGS, "llama", TINY_CONFIGS["llama"] | {"head_dim": 64})
    return tiny_checkpoint("llama", tmp_path)


def tokens_of(engine):
    """Three requests that come one step after the other: steps of prompts alone, mixed ones, and decode."""
    found = {}
    for index in range(3):
        prompt = list(range(5, 25 + 3 * index))
        engine.add(
            SequenceRequest(
                request_id=f"r{index}",
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
                block_hashes=list(block_hashes(prompt, 16)),
                tokens_per_hash=16,
                sampling=Sampling(max_tokens=8, temperature=0.7, top_p=0.9, seed=index, ignore_eos=True),
            )
        )
        take(engine.step(), found)
    while engine.scheduler.has_work:
        take(engine.step(), found)
    return found


def take(result, found):
    for output in result.outputs:
        found.setdefault(output.request_id, []).extend(output.token_ids)


def test_an_engine_that_warmed_up_captures_nothing_later_and_gives_the_same_tokens(fake_gpu, folder):
    warm = load_engine(folder, fake_gpu, torch.bfloat16, CONFIG)
    num_captures, replays = fake_gpu.gpu.num_captures, fake_gpu.gpu.num_replays
    found = tokens_of(warm)
    assert num_captures == fake_gpu.gpu.num_captures > 0 and fake_gpu.gpu.num_replays > replays
    warm.close()
    plain = load_engine(folder, fake_gpu, torch.bfloat16, CONFIG)
    plain.runner._graphs = plain.runner._pieces = None
    replays = fake_gpu.gpu.num_replays
    assert tokens_of(plain) == found and len(found) == 3 and all(len(tokens) == 8 for tokens in found.values())
    assert fake_gpu.gpu.num_replays == replays
    plain.close()
