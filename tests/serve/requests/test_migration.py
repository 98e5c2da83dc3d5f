"""Running sequences move off a worker that drains: the same tokens, no gap, and nothing held afterwards."""

import asyncio

import msgspec
import pytest

from kvrelay.plane import messages as wire
from kvrelay.plane.messages import Beams, Group
from kvrelay.plane.reports import LoadReport
from kvrelay.serve.requests.migration import Running, is_crowded, move_order
from tests.fakes import alphabet, expected_tokens, scripted, until
from tests.serve.conftest import MODEL, collect, sequence

pytestmark = pytest.mark.pure


# ---- which sequences move


def test_those_with_the_most_left_go_first_and_those_that_end_soon_stay():
    sequences = [Running(10, 0.01), Running(500, 0.01), Running(90, 0.01), Running(300, 0.0), Running(1, 0.0)]
    assert move_order(sequences, move_s=0.2) == [1, 3, 2]


@pytest.mark.parametrize(
    ("load", "wanted"),
    [
        (LoadReport(seq=1, running=4, free_blocks=100), False),
        (LoadReport(seq=1, running=60, receiving=4, free_blocks=1000), True),
        (LoadReport(seq=1, running=4, waiting=1, free_blocks=100), True),
        (LoadReport(seq=1, running=4, free_blocks=8), True),
        (None, False),
    ],
)
async def test_a_worker_without_room_for_the_extra_sequence_is_crowded(make_cluster, load, wanted):
    cluster = await make_cluster()
    assert is_crowded(load, cluster.decode[0].info()) is wanted


# ---- moves


class Moving:
    """A cluster in which one sequence has been stopped in the middle of its output on one of two decode workers."""

    def __init__(self, cluster, source, target, reading):
        self.cluster, self.source, self.target, self.reading = cluster, source, target, reading

    @property
    def outcomes(self):
        return dict(self.cluster.dispatcher.stats.moves.outcomes)

    def drain(self):
        """The source takes nothing new, as it reports."""
        self.source.say_raw(LoadReport(seq=9, is_draining=True, running=1, free_blocks=100, total_blocks=1024))

    async def ends_as_if_nothing_had_happened(self, request):
        for worker in self.cluster.decode:
            worker.resume.set()
        tokens, reason = await self.reading
        assert (tokens, reason) == (expected_tokens(alphabet, request), "length")
        await self.cluster.all_released()
        assert not self.cluster.dispatcher.links.submissions and not self.cluster.dispatcher.running


async def stopped(make_cluster, request, at=3, **options):
    return await stopped_at(at, make_cluster, lambda cluster: collect(cluster.dispatcher.generate(request)), **options)


async def stopped_at(at, make_cluster, read, **options):
    cluster = await make_cluster(decode=2, **options)
    cluster.dispatcher.migrations.move_s = 0.0  # fakes are faster than any move
    for worker in cluster.decode:
        worker.pause_at = at
        worker.peers = {peer.worker_id: peer for peer in cluster.decode}
    reading = asyncio.create_task(read(cluster))
    paused = [asyncio.create_task(worker.paused.wait()) for worker in cluster.decode]
    await asyncio.wait(paused, return_when=asyncio.FIRST_COMPLETED)
    for task in paused:
        task.cancel()
    source = next(worker for worker in cluster.decode if worker.paused.is_set())
    target = next(worker for worker in cluster.decode if worker is not source)
    target.pause_at = None
    await cluster.dispatcher.queries.status(source.worker_id)  # what it sent has arrived
    return Moving(cluster, source, target, reading)


@pytest.mark.parametrize("at", [1, 2, 7, 30])
async def test_a_sequence_goes_on_elsewhere_with_its_kv(make_cluster, at):
    request = sequence(seed=3, max_tokens=40)
    moving = await stopped(make_cluster, request, at)
    moving.source.pause_at = None  # of what continues it: the original stays where it is
    moving.drain()
    tokens, reason = await moving.reading
    assert (tokens, reason) == (expected_tokens(alphabet, request), "length")
    (prefill,) = [m for m in moving.source.received if isinstance(m, wire.Prefill)]
    (reserve,) = [m for m in moving.target.received if isinstance(m, wire.Reserve)]
    assert prefill.request == reserve.request and prefill.moves == "r1"
    assert prefill.request.token_ids == request.token_ids + tokens[:at]
    assert moving.outcomes == {"moved": 1}
    assert moving.cluster.prefill[0].count(wire.Prefill) == 1  # nothing was computed again
    flows = moving.cluster.dispatcher.stats.kv_flows  # what /ui draws
    prompt, whole = ("p0", moving.source.worker_id, "fake"), (moving.source.worker_id, moving.target.worker_id, "fake")
    assert set(flows) == {prompt, whole} and flows[whole] > 0
    (record,) = moving.cluster.dispatcher.requests.newest(1)
    assert record.decode == moving.target.worker_id
    await moving.ends_as_if_nothing_had_happened(request)


@pytest.mark.parametrize("at", [11, 13, 14])  # within the stop string; before its last character
async def test_a_stop_string_may_begin_before_a_move_and_end_after_it(make_cluster, at):
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 25, "stop": ["quiet", "brown"]}
    moving = await stopped_at(
        at,
        make_cluster,
        lambda cluster: cluster.client.post("/v1/completions", json=asked),
        script=scripted("the quick brown fox jumps"),
    )
    moving.source.pause_at = None
    moving.drain()
    (choice,) = (await moving.reading).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("the quick ", "stop")
    assert moving.outcomes == {"moved": 1}
    moving.source.resume.set()
    await moving.cluster.all_released()


async def test_a_former_member_is_emptied_and_then_dropped(make_cluster):
    request = sequence(seed=3, max_tokens=40)
    moving = await stopped(make_cluster, request)
    dispatcher, gone = moving.cluster.dispatcher, moving.source.worker_id
    moving.source.pause_at = None
    members = [link.member for link in dispatcher.links.members() if link.worker_id != gone]
    dispatcher.workers.set_members(members)
    await moving.ends_as_if_nothing_had_happened(request)
    assert moving.outcomes == {"moved": 1}
    await until(lambda: not dispatcher.links.retired())


async def test_without_another_worker_it_stays_and_ends_where_it_is(make_cluster):
    request = sequence(seed=3, max_tokens=40)
    moving = await stopped(make_cluster, request)
    await moving.target.kill()
    moving.drain()
    await until(lambda: moving.outcomes.get("failed"))
    moving.source.resume.set()
    tokens, reason = await moving.reading
    assert (tokens, reason) == (expected_tokens(alphabet, request), "length")
    assert moving.cluster.dispatcher.stats.retries == 0


@pytest.mark.parametrize("reason", ["full", "draining", "invalid"])
async def test_a_target_that_refuses_changes_nothing(make_cluster, reason):
    request = sequence(seed=3, max_tokens=40)
    moving = await stopped(make_cluster, request)
    moving.target.answers = [lambda m: wire.Refused(request_id=m.request.request_id, reason=reason)]
    moving.source.pause_at = None
    moving.drain()
    await until(lambda: moving.outcomes.get("failed"))
    await moving.ends_as_if_nothing_had_happened(request)
    assert moving.cluster.dispatcher.stats.retries == 0


@pytest.mark.parametrize("who", ["source", "target"])
async def test_a_worker_that_dies_in_the_middle_of_a_move_costs_no_token(make_cluster, who):
    request = sequence(seed=3, max_tokens=40)
    moving = await stopped(make_cluster, request)
    moving.source.hold_first_token.clear()  # of what continues the sequence: the move hangs
    moving.drain()
    await moving.source.until(lambda worker: worker.count(wire.Prefill) == 1)
    victim = moving.source if who == "source" else moving.target
    moving.cluster.decode.remove(victim)
    await victim.kill()
    if who == "target":
        await until(lambda: moving.outcomes.get("failed"))
        assert not moving.reading.done()
    await moving.ends_as_if_nothing_had_happened(request)
    assert moving.cluster.dispatcher.stats.retries == (who == "source")


async def test_a_source_without_room_ends_the_original_first_and_a_failure_is_retried(make_cluster):
    request = sequence(seed=3, max_tokens=40)
    moving = await stopped(make_cluster, request)
    moving.source.say_raw(LoadReport(seq=8, is_draining=True, running=64, waiting=2, total_blocks=1024))
    moving.source.answers = [
        lambda m: wire.Failed(request_id=m.request.request_id, code="transfer", message="cut", retryable=True)
    ]
    await moving.ends_as_if_nothing_had_happened(request)
    kinds = [type(m) for m in moving.source.received if isinstance(m, wire.Prefill | wire.Abort)]
    assert kinds[:2] == [wire.Prefill, wire.Abort]
    assert moving.outcomes["failed"] == 1 and moving.cluster.dispatcher.stats.retries == 1


async def test_a_client_that_leaves_in_the_middle_of_a_move_leaves_nothing(make_cluster):
    moving = await stopped(make_cluster, sequence(seed=3, max_tokens=40))
    moving.source.hold_first_token.clear()
    moving.drain()
    await moving.source.until(lambda worker: worker.count(wire.Prefill) == 1)
    moving.reading.cancel()
    await asyncio.gather(moving.reading, return_exceptions=True)
    await moving.cluster.all_released()
    assert not moving.cluster.dispatcher.links.submissions


async def test_the_choices_of_a_group_move_together(make_cluster):
    cluster = await make_cluster(decode=2)
    cluster.dispatcher.migrations.move_s = 0.0
    request = msgspec.structs.replace(sequence(max_tokens=30), group=Group(seeds=(5, 9)))
    for worker in cluster.decode:
        worker.pause_at = 4
        worker.peers = {peer.worker_id: peer for peer in cluster.decode}
    said: dict[int, list[int]] = {0: [], 1: []}

    async def read():
        async for output in cluster.dispatcher.generate(request):
            assert output.position == len(said[output.choice])
            said[output.choice] += output.token_ids

    reading = asyncio.create_task(read())
    await until(lambda: any(worker.paused.is_set() for worker in cluster.decode))
    source = next(worker for worker in cluster.decode if worker.paused.is_set())
    await cluster.dispatcher.queries.status(source.worker_id)
    for worker in cluster.decode:
        worker.pause_at = None
    source.say_raw(LoadReport(seq=9, is_draining=True, running=2, free_blocks=100, total_blocks=1024))
    await reading
    for choice, seed in enumerate((5, 9)):
        assert said[choice] == expected_tokens(alphabet, sequence(max_tokens=30, seed=seed))
    assert dict(cluster.dispatcher.stats.moves.outcomes) == {"moved": 1}
    await cluster.all_released()


async def test_a_beam_search_stays(make_cluster):
    one = msgspec.structs.replace(sequence(max_tokens=10), group=Group(beams=Beams(width=2, num_returned=1)))
    moving = await stopped(make_cluster, one, 1)
    moving.drain()
    await asyncio.sleep(0.1)
    assert moving.outcomes == {} and moving.target.count(wire.Reserve) == 0
    moving.reading.cancel()
    await asyncio.gather(moving.reading, return_exceptions=True)


async def test_no_more_than_two_sequences_of_a_worker_move_at_once(make_cluster):
    cluster = await make_cluster(decode=2)
    cluster.dispatcher.migrations.move_s = 0.0
    source, target = cluster.decode
    for worker in cluster.decode:
        worker.pause_at = 2
        worker.peers = {peer.worker_id: peer for peer in cluster.decode}
    dispatcher = cluster.dispatcher
    target_member = next(link.member for link in dispatcher.links.members() if link.worker_id == target.worker_id)
    others = [link.member for link in dispatcher.links.members() if link.worker_id != target.worker_id]
    dispatcher.workers.set_members(others)  # so that all begin on one
    requests = [sequence(seed=n, max_tokens=40, request_id=f"r{n}") for n in range(5)]
    reading = [asyncio.create_task(collect(dispatcher.generate(one))) for one in requests]
    await source.until(lambda worker: len(worker.holding) == 5)
    await until(lambda: all(one.attempt is not None and one.attempt.is_decoding for one in dispatcher.running))
    dispatcher.workers.set_members([*others, target_member])
    await dispatcher.workers.wait_for(lambda d: len(d.live_workers()) == 3)
    source.hold_first_token.clear()
    source.say_raw(LoadReport(seq=9, is_draining=True, running=5, free_blocks=100, total_blocks=1024))
    await source.until(lambda worker: worker.count(wire.Prefill) == 2)
    await asyncio.sleep(0.2)
    assert source.count(wire.Prefill) == 2 and target.count(wire.Reserve) == 2
    for worker in cluster.decode:
        worker.pause_at = None
        worker.resume.set()
    source.hold_first_token.set()
    for one, task in zip(requests, reading, strict=True):
        assert (await task)[0] == expected_tokens(alphabet, one)
    await cluster.all_released()
