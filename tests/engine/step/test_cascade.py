"""An engine whose decode rows share prefixes: tokens are those of one where each reads for itself, and it shows in its
load.
"""

import pytest
import torch

from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.hashing import block_hashes
from kvrelay.kernels.cpu.backend import CpuBackend
from kvrelay.kernels.cpu.native_kernels import WORTH
from kvrelay.plane.messages import Beams, Group, Sampling, SequenceRequest
from tests.engine.tiny import tiny_llama

VOCAB, BLOCK = 97, 8
PROMPT, TAIL = 330, 25  # tokens
SAMPLED = {"temperature": 0.9, "top_p": 0.95}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(
        tmp_path_factory.mktemp("tiny-llama"),
        num_hidden_layers=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )


@pytest.fixture(scope="module", params=[1, 2], ids=lambda threads: f"{threads} threads")
def backend(request):
    backend = CpuBackend(request.param)
    if backend.compiled_kernels is None:
        pytest.skip("no compiled kernels here")
    return backend


def prompt_of(length, seed):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def request(name, prompt, group=None, **sampling):
    return SequenceRequest(
        request_id=name,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        block_hashes=list(block_hashes(prompt, BLOCK)),
        sampling=Sampling(max_tokens=TAIL, ignore_eos=True, **sampling),
        group=group,
    )


def one_by_one(prompts):
    """The first prompt alone until it decodes, then the others, with chunks of theirs in the first's decode steps."""
    first, *others = [request(f"r{index}", prompt, temperature=0.0) for index, prompt in enumerate(prompts)]
    return [[first], others]


SYSTEM = prompt_of(PROMPT, 1)
WAVES = {
    "samples": [[request("g", SYSTEM, Group(seeds=(11, 12, 13, 14)), **SAMPLED)]],
    "beams": [[request("g", SYSTEM, Group(beams=Beams(width=4, num_returned=4)), temperature=0.0)]],
    "one system prompt": one_by_one([SYSTEM + prompt_of(40 + 9 * index, 7 + index) for index in range(5)]),
    "nothing in common": one_by_one([prompt_of(PROMPT, 20 + index) for index in range(3)]),
}


def serve(folder, backend, waves, *, cascade):
    """(tokens by stream and choice, KV tokens spared) of waves of requests, each begun once the last one decodes."""
    config = EngineConfig(block_size=BLOCK, kv_memory_bytes=8 << 20, token_budget=64)
    engine, before = load_engine(folder, backend, torch.float32, config), backend.cascade_saved_tokens
    backend.compiled_kernels.worth = WORTH if cascade else 1 << 40
    streams, left = {}, list(waves)
    while left or engine.scheduler.has_work:
        if left and (not engine.scheduler.has_work or streams):
            for wanted in left.pop(0):
                engine.add(wanted)
        for output in engine.step().outputs:
            streams.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
        engine.check()
    assert engine.pool.counts().used == 0
    return streams, engine.reports.load().cascade_saved_tokens - before


@pytest.mark.parametrize("name", WAVES)
def test_tokens_are_those_of_rows_that_read_for_themselves(folder, backend, name):
    together, spared = serve(folder, backend, WAVES[name], cascade=True)
    apart, none = serve(folder, backend, WAVES[name], cascade=False)
    assert together == apart and all(len(tokens) == TAIL for tokens in together.values())
    assert none == 0
    assert (spared > 0) is (name != "nothing in common")
