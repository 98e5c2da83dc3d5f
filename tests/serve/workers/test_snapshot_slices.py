"""Snapshots go in a little at a time on the ingress's loop: others run in between, and what happens meanwhile is
not lost.
"""

import asyncio
import itertools
from functools import partial

import pytest

from kvrelay.plane import messages as wire
from kvrelay.plane.reports import KvEvents
from kvrelay.router.index.indexed_worker import SLICE
from kvrelay.router.index.prefix_index import PrefixIndex
from kvrelay.router.types import IndexState
from kvrelay.serve.workers.queries import SLICE_S, run_in_slices
from kvrelay.types import Role
from tests.fakes import FakeWorker, alphabet
from tests.router.index.index_cases import kv_snapshot, match
from tests.serve.conftest import collect, sequence
from tests.serve.workers.test_several_ingresses import another_ingress, becomes_true, chain

CHAIN = chain("c", 20 * SLICE)


class Clock:
    """Each look at it takes so long."""

    def __init__(self, step_s):
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self):
        self.now_s += self.step_s
        return self.now_s


@pytest.mark.parametrize(("slice_s", "slices"), [(SLICE_S / 4, 4), (2 * SLICE_S, 1)])
async def test_others_run_whenever_a_millisecond_is_over(slice_s, slices):
    index = PrefixIndex(schedule=partial(run_in_slices, clock=Clock(slice_s)))
    index.add_worker("w", max_blocks=len(CHAIN))
    index.apply_snapshot("w", kv_snapshot(1, CHAIN))
    seen = [0]
    while index.state("w") is not IndexState.EXACT and len(seen) < 100:
        await asyncio.sleep(0)
        seen.append(index.num_blocks("w"))
    steps = {after - before for before, after in itertools.pairwise(seen)}
    assert len(seen) > 20 / slices and max(steps) == slices * SLICE


async def test_a_slice_that_fails_ends_no_other():
    index = PrefixIndex(schedule=run_in_slices)
    failures, loop = [], asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
    for name in ("w1", "w2"):
        index.add_worker(name, max_blocks=len(CHAIN))
    index.apply_snapshot("w1", kv_snapshot(1, [*CHAIN[:SLICE], object(), *CHAIN]))
    index.apply_snapshot("w2", kv_snapshot(1, CHAIN))
    await becomes_true(lambda: index.state("w2") is IndexState.EXACT)
    assert [type(error) for error in failures] == [TypeError]
    assert index.state("w1") is IndexState.STALE
    assert index.apply_audit("w1", 1, [], []) is False
    index.apply_snapshot("w1", kv_snapshot(1, CHAIN))
    await becomes_true(lambda: index.state("w1") is IndexState.EXACT)


async def test_an_ingress_serves_while_a_snapshot_in_parts_goes_in_and_events_count(make_cluster):
    """The worker's news between its parts: what it stores and removes meanwhile is known in the end."""
    cluster = await make_cluster(prefill=1, decode=1)
    worker = cluster.prefill[0]
    worker.cached, worker.kv_seq, worker.part_hashes = list(CHAIN), 4, 100
    async with another_ingress(cluster) as ingress:
        index = ingress.router.index
        await worker.until(lambda one: one.count(wire.Subscribe) == 2)  # its snapshot is on its way
        worker.say_raw(KvEvents(seq=5, removed=[CHAIN[5000]]))
        worker.say_raw(KvEvents(seq=6, stored=chain("d", 3)))
        tokens = await collect(ingress.generate(sequence("x" * 200)))
        assert tokens
        await becomes_true(lambda: index.num_blocks("p0") == len(CHAIN) + 2)
        await becomes_true(lambda: index.state("p0") is IndexState.EXACT)
        assert (match(index, CHAIN)["p0"], match(index, chain("d", 9))["p0"]) == (5000, 3)


async def test_a_worker_that_dies_half_way_and_one_in_its_place(make_cluster):
    cluster = await make_cluster(prefill=1, decode=1)
    index, member = cluster.dispatcher.router.index, [link.member for link, _ in cluster.dispatcher.workers.all_links()]
    worker = FakeWorker("p1", Role.PREFILL, alphabet)
    worker.cached, worker.kv_seq = list(CHAIN), 1
    cluster.dispatcher.workers.set_members([*member, await worker.start()])
    await becomes_true(lambda: "p1" in {view.worker_id for view in cluster.dispatcher.router.workers()})
    await worker.aclose()
    await becomes_true(lambda: "p1" not in {view.worker_id for view in cluster.dispatcher.router.workers()})
    again = FakeWorker("p1", Role.PREFILL, alphabet, epoch="e2")
    again.cached, again.kv_seq = CHAIN[:7], 1
    try:
        cluster.dispatcher.workers.set_members([*member, await again.start()])
        await becomes_true(lambda: match(index, CHAIN) == {"p1": 7})
        await becomes_true(lambda: len(index) == 7)  # the last of the old one is gone
    finally:
        await again.aclose()
