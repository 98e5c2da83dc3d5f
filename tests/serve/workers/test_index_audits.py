"""The ingress audits its workers: who disagrees is asked for everything, who does not answer harms nobody."""

import pytest

from kvrelay.errors import WorkerLost
from kvrelay.plane import messages as wire
from kvrelay.plane.reports import IN_POOL, NOWHERE, KvEvents
from kvrelay.router.index.indexed_worker import AuditCounts
from kvrelay.router.types import IndexState
from tests.fakes import until
from tests.router.index.index_cases import match

CHAIN = [f"h{i}".encode().ljust(16) for i in range(4)]


async def holding(make_cluster):
    """A cluster whose prefill worker p0 is known to hold a chain."""
    cluster = await make_cluster()
    index = cluster.dispatcher.router.index
    await until(lambda: index.state("p0") is IndexState.EXACT)
    cluster.dispatcher.router.apply_events("p0", KvEvents(seq=1, stored=CHAIN))
    return cluster, cluster.prefill[0], index


async def test_an_answer_that_agrees_is_counted(make_cluster):
    cluster, worker, index = await holding(make_cluster)
    worker.audited = 1, [IN_POOL] * len(CHAIN)
    await cluster.dispatcher.workers.audits.audit("p0", seed=1)
    counts = index.audit_counts("p0")
    assert counts.compared == len(set(next(m for m in worker.received if isinstance(m, wire.Audit)).hashes)) > 0
    assert (counts.wrong, counts.missed, worker.count(wire.Subscribe)) == (0, 0, 1)
    metrics = (await cluster.client.get("/metrics")).text
    assert f'kvrelay_router_audited_hashes_total{{result="agreed",worker="p0"}} {counts.compared}.0' in metrics


async def test_an_answer_that_disagrees_fetches_a_snapshot(make_cluster):
    cluster, worker, index = await holding(make_cluster)
    worker.audited = 1, [NOWHERE] * len(CHAIN)
    await cluster.dispatcher.workers.audits.audit("p0", seed=1)
    await worker.until(lambda w: w.count(wire.Subscribe) == 2)
    assert index.audit_counts("p0").wrong == index.audit_counts("p0").compared > 0
    await cluster.dispatcher.queries.status("p0")  # comes after the snapshot, which has nothing, as of an older event
    assert match(index, CHAIN) == {}


async def test_a_stale_worker_is_asked_for_its_number_and_a_snapshot(make_cluster):
    cluster, worker, index = await holding(make_cluster)
    index.mark_stale("p0")
    worker.audited = 0, []
    await cluster.dispatcher.workers.audits.audit("p0", seed=1)
    await worker.until(lambda w: w.count(wire.Subscribe) == 2)
    assert [message.hashes for message in worker.received if isinstance(message, wire.Audit)] == [[]]


async def test_workers_are_asked_in_turn_and_one_that_says_nothing_is_passed_over(make_cluster, monkeypatch):
    monkeypatch.setattr("kvrelay.serve.workers.queries.AUDIT_S", 0.01)
    _, worker, index = await holding(make_cluster)
    worker.audited = 1, [IN_POOL] * len(CHAIN)
    await until(lambda: index.audit_counts("p0") != AuditCounts())
    assert index.state("p0") is IndexState.EXACT


async def test_an_audit_of_who_is_not_there_fails_as_any_question(make_cluster):
    cluster = await make_cluster()
    with pytest.raises(WorkerLost):
        await cluster.dispatcher.queries.audit("nobody", CHAIN)
