"""A decode worker that hands a sequence back: the stream goes on over the hop, and it is nobody's fault."""

import asyncio

from kvrelay.plane import messages as wire
from kvrelay.plane.reports import LoadReport
from tests.fakes import alphabet, expected_tokens
from tests.serve.conftest import collect, sequence


async def until_paused(cluster, request):
    """Its reading, once its decode worker has said some tokens."""
    decode = cluster.decode[0]
    decode.pause_at = 3
    reading = asyncio.create_task(collect(cluster.dispatcher.generate(request)))
    await decode.paused.wait()
    return reading


def return_to_prefill(decode, request):
    decode.end(request.request_id)
    decode.pause_at = None
    decode.say_raw(wire.Failed(request_id=request.request_id, code=wire.PREEMPTED, message="x", retryable=True))


async def test_a_sequence_that_is_handed_back_is_prefilled_again_and_goes_on(make_cluster):
    cluster = await make_cluster(retry_budget=0)
    request = sequence(seed=3)
    reading = await until_paused(cluster, request)
    return_to_prefill(cluster.decode[0], request)
    tokens, reason = await reading
    assert (tokens, reason) == (expected_tokens(alphabet, request), "length")
    first, second = [m for m in cluster.decode[0].received if isinstance(m, wire.Reserve)]
    assert (first.request.num_prefill_returns, second.request.num_prefill_returns) == (0, 1)
    assert second.request.num_output_tokens == 3 and second.prefill_tokens_per_s > 0
    assert cluster.prefill[0].count(wire.Prefill) == 2 and cluster.dispatcher.stats.retries == 0
    await cluster.all_released()


async def test_its_turn_comes_again_however_often_there_is_no_room(make_cluster):
    cluster = await make_cluster(retry_budget=0)
    request = sequence()
    full = [
        lambda m: wire.Refused(request_id=m.request.request_id, reason="full", retry_after_s=0.001) for _ in range(4)
    ]
    decode, reading = cluster.decode[0], await until_paused(cluster, request)
    decode.answers = full
    return_to_prefill(decode, request)
    assert (await reading)[0] == expected_tokens(alphabet, request)
    assert decode.count(wire.Reserve) + decode.count(wire.Generate) == 6 and not decode.answers
    await cluster.all_released()


async def test_without_a_prefill_worker_left_it_is_computed_where_it_can_be(make_cluster):
    cluster = await make_cluster(retry_budget=0)
    request = sequence()
    decode, reading = cluster.decode[0], await until_paused(cluster, request)
    await cluster.prefill[0].kill()
    async with asyncio.timeout(10):
        await cluster.dispatcher.workers.wait_for(lambda d: len(d.live_workers()) == 1)
    return_to_prefill(decode, request)
    assert (await reading)[0] == expected_tokens(alphabet, request)
    assert decode.count(wire.Generate) == 1


async def test_metrics_tell_what_became_of_pre_empted_sequences(make_cluster):
    cluster = await make_cluster()
    cluster.decode[0].say_raw(
        LoadReport(
            seq=2,
            preempted={"swap": 3, "return-to-prefill": 1},
            swapped=2,
            swapped_blocks=5,
            swapped_bytes=640,
            swap_out_s=0.5,
            recomputed_tokens=7,
        )
    )
    await cluster.dispatcher.queries.status("d0")  # what came before it has been taken note of
    text = (await cluster.client.get("/metrics")).text

    def value(name: str, *labels: str) -> float:
        [line] = [
            line
            for line in text.splitlines()
            if line.startswith(name + "{") and all(one in line for one in ('"d0"', *labels))
        ]
        return float(line.rpartition(" ")[2])

    assert value("kvrelay_worker_preempted_total", 'mode="swap"') == 3
    assert value("kvrelay_worker_preempted_total", 'mode="return-to-prefill"') == 1
    assert value("kvrelay_worker_swapped") == 2 and value("kvrelay_worker_swapped_blocks") == 5
    assert value("kvrelay_worker_swapped_bytes") == 640
    assert value("kvrelay_worker_swap_seconds_total", 'direction="out"') == 0.5
    assert value("kvrelay_worker_recomputed_tokens_total") == 7
