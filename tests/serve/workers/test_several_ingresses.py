"""Several ingresses over the same workers, on real sockets: they share load, and one that starts anew is soon as
good as ever.
"""

import asyncio
import contextlib
import time

import pytest

from kvrelay.plane import messages as wire
from kvrelay.plane.reports import KvEvents, LoadReport
from kvrelay.router.decision.router import Router
from kvrelay.router.types import Decision, IndexState, RouteRequest
from kvrelay.serve.requests.dispatcher import Dispatcher
from kvrelay.serve.workers.membership import Placer
from kvrelay.serve.workers.queries import run_in_slices
from kvrelay.types import Role
from tests.fakes import SECRET, FakeWorker, alphabet, until
from tests.serve.conftest import collect, sequence


@contextlib.asynccontextmanager
async def another_ingress(cluster, *, wait=True):
    """One more dispatcher over the workers of a cluster, with an empty router."""
    settings = cluster.settings
    tokens_per_hash = settings.tokens_per_hash
    router = Router(settings.router, tokens_per_hash=tokens_per_hash, slo=settings.slo, schedule=run_in_slices)
    dispatcher = Dispatcher(router, SECRET, settings)
    await dispatcher.start()
    dispatcher.workers.set_members([link.member for link, _ in cluster.dispatcher.workers.all_links()])
    try:
        if wait:
            async with asyncio.timeout(10):
                await dispatcher.workers.wait_for(lambda d: len(d.live_workers()) == len(cluster.workers))
        yield dispatcher
    finally:
        await dispatcher.aclose()


async def becomes_true(condition, within_s=10.0):
    """Looks again and again; the time that it took, seconds."""
    began_s = time.monotonic()
    await until(condition, within_s)
    return time.monotonic() - began_s


def seen(dispatcher, worker_id):
    """(queued prompt tokens, sequences) that this ingress counts at a worker."""
    view = next(view for view in dispatcher.router.workers() if view.worker_id == worker_id)
    return view.load["queued_tokens"], view.load["sequences"]


def asked(name, chain, num_tokens=None):
    """A request for a prompt of these blocks, and of some tokens more."""
    return RouteRequest(name, tuple(chain), num_tokens or 16 * len(chain) + 40, 8)


def chain(name, count=20):
    return [f"{name}-{index}".encode().ljust(16) for index in range(count)]


# ---- load


async def test_an_ingress_counts_what_another_has_sent_before_any_report_shows_it(make_cluster):
    cluster = await make_cluster()
    cluster.prefill[0].hold_first_token.clear()
    prompt = "x" * 300
    async with another_ingress(cluster) as other:
        reading = asyncio.create_task(collect(cluster.dispatcher.generate(sequence(prompt, max_tokens=4))))
        await becomes_true(lambda: seen(other, "p0") == (300, 1) and seen(other, "d0")[1] == 1)
        assert not reading.done()
        cluster.prefill[0].hold_first_token.set()
        await reading
        await becomes_true(lambda: seen(other, "p0") == (0, 0) == seen(other, "d0"))
    assert all(worker.count(LoadReport) == 0 for worker in cluster.workers)


@pytest.mark.parametrize("is_shared", [True, False])
async def test_two_ingresses_do_not_choose_the_same_idle_worker(make_cluster, is_shared, monkeypatch):
    if not is_shared:
        monkeypatch.setattr(Placer, "apply_others", lambda self, worker_id, others: None)
    cluster = await make_cluster(prefill=2, decode=1)
    for worker in cluster.prefill:
        worker.hold_first_token.clear()
    async with another_ingress(cluster) as other:
        streams = [asyncio.create_task(collect(cluster.dispatcher.generate(sequence("x" * 400, request_id="mine"))))]
        if is_shared:
            await becomes_true(lambda: seen(other, "p0")[0] + seen(other, "p1")[0] == 400)
        streams.append(asyncio.create_task(collect(other.generate(sequence("y" * 400, request_id="other")))))
        await becomes_true(lambda: sum(worker.count(wire.Prefill) for worker in cluster.prefill) == 2)
        assert sorted(worker.count(wire.Prefill) for worker in cluster.prefill) == ([1, 1] if is_shared else [0, 2])
        for worker in cluster.prefill:
            worker.hold_first_token.set()
        await asyncio.gather(*streams)


async def test_what_an_ingress_had_sent_is_counted_no_more_when_it_goes(make_cluster):
    cluster = await make_cluster()
    cluster.prefill[0].hold_first_token.clear()
    async with another_ingress(cluster) as other:
        reading = asyncio.create_task(collect(other.generate(sequence("x" * 300))))
        await becomes_true(lambda: seen(cluster.dispatcher, "p0") == (300, 1))
    await asyncio.gather(reading, return_exceptions=True)
    await becomes_true(lambda: seen(cluster.dispatcher, "p0") == (0, 0) == seen(cluster.dispatcher, "d0"))


async def test_a_single_ingress_tells_nobody_anything(make_cluster):
    cluster = await make_cluster()
    await collect(cluster.dispatcher.generate(sequence()))
    await cluster.dispatcher.queries.status("p0")  # answered after anything sent before
    assert all(worker.count(wire.Assigned) == 0 for worker in cluster.workers)


async def test_many_changes_at_once_are_one_message(make_cluster, monkeypatch):
    monkeypatch.setattr("kvrelay.plane.messages.SHARE_LOAD_S", 1.0)
    cluster = await make_cluster()
    cluster.prefill[0].hold_first_token.clear()
    async with another_ingress(cluster) as other:
        await becomes_true(lambda: cluster.prefill[0].count(wire.Assigned) == 2)  # each its first word
        streams = [
            asyncio.create_task(
                collect(other.generate(sequence(str(index) * 100, request_id=f"r{index}"), force="remote"))
            )
            for index in range(9)
        ]
        await becomes_true(lambda: seen(cluster.dispatcher, "p0") == (900, 9))
        assert cluster.prefill[0].count(wire.Assigned) <= 4
        cluster.prefill[0].hold_first_token.set()
        await asyncio.gather(*streams)


# ---- restart


async def test_a_restarted_ingress_decides_as_one_that_never_restarted(make_cluster):
    """By events since the beginning, or by one snapshot: the same index, the same choices, the same cost to the
    last bit.
    """
    cluster = await make_cluster(prefill=3, decode=2)
    prompts = {name: chain(name) for name in "abcdef"}
    for seq, (name, worker) in enumerate(zip(prompts, [*cluster.workers, cluster.prefill[0]], strict=True), start=1):
        for start in range(0, 20, 5):
            worker.kv_seq += 1
            worker.cached += prompts[name][start : start + 5]
            worker.say_raw(KvEvents(seq=worker.kv_seq, stored=prompts[name][start : start + 5]))
        worker.say_raw(LoadReport(seq=seq, free_blocks=1024, total_blocks=1024, prefill_tokens_per_s=1000.0 * seq))
    old = cluster.dispatcher.router
    await becomes_true(lambda: sum(view.indexed_blocks for view in old.workers()) == 120)
    for worker in cluster.workers:  # the newcomer hears the same reports
        await cluster.dispatcher.queries.status(worker.worker_id)
    async with another_ingress(cluster) as restarted:
        took_s = await becomes_true(lambda: sum(view.indexed_blocks for view in restarted.router.workers()) == 120)
        assert took_s < 10.0  # one snapshot
        assert {view.index_state for view in restarted.router.workers()} == {IndexState.EXACT}
        for number, worker in enumerate(cluster.workers, start=1):
            worker.say_raw(LoadReport(seq=9, free_blocks=1024, total_blocks=1024, prefill_tokens_per_s=1000.0 * number))
            for dispatcher in (cluster.dispatcher, restarted):
                await dispatcher.queries.status(worker.worker_id)  # the report has arrived
        for name, blocks in prompts.items():
            choices = [decided(router, asked(name, blocks)) for router in (old, restarted.router)]
            assert (choices[0].prefill, choices[0].decode) == (choices[1].prefill, choices[1].decode)
            assert choices[0].terms == choices[1].terms
            assert choices[1].cached_tokens_prefill + choices[1].cached_tokens_decode > 0, "nothing was found"


def decided(router, request):
    choice = router.select_and_reserve(request, 0.0)
    router.on_end(request.request_id)
    assert isinstance(choice, Decision)
    return choice


class SlowWorker(FakeWorker):
    """Says nothing to whoever subscribes until it is let."""

    def __init__(self, *args, **info):
        super().__init__(*args, **info)
        self.may_answer = asyncio.Event()

    def _handle(self, connection, message):
        if isinstance(message, wire.Subscribe) and not self.may_answer.is_set():
            self._spawn(sequence(request_id="snapshot"), self._answer_later(connection, message))
        else:
            super()._handle(connection, message)

    async def _answer_later(self, connection, message):
        await self.may_answer.wait()
        super()._handle(connection, message)


async def test_a_worker_whose_snapshot_is_late_holds_up_nobody(make_cluster):
    """Meanwhile the others serve with their hits, and it serves without."""
    cluster = await make_cluster(prefill=1, decode=1)
    quick, prompt = cluster.prefill[0], chain("a")
    slow = SlowWorker("p1", Role.PREFILL, alphabet)
    slow.peers = quick.peers
    for worker in (quick, slow):
        worker.cached, worker.kv_seq = list(prompt), 1
    members = [link.member for link, _ in cluster.dispatcher.workers.all_links()] + [await slow.start()]
    settings = cluster.settings
    ingress = Dispatcher(Router(settings.router, tokens_per_hash=settings.tokens_per_hash), SECRET, settings)
    try:
        await ingress.start()
        ingress.workers.set_members(members)
        states = {"p0": IndexState.EXACT, "d0": IndexState.EXACT, "p1": IndexState.STALE}
        await becomes_true(lambda: {v.worker_id: v.index_state for v in ingress.router.workers()} == states)
        choice = decided(ingress.router, asked("early", prompt))
        assert (choice.prefill, choice.cached_tokens_prefill) == ("p0", 320)
        await collect(ingress.generate(sequence("x" * 200)))
        cold = RouteRequest("cold", tuple(chain("b")), 360, 8, excluded=frozenset({"p0"}), force="remote")
        assert decided(ingress.router, cold).prefill == "p1"
        slow.may_answer.set()
        await becomes_true(lambda: all(v.index_state is IndexState.EXACT for v in ingress.router.workers()))
        again = RouteRequest("again", tuple(prompt), 360, 8, excluded=frozenset({"p0"}), force="remote")
        assert decided(ingress.router, again).cached_tokens_prefill == 320
    finally:
        await ingress.aclose()
        await slow.aclose()
