"""Drafts change how many steps a stream takes, never its tokens."""

import random

import pytest
import torch

from kvrelay.engine.execution.launch import StepExecutor
from kvrelay.engine.speculation.draft_choice import Speculation
from kvrelay.engine.speculation.speculation import PromptLookup
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig, Extensions
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.build import make_swap_area
from kvrelay.hashing import block_hashes
from kvrelay.kernels.select import select_backend
from kvrelay.plane.messages import Group, Sampling, SequenceRequest
from kvrelay.types import FinishReason
from tests.engine.tiny import tiny_llama

VOCAB, BLOCK = 61, 8
BLOCK_BYTES = BLOCK * 2 * 2 * 2 * 16 * 4
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.3, "seed": 7},
    "logprobs": {"temperature": 0.3, "seed": 8, "logprobs": 2},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3},
    "min_tokens": {"temperature": 0.0, "min_tokens": 9},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny-llama"), seed=3, vocab_size=VOCAB, num_hidden_layers=2)


@pytest.fixture
def make(folder, monkeypatch):
    engines: list[Engine] = []

    def build(*, draft_tokens: int, blocks: int = 96, always: bool = True, budget: int = 64) -> Engine:
        if always:
            monkeypatch.setattr(Speculation, "begins", lambda self, count: True)
            monkeypatch.setattr(Speculation, "lengths", lambda self, count, drafters: [self.most] * len(drafters))
        config = EngineConfig(
            block_size=BLOCK, kv_memory_bytes=blocks * BLOCK_BYTES, token_budget=budget, draft_tokens=draft_tokens
        )
        extensions = Extensions(
            swap_area=lambda cache: make_swap_area(cache.memory, 64 * BLOCK_BYTES, "full", lambda: None)
        )
        engine = load_engine(folder, select_backend("cpu", "cpu", 1), torch.float32, config, extensions)
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.close()


def prompts() -> list[list[int]]:
    chance = random.Random(5)
    phrase = [chance.randrange(3, VOCAB) for _ in range(7)]
    return [phrase * 3, [4] * 12, [chance.randrange(3, VOCAB) for _ in range(20)], [*phrase, 9, *phrase[:5]]]


def request(
    name: str,
    prompt: list[int],
    *,
    max_tokens: int = 40,
    ignore_eos: bool = True,
    group: Group | None = None,
    **sampling,
) -> SequenceRequest:
    return SequenceRequest(
        request_id=name,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        block_hashes=list(block_hashes(prompt, BLOCK)),
        sampling=Sampling(max_tokens=max_tokens, ignore_eos=ignore_eos, **sampling),
        group=group,
    )


def serve(engine: Engine, **sampling) -> tuple[list, int]:
    """(the output of each stream, with log-probabilities and its end), steps."""
    for index, prompt in enumerate(prompts()):
        engine.add(request(str(index), prompt, **sampling))
    streams = {str(index): ([], [], []) for index in range(len(prompts()))}
    steps = 0
    while engine.scheduler.has_work:
        for output in engine.step().outputs:
            tokens, logprobs, ends = streams[output.request_id]
            assert output.position == len(tokens)
            tokens += output.token_ids
            logprobs += [(one.token_id, round(one.logprob, 4)) for one in output.logprobs]
            ends += [output.finish_reason] * (output.finish_reason is not None)
        engine.check()
        steps += 1
    assert engine.pool.counts().used == 0
    return list(streams.values()), steps


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_tokens_are_those_of_plain_steps(make, sampling, ignore_eos):
    expected, plain_steps = serve(make(draft_tokens=0), ignore_eos=ignore_eos, **sampling)
    engine = make(draft_tokens=5)
    got, steps = serve(engine, ignore_eos=ignore_eos, **sampling)
    assert got == expected
    speculation = engine.drafts.speculation
    assert (speculation.num_accepted > 0) == ("repetition_penalty" not in sampling)
    assert steps <= plain_steps


def test_drafts_that_are_all_wrong_change_nothing_but_the_work(make, monkeypatch):
    expected, plain_steps = serve(make(draft_tokens=0), temperature=0.0)
    monkeypatch.setattr(
        PromptLookup, "draft", lambda self, tokens, most: [(tokens[-1] + 1 + i) % VOCAB for i in range(most)]
    )
    engine = make(draft_tokens=4)
    got, steps = serve(engine, temperature=0.0)
    assert got == expected and steps <= plain_steps
    assert engine.drafts.speculation.num_drafted > 10 * engine.drafts.speculation.num_accepted


def test_control_a_draft_that_is_kept_unseen_changes_the_tokens(make, monkeypatch):
    expected, _ = serve(make(draft_tokens=0), temperature=0.0)
    monkeypatch.setattr(
        PromptLookup, "draft", lambda self, tokens, most: [(tokens[-1] + 1 + i) % VOCAB for i in range(most)]
    )
    append = StepExecutor.take_drafted

    def believe(self, item, tokens, logprobs, outputs):
        append(self, item, [*item.drafts, tokens[-1]], logprobs, outputs)

    monkeypatch.setattr(StepExecutor, "take_drafted", believe)
    assert serve(make(draft_tokens=4), temperature=0.0)[0] != expected


def test_text_that_repeats_takes_a_fraction_of_the_steps(make):
    def steps(draft_tokens: int) -> int:
        engine, count = make(draft_tokens=draft_tokens), 0
        engine.add(request("loop", [4] * 12, temperature=0.0))
        while engine.scheduler.has_work:
            engine.step()
            count += 1
        return count

    assert steps(0) == 40 and steps(6) < 30


@pytest.mark.parametrize("blocks", [14, 20])
def test_drafts_never_preempt_and_a_preempted_sequence_continues_the_same(make, blocks):
    expected, _ = serve(make(draft_tokens=0), temperature=0.0)
    plain = make(draft_tokens=0, blocks=blocks)
    assert serve(plain, temperature=0.0)[0] == expected
    engine = make(draft_tokens=6, blocks=blocks)
    assert serve(engine, temperature=0.0)[0] == expected
    assert engine.reports.load().preemptions <= plain.reports.load().preemptions + 1


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_a_stream_is_never_longer_than_asked_for(make, max_tokens):
    expected, _ = serve(make(draft_tokens=0), temperature=0.0, max_tokens=max_tokens)
    got, _ = serve(make(draft_tokens=8), temperature=0.0, max_tokens=max_tokens)
    assert got == expected and all(len(tokens) == max_tokens for tokens, _, _ in got)


def test_the_longest_context_is_kept(make):
    def run(draft_tokens: int) -> list[int]:
        engine = make(draft_tokens=draft_tokens)
        engine.add(request("long", [5, 6, 7] * 60, max_tokens=500, temperature=0.0))
        tokens: list[int] = []
        while engine.scheduler.has_work:
            for output in engine.step().outputs:
                tokens += output.token_ids
                reason = output.finish_reason
        assert reason is FinishReason.LENGTH
        return tokens

    assert run(7) == run(0) and len(run(7)) == 256 - 180


def test_the_token_budget_bounds_drafts(make):
    engine = make(draft_tokens=8, budget=7)
    for index, prompt in enumerate(prompts()):
        engine.add(request(str(index), prompt, temperature=0.0))
    while engine.scheduler.has_work:
        assert engine.step().num_tokens <= 7
    assert engine.drafts.speculation.num_accepted > 0


def test_groups_are_left_alone(make):
    def run(draft_tokens: int) -> dict[int, list[int]]:
        engine = make(draft_tokens=draft_tokens)
        engine.add(request("g", prompts()[0], max_tokens=12, temperature=0.7, seed=3, group=Group(seeds=(3, 4, 5))))
        streams: dict[int, list[int]] = {}
        while engine.scheduler.has_work:
            for output in engine.step().outputs:
                streams.setdefault(output.choice, []).extend(output.token_ids)
        return streams

    assert run(6) == run(0) and len(run(0)) == 3


def test_left_to_itself_it_measures_first(make):
    expected, _ = serve(make(draft_tokens=0), temperature=0.0)
    engine = make(draft_tokens=6, always=False)
    got, _ = serve(engine, temperature=0.0)
    assert got == expected and engine.drafts.speculation.times.plain_s
