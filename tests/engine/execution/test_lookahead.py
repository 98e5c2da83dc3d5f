"""A step that is launched before the last one's tokens are known gives the very same streams, and nothing changes hands
early.
"""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from kvrelay.engine.execution.runner import InFlightStep
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.engine.step.engine import Engine
from kvrelay.hashing import block_hashes
from kvrelay.kernels.oracle.reference import ReferenceBackend
from kvrelay.plane.messages import Beams, Group, Sampling, SequenceRequest
from kvrelay.types import BlockId
from tests.engine.execution.late_device import LateBackend, LateTokens, late

VOCAB, BLOCK = 97, 8
BLOCK_BYTES = BLOCK * 2 * 2 * 16 * 4
STOPS = tuple(range(3, 24))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=96,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
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
        request_id=name,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        group=group,
        block_hashes=list(block_hashes(prompt, BLOCK)),
        sampling=Sampling(**options),
    )


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
    assert not engine.scheduler.sequences and not engine.scheduler.blocks.quarantined and engine.batch.in_flight is None
    assert engine.pool.counts().used == 0 and len(engine.runner._free_rows) == engine.config.max_running


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
    assert 0 < engine.backend.num_fed < engine.reports.timing.num_steps


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
    assert engine.scheduler.preemption.num_preemptions > 0 and engine.backend.num_fed > 0
    assert_clean(engine)


def test_cached_prefixes_and_copied_tails(make):
    shared = prompt_of(45, 20)
    asked = [request(str(n), [*shared[: 45 - n], *prompt_of(4, n)], max_tokens=6) for n in range(8)]
    for blocks in (60, 16):
        engine = make(True, blocks=blocks)
        assert serve(engine, asked, 2) == serve(make(False, blocks=blocks), asked, 2)
        assert engine.scheduler.admission.hit_tokens > 0
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


def test_text_that_does_not_repeat_itself_is_seldom_waited_for(make):
    """Though a draft may come into every step: whether one is found cannot be known before."""
    engine = make(True, draft_tokens=4)
    for n in range(3):
        engine.add(request(str(n), prompt_of(10, 70 + n), max_tokens=70, temperature=3.0, seed=n))
    drain(engine)
    assert engine.drafts.speculation.num_drafted < 20
    assert engine.backend.num_fed > 0.75 * engine.reports.timing.num_steps
    assert_clean(engine)


# ---- nothing changes hands early


def running(make, *, blocks: int = 20) -> Engine:
    """Two sequences that decode, with a step under way; "ends" stops with the token that is being drawn."""
    engine = make(True, blocks=blocks, prefix_caching=False)
    [[first, second]] = [[out[2][0] for out in drain(alone_with(make, "ends"))["ends"][1:3]]]
    assert first != second
    engine.add(request("ends", prompt_of(12, 40), max_tokens=40, stop_token_ids=(second,)))
    engine.add(request("other", prompt_of(12, 41), max_tokens=40))
    for _ in range(3):
        engine.step()
    assert engine.batch.in_flight is not None and engine.scheduler.sequences["ends"].num_output == 2
    return engine


def alone_with(make, name: str) -> Engine:
    engine = make(False)
    engine.add(request(name, prompt_of(12, 40), max_tokens=3))
    return engine


def write_into_what_is_free(engine: Engine) -> tuple[list[int], torch.Tensor]:
    """As a transfer does it, beside the device's stream: every block that nobody holds."""
    lent = engine.take_probe_blocks(99)
    assert lent
    return lent, engine.cache.storage.tensor[lent].clone()


def leave(engine: Engine, how: str) -> None:
    if how == "abort":
        assert engine.abort("ends")
    else:
        assert any(out.stop_token is not None for out in engine.step().outputs)
    assert "ends" not in engine.scheduler.sequences and engine.batch.in_flight is not None
    engine.check()


@pytest.mark.parametrize("how", ["abort", "stop"])
def test_blocks_of_who_has_gone_are_nobodys_until_the_step_is_collected(make, how):
    engine = running(make)
    leave(engine, how)
    assert engine.reports.load().quarantined_blocks
    lent, written = write_into_what_is_free(engine)
    for _ in range(2):
        engine.step()
    assert torch.equal(engine.cache.storage.tensor[lent], written)
    engine.scheduler.blocks.return_probe_blocks(lent)
    drain(engine)
    assert_clean(engine)


@pytest.mark.parametrize("how", ["abort", "stop"])
def test_blocks_that_are_given_away_at_once_are_written_by_the_late_step(make, how, monkeypatch):
    monkeypatch.setattr(InFlightStep, "keep", lambda self, seq: None)
    engine = running(make)
    leave(engine, how)
    lent, written = write_into_what_is_free(engine)
    for _ in range(2):
        engine.step()
    assert not torch.equal(engine.cache.storage.tensor[lent], written)


def test_a_copied_block_is_kept_until_it_was_copied(make):
    engine = make(True)
    shared = prompt_of(24, 50)
    for name, prompt in (("first", [*shared, 90]), ("second", [*shared[:21], 91, 92])):
        engine.add(request(name, prompt, max_tokens=2))
        if name == "first":
            drain(engine)
    engine.step()
    [flight] = [engine.batch.in_flight]
    [copy] = flight.plan.copies
    assert [list(blocks) for blocks in engine.scheduler.blocks.quarantined.values()] == [[copy.source]]
    drain(engine)
    assert_clean(engine)


def test_a_held_prompt_is_complete_when_its_first_token_is_told(make):
    contents = []
    for is_late in (False, True):
        engine = make(is_late)
        for seed in range(3):
            engine.add(request(str(seed), prompt_of(30 + seed, seed)), hold=True, output_limit=1)
        found = {}
        for _ in range(20):
            for output in engine.step().outputs:
                blocks = list(engine.scheduler.held[output.request_id].blocks)
                kv = engine.cache.storage.tensor[blocks].movedim(0, 2).flatten(2, 3)
                found[output.request_id] = told(output), kv[:, :, : 30 + int(output.request_id)].clone()
        contents.append(found)
        for name in list(found):
            engine.abort(name)
        assert_clean(engine)
    for name, (output, kv) in contents[0].items():
        assert contents[1][name][0] == output and torch.equal(contents[1][name][1], kv)
    assert len(contents[0]) == len(contents[1]) == 3


def test_who_is_taken_off_the_batch_between_steps_has_the_token_that_was_being_drawn(make):
    def serve_with_preemption(engine: Engine) -> dict[str, list[tuple]]:
        for one in (ASKED[0], ASKED[2]):
            engine.add(one)
        streams = drain(engine, num_steps=4)
        engine.preempt(tuple(engine.scheduler.running))
        return drain(engine, streams)

    engine = make(True)
    assert serve_with_preemption(engine) == serve_with_preemption(make(False))
    assert engine.scheduler.preemption.num_preemptions == 2
    assert_clean(engine)


# ---- errors


@pytest.mark.parametrize("part", ["run", "draw", "wait"])
def test_a_step_that_fails_leaves_nothing_behind(make, part, monkeypatch):
    engine = running(make)
    owner = {"run": engine.runner, "draw": engine.executor.sampler, "wait": LateTokens}[part]

    def fail(*args, **options):
        raise RuntimeError("the device is gone")

    engine.add(request("new", prompt_of(20, 60)))
    with monkeypatch.context() as patch:
        patch.setattr(owner, part, fail)
        with pytest.raises(RuntimeError, match="gone"):
            engine.step()
    assert all(0 not in seq.token_ids for seq in engine.scheduler.sequences.values())
    engine.check()
    for name in list(engine.scheduler.sequences):
        engine.abort(name)
    assert_clean(engine)


def test_closing_waits_for_the_step_under_way(make):
    engine = running(make)
    engine.close()
    assert engine.batch.in_flight is None and engine.backend.stream.num_done == engine.backend.stream.num_launched
    engine.check()


# ---- in any order


@pytest.fixture(scope="module")
def expected(make):
    """Each request's stream, alone and step by step."""
    return {one.request_id: drain_one(make(False), one) for one in ASKED + CLOSE}


def drain_one(engine: Engine, one: SequenceRequest) -> list[tuple]:
    engine.add(one)
    return drain(engine)[one.request_id]


def live(engine: Engine, rng: random.Random, expected: dict[str, list[tuple]], num_events: int) -> None:
    """Requests come, go and are pre-empted between steps; blocks are lent. Raises AssertionError where a stream is not
    its own.
    """
    streams: dict[str, list[tuple]] = {}
    left, aborted, lent = [*ASKED, *CLOSE], set[str](), list[BlockId]()
    written = torch.empty(0)
    for _ in range(num_events):
        event = rng.choice(["add", "add", "step", "step", "step", "abort", "preempt", "lend", "take back"])
        here = list(engine.scheduler.sequences)
        if event == "add" and left:
            engine.add(left.pop(rng.randrange(len(left))))
        elif event == "abort" and here and rng.random() < 0.4:
            aborted.add(name := rng.choice(here))
            engine.abort(name)
        elif event == "preempt" and engine.scheduler.running and rng.random() < 0.4:
            engine.preempt((rng.choice(engine.scheduler.running),))
        elif event == "lend" and not lent:
            lent = engine.take_probe_blocks(3)
            written = engine.cache.storage.tensor[lent].clone()
        elif event == "take back" and lent:
            assert torch.equal(engine.cache.storage.tensor[lent], written), "a late step wrote into lent blocks"
            engine.scheduler.blocks.return_probe_blocks(lent)
            lent = []
        elif event == "step":
            drain(engine, streams, 1)
        engine.check()
    engine.scheduler.blocks.return_probe_blocks(lent)
    drain(engine, streams)
    for name, stream in streams.items():
        whole = expected[name]
        assert stream == whole[: len(stream)] and (name in aborted or len(stream) == len(whole)), name
    assert_clean(engine)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), blocks=st.sampled_from([14, 24, 60]), drafts=st.sampled_from([0, 3]))
def test_whatever_happens_between_steps_each_stream_is_its_own(make, expected, seed, blocks, drafts):
    live(make(True, blocks=blocks, draft_tokens=drafts), random.Random(seed), expected, num_events=45)


def tokens_of_other_rows(monkeypatch):
    real = InFlightStep.feed

    def feed(self, plan):
        found = real(self, plan)
        if found is not None and (found.sources >= 0).sum() > 1:
            fed = found.sources >= 0
            found.sources[fed] = found.sources[fed].roll(1)
        return found

    monkeypatch.setattr(InFlightStep, "feed", feed)


def who_may_have_to_give_way_is_looked_past(monkeypatch):
    monkeypatch.setattr(Scheduler, "may_look_ahead", lambda self: True)


@pytest.mark.parametrize("mistake", [tokens_of_other_rows, who_may_have_to_give_way_is_looked_past])
def test_such_lives_find_mistakes(make, expected, mistake, monkeypatch):
    mistake(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        for seed in range(20):
            live(make(True, blocks=14), random.Random(seed), expected, num_events=45)


# ---- what it is worth
