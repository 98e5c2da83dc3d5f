"""One sequence's life over real sockets: paths, order, retries, release."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from kvrelay.cluster.deployments.ingress import until_ready
from kvrelay.errors import EngineFailed, InvalidRequest, Overloaded, RequestError, WorkerLost
from kvrelay.plane import messages as wire
from kvrelay.plane.reports import LoadReport
from kvrelay.serve.requests.retries import AWAITED, AttemptFailed, Retries, Unavailable
from kvrelay.serve.workers.worker_link import Member
from kvrelay.types import Role
from tests.fakes import EOS, FINGERPRINT, FakeWorker, alphabet, expected_tokens, scripted, until
from tests.serve.conftest import collect, hold_in_line, sequence


async def test_a_sequence_is_prefilled_on_one_worker_and_decoded_on_another(make_cluster):
    cluster = await make_cluster()
    request = sequence(seed=5)
    tokens, reason = await collect(cluster.dispatcher.generate(request))
    assert (tokens, reason) == (expected_tokens(alphabet, request), "length")
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    assert (prefill.count(wire.Prefill), decode.count(wire.Reserve), decode.count(wire.Generate)) == (1, 1, 0)
    await cluster.all_released()


async def test_decode_reserves_before_prefill_is_asked(make_cluster):
    cluster = await make_cluster()
    full = wire.Refused(request_id="r1", reason="full", retry_after_s=3.0)
    cluster.decode[0].answers = [lambda message: full] * 2
    with pytest.raises(Overloaded) as caught:
        await collect(cluster.dispatcher.generate(sequence()))
    assert caught.value.status == 429
    assert cluster.prefill[0].count(wire.Prefill) == 0


async def test_a_finished_sequence_is_not_aborted_anywhere(make_cluster):
    cluster = await make_cluster()
    await collect(cluster.dispatcher.generate(sequence()))
    await cluster.dispatcher.queries.status("p0")  # answered after anything sent before
    await cluster.dispatcher.queries.status("d0")
    assert [worker.count(wire.Abort) for worker in cluster.workers] == [0, 0]


async def test_one_token_needs_no_decode_worker(make_cluster):
    cluster = await make_cluster()
    tokens, _ = await collect(cluster.dispatcher.generate(sequence(max_tokens=1)))
    assert len(tokens) == 1
    assert cluster.decode[0].count(wire.Reserve) == 0
    await cluster.all_released()


@pytest.mark.parametrize("force", ["local", "remote"])
async def test_the_path_can_be_forced(make_cluster, force):
    cluster = await make_cluster()
    request = sequence()
    tokens, _ = await collect(cluster.dispatcher.generate(request, force=force))
    assert tokens == expected_tokens(alphabet, request)
    assert cluster.decode[0].count(wire.Generate) == (force == "local")
    assert cluster.prefill[0].count(wire.Prefill) == (force == "remote")


async def test_without_prefill_workers_decode_does_it_all(make_cluster):
    cluster = await make_cluster(prefill=0)
    request = sequence()
    tokens, _ = await collect(cluster.dispatcher.generate(request))
    assert tokens == expected_tokens(alphabet, request)


async def test_a_first_token_that_is_final_frees_the_reservation(make_cluster):
    cluster = await make_cluster(script=scripted("", then_eos=True))
    tokens, reason = await collect(cluster.dispatcher.generate(sequence()))
    assert (tokens, reason) == ([EOS], "stop")
    await cluster.all_released()
    assert cluster.decode[0].count(wire.Abort) == 1


async def test_tokens_that_overtake_the_first_one_wait_for_it(make_cluster):
    cluster = await make_cluster()
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    prefill.hold_first_token.clear()
    request = sequence()
    reading = asyncio.create_task(collect(cluster.dispatcher.generate(request)))
    await prefill.until(lambda w: w.count(wire.Prefill) == 1)
    tokens = expected_tokens(alphabet, request)
    decode.send_output(request, tokens, 1, 2, is_first=False)
    decode.send_output(request, tokens, 1, 1, is_first=False)  # and once more
    await cluster.dispatcher.queries.status("d0")  # both have been delivered now
    assert not reading.done()
    prefill.hold_first_token.set()
    assert (await reading)[0] == tokens
    await cluster.all_released()


# ---- faults


async def test_a_prefill_worker_that_dies_before_the_first_token_is_replaced(make_cluster):
    cluster = await make_cluster(prefill=2)
    for worker in cluster.prefill:
        worker.hold_first_token.clear()
    request = sequence()
    reading = asyncio.create_task(collect(cluster.dispatcher.generate(request)))
    victim = await first_with(cluster.prefill, wire.Prefill)
    await victim.kill()
    other = next(w for w in cluster.prefill if w is not victim)
    other.hold_first_token.set()
    assert (await reading)[0] == expected_tokens(alphabet, request)
    assert cluster.dispatcher.stats.retries == 1
    await cluster.decode[0].until(lambda w: not w.holding)


@pytest.mark.parametrize("at", [1, 2, 7])
async def test_a_stream_goes_on_when_its_decode_worker_dies(make_cluster, at):
    cluster = await make_cluster(decode=2)
    for worker in cluster.decode:
        worker.pause_at = at
    request = sequence(seed=3)
    reading = asyncio.create_task(collect(cluster.dispatcher.generate(request)))
    victim = await first_with(cluster.decode, wire.Reserve)
    await victim.paused.wait()
    await cluster.dispatcher.queries.status(victim.worker_id)  # what it sent has arrived
    for worker in cluster.decode:
        worker.resume.set()
    await victim.kill()
    tokens, reason = await reading
    assert (tokens, reason) == (expected_tokens(alphabet, request), "length")
    again = [
        m for w in cluster.workers if w is not victim for m in w.received if isinstance(m, wire.Reserve | wire.Generate)
    ]
    assert all(m.request.num_prompt_tokens == request.num_prompt_tokens for m in again)
    await cluster.prefill[0].until(lambda w: not w.holding)


async def test_a_stream_that_gets_on_survives_any_number_of_deaths(make_cluster):
    cluster = await make_cluster(prefill=0, decode=5)
    alive, request = list(cluster.decode), sequence(seed=3)
    for worker in alive:
        worker.pause_at = 1
    reading = asyncio.create_task(collect(cluster.dispatcher.generate(request)))
    for at in (1, 2, 3, 4):
        await until(lambda: any(worker.paused.is_set() for worker in alive))
        victim = next(worker for worker in alive if worker.paused.is_set())
        await cluster.dispatcher.queries.status(victim.worker_id)  # what it sent has arrived
        alive.remove(victim)
        for worker in alive:
            worker.pause_at = at + 1
        await victim.kill()
    await until(lambda: alive[0].paused.is_set())
    alive[0].resume.set()
    assert await reading == (expected_tokens(alphabet, request), "length")
    assert cluster.dispatcher.stats.retries == 4


def test_deaths_without_a_token_in_between_end_a_request_and_a_token_starts_the_count_again():
    """A request that kills every worker must not kill all of them."""

    def deaths(retries, num_tokens):
        count = 0
        with pytest.raises(WorkerLost):
            while count < 99:
                retries.failed(AttemptFailed(f"d{count}", "lost", "gone"), num_tokens)
                count += 1
        return count

    assert deaths(Retries(), 0) == 4
    retries = Retries()
    for num_tokens in range(1, 50):
        assert retries.failed(AttemptFailed("d0", "lost", "gone"), num_tokens)
    assert deaths(retries, 49) == 3
    retries, fault = Retries(), AttemptFailed("d0", "engine", "broken")
    assert retries.failed(fault, 1) and retries.failed(fault, 2)
    with pytest.raises(EngineFailed):
        retries.failed(fault, 3)  # what a worker reports counts whether tokens come or not
    with pytest.raises(WorkerLost):
        Retries(budget=0).failed(AttemptFailed("d0", "lost", "gone"))


def test_after_new_tokens_a_worker_that_refused_earlier_may_be_chosen():
    """It may have had another role then."""
    retries = Retries()
    assert not retries.failed(AttemptFailed("d0", "draining", "takes no decode requests"))
    assert not retries.failed(AttemptFailed("", AWAITED, "no decode worker is up"))
    assert retries.excluded == {"d0"} and retries.num_waits == 1
    assert retries.failed(AttemptFailed("d1", "lost", "gone"), 7)
    assert retries.excluded == {"d1"} and retries.num_refusals == retries.num_waits == 0
    assert not retries.failed(AttemptFailed("d0", "draining", "takes no decode requests"))
    assert retries.failed(AttemptFailed("d2", "lost", "gone"), 7)  # no token since
    assert retries.excluded == {"d0", "d1", "d2"}


@pytest.mark.usefixtures("short_waits")
async def test_with_no_worker_left_the_sequence_fails_cleanly(make_cluster):
    cluster = await make_cluster()
    cluster.decode[0].pause_at = 3
    stream = cluster.dispatcher.generate(sequence())
    reading = asyncio.create_task(collect(stream))
    await cluster.decode[0].paused.wait()
    await cluster.decode[0].kill()
    with pytest.raises(WorkerLost):
        await reading
    assert cluster.dispatcher.stats.running == 0


async def test_a_failed_transfer_is_recomputed_on_the_decode_worker(make_cluster):
    cluster = await make_cluster()
    cluster.prefill[0].answers = [fail_with("transfer")]
    request = sequence()
    tokens, _ = await collect(cluster.dispatcher.generate(request))
    assert tokens == expected_tokens(alphabet, request)
    assert (cluster.prefill[0].count(wire.Prefill), cluster.decode[0].count(wire.Generate)) == (1, 1)
    await cluster.all_released()


async def test_a_forced_path_is_kept_when_tried_again(make_cluster):
    cluster = await make_cluster()
    cluster.prefill[0].answers = [fail_with("transfer")] * 2
    request = sequence()
    tokens, _ = await collect(cluster.dispatcher.generate(request, force="remote"))
    assert tokens == expected_tokens(alphabet, request)
    assert (cluster.prefill[0].count(wire.Prefill), cluster.decode[0].count(wire.Generate)) == (3, 0)
    await cluster.all_released()


async def test_the_retry_budget_is_an_end(make_cluster):
    cluster = await make_cluster(prefill=0, decode=2, retry_budget=1)
    for worker in cluster.decode:
        worker.answers = [fail_with("engine")] * 9
    with pytest.raises(EngineFailed):
        await collect(cluster.dispatcher.generate(sequence()))
    assert sum(worker.count(wire.Generate) for worker in cluster.decode) == 2
    await cluster.all_released()


async def test_what_is_not_retryable_is_not_retried(make_cluster):
    cluster = await make_cluster(prefill=0)
    cluster.decode[0].answers = [fail_with("engine", retryable=False)]
    with pytest.raises(EngineFailed):
        await collect(cluster.dispatcher.generate(sequence()))
    assert cluster.decode[0].count(wire.Generate) == 1


async def test_a_full_decode_worker_passes_the_sequence_to_another(make_cluster):
    cluster = await make_cluster(decode=2)
    refusal = [lambda m: wire.Refused(request_id=m.request.request_id, reason="full")]
    first = []

    def refuse_once(message):
        first.append(message)
        return refusal[0](message) if len(first) == 1 else None

    for worker in cluster.decode:
        worker.answers = [refuse_once]
    request = sequence()
    assert (await collect(cluster.dispatcher.generate(request)))[0] == expected_tokens(alphabet, request)
    assert sorted(worker.count(wire.Reserve) for worker in cluster.decode) == [1, 1]
    await cluster.all_released()


async def test_a_message_of_an_earlier_attempt_changes_nothing(make_cluster):
    cluster = await make_cluster(prefill=0)
    decode = cluster.decode[0]
    decode.answers = [fail_with("engine")]
    decode.pause_at = 2
    request = sequence()
    reading = asyncio.create_task(collect(cluster.dispatcher.generate(request)))
    await decode.paused.wait()
    decode.say_raw(wire.Failed(request_id="r1", code="engine", message="late", retryable=False))
    decode.say_raw(wire.Tokens(outputs=[wire.TokenOutput(request_id="r1", position=2, token_ids=[0])]))
    decode.resume.set()
    assert (await reading)[0] == expected_tokens(alphabet, request)


async def test_more_tokens_than_asked_for_are_a_workers_fault(make_cluster):
    cluster = await make_cluster(prefill=0)
    decode = cluster.decode[0]
    decode.pause_at = 0
    reading = asyncio.create_task(collect(cluster.dispatcher.generate(sequence(max_tokens=4))))
    await decode.paused.wait()
    decode.say_raw(wire.Tokens(outputs=[wire.TokenOutput(request_id="r1", position=0, token_ids=[1] * 5)]))
    with pytest.raises(EngineFailed):
        await reading
    await decode.until(lambda w: not w.holding)


# ---- ends


@pytest.mark.parametrize("stage", ["reserve", "prefill", "transfer", "decode"])
async def test_leaving_frees_both_workers_at_every_stage(make_cluster, stage):
    cluster = await make_cluster()
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    if stage == "reserve":
        decode.answers = [hold_in_line(decode)]
    elif stage == "prefill":
        prefill.hold_first_token.clear()
    elif stage == "transfer":
        prefill.peers = {"d0": FakeWorker("nowhere", Role.DECODE)}  # the KV never arrives
    else:
        decode.pause_at = 2
    reading = asyncio.create_task(collect(cluster.dispatcher.generate(sequence())))
    if stage == "reserve":
        await decode.until(lambda w: w.holding)
    elif stage == "prefill":
        await prefill.until(lambda w: w.holding)
    elif stage == "transfer":
        await prefill.until(lambda w: w.count(wire.Prefill))
    else:
        await decode.paused.wait()
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    await cluster.all_released()


@pytest.mark.parametrize("is_first", ["token", "transfer"])
async def test_a_prefill_worker_is_aborted_until_its_token_and_its_kv_have_both_arrived(make_cluster, is_first):
    cluster = await make_cluster()
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    request = sequence()

    def hold(message):
        """It has the request's blocks, and has sent its first token or not."""
        prefill.holding.add(request.request_id)
        if is_first == "transfer":
            return LoadReport(seq=2)
        token = wire.TokenOutput(request_id=request.request_id, position=0, token_ids=[97], timings=wire.Timings())
        return wire.Tokens(outputs=[token])

    prefill.answers = [hold]
    reading = asyncio.create_task(collect(cluster.dispatcher.generate(request)))
    await prefill.until(lambda w: w.holding)
    if is_first == "transfer":
        decode.commit(request.request_id)
        decode.pause_at = 1
    await cluster.dispatcher.queries.status("p0")
    await cluster.dispatcher.queries.status("d0")  # both have been delivered now
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    await prefill.until(lambda w: w.count(wire.Abort) == 1)
    await cluster.all_released()


async def test_closing_the_generator_aborts_at_once(make_cluster):
    cluster = await make_cluster()
    cluster.decode[0].pause_at = 3
    stream = cluster.dispatcher.generate(sequence())
    await anext(stream)
    await stream.aclose()
    await cluster.all_released()
    assert cluster.dispatcher.stats.outcomes["client"] == 1


async def test_a_deadline_ends_a_sequence_and_frees_it(make_cluster):
    cluster = await make_cluster(serve={"request_timeout_s": 0.05})
    cluster.decode[0].pause_at = 2
    with pytest.raises(RequestError) as caught:
        await collect(cluster.dispatcher.generate(sequence()))
    assert caught.value.status == 504
    await cluster.all_released()


async def test_too_many_sequences_are_refused(make_cluster):
    cluster = await make_cluster(router={"max_inflight": 1})
    cluster.decode[0].pause_at = 1
    first = cluster.dispatcher.generate(sequence())
    await anext(first)
    with pytest.raises(Overloaded):
        await anext(cluster.dispatcher.generate(sequence(request_id="r2")))
    await first.aclose()
    cluster.decode[0].resume.set()
    assert len((await collect(cluster.dispatcher.generate(sequence(request_id="r3"))))[0]) == 8


async def test_without_workers_the_answer_is_503(make_cluster):
    cluster = await make_cluster(prefill=0, decode=0)
    with pytest.raises(RequestError) as caught:
        await collect(cluster.dispatcher.generate(sequence()))
    assert caught.value.status == 503


async def test_a_sequence_too_long_for_every_worker_is_the_clients_fault(make_cluster):
    cluster = await make_cluster()
    with pytest.raises(InvalidRequest):
        await collect(cluster.dispatcher.generate(sequence("x" * 1100, max_tokens=100)))


# ---- membership


async def test_a_worker_that_restarts_is_used_again(make_cluster):
    cluster = await make_cluster(prefill=0)
    await cluster.decode[0].kill()
    async with asyncio.timeout(10):
        await cluster.dispatcher.workers.wait_for(lambda d: not d.is_ready())
    successor = FakeWorker("d0", Role.DECODE, epoch="e2")
    cluster.decode[0] = successor
    cluster.dispatcher.workers.set_members([await successor.start()])
    async with asyncio.timeout(10):
        await cluster.dispatcher.workers.wait_for(lambda d: d.is_ready())
    assert len((await collect(cluster.dispatcher.generate(sequence())))[0]) == 8


async def test_a_new_ingress_takes_no_request_before_it_has_a_decode_worker_or_has_waited_its_time(make_cluster):
    cluster = await make_cluster(prefill=0)
    workers = cluster.dispatcher.workers
    members = [link.member for link, _ in workers.all_links()]
    workers.set_members([])
    async with asyncio.timeout(10):
        await workers.wait_for(lambda d: not d.is_ready())
    waiting = asyncio.create_task(until_ready(workers, limit_s=60))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    workers.set_members(members)
    async with asyncio.timeout(10):
        await waiting
    assert workers.is_ready()
    workers.set_members([])
    await until_ready(workers, limit_s=0.05)


async def test_a_worker_no_longer_listed_ends_its_streams_but_gets_no_new_ones(make_cluster):
    cluster = await make_cluster(prefill=0, decode=1)
    cluster.decode[0].pause_at = 3
    reading = asyncio.create_task(collect(cluster.dispatcher.generate(sequence())))
    await cluster.decode[0].paused.wait()
    cluster.dispatcher.workers.set_members([])
    waiting = asyncio.create_task(collect(cluster.dispatcher.generate(sequence(request_id="r2"))))
    await asyncio.sleep(0.05)
    cluster.decode.append(FakeWorker("d1", Role.DECODE))
    cluster.dispatcher.workers.set_members([await cluster.decode[1].start()])
    assert len((await waiting)[0]) == 8 and cluster.decode[1].count(wire.Generate) == 1
    cluster.decode[0].resume.set()
    assert len((await reading)[0]) == 8


@pytest.mark.parametrize("code", ["draining", wire.DRAINED])
async def test_whom_a_leaving_worker_sends_away_waits_for_its_successor(make_cluster, code):
    cluster = await make_cluster(prefill=0, decode=1)
    cluster.decode[0].answers = [fail_with(code)] * 99
    waiting = asyncio.create_task(collect(cluster.dispatcher.generate(sequence())))
    await cluster.decode[0].until(lambda worker: worker.count(wire.Generate))
    cluster.decode.append(FakeWorker("d1", Role.DECODE))
    cluster.dispatcher.workers.set_members([await cluster.decode[1].start()])
    assert len((await waiting)[0]) == 8
    await cluster.all_released()


async def test_a_stream_whose_only_worker_died_and_requests_after_it_wait_for_the_successor(make_cluster):
    cluster = await make_cluster(prefill=0, decode=1)
    cluster.decode[0].pause_at = 3
    reading = asyncio.create_task(collect(cluster.dispatcher.generate(sequence())))
    await cluster.decode[0].paused.wait()
    await cluster.decode[0].kill()
    waiting = asyncio.create_task(collect(cluster.dispatcher.generate(sequence(request_id="r2"))))
    await asyncio.sleep(0.3)
    assert not reading.done() and not waiting.done()
    cluster.decode.append(FakeWorker("d1", Role.DECODE))
    dead = Member("d0", "decode", "127.0.0.1", cluster.decode[0].port)  # listed as long as it may send a heartbeat
    cluster.dispatcher.workers.set_members([dead, await cluster.decode[1].start()])
    assert (await reading)[0] == (await waiting)[0] == expected_tokens(alphabet, sequence())
    await cluster.decode[1].until(lambda worker: not worker.holding)


async def test_a_request_without_a_worker_that_may_come_is_refused_at_once(make_cluster, monkeypatch):
    monkeypatch.setattr("kvrelay.serve.requests.retries.MAX_WAITS", 1 << 30)
    cluster = await make_cluster(prefill=0, decode=1)
    cluster.dispatcher.workers.set_members([])
    await until(lambda: not cluster.dispatcher.workers.all_links())
    async with asyncio.timeout(20):
        with pytest.raises(Unavailable):
            await collect(cluster.dispatcher.generate(sequence()))


@pytest.mark.usefixtures("short_waits")
async def test_nobody_waits_longer_than_a_successor_should_take(make_cluster):
    cluster = await make_cluster(prefill=0, decode=1)
    cluster.decode[0].answers = [fail_with("draining")] * 9
    with pytest.raises(Overloaded):
        await collect(cluster.dispatcher.generate(sequence()))
    await cluster.all_released()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"block_size": 24}, "blocks have 24 tokens, but prompts are hashed by 16"),
        (
            {"fingerprint": replace(FINGERPRINT, model="another")},
            "model: 'another' != 'fake' of worker d0: let every worker",
        ),
        ({"fingerprint": replace(FINGERPRINT, dtype="float16")}, "dtype: 'float16' != 'float32'"),
        ({"claims_to_be": "someone"}, "is worker someone"),
    ],
)
async def test_a_worker_that_does_not_fit_is_not_used(make_cluster, wrong, why, caplog):
    cluster = await make_cluster(prefill=0, decode=1)
    stranger = FakeWorker("d9", Role.DECODE, **wrong)
    member = await stranger.start()
    cluster.decode.append(stranger)
    listed = Member("d0", "decode", "127.0.0.1", cluster.decode[0].port)
    cluster.dispatcher.workers.set_members([listed, member])
    await stranger.until(lambda w: w.num_greetings > 1)  # turned away once, and back
    await collect(cluster.dispatcher.generate(sequence()))
    assert [info.worker_id for info, _ in cluster.dispatcher.workers.live_workers()] == ["d0"]
    assert why in caplog.text


@pytest.mark.parametrize(
    ("other", "transfer"),
    [
        ({"block_size": 32, "fingerprint": replace(FINGERPRINT, block_size=32, order="HND")}, {}),
        ({"fingerprint": replace(FINGERPRINT, dtype="float16")}, {"convert_dtype": True}),
    ],
)
async def test_a_worker_that_differs_in_what_can_be_paired_is_used(make_cluster, other, transfer):
    cluster = await make_cluster(prefill=0, decode=1, transfer=transfer)
    cluster.decode.append(FakeWorker("d1", Role.DECODE, **other))
    members = [Member("d0", "decode", "127.0.0.1", cluster.decode[0].port), await cluster.decode[1].start()]
    cluster.dispatcher.workers.set_members(members)
    async with asyncio.timeout(10):
        await cluster.dispatcher.workers.wait_for(lambda d: len(d.live_workers()) == 2)
    cluster.dispatcher.workers.set_members(members[1:])
    request = sequence()
    assert (await collect(cluster.dispatcher.generate(request)))[0] == expected_tokens(alphabet, request)
    assert cluster.decode[1].count(wire.Generate) == 1


async def test_hashes_travel_with_the_tokens_that_each_covers(make_cluster):
    cluster = await make_cluster(prefill=0, engine={"block_size": 8})
    worker = cluster.decode[0]
    response = await cluster.client.post(
        "/v1/completions", json={"model": "fake-model", "prompt": "x" * 40, "max_tokens": 1}
    )
    assert response.status_code == 200
    request = next(message.request for message in worker.received if isinstance(message, wire.Generate))
    assert (request.tokens_per_hash, len(request.block_hashes)) == (8, 5)


def fail_with(code, *, retryable=True):
    return lambda m: wire.Failed(request_id=m.request.request_id, code=code, message="x", retryable=retryable)


async def first_with(workers, kind):
    """The worker that has got a message of this kind, once one has."""
    tasks = {asyncio.create_task(w.until(lambda w: w.count(kind))): w for w in workers}
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return tasks[done.pop()]


async def test_an_abort_goes_over_the_connection_that_the_request_came_by(make_cluster):
    """A worker that was de-listed and listed again has two: it heeds only the one that asked."""
    cluster = await make_cluster(prefill=0)
    worker = cluster.decode[0]
    worker.pause_at = 3
    stream = cluster.dispatcher.generate(sequence(max_tokens=50))
    await anext(stream)
    await worker.paused.wait()
    member = Member(worker.worker_id, worker.role.value, "127.0.0.1", worker.port)
    cluster.dispatcher.workers.set_members([])
    cluster.dispatcher.workers.set_members([member])
    async with asyncio.timeout(10):
        await cluster.dispatcher.workers.wait_for(lambda d: d.is_ready())
    await stream.aclose()
    await cluster.all_released()
