"""A step that is launched before the last one's tokens are known gives the very same streams, and nothing changes hands early."""

import pytest
import torch

# from hypothesis import given, settings
# from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from kvrelay.engine.engine import Engine, EngineConfig, load_engine
from kvrelay.hashing import block_hashes
from kvrelay.kernels.reference import ReferenceBackend
from kvrelay.wire import Beams, Group, Sampling, SequenceRequest
from tests.late_device import LateBackend, late

VOCAB, BLOCK = 97, 8
BLOCK_BYTES = BLOCK * 2 * 2 * 16 * 4
STOPS = tuple(range(3, 24))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=96, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
        initializer_range=0.2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("tiny-llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def make(folder):
    """make(is_late, blocks=..., **EngineConfig): an engine over the reference's kernels."""
    torch.set_num_threads(1)

    def build(is_late: bool, *, blocks: int = 60, **changes) -> Engine:
        config = EngineConfig(
            block_size=BLOCK, kv_memory_bytes=blocks * BLOCK_BYTES, **{"token_budget": 24, "max_running": 8, **changes}
        )
        backend = LateBackend() if is_late else ReferenceBackend("cpu")
        engine = load_engine(folder, backend, torch.float32, config)
        return late(engine) if is_late else engine

    return build


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(24, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def request(name: str, prompt: list[int], group: Group | None = None, **sampling) -> SequenceRequest:
    options = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **sampling}
    return SequenceRequest(
        request_id=name, token_ids=prompt, num_prompt_tokens=len(prompt), group=group,
        block_hashes=list(block_hashes(prompt, BLOCK)), sampling=Sampling(**options),
    )  # fmt: skip


def told(output) -> tuple:
    """Without times, which differ, and without what is cached: that depends on when it was asked for."""
    logprobs = [(one.token_id, round(one.logprob, 4)) for one in output.logprobs]
    prompt = [(one.token_id, round(one.logprob, 4)) for one in output.prompt_logprobs]
    return (
        output.choice,
        output.position,
        tuple(output.token_ids),
        output.finish_reason,
        output.stop_token,
        logprobs,
        prompt,
    )


def drain(
    engine: Engine, streams: dict[str, list[tuple]] | None = None, num_steps: int = 600
) -> dict[str, list[tuple]]:
    streams = {} if streams is None else streams
    for _ in range(num_steps):
        if not engine.scheduler.has_work:
            break
        for output in engine.step().outputs:
            streams.setdefault(output.request_id, []).append(told(output))
        engine.check()
    return streams


def assert_clean(engine: Engine) -> None:
    assert not engine.scheduler.sequences and not engine.scheduler.quarantined and engine._flight is None
    assert engine.pool.counts().used == 0 and len(engine._runner._free_slots) == engine.max_running


ASKED = [
    request("greedy", prompt_of(5, 0)),
    request("long", prompt_of(60, 1), max_tokens=30),
    request("seeded", prompt_of(9, 2), temperature=1.0, seed=3, max_tokens=20),
    request("stops", prompt_of(17, 3), temperature=1.0, seed=4, stop_token_ids=STOPS, max_tokens=60),
    request("stops late", prompt_of(8, 4), temperature=1.3, seed=9, stop_token_ids=STOPS, min_tokens=4, max_tokens=60),
    request("stops greedily", prompt_of(16, 5), stop_token_ids=tuple(range(3, 60)), max_tokens=60),
    request("one", prompt_of(8, 6), max_tokens=1),
    request("none", prompt_of(12, 7), max_tokens=0),
    request("biased", prompt_of(4, 8), logit_bias={5: 9.0}, temperature=0.8, seed=1),
    request("to the end", prompt_of(80, 9), max_tokens=60),
]
CLOSE = [
    request("penalties", prompt_of(8, 10), repetition_penalty=1.3, frequency_penalty=0.5, temperature=0.7, seed=2),
    request("told", prompt_of(8, 11), logprobs=2, max_tokens=6),
    request("prompt told", prompt_of(30, 12), prompt_logprobs=1, max_tokens=4),
]


def serve(engine: Engine, asked: list[SequenceRequest], every: int) -> dict[str, list[tuple]]:
    """One more of these requests every so many steps."""
    streams: dict[str, list[tuple]] = {}
    for one in asked:
        engine.add(one)
        drain(engine, streams, every)
    return drain(engine, streams)


@pytest.mark.parametrize("every", [0, 1, 3])
def test_streams_are_those_of_the_plain_loop(make, every):
    engine = make(True)
    assert serve(engine, ASKED, every) == serve(make(False), ASKED, every)
    assert_clean(engine)
    assert engine.backend.num_fed > 20


def test_rows_that_need_more_than_tokens_are_collected_at_once_beside_others(make):
    asked = [ASKED[0], *CLOSE, ASKED[2], ASKED[3]]
    engine = make(True)
    assert serve(engine, asked, 2) == serve(make(False), asked, 2)
    assert_clean(engine)
    assert 0 < engine.backend.num_fed < engine._speed.num_steps


def test_the_host_waits_once_for_each_step_and_only_when_the_next_one_is_launched(make):
    engine = make(True)
    for one in ASKED[:2]:
        engine.add(one)
    stream = engine.backend.stream
    assert engine.step().outputs == [] and stream.num_waits == 0  # launched, nothing to bring yet
    for number in range(1, 8):
        launched = stream.num_launched
        result = engine.step()
        assert result.num_tokens and stream.num_waits == number
        assert stream.num_done == launched < stream.num_launched  # the device has work when the host turns away
    engine.close()


def test_preempted_sequences_and_short_memory(make):
    asked = [request(str(seed), prompt_of(20, seed), max_tokens=24) for seed in range(4)]
    engine, loop = make(True, blocks=13), make(False, blocks=13)
    assert serve(engine, asked, 0) == serve(loop, asked, 0)
    assert engine.scheduler.num_preemptions > 0 and engine.backend.num_fed > 0
    assert_clean(engine)


def test_cached_prefixes_and_copied_tails(make):
    shared = prompt_of(45, 20)
    asked = [request(str(n), [*shared[: 45 - n], *prompt_of(4, n)], max_tokens=6) for n in range(8)]
    for blocks in (60, 16):
        engine = make(True, blocks=blocks)
        assert serve(engine, asked, 2) == serve(make(False, blocks=blocks), asked, 2)
        assert engine.scheduler.hit_tokens > 0
        assert_clean(engine)


def test_groups_and_single_sequences_by_turns(make):
    asked = [
        ASKED[0],
        request("samples", prompt_of(11, 30), Group(seeds=(5, 6, 7)), temperature=1.0, seed=5),
        request("beams", prompt_of(9, 31), Group(beams=Beams(width=2, num_returned=2)), max_tokens=6),
        ASKED[2],
    ]
    engine = make(True)
    assert serve(engine, asked, 4) == serve(make(False), asked, 4)
    assert engine.backend.num_fed > 0
    assert_clean(engine)


def test_drafts_and_looking_ahead_take_turns(make):
    asked = [
        request(str(n), [*(prompt_of(4, n) * 4), n + 30], max_tokens=40, temperature=n % 2 * 0.3, seed=n)
        for n in range(4)
    ]
    engine = make(True, draft_tokens=4)
    assert serve(engine, asked, 5) == serve(make(False), asked, 5)
    assert engine.drafts.speculation.num_drafted > 0
    assert_clean(engine)
