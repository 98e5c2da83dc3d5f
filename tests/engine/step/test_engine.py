"""The engine against Hugging Face: batched, chunked, cached, pre-empted, handed over: the same tokens."""

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.engine.step.engine import Engine
from kvrelay.hashing import block_hashes
from kvrelay.kernels.select import select_backend
from kvrelay.plane.messages import Sampling, SequenceRequest, TokenOutput
from tests.engine.tiny import greedy_oracle, tiny_llama

VOCAB = 97


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def oracle(folder):
    return greedy_oracle(folder)


@pytest.fixture(params=["reference", "cpu"])
def make(request, folder):
    backend = select_backend(request.param, "cpu", 1)

    def build(**changes) -> Engine:
        config = {"block_size": 8, "kv_memory_bytes": 64 * 8 * 3 * 2 * 2 * 16 * 4, "token_budget": 24, **changes}
        return load_engine(folder, backend, torch.float32, EngineConfig(**config))

    return build


def request(name: str, prompt: list[int], *, max_tokens: int = 12, block_size: int = 8, **sampling) -> SequenceRequest:
    options = {"temperature": 0.0, "ignore_eos": True, **sampling}
    return SequenceRequest(
        request_id=name,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        block_hashes=list(block_hashes(prompt, block_size)),
        sampling=Sampling(max_tokens=max_tokens, **options),
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed + length)).tolist()


def drain(engine: Engine) -> dict[str, list[TokenOutput]]:
    """Step until nothing is left to do."""
    outputs: dict[str, list[TokenOutput]] = {}
    for _ in range(2000):
        if not engine.scheduler.has_work:
            break
        for output in engine.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
        engine.check()
    return outputs


def tokens(outputs: list[TokenOutput]) -> list[int]:
    assert [output.position for output in outputs] == list(range(len(outputs)))
    return [token for output in outputs for token in output.token_ids]


def test_greedy_equals_hugging_face_alone_and_batched(make, oracle):
    prompts = [prompt_of(n) for n in (1, 7, 8, 9, 16, 50, 90)]
    expected = [oracle(prompt, 12) for prompt in prompts]
    engine = make()
    alone = []
    for index, prompt in enumerate(prompts):
        engine.add(request(f"alone-{index}", prompt))
        alone.append(tokens(drain(engine)[f"alone-{index}"]))
    assert alone == expected
    engine = make()
    for index, prompt in enumerate(prompts):
        engine.add(request(str(index), prompt))
    together = drain(engine)
    assert [tokens(together[str(index)]) for index in range(len(prompts))] == expected


def test_a_cached_prefix_gives_the_same_tokens_and_is_not_computed_again(make, oracle):
    engine = make()
    prompt = prompt_of(50)
    engine.add(request("a", prompt))
    cold = drain(engine)["a"]
    engine.add(request("b", prompt))
    warm = drain(engine)["b"]
    assert tokens(cold) == tokens(warm) == oracle(prompt, 12)
    assert (cold[0].cached_tokens, warm[0].cached_tokens) == (0, 48)


def test_preempted_sequences_give_the_same_tokens(make, oracle):
    engine = make(kv_memory_bytes=13 * 8 * 3 * 2 * 2 * 16 * 4)
    prompts = [prompt_of(20, seed) for seed in range(4)]
    for index, prompt in enumerate(prompts):
        engine.add(request(str(index), prompt, max_tokens=24))
    outputs = drain(engine)
    assert engine.scheduler.preemption.num_preemptions > 0
    assert [tokens(outputs[str(i)]) for i in range(4)] == [oracle(prompt, 24) for prompt in prompts]
    assert engine.pool.counts().used == 0


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 50])
def test_blocks_handed_over_continue_the_same_stream_and_corrupt_ones_do_not(make, oracle, length):
    source, target = make(), make()
    prompt = prompt_of(length)
    for corrupt in (False, True):
        source.add(request("a", prompt), hold=True, output_limit=1)
        first = drain(source)["a"][0]
        assert first.finish_reason is None
        target.reset_cache()
        target.reserve(request("a", prompt))
        [reservation] = target.step().reservations
        held = source.scheduler.held["a"].blocks
        for index, block in zip(
            range(reservation.first_block, reservation.num_blocks), reservation.target_blocks, strict=True
        ):
            target.cache.storage.tensor[block] = source.cache.storage.tensor[held[index]]
        if corrupt:
            target.cache.storage.tensor[reservation.target_blocks[0], :, 1, 0] *= -3.0
        source.abort("a")
        assert target.requests.activate("a", first.token_ids)
        rest = drain(target)["a"]
        stream = first.token_ids + [token for output in rest for token in output.token_ids]
        assert (stream == oracle(prompt, 12)) is not corrupt
        assert rest[0].position == 1
        target.reset_cache()
    assert source.pool.counts().used == target.pool.counts().used == 0


def test_a_seeded_stream_continued_elsewhere_is_the_same_stream(make):
    prompt = prompt_of(20)
    whole = make()
    whole.add(
        request(
            "a", prompt, temperature=0.9, top_p=0.95, top_k=40, seed=7, repetition_penalty=1.1, frequency_penalty=0.2
        )
    )
    expected = tokens(drain(whole)["a"])
    other = make()
    resumed = request(
        "a", prompt, temperature=0.9, top_p=0.95, top_k=40, seed=7, repetition_penalty=1.1, frequency_penalty=0.2
    )
    other.add(
        SequenceRequest(
            request_id="a",
            token_ids=prompt + expected[:5],
            num_prompt_tokens=len(prompt),
            block_hashes=list(block_hashes(prompt + expected[:5], 8)),
            sampling=resumed.sampling,
        )
    )
    outputs = drain(other)["a"]
    assert outputs[0].position == 5
    assert [t for o in outputs for t in o.token_ids] == expected[5:]
    different = make()
    different.add(
        request(
            "a", prompt, temperature=0.9, top_p=0.95, top_k=40, seed=8, repetition_penalty=1.1, frequency_penalty=0.2
        )
    )
    assert tokens(drain(different)["a"]) != expected


def test_stops_lengths_and_minimum(make, oracle):
    prompt = prompt_of(10)
    greedy = oracle(prompt, 12)
    stop = greedy[3]
    first = greedy.index(stop)
    engine = make()
    engine.add(request("stop", prompt, stop_token_ids=(stop,)))
    engine.add(request("min", prompt, stop_token_ids=(stop,), min_tokens=12))
    engine.add(request("one", prompt, max_tokens=1))
    engine.add(request("none", prompt, max_tokens=0))
    outputs = drain(engine)
    assert tokens(outputs["stop"]) == greedy[: first + 1]
    assert (outputs["stop"][-1].finish_reason, outputs["stop"][-1].stop_token) == ("stop", stop)
    assert len(tokens(outputs["min"])) == 12 and stop not in tokens(outputs["min"])
    assert tokens(outputs["one"]) == greedy[:1] and outputs["one"][0].finish_reason == "length"
    assert outputs["none"][0].token_ids == [] and outputs["none"][0].finish_reason == "length"


def test_logprobs_of_output_and_prompt_are_the_models(make, folder):
    prompt = prompt_of(30)
    engine = make()
    engine.add(request("warm", prompt))
    drain(engine)
    engine.add(request("a", prompt, max_tokens=2, logprobs=3, prompt_logprobs=2))
    outputs = drain(engine)["a"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = prompt + outputs[0].token_ids
    with torch.no_grad():
        logp = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    echoed = outputs[0].prompt_logprobs
    assert [entry.token_id for entry in echoed] == prompt[1:]
    for position, entry in enumerate(echoed):
        assert entry.logprob == pytest.approx(logp[position, entry.token_id].item(), abs=1e-3)
        assert [token for token, _ in entry.top] == logp[position].topk(2).indices.tolist()
        assert entry.rank == 1 + int((logp[position] > logp[position, entry.token_id]).sum())
    for output, row in zip(outputs, logp[len(prompt) - 1 :], strict=True):
        [entry] = output.logprobs
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-3)
        assert len(entry.top) == 3


def test_bad_requests_are_refused_with_a_reason(make):
    engine = make()
    assert (engine.requests.refusal(request("a", [1, VOCAB])) or ("",))[0] == "invalid"
    assert (engine.requests.refusal(request("a", [])) or ("",))[0] == "invalid"
    assert (engine.requests.refusal(request("a", prompt_of(256))) or ("",))[0] == "too_long"
    assert engine.requests.refusal(request("a", prompt_of(255))) is None


def test_abort_in_every_state_frees_everything(make):
    engine = make()
    engine.add(request("waiting", prompt_of(60)))
    engine.abort("waiting")
    engine.add(request("chunked", prompt_of(60)))
    engine.step()
    engine.abort("chunked")
    engine.add(request("held", prompt_of(9)), hold=True, output_limit=1)
    engine.step()
    assert engine.scheduler.held
    engine.abort("held")
    engine.reserve(request("receiving", prompt_of(9)))
    engine.step()
    engine.abort("receiving")
    assert not engine.abort("unknown")
    assert engine.pool.counts().used == 0 and not engine.scheduler.sequences
    engine.check()


def test_heads_before_tokens_in_memory_give_the_same_tokens(folder, oracle):
    backend = select_backend("reference", "cpu", 1)
    config = EngineConfig(block_size=8, kv_layout="HND", kv_memory_bytes=64 * 8 * 3 * 2 * 2 * 16 * 4, token_budget=24)
    engine = load_engine(folder, backend, torch.float32, config)
    assert engine.cache.memory.layout.order == engine.cache.fingerprint.order == "HND"
    prompt = prompt_of(50)
    for name in ("cold", "cached"):
        engine.add(request(name, prompt))
        assert tokens(drain(engine)[name]) == oracle(prompt, 12)


def test_hashes_finer_than_the_blocks_find_and_name_the_same_blocks(make, oracle):
    engine, prompt = make(), prompt_of(50)
    for name in ("cold", "warm"):
        wanted = msgspec.structs.replace(request(name, prompt, block_size=2), tokens_per_hash=2)
        engine.add(wanted)
        outputs = drain(engine)[name]
        assert tokens(outputs) == oracle(prompt, 12)
    assert outputs[0].cached_tokens == 48
    events = engine.reports.drain_events()
    whole = prompt + oracle(prompt, 12)
    assert set(events.stored) == set(block_hashes(whole[:-1], 2)[3::4])  # the last token has no KV


@pytest.mark.parametrize("step", [16, 3, -8])
def test_hashes_that_name_no_block_of_this_engine_are_refused(make, step):
    wanted = msgspec.structs.replace(request("a", prompt_of(50)), tokens_per_hash=step)
    assert make().requests.refusal(wanted) == ("invalid", f"hashes of every {step} tokens name no blocks of 8")


def test_a_prompt_that_parts_within_a_block_goes_on_in_a_copy_of_it(make, oracle):
    engine, first = make(), prompt_of(29)
    engine.add(request("a", first))
    drain(engine)
    for name, prompt in (("b", [*first[:22], *prompt_of(5, 7)]), ("c", first)):
        engine.add(request(name, prompt))
        [*outputs] = drain(engine)[name]
        assert outputs[0].cached_tokens == (22 if name == "b" else 28)
        assert [token for output in outputs for token in output.token_ids] == oracle(prompt, 12)
    assert engine.reports.load().prefix_hit_tokens == 50


def test_the_block_that_was_copied_from_is_as_it_was(make, oracle):
    engine, first = make(), prompt_of(24)
    engine.add(request("a", first))
    drain(engine)
    engine.add(request("b", [*first[:13], *prompt_of(20, 3)]))
    drain(engine)
    engine.add(request("c", [*first, 5, 6, 7]))
    outputs = drain(engine)["c"]
    assert outputs[0].cached_tokens == 24
    assert [token for output in outputs for token in output.token_ids] == oracle([*first, 5, 6, 7], 12)


def test_without_the_copy_the_tokens_are_others(make, oracle, monkeypatch):
    engine, first = make(), prompt_of(29)
    engine.add(request("a", first))
    drain(engine)
    monkeypatch.setattr(engine.cache.storage, "copy_blocks", lambda copies: None)
    prompt = [*first[:22], *prompt_of(5, 7)]
    engine.add(request("b", prompt))
    assert [token for output in drain(engine)["b"] for token in output.token_ids] != oracle(prompt, 12)


def test_the_load_reports_the_last_steps_batch_and_who_is_held(make):
    engine = make()
    assert (engine.reports.load().steps, engine.reports.load().batch_sequences, engine.reports.load().batch_tokens) == (
        0,
        0,
        0,
    )
    engine.add(request("a", prompt_of(10), max_tokens=2), hold=True, output_limit=1)
    engine.add(request("b", prompt_of(7), max_tokens=4))
    engine.reserve(request("c", prompt_of(9)))
    assert (engine.reports.load().waiting, engine.reports.load().reserving) == (3, 1)
    engine.step()
    load = engine.reports.load()
    assert (load.steps, load.batch_sequences, load.batch_tokens, load.held, load.reserving) == (1, 2, 17, 1, 0)
    engine.step()
    load = engine.reports.load()
    assert (load.steps, load.batch_sequences, load.batch_tokens) == (2, 1, 1)
