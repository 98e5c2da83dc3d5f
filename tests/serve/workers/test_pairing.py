"""The ingress pairs workers by itself, never sends a request where KV cannot go, and tells why."""

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from kvrelay.plane import messages as wire
from kvrelay.plane.reports import KvPathLoad, LoadReport, PairsSeen
from kvrelay.serve.workers.pairs import Verdict
from kvrelay.types import Role
from tests.fakes import FakeWorker, until

BODY = {"model": "fake-model", "prompt": "hello world", "max_tokens": 4}


async def complete(cluster, **headers):
    return await cluster.client.post("/v1/completions", json=BODY, headers=headers)


async def health(cluster):
    return await cluster.client.get("/health")


async def until_settled(cluster):
    async with asyncio.timeout(10):
        await cluster.dispatcher.workers.wait_for(lambda d: d.pairs.book.is_settled())


async def metrics(cluster):
    """{name: [(labels, value)]} of every family."""
    text = (await cluster.client.get("/metrics")).text
    return {f.name: [(s.labels, s.value) for s in f.samples] for f in text_string_to_metric_families(text)}


async def test_each_prefill_worker_is_told_each_decode_workers_address(make_cluster):
    cluster = await make_cluster(prefill=2, decode=2)
    for worker in cluster.prefill:
        asked = [message for message in worker.received if isinstance(message, wire.Pair)]
        assert {(m.worker_id, m.epoch, m.host, m.kv_port) for m in asked} == {
            ("d0", "e1", "127.0.0.1", 7),
            ("d1", "e1", "127.0.0.1", 7),
        }
    assert {pair.verdict for pair in cluster.dispatcher.workers.pairs.book.pairs} == {Verdict.OK}


async def test_a_pair_that_is_not_reported_yet_is_used(make_cluster):
    cluster = await make_cluster(prefill=1)
    late = FakeWorker("d9", Role.DECODE)
    cluster.prefill[0].pairing = lambda message: None
    cluster.prefill[0].peers["d9"] = late
    members = [*[link.member for link in cluster.dispatcher.links.members()], await late.start()]
    cluster.decode.append(late)
    cluster.dispatcher.workers.set_members([member for member in members if member.worker_id != "d0"])
    async with asyncio.timeout(10):
        await cluster.dispatcher.workers.wait_for(lambda d: {i.worker_id for i, _ in d.live_workers()} == {"p0", "d9"})
    assert [pair.verdict for pair in cluster.dispatcher.workers.pairs.book.pairs] == [Verdict.UNKNOWN]
    assert (await health(cluster)).status_code == (await complete(cluster)).status_code == 200
    assert late.count(wire.Reserve) == 1


async def test_when_no_pair_fits_clients_get_503_with_the_field_and_the_remedy(make_cluster):
    cluster = await make_cluster(prefill=1, decode=2, pairings=[FakeWorker.incompatible])
    for headers in ({}, {"x-kvrelay-prefill": "local"}, {"x-kvrelay-prefill": "remote"}):
        answer = await complete(cluster, **headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (503, "kv_incompatible", "server_error")
        assert "dtype: 'float32' != 'bfloat16'" in error["message"] and "same settings" in error["message"]
        assert answer.headers["retry-after"]
    told = await health(cluster)
    assert (
        told.status_code == 503
        and told.json()["status"] == "no KV can travel"
        and len(told.json()["incompatible_pairs"]) == 2
    )
    assert all(worker.count(wire.Generate) == worker.count(wire.Reserve) == 0 for worker in cluster.decode)
    assert not cluster.dispatcher.workers.is_ready()


async def test_a_passing_fault_is_no_reason_to_refuse(make_cluster):
    def lost(worker, message):
        return worker.incompatible(message, reason="PeerLost")

    cluster = await make_cluster(pairings=[lost])
    assert (await health(cluster)).status_code == (await complete(cluster)).status_code == 200


async def test_one_misfit_among_pairs_that_fit_is_routed_around_and_explained(make_cluster):
    cluster = await make_cluster(prefill=2, pairings=[FakeWorker.incompatible])
    for _ in range(6):
        told = (await complete(cluster, **{"x-kvrelay-explain": "1"})).json()["kvrelay"]
        assert told["prefill"] == "p1"
        assert [(pair["prefill"], pair["decode"]) for pair in told["incompatible_pairs"]] == [("p0", "d0")]
        assert "dtype" in told["incompatible_pairs"][0]["reason"]
    assert (await health(cluster)).json()["incompatible_pairs"]


async def test_a_prefill_worker_that_is_turned_away_is_no_licence_to_decode_alone(make_cluster):
    cluster = await make_cluster(prefill=0)
    stranger = FakeWorker("p9", Role.PREFILL, block_size=24)
    members = [*[link.member for link in cluster.dispatcher.links.members()], await stranger.start()]
    cluster.prefill.append(stranger)
    cluster.dispatcher.workers.set_members(members)
    async with asyncio.timeout(10):
        await cluster.dispatcher.workers.wait_for(lambda d: bool(d.pairs.book.rejected()))
    answer = await complete(cluster)
    assert answer.status_code == 503 and "block_size" in answer.json()["error"]["message"]
    assert (await health(cluster)).status_code == 503
    cluster.dispatcher.workers.set_members(members[:1])
    assert (await complete(cluster)).status_code == 200


async def test_when_the_misfit_leaves_the_others_serve_again(make_cluster):
    cluster = await make_cluster(prefill=1, pairings=[FakeWorker.incompatible])
    assert (await complete(cluster)).status_code == 503
    members = [link.member for link in cluster.dispatcher.links.members()]
    cluster.dispatcher.workers.set_members([member for member in members if member.worker_id != "p0"])
    assert (await complete(cluster)).status_code == 200  # no prefill worker: aggregated, as before


async def test_every_pair_can_be_measured_anew(make_cluster):
    cluster = await make_cluster(prefill=2)
    for speed, worker in zip((2e9, 3e9), cluster.prefill, strict=True):
        worker.pairing = lambda message, worker=worker, speed=speed: worker.fits(message, bytes_per_s=speed)
    assert (await cluster.client.post("/kvrelay/pairs")).json()["is_settled"] is False
    await until_settled(cluster)
    view = (await cluster.client.get("/kvrelay/pairs")).json()
    assert [pair["paths"][0]["bytes_per_s"] for pair in view["pairs"]] == [2e9, 3e9]
    for worker in cluster.prefill:
        assert [message.is_probe for message in worker.received if isinstance(message, wire.Pair)] == [False, True]


async def test_the_table_needs_the_api_key(make_cluster):
    cluster = await make_cluster(serve={"api_key": "k"})
    for method in ("GET", "POST"):
        assert (await cluster.client.request(method, "/kvrelay/pairs")).status_code == 401
    answer = await cluster.client.get("/kvrelay/pairs", headers={"authorization": "Bearer k"})
    assert answer.status_code == 200 and answer.json()["pairs"][0]["verdict"] == "ok"


async def test_the_decode_workers_own_figures_keep_the_table_fresh(make_cluster):
    cluster = await make_cluster()
    report = cluster.prefill[0].fits(wire.Pair(worker_id="d0", epoch="e1", host="h", kv_port=7), bytes_per_s=5e9)
    cluster.decode[0].say_raw(PairsSeen(reports=[report]))
    async with asyncio.timeout(10):
        while (await cluster.client.get("/kvrelay/pairs")).json()["pairs"][0]["paths"][0]["bytes_per_s"] != 5e9:
            await asyncio.sleep(0)


async def test_metrics_of_pairs_name_both_ends_the_path_and_whether_it_works(make_cluster):
    cluster = await make_cluster(prefill=2, pairings=[FakeWorker.incompatible])
    found = await metrics(cluster)
    assert sorted(found["kvrelay_kvtransfer_pairs"], key=lambda sample: sample[0]["source"]) == [
        ({"source": "p0", "target": "d0", "path": "none", "ok": "false"}, 1),
        ({"source": "p1", "target": "d0", "path": "fake", "ok": "true"}, 1),
    ]
    ends = {"source": "p1", "target": "d0", "path": "fake"}
    assert found["kvrelay_kvtransfer_path_bytes_per_second"] == [(ends, 1e9)]
    assert found["kvrelay_kvtransfer_path_latency_seconds"] == [(ends, 1e-5)]


async def test_metrics_of_transfers_are_told_by_worker_and_path_and_refusals_by_reason(make_cluster):
    cluster = await make_cluster()
    report = {
        "kv_leases": 3, "kv_expired_leases": 2, "kv_refused": {"checksum": 4, "expired": 1}, "kv_check_s": 1.0,
        "kv_paths": [KvPathLoad("shm", 1000, 0.5, 0.125, 0.25, 0), KvPathLoad("tcp", 10, 0.25, 0.0, 0.5, 7)],
    }  # fmt: skip
    for worker in (cluster.prefill[0], cluster.decode[0]):
        worker.say_raw(LoadReport(seq=2, total_blocks=9, **report))
    await until(lambda: not any(load.seq != 2 for _, load in cluster.dispatcher.workers.live_workers()))
    found = await metrics(cluster)

    def of(name, label, worker="d0"):
        samples = found[f"kvrelay_kvtransfer_{name}"]
        return {labels.get(label): value for labels, value in samples if labels["worker"] == worker}

    assert of("bytes", "path") == {"shm": 1000, "tcp": 10}
    assert of("read_seconds", "path") == {"shm": 0.5, "tcp": 0.25}
    assert of("exposed_seconds", "path") == {"shm": 0.125, "tcp": 0.0}
    assert of("check_seconds", "path") == {"shm": 0.25, "tcp": 0.5, "any": 0.25}  # any: as a source
    assert of("retries", "path") == {"shm": 0, "tcp": 7}
    refusals = of("refusals", "reason")
    assert (refusals["checksum"], refusals["expired"], sum(refusals.values())) == (4, 1, 5)  # others begin with 0
    assert of("leases", "role") == {"decode": 3} and of("lease_expired", "role") == {"decode": 2}
