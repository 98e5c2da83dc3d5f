"""Groups in a real engine: choices equal requests of their own, beams equal Hugging Face's, and nothing is held at the
end.
"""

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.engine.step.engine import Engine
from kvrelay.hashing import block_hashes
from kvrelay.kernels.select import select_backend
from kvrelay.plane.messages import Beams, Group, Sampling, SequenceRequest, TokenOutput
from tests.engine.tiny import tiny_llama

VOCAB, EOS, BLOCK = 97, 2, 8
BLOCK_BYTES = BLOCK * 3 * 2 * 2 * 16 * 4
SEEDS = (11, 12, 13, 14)
PARAMS = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def hugging_face(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def search(prompt: list[int], width: int, count: int, max_tokens: int, **options) -> list[list[int]]:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            num_beams=width,
            num_return_sequences=count,
            pad_token_id=0,
            **options,
        )
        return [up_to_the_end(row[len(prompt) :].tolist()) for row in out]

    return search


def up_to_the_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


@pytest.fixture
def make(folder):
    backend = select_backend("reference", "cpu", 1)

    def build(blocks: int = 128, **changes) -> Engine:
        config = {"block_size": BLOCK, "kv_memory_bytes": blocks * BLOCK_BYTES, "token_budget": 24, **changes}
        return load_engine(folder, backend, torch.float32, EngineConfig(**config))

    return build


def request(name: str, prompt: list[int], group: Group | None = None, *, max_tokens: int = 20, **sampling):
    return SequenceRequest(
        request_id=name,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        block_hashes=list(block_hashes(prompt, BLOCK)),
        sampling=Sampling(max_tokens=max_tokens, **sampling),
        group=group,
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed + length)).tolist()


def drain(engine: Engine, on_step=lambda step: None) -> list[TokenOutput]:
    outputs: list[TokenOutput] = []
    for step in range(3000):
        if not engine.scheduler.has_work:
            break
        on_step(step)
        outputs += engine.step().outputs
        engine.check()
    assert not engine.scheduler.groups and not engine.scheduler.sequences
    assert engine.pool.counts().used == 0
    return outputs


def streams(outputs: list[TokenOutput], name: str = "g") -> dict[int, list[int]]:
    """Tokens by choice; each position came once."""
    found: dict[int, list[int]] = {}
    for output in outputs:
        if output.request_id == name:
            tokens = found.setdefault(output.choice, [])
            assert output.position == len(tokens)
            tokens += output.token_ids
    return found


def alone(make, prompt: list[int], seeds=SEEDS, **options) -> dict[int, list[int]]:
    """What requests of their own with these seeds give."""
    found = {}
    for choice, seed in enumerate(seeds):
        engine = make()
        engine.add(request("g", prompt, seed=seed, **{**PARAMS, **options}))
        found[choice] = streams(drain(engine))[0]
    return found


@pytest.mark.parametrize("length", [1, 8, 50])
def test_the_choices_of_a_group_are_those_of_requests_of_their_own(make, length):
    prompt, engine = prompt_of(length), make()
    engine.add(request("g", prompt, Group(seeds=SEEDS), **PARAMS))
    outputs = drain(engine)
    assert streams(outputs) == alone(make, prompt)
    assert len({tuple(tokens) for tokens in streams(outputs).values()}) > 1
    assert [output.num_left for output in outputs if output.finish_reason] == [3, 2, 1, 0]
    assert outputs[0].timings is not None and outputs[0].cached_tokens == 0


def test_the_prompt_is_computed_once_and_its_full_blocks_are_held_once(make):
    engine, tokens, used = make(), 0, 0
    engine.add(request("g", prompt_of(50), Group(seeds=SEEDS), max_tokens=4, ignore_eos=True, **PARAMS))
    while engine.scheduler.has_work:
        tokens += engine.step().num_tokens
        used = max(used, engine.pool.counts().used)
    assert tokens == 50 + 4 * 3  # each choice's first token comes with the prompt
    assert used == 6 + 4  # six full blocks of the prompt, and a copy of the seventh for each


def test_a_preempted_group_is_preempted_and_comes_back_as_one(make):
    prompt = prompt_of(20)
    expected = alone(make, prompt, max_tokens=30, ignore_eos=True)
    engine = make(24)
    engine.add(request("first", prompt_of(40), max_tokens=90, temperature=0.0, ignore_eos=True))
    engine.add(request("g", prompt, Group(seeds=SEEDS), max_tokens=30, ignore_eos=True, **PARAMS))

    def look(step: int) -> None:
        waiting = [seq for seq in engine.scheduler.waiting if seq.group is not None]
        assert all(seq is seq.group.leader and not seq.group.members for seq in waiting)

    outputs = drain(engine, look)
    assert engine.scheduler.preemption.num_preemptions > 0
    assert streams(outputs) == expected


def test_a_group_that_does_not_fit_at_once_is_decoded_part_by_part(make):
    prompt = prompt_of(20)
    expected = alone(make, prompt, max_tokens=40, ignore_eos=True)
    engine = make(16)
    engine.add(request("g", prompt, Group(seeds=SEEDS), max_tokens=40, ignore_eos=True, **PARAMS))
    assert streams(drain(engine)) == expected
    assert engine.scheduler.preemption.num_preemptions > 0


def test_a_group_is_continued_on_another_worker(make):
    prompt = prompt_of(20)
    expected = alone(make, prompt, ignore_eos=True)
    emitted = [expected[0][:9], expected[1][:1], [], expected[3]]
    engine = make()
    engine.add(request("g", prompt, Group(seeds=SEEDS, emitted=emitted, ended=(3,)), ignore_eos=True, **PARAMS))
    rest = {choice: [] for choice in range(3)}
    for output in drain(engine):
        assert output.position == len(emitted[output.choice]) + len(rest[output.choice])
        rest[output.choice] += output.token_ids
    assert [emitted[choice] + rest[choice] for choice in range(3)] == [expected[choice] for choice in range(3)]


@pytest.mark.parametrize("length", [8, 13])
@pytest.mark.parametrize("beams", [None, Beams(width=4, num_returned=2)])
def test_a_group_goes_over_the_hop_as_one_and_a_corrupt_block_changes_it(make, length, beams):
    group = Group(beams=beams) if beams else Group(seeds=SEEDS)
    options = {"max_tokens": 12, **({} if beams else PARAMS)}
    prompt, whole = prompt_of(length), make()
    whole.add(request("g", prompt, group, **options))
    expected = streams(drain(whole))
    results = []
    for is_corrupt in (False, True):
        source, target = make(), make()
        source.add(request("g", prompt, group, **options), hold=True, output_limit=1)
        firsts = source.step().outputs
        while not firsts:
            firsts = source.step().outputs
        target.reserve(request("g", prompt, group, **options))
        [reservation] = target.step().reservations
        held = source.scheduler.held["g"].blocks
        for index, block in zip(range(reservation.num_blocks), reservation.target_blocks, strict=False):
            target.cache.storage.tensor[block] = source.cache.storage.tensor[held[index]]
        if is_corrupt:
            target.cache.storage.tensor[reservation.target_blocks[0], :, 1, 0] *= -3.0
        source.abort("g")
        source.check()
        assert source.pool.counts().used == 0 and not source.scheduler.groups
        tokens = [token for output in firsts for token in output.token_ids]
        assert target.requests.activate("g", tokens, firsts[0].candidates)
        ended = {output.choice for output in firsts if output.finish_reason}
        rest = [output for output in drain(target) if output.choice not in ended]
        results.append(streams(firsts + rest))
    assert results[0] == expected
    assert results[1] != expected


def test_an_aborted_group_or_choice_leaves_nothing(make):
    for when in range(5):
        engine = make()
        engine.add(request("g", prompt_of(30), Group(seeds=SEEDS), ignore_eos=True, **PARAMS))
        for _ in range(when):
            engine.step()
        assert engine.abort("g")
        assert drain(engine) == []
    engine = make()
    engine.add(request("g", prompt_of(30), Group(seeds=SEEDS), max_tokens=9, ignore_eos=True, **PARAMS))
    engine.requests.abort_choice("g", 2)  # before its members are there
    for _ in range(4):
        engine.step()
    engine.requests.abort_choice("g", 0)
    ends = [output for output in drain(engine) if output.finish_reason]
    assert sorted(output.choice for output in ends) == [1, 3]


CASES = [
    (2, {}),
    (2, {"early_stopping": "never"}),
    (2, {"length_penalty": -1.0}),
    (4, {}),
    (4, {"early_stopping": True}),
    (4, {"length_penalty": 2.0, "early_stopping": "never"}),
    (16, {}),
    (16, {"length_penalty": 0.0, "early_stopping": True}),
]


@pytest.mark.parametrize(("width", "options"), CASES)
def test_beam_search_equals_hugging_face(make, hugging_face, width, options):
    engine = make(256)
    count = min(width, 3)
    prompts = [prompt_of(length) for length in (1, 16, 40)]
    for index, prompt in enumerate(prompts):
        beams = Beams(width=width, num_returned=count, **options)
        engine.add(request(f"g{index}", prompt, Group(beams=beams), max_tokens=16))
    outputs = drain(engine)
    for index, prompt in enumerate(prompts):
        got = streams(outputs, f"g{index}")
        assert [got[choice] for choice in range(count)] == hugging_face(prompt, width, count, 16, **options)


def test_preempted_beams_find_the_same(make, hugging_face):
    prompt, engine = prompt_of(20), make(22)
    beams = Beams(width=4, num_returned=4)
    engine.add(request("first", prompt_of(80), max_tokens=60, temperature=0.0, ignore_eos=True))
    engine.add(request("g", prompt, Group(beams=beams), max_tokens=24, min_tokens=20))
    outputs = drain(engine)
    assert engine.scheduler.preemption.num_preemptions > 0
    assert list(streams(outputs).values()) == hugging_face(prompt, 4, 4, 24, min_new_tokens=20)


def test_what_can_never_run_is_refused(make):
    engine, prompt = make(16, max_running=8), prompt_of(20)

    def refusal(group: Group, **options):
        return (engine.requests.refusal(request("g", prompt, group, **options)) or ("",))[0]

    assert refusal(Group(seeds=SEEDS)) == ""
    assert refusal(Group(seeds=tuple(range(9)))) == "invalid"
    assert refusal(Group(beams=Beams(width=4, num_returned=4)), max_tokens=60) == "too_long"
    assert refusal(Group(beams=Beams(width=4, num_returned=5))) == "invalid"
    assert refusal(Group()) == "invalid"
    continued = msgspec.structs.replace(request("g", prompt, Group(seeds=SEEDS)), num_prompt_tokens=10)
    assert (engine.requests.refusal(continued) or ("",))[0] == "invalid"
