"""A draft model changes how many steps a stream takes, never its tokens; its own blocks come and go, and none is
lost.
"""

import random

import pytest
import torch

from kvrelay.engine.checkpoints.loading import load_model
from kvrelay.engine.execution.launch import StepExecutor
from kvrelay.engine.speculation.draft_choice import DraftModelChoice, Speculation
from kvrelay.engine.speculation.draft_model import DraftModel
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig, Extensions
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.build import make_swap_area
from kvrelay.hashing import block_hashes
from kvrelay.kernels.backend import Backend
from kvrelay.kernels.select import select_backend
from kvrelay.plane.messages import Sampling, SequenceRequest
from tests.engine.execution.late_device import LateBackend, late
from tests.engine.tiny import tiny_llama

VOCAB, BLOCK = 61, 8
BLOCK_BYTES = BLOCK * 2 * 2 * 2 * 16 * 4
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 7, "top_p": 0.9, "top_k": 30},
    "biased": {"temperature": 0.8, "seed": 9, "logit_bias": {3: 4.0, 60: 3.0}, "logprobs": 1},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3},
    "min_tokens": {"temperature": 0.8, "min_tokens": 9, "seed": 1},
}


def used_draft_blocks(engine):
    model = engine.drafts.model
    return 0 if model is None else model.cache.pool.counts().used


@pytest.fixture(scope="module")
def folders(tmp_path_factory, one_thread):
    def write(name: str, **changes):
        return tiny_llama(
            tmp_path_factory.mktemp(name), **{"vocab_size": VOCAB, "num_hidden_layers": 1, "seed": 4} | changes
        )

    return {
        "itself": write("target", seed=3, num_hidden_layers=2),
        "another": write("another"),
        "fewer tokens": write("fewer", vocab_size=60),
        "more tokens": write("more", vocab_size=80),
    }


@pytest.fixture
def make(folders, monkeypatch):
    engines: list[Engine] = []

    def build(
        draft: str | None = None,
        *,
        tokens: int = 5,
        blocks: int = 96,
        draft_blocks: int = 96,
        always: bool = True,
        budget: int = 64,
        lookup: bool = False,
        backend: Backend | None = None,
    ) -> Engine:
        if always:
            monkeypatch.setattr(Speculation, "begins", lambda self, count: True)
            monkeypatch.setattr(Speculation, "lengths", lambda self, count, drafters: [self.most] * len(drafters))
            monkeypatch.setattr(
                DraftModelChoice, "lengths", lambda self, candidates, *_, **__: [one.most for one in candidates]
            )
        backend = backend or select_backend("cpu", "cpu", 1)
        config = EngineConfig(
            block_size=BLOCK,
            kv_memory_bytes=blocks * BLOCK_BYTES,
            token_budget=budget,
            draft_tokens=tokens if draft else 0,
            prompt_lookup=lookup,
        )
        draft_model = None
        if draft is not None:
            model = load_model(folders[draft], backend, torch.float32, block_size=BLOCK)
            block_bytes = BLOCK_BYTES * model.spec.num_layers // 2
            draft_model = DraftModel(
                model,
                backend,
                block_size=BLOCK,
                kv_memory_bytes=draft_blocks * block_bytes,
                max_running=64,
                max_model_len=256,
                vocab_size=VOCAB,
            )
        extensions = Extensions(
            swap_area=lambda cache: make_swap_area(cache.memory, 64 * BLOCK_BYTES, "full", lambda: None),
            draft_model=draft_model,
        )
        engine = load_engine(folders["itself"], backend, torch.float32, config, extensions)
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.close()


def prompts() -> list[list[int]]:
    chance = random.Random(5)
    return [[chance.randrange(3, VOCAB - 1) for _ in range(size)] for size in (3, 8, 21, 40)]


def request(
    name: str, prompt: list[int], *, max_tokens: int = 30, ignore_eos: bool = True, **sampling
) -> SequenceRequest:
    return SequenceRequest(
        request_id=name,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        block_hashes=list(block_hashes(prompt, BLOCK)),
        sampling=Sampling(max_tokens=max_tokens, ignore_eos=ignore_eos, **sampling),
    )


def serve(engine: Engine, **sampling) -> tuple[list, int]:
    """(the output of each stream, with log-probabilities and its end), steps."""
    for index, prompt in enumerate(prompts()):
        engine.add(request(str(index), prompt, **sampling))
    streams = {str(index): ([], [], []) for index in range(len(prompts()))}
    steps = 0
    while engine.scheduler.has_work:
        steps += 1
        for output in engine.step().outputs:
            tokens, logprobs, ends = streams[output.request_id]
            assert output.position == len(tokens)
            tokens += output.token_ids
            logprobs += [(one.token_id, round(one.logprob, 4)) for one in output.logprobs]
            ends += [output.finish_reason] * (output.finish_reason is not None)
        engine.check()
    assert engine.pool.counts().used == used_draft_blocks(engine) == 0
    return list(streams.values()), steps


@pytest.mark.parametrize(
    ("draft", "name"), [*(("itself", name) for name in SAMPLINGS), ("another", "greedy"), ("another", "seeded")]
)
def test_tokens_are_those_of_plain_steps(make, draft, name):
    sampling = SAMPLINGS[name]
    expected, plain_steps = serve(make(), **sampling)
    engine = make(draft)
    got, steps = serve(engine, **sampling)
    assert got == expected
    load = engine.reports.load()
    assert (load.model_drafted_tokens > 0) == ("repetition_penalty" not in sampling)
    if draft == "itself":  # with the same random numbers nearly all are right, drawn or not
        assert load.model_accepted_tokens == load.model_drafted_tokens and (
            steps < plain_steps or not load.model_drafted_tokens
        )
    assert load.drafted_tokens == load.model_drafted_tokens


@pytest.mark.parametrize("name", ["greedy", "seeded", "penalties"])
def test_on_a_device_that_computes_late_drafts_are_the_same_and_are_read_at_once(make, name):
    """A pass takes the last one's tokens on the device: a step waits for its drafts once and for its tokens once."""
    expected, _ = serve(make("another"), **SAMPLINGS[name])
    engine = late(make("another", backend=LateBackend()))
    got, steps = serve(engine, **SAMPLINGS[name])
    assert got == expected
    stream, num_drafted = engine.backend.stream, engine.reports.load().model_drafted_tokens
    if name != "penalties":  # tokens that change the next one's logits are read pass by pass
        assert num_drafted and engine.backend.num_fed > steps and stream.num_waits <= 2 * steps + 4


@pytest.mark.parametrize(("draft", "temperature"), [("fewer tokens", 0.0), ("more tokens", 0.8)])
def test_a_vocabulary_that_is_padded_otherwise_does_no_harm(make, draft, temperature):
    sampling = {"temperature": temperature, "seed": 5, "logit_bias": {60: -100.0, 7: 1.0}}
    engine = make(draft)
    assert serve(engine, **sampling)[0] == serve(make(), **sampling)[0]
    assert engine.reports.load().model_drafted_tokens > 0


def test_a_text_with_tokens_that_the_draft_model_lacks_is_left_alone(make):
    engine = make("fewer tokens")
    engine.add(request("r", [5, 60, 7, 8], temperature=0.0))
    while engine.scheduler.has_work:
        engine.step()
        engine.check()
    assert engine.reports.load().model_drafted_tokens == 0


def test_control_a_draft_that_is_kept_unseen_changes_the_tokens(make, monkeypatch):
    expected, _ = serve(make(), temperature=0.0)
    take = StepExecutor.take_drafted

    def believe(self, item, tokens, logprobs, outputs):
        take(self, item, [*item.drafts, tokens[-1]], logprobs, outputs)

    monkeypatch.setattr(StepExecutor, "take_drafted", believe)
    assert serve(make("another"), temperature=0.0)[0] != expected


def run(engine: Engine, *wanted: SequenceRequest) -> tuple[dict[str, list[int]], int]:
    """(the output of each stream, steps)."""
    streams: dict[str, list[int]] = {one.request_id: [] for one in wanted}
    steps = 0
    for one in wanted:
        engine.add(one)
    while engine.scheduler.has_work:
        for output in engine.step().outputs:
            streams[output.request_id] += output.token_ids
        engine.check()
        steps += 1
    return streams, steps


def test_the_model_itself_as_draft_takes_a_fraction_of_the_steps(make):
    one = request("r", prompts()[2], temperature=0.7, seed=4)
    assert run(make("itself"), one)[1] < run(make(), one)[1] / 4


def test_passes_are_replayed_from_recordings(make):
    engine = make("itself")
    run(engine, request("r", prompts()[2], temperature=0.0))
    graphs = engine.drafts.model._runner._graphs
    if graphs is None:
        pytest.skip("no compiler: nothing is recorded")
    assert graphs.why_not is None and graphs.has_captures


@pytest.mark.parametrize("blocks", [14, 20])
def test_a_preempted_sequence_is_forgotten_and_continues_the_same(make, blocks):
    expected, _ = serve(make(), temperature=0.8, seed=2)
    engine = make("itself", blocks=blocks)
    assert serve(engine, temperature=0.8, seed=2)[0] == expected
    assert engine.reports.load().preemptions > 0 and engine.reports.load().model_accepted_tokens > 0


@pytest.mark.parametrize("draft_blocks", [2, 9])
def test_a_pool_that_is_too_small_for_all_drafts_for_some(make, draft_blocks):
    expected, _ = serve(make(), temperature=0.0)
    engine = make("itself", draft_blocks=draft_blocks)
    assert serve(engine, temperature=0.0)[0] == expected
    assert engine.drafts.model.cache.pool.num_blocks == draft_blocks
    assert engine.reports.load().model_accepted_tokens > 0


def tokens_of_passes(engine):
    """A list that grows by the tokens of each pass of the draft model."""
    tokens, draft = [], engine.drafts.model.draft

    def noted(*args, **options):
        drafted = draft(*args, **options)
        tokens.extend(one.num_tokens for one in drafted.passes)
        return drafted

    engine.drafts.model.draft = noted
    return tokens


def test_a_text_is_caught_up_on_in_chunks(make):
    engine = make("itself", budget=16)
    most = tokens_of_passes(engine)
    one = request("r", prompts()[3], temperature=0.0)
    assert run(engine, one)[0] == run(make(), one)[0]
    assert max(most) == 16 and engine.reports.load().model_accepted_tokens > 0


def test_what_begins_alike_is_not_computed_twice(make):
    engine = make("itself")
    prompt = prompts()[3]
    run(engine, request("first", prompt, temperature=0.0, max_tokens=4))
    tokens = tokens_of_passes(engine)
    run(engine, request("second", prompt, temperature=0.0, max_tokens=4))
    assert tokens[0] <= BLOCK


def test_an_aborted_sequence_leaves_nothing_behind(make):
    engine = make("itself")
    engine.add(request("r", prompts()[2], temperature=0.0))
    while not used_draft_blocks(engine):
        engine.step()
    engine.abort("r")
    engine.check()
    assert used_draft_blocks(engine) == 0


def test_a_block_without_a_holder_is_noticed(make):
    engine = make("itself")
    engine.drafts.model.cache.pool.allocate(1)
    with pytest.raises(AssertionError, match="held by no sequence"):
        engine.check()


def test_a_shadow_that_stays_behind_is_noticed(make):
    engine = make("itself")
    engine.add(request("r", prompts()[2], temperature=0.0))
    while not used_draft_blocks(engine):
        engine.step()
    engine.drafts.model.cache.forget = lambda seq: None
    engine.abort("r")
    with pytest.raises(AssertionError, match="no longer runs"):
        engine.check()


def test_its_own_text_and_the_model_go_together(make):
    engine = make("itself", lookup=True)
    wanted = [request("loop", [4] * 12, temperature=0.0), request("open", prompts()[2], temperature=0.0)]
    assert run(engine, *wanted)[0] == run(make(), *wanted)[0]


def test_left_to_itself_it_measures_first(make):
    engine = make("itself", always=False)
    expected, _ = serve(make(always=False), temperature=0.8, seed=6)
    assert serve(engine, temperature=0.8, seed=6)[0] == expected
    assert engine.drafts.speculation.times.plain_s
