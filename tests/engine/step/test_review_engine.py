"""What must not kill an engine, hang a client, or burn a core."""

import asyncio
import inspect
import math

import pytest
import torch

from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker import thread as engine_thread
from kvrelay.engine.worker.thread import EngineThread
from kvrelay.hashing import block_hashes
from kvrelay.kernels.select import select_backend
from kvrelay.plane.messages import Sampling, SequenceRequest

NAN = math.nan


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    folder = tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")
    backend = select_backend("reference", "cpu", 1)

    def build(num_blocks: int = 64, **changes) -> Engine:
        probe = load_engine(folder, backend, torch.float32, EngineConfig(kv_memory_bytes=4 << 20))
        size = probe.cache.memory.layout.block_bytes
        return load_engine(
            folder, backend, torch.float32, EngineConfig(**{"kv_memory_bytes": num_blocks * size, **changes})
        )

    return build


def request(name: str, prompt: list[int], hashes: list[bytes] | None = None, **sampling) -> SequenceRequest:
    return SequenceRequest(
        request_id=name,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        block_hashes=list(block_hashes(prompt, 16)) if hashes is None else hashes,
        sampling=Sampling(**{"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, **sampling}),
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def drain(engine: Engine) -> dict[str, list]:
    outputs: dict[str, list] = {}
    for _ in range(2000):
        for output in engine.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
        engine.check()
        if not engine.scheduler.has_work:
            break
    return outputs


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": NAN},
        {"temperature": math.inf},
        {"temperature": -1.0},
        {"top_k": 2**63},
        {"top_p": NAN},
        {"min_p": NAN},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": NAN},
        {"presence_penalty": NAN},
        {"frequency_penalty": math.inf},
        {"logit_bias": {99_999: 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {5: NAN}},
        {"min_tokens": 3, "stop_token_ids": (99_999,)},
        {"logprobs": 99_999},
        {"logprobs": -1},
        {"prompt_logprobs": 99_999},
        {"prompt_logprobs": -2},
    ],
    ids=str,
)
def test_sampling_that_no_kernel_can_carry_out_is_refused_and_never_reaches_the_engine(make, sampling):
    engine = make()
    refusal = engine.requests.refusal(request("a", prompt_of(20), **sampling))
    assert refusal is not None and refusal[0] == "invalid" and refusal[1]


def test_the_limits_themselves_are_allowed(make):
    engine = make()
    vocab = engine.model.spec.vocab_size
    widest = request(
        "a",
        prompt_of(20),
        logprobs=vocab,
        prompt_logprobs=vocab,
        top_k=2**31 - 1,
        logit_bias={vocab - 1: -100.0, 0: 100.0},
        stop_token_ids=(vocab - 1,),
        min_tokens=2,
        temperature=100.0,
        max_tokens=2**62,
        seed=-(2**63),
    )
    assert engine.requests.refusal(widest) is None


@pytest.mark.parametrize("hashes", [[b"x" * 16] * 9, [b""], [b"x" * 16, b"short"]], ids=["many", "empty", "short"])
def test_hashes_that_cannot_be_of_these_tokens_are_refused(make, hashes):
    refusal = make().requests.refusal(request("a", prompt_of(40), hashes))
    assert refusal is not None and refusal[0] == "invalid"


def test_a_prompt_preempted_halfway_reports_each_prompt_logprob_once(make):
    engine = make(num_blocks=8, token_budget=16)
    long = prompt_of(60, 2)
    engine.add(request("old", prompt_of(15, 1), max_tokens=60))
    engine.add(request("young", long, prompt_logprobs=1, max_tokens=2))
    alone = make()
    alone.add(request("young", long, prompt_logprobs=1, max_tokens=2))
    expected = drain(alone)["young"][0].prompt_logprobs
    engine.step()
    engine.step()
    young = engine.scheduler.sequences["young"]
    assert 0 < young.num_computed < len(long)
    engine.runner.forget(young)
    engine.scheduler.preempt_group((young,))  # as when the older one needs its blocks
    outputs = drain(engine)["young"]
    found = outputs[0].prompt_logprobs
    assert [entry.token_id for entry in found] == long[1:]
    # torch's sums depend on how many rows a chunk has
    assert [entry.logprob for entry in found] == pytest.approx([entry.logprob for entry in expected], rel=1e-4)
    assert [[token for token, _ in entry.top] for entry in found] == [
        [token for token, _ in entry.top] for entry in expected
    ]


def test_a_sequence_that_ends_with_the_token_it_arrived_with_reports_it(make):
    """A decode worker with a shorter context than the prefill worker: nothing is left to decode."""
    engine = make(max_model_len=33)
    prompt = prompt_of(32)
    assert engine.requests.refusal(request("a", prompt)) is None
    engine.reserve(request("a", prompt))
    assert engine.step().reservations
    assert engine.requests.activate("a", [7])
    outputs = drain(engine)["a"]
    assert [(o.position, o.token_ids, o.finish_reason) for o in outputs] == [(1, [], "length")]
    assert engine.pool.counts().used == 0


def test_every_running_sequence_gets_a_token_in_every_step(make):
    """However many are handed over, no more are seated than one step has tokens for."""
    engine = make(token_budget=16, max_running=64, num_blocks=200)
    for index in range(40):
        engine.reserve(request(str(index), prompt_of(4, index), max_tokens=40))
    for reservation in engine.step().reservations:
        engine.requests.activate(reservation.request_id, [7])
    seated = list(engine.scheduler.running)
    assert len(seated) > 1
    for _ in range(5):
        before = [seq.num_output for seq in seated]
        engine.step()
        assert [seq.num_output for seq in seated] == [count + 1 for count in before]


async def until(condition):
    """Wait until `condition()`, which may be a coroutine function, is true: at most ten seconds."""
    async with asyncio.timeout(60):
        while not (await found if inspect.isawaitable(found := condition()) else found):
            await asyncio.sleep(0.01)


async def test_an_engine_that_can_only_wait_sleeps(make, monkeypatch):
    """The head of the line needs blocks that are lent to a transfer: nothing to do until someone acts."""
    monkeypatch.setattr(engine_thread, "_IDLE_S", 0.05)
    engine = make(num_blocks=4)
    thread = EngineThread(lambda: engine, on_step=lambda result: None, on_failure=lambda error: None)
    await thread.start()
    try:
        await thread.call(lambda e: e.add(request("held", prompt_of(33), max_tokens=4), hold=True, output_limit=1))
        await until(lambda: thread.call(lambda e: bool(e.scheduler.held)))
        steps, checks = 0, []
        step, check = engine.step, engine.check

        def counted(*on_reserved):
            nonlocal steps
            steps += 1
            return step(*on_reserved)

        engine.step, engine.check = counted, lambda: (checks.append(steps), check())
        await thread.call(lambda e: e.add(request("next", prompt_of(33, 1), max_tokens=2)))
        await until(lambda: checks and checks[-1])  # the thread has been idle for a while since the last step
        assert steps <= 3
        await thread.call(lambda e: e.abort("held"))
        await until(lambda: thread.call(lambda e: not e.scheduler.sequences))
    finally:
        await thread.aclose()


def test_a_prompt_may_fill_the_whole_pool_when_one_token_is_drawn(make):
    engine = make(num_blocks=4)
    full = request("full", prompt_of(64), prompt_logprobs=0, max_tokens=1)
    assert engine.requests.refusal(full) is None
    engine.add(full)
    (output,) = drain(engine)["full"]
    assert len(output.prompt_logprobs) == 63 and engine.pool.counts().used == 0
    assert engine.requests.refusal(request("more", prompt_of(64), max_tokens=2)) is not None


async def test_a_reservation_queued_is_granted_when_the_last_running_sequence_ends(make):
    """Nobody sends a message then: the engine must not sleep on it."""
    engine = make(num_blocks=4)
    granted: list[str] = []

    def on_step(result):
        granted.extend(reservation.request_id for reservation in result.reservations)

    thread = EngineThread(lambda: engine, on_step=on_step, on_failure=lambda error: None)
    await thread.start()
    try:
        await thread.call(
            lambda e: (
                e.add(request("first", prompt_of(40), max_tokens=8)),
                e.reserve(request("next", prompt_of(40, 1))),
            )
        )
        await until(lambda: granted)
        assert granted == ["next"]
        assert await thread.call(lambda e: e.abort("next"))
        assert await thread.call(lambda e: e.pool.counts().used) == 0
    finally:
        await thread.aclose()


async def test_an_engine_at_rest_counts_its_blocks_once(make, monkeypatch):
    monkeypatch.setattr(engine_thread, "_IDLE_S", 0.05)
    engine, failures = make(), []
    thread = EngineThread(lambda: engine, on_step=lambda result: None, on_failure=failures.append)
    checks, check = [], engine.check
    engine.check = lambda: (checks.append(1), check())
    timeouts, sooner = [], engine_thread._sooner
    monkeypatch.setattr(engine_thread, "_sooner", lambda *each: timeouts.append(sooner(*each)) or timeouts[-1])
    await thread.start()
    try:
        await thread.call(lambda e: e.add(request("a", prompt_of(20))))
        await until(lambda: checks and timeouts[-1] is None)  # it waits for messages alone
        assert thread.is_alive and 1 <= len(checks) <= 3
        await thread.call(lambda e: e.pool.allocate(1))  # a block that nobody owns: leaked
        await until(lambda: failures)
        assert "1 blocks leaked" in str(failures[0]) and not thread.is_alive
    finally:
        await thread.aclose()
