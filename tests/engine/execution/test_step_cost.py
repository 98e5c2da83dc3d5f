"""The short ways of a step give the tokens, ends and figures of the long ones."""

import numpy as np
import pytest
import torch

from kvrelay.engine.execution.runner import sampled
from kvrelay.engine.execution.sampler import OutputProcessor, Sampler, uniforms
from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.engine.step.engine import Engine
from kvrelay.kernels.select import select_backend
from kvrelay.plane.messages import Sampling, SequenceRequest
from tests.engine.tiny import tiny_llama

VOCAB = 97


def uniform(seed: int, position: int) -> float:
    """One output position's number, in plain Python. Source: splitmix64 (Steele et al., OOPSLA 2014)."""
    mask = (1 << 64) - 1
    z = (seed + 0x9E3779B97F4A7C15 * (position + 1)) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return ((z ^ (z >> 31)) >> 11) / (1 << 53)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(
        tmp_path_factory.mktemp("tiny-llama"),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=96,
    )


@pytest.fixture
def backend():
    return select_backend("cpu", "cpu", 1)


@pytest.fixture
def make(folder, backend):
    def build() -> Engine:
        config = EngineConfig(block_size=8, kv_memory_bytes=40 * 8 * 2 * 2 * 16 * 4, token_budget=24)
        return load_engine(folder, backend, torch.float32, config)

    return build


def request(name: str, seed: int, length: int, **sampling) -> SequenceRequest:
    prompt = torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    options = {"max_tokens": 30, "seed": seed, **sampling}
    return SequenceRequest(
        request_id=name, token_ids=prompt, num_prompt_tokens=length, block_hashes=[], sampling=Sampling(**options)
    )


ASKED: list[dict[str, object]] = [
    {"ignore_eos": True, "temperature": 0.0},
    {"stop_token_ids": tuple(range(3, 40))},
    {"stop_token_ids": tuple(range(3, 40)), "min_tokens": 11},
    {"ignore_eos": True, "logprobs": 2},
    {"ignore_eos": True, "prompt_logprobs": 1, "frequency_penalty": 0.5},
    {"ignore_eos": True, "max_tokens": 200},  # to the longest sequence
    {"ignore_eos": True, "max_tokens": 1},
    {"ignore_eos": True, "temperature": 0.0, "max_tokens": 2},
]


def serve(engine: Engine) -> list[object]:
    """All outputs of these requests, some of which are pre-empted on the way; without times."""
    for number, sampling in enumerate(ASKED):
        engine.add(request(str(number), number, 5 + 7 * number, **sampling))
    told: list[object] = []
    for step in range(400):
        if step in (6, 15) and len(engine.scheduler.running) > 2:
            engine.preempt((engine.scheduler.running[1],))
        told += [_without_times(output) for output in engine.step().outputs]
        engine.check()
        if not engine.scheduler.has_work:
            break
    assert not engine.scheduler.sequences and len(engine.runner._free_rows) == engine.config.max_running
    return told


def _without_times(output) -> tuple[object, ...]:
    num_chunks = output.timings.num_chunks if output.timings is not None else None
    logprobs = [(one.token_id, one.logprob) for one in output.logprobs] if output.logprobs else []
    return (
        output.request_id,
        output.position,
        tuple(output.token_ids),
        output.finish_reason,
        output.stop_token,
        output.cached_tokens,
        num_chunks,
        len(logprobs),
        len(output.prompt_logprobs),
    )


def test_a_plain_streams_outputs_are_those_of_the_long_way(make, monkeypatch):
    closer_looks: list[str] = []
    real = OutputProcessor._append
    monkeypatch.setattr(
        OutputProcessor, "_append", lambda self, seq, *rest: closer_looks.append("") or real(self, seq, *rest)
    )
    short, num_short = serve(make()), len(closer_looks)
    monkeypatch.setattr(OutputProcessor, "_set_plain_until", lambda self, seq: None)
    assert serve(make()) == short
    assert num_short < len(short) / 2, "the short way was not taken"
    assert len(closer_looks) - num_short == len(short)


def test_a_plain_stream_that_does_not_look_at_its_end_is_found_out(make, monkeypatch):
    right = serve(make())
    monkeypatch.setattr(OutputProcessor, "_set_plain_until", lambda self, seq: setattr(seq, "plain_until", 1 << 30))
    engine = make()
    for number, sampling in enumerate(ASKED[:3]):
        engine.add(request(str(number), number, 5 + 7 * number, **sampling))
    wrong = [_without_times(output) for _ in range(60) for output in engine.step().outputs]
    assert not any(told[3] for told in wrong) and any(told[3] for told in right)


def test_many_random_numbers_at_once_are_those_one_by_one():
    seeds = [0, 1, 7, (1 << 63) - 1, (1 << 64) - 1, 0x9E3779B97F4A7C15]
    positions = [0, 1, 2, 1000, 1 << 31]
    pairs = [(seed, position) for seed in seeds for position in positions]
    many = uniforms(*(np.array(column, dtype=np.uint64) for column in zip(*pairs, strict=True)))
    assert many.tolist() == [uniform(seed, position) for seed, position in pairs]


def test_what_is_kept_of_a_batch_is_of_that_batch(backend):
    def row(seed: int, num_output: int, **sampling) -> Sequence:
        seq = Sequence(request(str(seed), seed, 4, **sampling), 8, seed)
        seq.token_ids += [5] * num_output
        return seq

    few = [row(seed, seed, temperature=seed % 2) for seed in range(5)]
    many = [row(seed, 3 * seed, temperature=0.7 if seed % 3 else 0.0, top_k=seed) for seed in range(40)]
    sampler = Sampler(backend, ())
    for seqs in (few, many, few, many[:20], many[::-1], few[:1]):
        for seq in seqs:
            seq.token_ids.append(9)
        batch = sampler._batch(seqs)
        params = [seq.request.sampling for seq in seqs]
        assert batch.top_k.tolist() == [one.top_k for one in params]
        assert batch.temperature.tolist() == pytest.approx([one.temperature for one in params])
        drawn = [
            uniform(one.seed, seq.num_output) if one.temperature else 0.0 for one, seq in zip(params, seqs, strict=True)
        ]
        assert batch.uniform.tolist() == drawn


def test_a_single_token_in_the_middle_of_a_prompt_draws_nothing(make):
    engine = make()
    for name in "ab":
        engine.add(request(name, 1, 4, ignore_eos=True))
    engine.step()
    engine.add(request("c", 3, 21, ignore_eos=True))
    engine.add(request("d", 4, 10, ignore_eos=True))  # 24 tokens a step: 1 of it is left over
    plan = engine.scheduler.schedule()
    assert [(item.seq.request_id, item.num_tokens) for item in plan.work] == [("a", 1), ("b", 1), ("d", 1), ("c", 21)]
    rows, seqs = sampled(plan)
    assert (rows, [seq.request_id for seq in seqs]) == ([0, 1, 23], ["a", "b", "c"])


SHORT: list[dict[str, object]] = [
    {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": (4, 5)},
    {"temperature": 0.0},
    {"temperature": 0.0, "min_tokens": 9, "logprobs": 2},
]


@pytest.fixture
def short_rows():
    """Rows whose likeliest token would end the first and the third of them too early, and the sampler's arguments."""
    seqs = [Sequence(request(str(row), row, 5, **asked), 8, row) for row, asked in enumerate(SHORT)]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[0, 5], logits[1, 5], logits[2, 2] = 50.0, 50.0, 50.0
    return logits, seqs


def test_tokens_that_would_end_a_sequence_too_early_are_passed_over_without_a_copy(backend, short_rows, monkeypatch):
    logits, seqs = short_rows
    before = logits.clone()
    seen: list[int] = []
    real = backend.sample_on_device
    monkeypatch.setattr(backend, "sample_on_device", lambda x, batch: seen.append(x.data_ptr()) or real(x, batch))
    tokens, logprobs = Sampler(backend, eos_ids=(2,)).sample(logits, seqs)
    banned = before.clone()
    banned[0, [2, 4, 5]] = banned[2, 2] = -torch.inf
    assert tokens == banned.argmax(dim=1).tolist() != before.argmax(dim=1).tolist()
    assert seen == [logits.data_ptr()], "the logits were copied"
    assert torch.equal(logits, before), "the logits were not given back as they came"
    assert logprobs[2].top[0][0] == 2, "log-probabilities are the model's own"


def test_bans_in_place_draw_what_bans_in_a_copy_draw(backend, short_rows, monkeypatch):
    logits, seqs = short_rows
    sampler = Sampler(backend, eos_ids=(2,))
    in_place = sampler.sample(logits, seqs)
    monkeypatch.setattr(sampler, "_is_immediate", False)
    assert sampler.sample(logits, seqs) == in_place


def test_a_draw_that_fails_leaves_the_logits_as_they_were(backend, short_rows, monkeypatch):
    logits, seqs = short_rows
    before = logits.clone()

    def fail(x: torch.Tensor, batch: object) -> torch.Tensor:
        assert not torch.equal(x, before)
        raise RuntimeError("no")

    monkeypatch.setattr(backend, "sample_on_device", fail)
    with pytest.raises(RuntimeError):
        Sampler(backend, eos_ids=(2,)).sample(logits, seqs)
    assert torch.equal(logits, before)


def test_a_row_that_is_long_enough_may_end(backend, short_rows):
    logits, seqs = short_rows
    seqs[0].token_ids.extend([7] * 9)
    tokens, _ = Sampler(backend, eos_ids=(2,)).sample(logits, seqs)
    assert tokens[0] == 5
