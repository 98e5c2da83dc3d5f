"""Constrained outputs: valid with random weights, and the same on every path that one engine has."""

import functools
import itertools
import json
import operator
import re

import msgspec
import pytest
import torch

from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.engine.execution import masks
from kvrelay.engine.execution.constraints import Constraint
from kvrelay.engine.execution.masks import Constraints
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.engine.step.engine import Engine
from kvrelay.kernels.oracle.reference import ReferenceBackend
from kvrelay.kernels.select import select_backend
from kvrelay.plane.messages import Beams, GrammarSpec, Group, Sampling, SequenceRequest, Thinking
from tests.engine.execution.late_device import LateBackend, late

VOCAB, BLOCK, EOS = 320, 8, 2
BLOCK_BYTES = BLOCK * 2 * 4 * 2 * 32 * 4
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "size": {"enum": ["small", "large"]},
        "ids": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 3},
    },
    "required": ["name", "size", "ids"],
    "additionalProperties": False,
}
JSON = GrammarSpec("json_schema", json.dumps(SCHEMA))
WORDS = GrammarSpec("regex", "(yes|no)( (yes|no)){2,9}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def text_of(folder):
    """Text of token ids, special ones left out."""
    from tokenizers import Tokenizer

    codec = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda ids: codec.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def make(folder, one_thread):
    """make(is_late, blocks=..., **EngineConfig): an engine of its own."""

    def build(*, backend=None, blocks: int = 90, **changes) -> Engine:
        config = EngineConfig(
            block_size=BLOCK, kv_memory_bytes=blocks * BLOCK_BYTES, **{"token_budget": 32, "max_running": 8, **changes}
        )
        engine = load_engine(folder, backend or select_backend("cpu", "cpu", 1), torch.float32, config)
        return late(engine) if isinstance(backend, LateBackend) else engine

    return build


def request(name: str, prompt: list[int], emitted: list[int] | None = None, group=None, **sampling) -> SequenceRequest:
    options = {"max_tokens": 120, "temperature": 0.0, **sampling}
    return SequenceRequest(
        request_id=name,
        token_ids=[*prompt, *(emitted or [])],
        num_prompt_tokens=len(prompt),
        block_hashes=[],
        sampling=Sampling(**options),
        group=group,
    )


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


Stream = tuple[list[int], str | None, int | None]  # tokens, finish reason, stop token


def serve(engine: Engine, *asked: SequenceRequest, between=lambda step: None) -> dict[tuple[str, int], Stream]:
    """Each request's streams, by choice; raises where the engine does not end up empty."""
    for one in asked:
        assert engine.requests.refusal(one) is None
        engine.add(one)
    found: dict[tuple[str, int], Stream] = {}
    for step in range(2000):
        if not engine.scheduler.has_work:
            break
        result = engine.step()
        assert not result.failed
        for out in result.outputs:
            tokens, _, _ = found.get((out.request_id, out.choice), ([], None, None))
            found[out.request_id, out.choice] = [*tokens, *out.token_ids], out.finish_reason, out.stop_token
        between(step)
        engine.check()
    assert not engine.scheduler.sequences and engine.pool.counts().used == 0
    engine.close()
    return found


def asked() -> list[SequenceRequest]:
    """Of every kind, some that no grammar binds among them."""
    start, end = (40,), (41, 42)
    return [
        request("plain", prompt_of(9, 0), max_tokens=20),
        request("json", prompt_of(11, 1), grammar=JSON),
        request("json drawn", prompt_of(20, 2), grammar=JSON, temperature=1.0, seed=5),
        request("words", prompt_of(5, 3), grammar=WORDS, temperature=1.3, seed=6, top_k=20),
        request(
            "thinks",
            prompt_of(7, 4),
            grammar=WORDS,
            temperature=1.0,
            seed=7,
            thinking=Thinking(start=start, end=end, is_open=True, budget=9),
        ),
        request("few", prompt_of(6, 5), allowed_token_ids=(60, 61, 62), temperature=1.0, seed=8, max_tokens=12),
        request(
            "bad",
            prompt_of(6, 6),
            bad_words=((60,), (61, 62)),
            allowed_token_ids=(60, 61, 62, 63),
            temperature=1.0,
            seed=9,
            max_tokens=40,
        ),
        request("biased", prompt_of(6, 7), grammar=WORDS, temperature=0.9, seed=10, repetition_penalty=1.2),
    ]


@pytest.fixture(scope="module")
def expected(make):
    """Each request's stream, alone."""
    return {key: stream for one in asked() for key, stream in serve(make(), one).items()}


def assert_valid(text: str) -> None:
    parsed = json.loads(text)
    assert set(parsed) == {"name", "size", "ids"} and re.fullmatch("[a-z]{1,8}", parsed["name"])
    assert parsed["size"] in ("small", "large") and len(parsed["ids"]) <= 3
    assert all(0 <= one <= 999 for one in parsed["ids"])


def test_outputs_are_valid_whatever_the_model_wants(expected, text_of):
    for name in ("json", "json drawn"):
        tokens, reason, stop = expected[name, 0]
        assert_valid(text_of(tokens))
        assert (reason, stop) == ("stop", EOS)
    assert re.fullmatch(WORDS.text, text_of(expected["words", 0][0]))
    thought = expected["thinks", 0][0]
    end = next(i for i in range(len(thought)) if thought[i : i + 2] == [41, 42])
    assert end <= 9 and re.fullmatch(WORDS.text, text_of(thought[end + 2 :]))
    assert set(expected["few", 0][0]) <= {60, 61, 62}
    bad = expected["bad", 0][0]
    assert {61, 63} <= set(bad) <= {61, 62, 63} and (61, 62) not in itertools.pairwise(bad)


def test_without_masks_they_are_not(make, monkeypatch):
    monkeypatch.setattr(Constraints, "_fill", lambda self, jobs, num_rows: None)
    engine = make()
    engine.add(asked()[1])
    failed = [failure for _ in range(20) for failure in engine.step().failed]
    assert failed == [("json", "the output does not match its grammar")]


def test_many_at_once_chunk_by_chunk(make, expected):
    assert serve(make(token_budget=10), *asked()) == expected


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted_ones_go_on_where_they_were(make, expected, preemption):
    engine = make(preemption=preemption)

    def between(step: int) -> None:
        if step % 7 == 3 and engine.scheduler.running:
            engine.preempt((engine.scheduler.running[step % len(engine.scheduler.running)],))

    assert serve(engine, *asked(), between=between) == expected
    assert engine.scheduler.preemption.num_preemptions > 5


def test_an_output_is_continued_elsewhere_from_any_token(make, expected):
    for one in asked()[1:]:
        tokens, reason, stop = expected[one.request_id, 0]
        for cut in {1, 2, len(tokens) // 3, len(tokens) // 2, len(tokens) - 1}:
            emitted = tokens[:cut]
            again = msgspec.structs.replace(one, token_ids=[*one.token_ids, *emitted])
            assert serve(make(), again)[one.request_id, 0] == (tokens[cut:], reason, stop), (one.request_id, cut)


def test_a_prefill_workers_first_token_is_replayed_by_the_decode_worker(make, expected, text_of):
    """No KV is sent here, so the model says something else, in the same grammar."""
    one = asked()[2]
    for first in (expected["json drawn", 0][0][:1], [60]):
        engine = make()
        engine.reserve(one)
        engine.step()
        assert engine.requests.activate(one.request_id, first)
        results = [engine.step() for _ in range(130)]
        tokens = [token for result in results for out in result.outputs for token in out.token_ids]
        failed = [failure for result in results for failure in result.failed]
        if first == [60]:
            assert tokens == [] and failed == [("json drawn", "the output does not match its grammar")]
        else:
            assert_valid(text_of([*first, *tokens]))
        assert engine.pool.counts().used == 0 and not engine.scheduler.sequences


@pytest.mark.parametrize("source", ["text", "wrong"])
def test_drafts_change_no_token(make, expected, source, monkeypatch):
    engine = make(draft_tokens=4, token_budget=64)
    every_step(engine, monkeypatch)
    if source == "wrong":  # drafts that grammars refuse, sooner or later
        lookup = "kvrelay.engine.speculation.speculation.PromptLookup.draft"
        monkeypatch.setattr(lookup, lambda self, ids, most: [len(ids) % 300, *ids[-1:], EOS, 41, 42][:most])
    widths = []
    widen = engine.drafts.widen

    def note(plan):
        plan = widen(plan)
        widths.extend(len(item.drafts) for item in plan.work)
        return plan

    monkeypatch.setattr(engine.drafts, "widen", note)
    assert serve(engine, *asked()) == expected
    assert sum(widths) > 10


def test_right_drafts_are_taken_through_the_end_of_reasoning(make, expected, monkeypatch):
    streams = {tuple(one.token_ids): [*one.token_ids, *expected[one.request_id, 0][0]] for one in asked()}
    starts = {prompt: len(prompt) for prompt in streams}

    def known(self, token_ids, most):
        prompt = next(prompt for prompt, size in starts.items() if tuple(token_ids[:size]) == prompt)
        return streams[prompt][len(token_ids) :][:most]

    engine = make(draft_tokens=4, token_budget=64)
    every_step(engine, monkeypatch)
    monkeypatch.setattr("kvrelay.engine.speculation.speculation.PromptLookup.draft", known)
    steps = []
    assert serve(engine, *asked(), between=steps.append) == expected
    assert len(steps) < 0.6 * max(len(tokens) for tokens, _, _ in expected.values())


def every_step(engine: Engine, monkeypatch) -> None:
    speculation = engine.drafts.speculation
    monkeypatch.setattr(speculation, "begins", lambda *args: True)
    monkeypatch.setattr(speculation, "lengths", lambda count, drafters: [4] * len(drafters))


def test_each_choice_is_what_it_would_be_alone(make):
    one = request("g", prompt_of(20, 11), grammar=JSON, temperature=1.0, group=Group(seeds=(1, 2, 3)))
    found = serve(make(), one)
    for choice, seed in enumerate((1, 2, 3)):
        alone = msgspec.structs.replace(one, group=None, sampling=msgspec.structs.replace(one.sampling, seed=seed))
        assert found["g", choice] == serve(make(), alone)["g", 0]
    assert len({tuple(tokens) for tokens, _, _ in found.values()}) == 3
    engine = make()

    def between(step: int) -> None:
        if step in (9, 20) and engine.scheduler.running:
            engine.preempt(tuple(engine.scheduler.running))

    assert serve(engine, one, between=between) == found and engine.scheduler.preemption.num_preemptions


def test_beams_are_refused(make):
    for own in ({"grammar": JSON}, {"allowed_token_ids": (5,)}, {"bad_words": ((5,),)}):
        one = request("b", prompt_of(5, 0), group=Group(beams=Beams(width=2, num_returned=1)), **own)
        assert make().requests.refusal(one)[0] == "invalid"


# ---- devices that compute by themselves


def test_on_an_asynchronous_device(make, expected):
    loop = serve(make(backend=ReferenceBackend("cpu")), *asked())
    assert serve(make(backend=LateBackend()), *asked()) == loop
    some = [one for one in asked() if not one.sampling.has_penalties]
    engine, steps = make(backend=LateBackend()), []
    found = serve(engine, *some, between=steps.append)
    assert found == {key: stream for key, stream in loop.items() if key != ("biased", 0)}
    assert engine.backend.num_fed > 20  # steps are launched before the tokens of the one before are known
    assert engine.backend.stream.num_waits <= len(steps)
    assert {key for key, stream in loop.items() if stream == expected[key]} >= {("few", 0), ("json", 0)}


def test_drafts_and_groups_on_an_asynchronous_device(make, monkeypatch):
    group = request("g", prompt_of(20, 11), grammar=WORDS, temperature=1.0, group=Group(seeds=(1, 2)))
    several = [*asked(), group]
    loop = serve(make(backend=ReferenceBackend("cpu")), *several)
    engine = make(backend=LateBackend(), draft_tokens=4, token_budget=64)
    every_step(engine, monkeypatch)
    assert serve(engine, *several) == loop


def test_penalties_are_looked_past_too(make):
    several = [
        request(str(n), prompt_of(6, n), frequency_penalty=0.7, temperature=n / 2, seed=n, max_tokens=20 + n)
        for n in range(3)
    ]
    engine = make(backend=LateBackend())
    assert serve(engine, *several) == serve(make(backend=ReferenceBackend("cpu")), *several)
    assert engine.backend.num_fed > 15


# ---- ends


def test_without_an_end_token_the_output_ends_with_the_grammar(make, text_of):
    spec = GrammarSpec("regex", "abc(de)?!")
    tokens, reason, stop = serve(make(), request("a", prompt_of(5, 1), grammar=spec, ignore_eos=True))["a", 0]
    assert re.fullmatch(spec.text, text_of(tokens)) and (reason, stop) == ("stop", None) and EOS not in tokens


def test_where_the_grammar_goes_on_no_end_is_drawn_that_would_end_nothing(make):
    spec = GrammarSpec("regex", "a+")
    asked = request("a", prompt_of(5, 1), grammar=spec, ignore_eos=True, temperature=1.0, max_tokens=30)
    tokens, reason, _ = serve(make(), asked)["a", 0]
    assert EOS not in tokens and len(tokens) == 30 and reason == "length"


def test_min_tokens_yields_to_the_grammar_and_no_further(make, text_of):
    sampling = {"temperature": 1.0, "seed": 3, "min_tokens": 12, "max_tokens": 40}
    tokens, reason, stop = serve(
        make(), request("a", prompt_of(5, 1), grammar=GrammarSpec("regex", "abc"), **sampling)
    )["a", 0]
    assert text_of(tokens) == "abc" and (reason, stop) == ("stop", EOS)
    tokens, reason, _ = serve(
        make(), request("a", prompt_of(5, 1), grammar=GrammarSpec("regex", "a{1,30}"), **sampling)
    )["a", 0]
    assert len(tokens) >= 12 and set(text_of(tokens)) == {"a"} and reason in ("stop", "length")


def test_bad_words_and_allowed_tokens_yield_to_the_grammar(make, text_of):
    spec = GrammarSpec("regex", "abc")
    for own in ({"bad_words": tuple((token,) for token in range(VOCAB))}, {"allowed_token_ids": (7,)}):
        tokens, reason, _ = serve(make(), request("a", prompt_of(5, 1), grammar=spec, **own))["a", 0]
        assert text_of(tokens) == "abc" and reason == "stop"


def test_max_tokens_ends_an_unfinished_output_with_length(make):
    tokens, reason, stop = serve(make(), request("a", prompt_of(5, 1), grammar=JSON, max_tokens=5))["a", 0]
    assert len(tokens) == 5 and (reason, stop) == ("length", None)


# ---- thinking


def thinking(**changes) -> Thinking:
    return Thinking(**{"start": (40,), "end": (41,), **changes})


def test_the_grammar_binds_at_once_where_the_output_does_not_begin_to_reason(make, text_of):
    found = set()
    for seed in range(6):
        one = request(
            "a",
            prompt_of(5, seed),
            grammar=WORDS,
            thinking=thinking(budget=6),
            temperature=1.5,
            seed=seed,
            logit_bias={40: (-6.0, 6.0)[seed % 2]},
        )
        tokens, reason, _ = serve(make(), one)["a", 0]
        if did_think := tokens[0] == 40:
            tokens = tokens[tokens.index(41) + 1 :]
        found.add(did_think)
        assert re.fullmatch(WORDS.text, text_of(tokens)) and reason == "stop"
    assert found == {True, False}


def test_no_end_within_reasoning_while_a_grammar_waits(make, text_of):
    one = request(
        "a", prompt_of(5, 1), grammar=WORDS, thinking=thinking(is_open=True, budget=20), logit_bias={EOS: 50.0}
    )
    tokens, reason, _ = serve(make(), one)["a", 0]
    end = tokens.index(41)
    assert EOS not in tokens[:end] and re.fullmatch(WORDS.text, text_of(tokens[end + 1 :])) and reason == "stop"
    alone = request("a", prompt_of(5, 1), thinking=thinking(is_open=True, budget=20), logit_bias={EOS: 50.0})
    assert serve(make(), alone)["a", 0] == ([EOS], "stop", EOS)  # nothing waits: it may end


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_after_its_budget_reasoning_is_ended_token_by_token(make, budget):
    marks = Thinking(start=(40,), end=(50, 51, 52), is_open=True, budget=budget)
    one = request("a", prompt_of(5, 2), thinking=marks, max_tokens=20, logit_bias={50: -50.0, EOS: -50.0})
    tokens = serve(make(), one)["a", 0][0]
    assert tokens[budget : budget + 3] == [50, 51, 52] and len(tokens) == 20
    assert 50 not in tokens[:budget]


# ---- what cannot be continued


def test_one_that_cannot_be_continued_fails_alone(make, expected, monkeypatch):
    engine = make()
    several = asked()[:3]
    for one in several:
        engine.add(one)
    engine.step()
    broken = engine.scheduler.sequences["json"]
    streams, failed = {}, []
    for step in range(400):
        if step == 12:
            broken.constraint.problem = "the output exceeds the grammar's limits"
        result = engine.step()
        failed += result.failed
        for out in result.outputs:
            streams.setdefault(out.request_id, []).extend(out.token_ids)
        engine.check()
    assert failed == [("json", "the output exceeds the grammar's limits")]
    for name in ("plain", "json drawn"):
        tokens = expected[name, 0][0]
        assert streams[name] == tokens[-len(streams[name]) :] and len(streams[name]) >= len(tokens) - 1
    assert engine.pool.counts().used == 0 and not engine.scheduler.sequences


def test_a_library_that_raises_ends_the_one_it_raises_for(make, expected, monkeypatch):
    engine, real = make(), masks.fill_masks
    for one in asked()[:3]:
        engine.add(one)
    bad = engine.scheduler.sequences["json"].constraint

    def fill_masks(rows, out):
        if any(matcher is bad._matcher and bad.num_seen > 4 for matcher, _, _ in rows):
            raise RuntimeError("no such state")
        real(rows, out)

    monkeypatch.setattr(masks, "fill_masks", fill_masks)
    results = [engine.step() for _ in range(130)]
    [(name, problem)] = [failure for result in results for failure in result.failed]
    assert name == "json" and "no such state" in problem
    tokens = [out.token_ids for result in results for out in result.outputs if out.request_id == "json drawn"]
    assert functools.reduce(operator.iadd, tokens, []) == expected["json drawn", 0][0]
    assert engine.pool.counts().used == 0 and not engine.scheduler.sequences


def test_a_continued_output_that_its_grammar_refuses_fails(make):
    engine = make()
    engine.add(request("a", prompt_of(5, 1), emitted=[70, 71, 72], grammar=JSON))
    group = Group(seeds=(1, 2), emitted=[[70], [71]])
    engine.add(request("g", prompt_of(5, 2), grammar=JSON, group=group))
    failed = [failure for _ in range(10) for failure in engine.step().failed]
    assert sorted(name for name, _ in failed) == ["a", "g"]
    engine.check()
    assert engine.pool.counts().used == 0 and not engine.scheduler.sequences and not engine.scheduler.groups


@pytest.mark.parametrize(
    "own",
    [
        {"allowed_token_ids": (VOCAB,)},
        {"bad_words": ((3,), ())},
        {"bad_words": ((-1,),)},
        {"thinking": Thinking(start=(), end=(), budget=3)},
        {"thinking": Thinking(start=(1,), end=(VOCAB,), budget=3)},
        {"thinking": Thinking(start=(1,), end=(2,), budget=-1)},
    ],
)
def test_what_makes_no_sense_is_refused(make, own):
    refusal = make().requests.refusal(request("a", prompt_of(5, 1), **own))
    assert refusal is not None and refusal[0] == "invalid" and next(iter(own)) in refusal[1]


def test_a_plain_request_has_no_constraint(make):
    engine = make()
    engine.add(request("a", prompt_of(5, 1), thinking=thinking()))
    assert engine.scheduler.sequences["a"].constraint is None
    engine.add(request("b", prompt_of(5, 1), thinking=thinking(budget=4)))
    assert isinstance(engine.scheduler.sequences["b"].constraint, Constraint)
