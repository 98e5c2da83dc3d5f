"""SLO admission over HTTP: the field `slo`, 429 with its reason, what is told and counted; and nothing at all while
it is off.
"""

import asyncio
import json

import pytest

from kvrelay.plane import messages as wire
from kvrelay.plane.reports import LoadReport
from kvrelay.router.slo.forecast import MIN_EVIDENCE
from kvrelay.router.slo.learning import DurationFit
from tests.serve.api.test_api import chat, complete, events
from tests.serve.requests.test_dispatcher import first_with

OUT_OF_REACH_S = 1e-6
SLO = {
    "classes": {
        "tight": {"ttft_s": OUT_OF_REACH_S},
        "fast": {"ttft_s": OUT_OF_REACH_S, "degrade_to": "slow"},
        "slow": {"ttft_s": 60.0},
    }
}
TIGHT = {"slo": {"class": "tight"}}


async def measured(make_cluster, **sections):
    """A cluster whose workers have computed some prompts: their times are known."""
    cluster = await make_cluster(**{"slo": SLO} | sections)
    for _ in range(MIN_EVIDENCE * len(cluster.prefill)):
        assert (await complete(cluster)).status_code == 200
    return cluster


def asked_of(cluster):
    return sum(worker.count(kind) for worker in cluster.workers for kind in (wire.Reserve, wire.Prefill, wire.Generate))


async def samples(cluster, name):
    """A metric's lines, without its name."""
    text = (await cluster.client.get("/metrics")).text
    return {line.removeprefix(name) for line in text.splitlines() if line.startswith(name)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [chat, complete])
async def test_an_slo_out_of_reach_is_429_before_any_worker_is_asked(make_cluster, ask, stream):
    cluster = await measured(make_cluster)
    before = asked_of(cluster)
    response = await ask(cluster, {**TIGHT, "stream": stream})
    assert response.status_code == 429
    assert 1 <= int(response.headers["retry-after"]) <= 60
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "slo_unreachable", "slo")
    assert error["slo"]["class"] == "tight" and error["slo"]["missed"] == ["ttft"]
    assert error["slo"]["wanted"]["ttft_s"] == OUT_OF_REACH_S < error["slo"]["predicted"]["ttft_s"]
    assert asked_of(cluster) == before
    await cluster.all_released()


async def test_what_is_not_measured_yet_is_admitted(make_cluster):
    cluster = await make_cluster(slo=SLO)
    assert (await complete(cluster, TIGHT)).status_code == 200


async def test_a_request_of_another_class_or_of_none_is_served(make_cluster):
    cluster = await measured(make_cluster)
    answer = await complete(cluster, {"slo": {"class": "slow"}})
    assert answer.status_code == 200 and "kvrelay" not in answer.json()
    assert (await complete(cluster)).status_code == 200


async def test_a_request_may_loosen_its_class(make_cluster):
    cluster = await measured(make_cluster)
    assert (await complete(cluster, {"slo": {"class": "tight", "ttft_s": 60.0}})).status_code == 200
    assert (await complete(cluster, {"slo": {"class": "slow", "ttft_s": OUT_OF_REACH_S}})).status_code == 429


@pytest.mark.parametrize("ask", [chat, complete])
@pytest.mark.parametrize(
    ("slo", "verdict", "degraded_to"),
    [({"class": "fast"}, "degraded", "slow"), ({"class": "tight", "on_miss": "queue"}, "queued", None)],
)
async def test_who_is_served_without_the_promise_is_told(make_cluster, ask, slo, verdict, degraded_to):
    cluster = await measured(make_cluster)
    whole = (await ask(cluster, {"slo": slo})).json()["kvrelay"]
    last = events(await ask(cluster, {"slo": slo, "stream": True}))[-1]["kvrelay"]
    for told in (whole, last):
        assert told.keys() == {"slo"}
        assert (told["slo"]["verdict"], told["slo"].get("degraded_to")) == (verdict, degraded_to)


async def test_the_forecast_is_explained(make_cluster):
    cluster = await measured(make_cluster)
    answer = await complete(cluster, {"slo": {"class": "slow"}}, **{"x-kvrelay-explain": "1"})
    told = answer.json()["kvrelay"]
    assert told["forecast"]["ttft_us"] > 0 and told["forecast"]["tpot_us"] is None
    assert told["slo"]["verdict"] == "admitted"


async def test_several_samples_are_admitted_as_one_request(make_cluster):
    cluster = await measured(make_cluster)
    assert (await complete(cluster, {"slo": {"class": "slow"}, "n": 3, "prompt": ["ab", "cd"]})).status_code == 200
    assert cluster.dispatcher.stats.slo_verdicts == {("slow", "admitted"): 1, ("default", "admitted"): MIN_EVIDENCE}
    assert (await complete(cluster, {**TIGHT, "n": 3})).status_code == 429
    await cluster.all_released()
    stats = cluster.dispatcher.stats
    assert stats.outcomes["slo"] == stats.hopeless == 3  # no number of workers would meet that


async def test_verdicts_outcomes_and_errors_are_metrics(make_cluster):
    cluster = await measured(make_cluster)
    await complete(cluster, {"slo": {"class": "slow"}})
    await complete(cluster, TIGHT)
    verdicts = await samples(cluster, "kvrelay_slo_verdicts_total")
    assert {'{class="tight",verdict="refused"} 1.0', '{class="slow",verdict="admitted"} 1.0'} <= verdicts
    assert '{class="slow",met="true"} 1.0' in await samples(cluster, "kvrelay_slo_outcomes_total")
    assert '{outcome="slo"} 1.0' in await samples(cluster, "kvrelay_requests_total")
    counts = await samples(cluster, "kvrelay_slo_prediction_ratio_count")
    assert counts == {'{time="ttft"} 1.0', '{time="tpot"} 0.0'}  # those before had no prediction yet
    assert len(await samples(cluster, "kvrelay_slo_prediction_error_ratio")) == 2


async def test_a_slow_decode_worker_is_refused_for(make_cluster):
    cluster = await measured(make_cluster)
    for batch in (1, 2, 3, 4):
        report = LoadReport(
            seq=1 + batch, running=batch, decode_step_s=0.1 * batch, total_blocks=1024, free_blocks=1000
        )
        cluster.decode[0].say_raw(report)
    await cluster.dispatcher.queries.status("d0")  # all of it has been delivered now
    error = (await complete(cluster, {"slo": {"tpot_s": 0.01}})).json()["error"]
    assert error["slo"]["missed"] == ["tpot"]
    assert (await complete(cluster, {"slo": {"tpot_s": 100.0}})).status_code == 200


async def test_who_was_let_in_is_not_refused_after_a_workers_death(make_cluster):
    cluster = await measured(make_cluster, prefill=2)
    for worker in cluster.prefill:
        worker.hold_first_token.clear()
        worker.received.clear()
    slo = {"slo": {"class": "slow"}}
    asking = asyncio.create_task(complete(cluster, slo))
    victim = await first_with(cluster.prefill, wire.Prefill)
    other = next(worker for worker in cluster.prefill if worker is not victim)
    now_s = cluster.dispatcher.clock()
    for known in cluster.dispatcher.router.forecast._workers.values():
        known.compute = DurationFit((1.0, 1.0, 1.0))
        for _ in range(5):
            known.learn_prefill((1.0, 5.0, 12.5), 500.0, now_s)
    async with asyncio.timeout(10):
        assert (await complete(cluster, slo)).status_code == 429  # for who comes now
    await victim.kill()
    other.hold_first_token.set()
    assert (await asking).status_code == 200
    assert cluster.dispatcher.stats.retries == 1


@pytest.mark.parametrize(
    ("slo", "param"),
    [
        ({"class": "gold"}, "slo.class"),
        ({"class": ""}, "slo.class"),
        ({"class": 5}, "slo.class"),
        ({"ttft_s": 0}, "slo.ttft_s"),
        ({"ttft_s": "1"}, "slo.ttft_s"),
        ({"tpot_s": -1}, "slo.tpot_s"),
        ({"tpot_s": 1e400}, "slo.tpot_s"),
        ({"on_miss": "drop"}, "slo.on_miss"),
        ({"ttft": 1}, "slo.ttft"),
        ("tight", "slo"),
    ],
)
async def test_a_wrong_field_is_named(make_cluster, slo, param):
    cluster = await make_cluster(slo=SLO)
    body = json.dumps({"model": "fake-model", "prompt": "a", "slo": slo}).encode()  # 1e400 becomes Infinity
    response = await cluster.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    if slo != {"tpot_s": 1e400}:  # that is no JSON
        assert response.json()["error"]["param"] == param


async def test_while_it_is_off_nothing_changes(make_cluster):
    cluster = await make_cluster()
    for _ in range(MIN_EVIDENCE + 1):
        answer = await complete(cluster, **{"x-kvrelay-explain": "1"})
        assert answer.status_code == 200
        assert not {"slo", "forecast"} & answer.json()["kvrelay"].keys()
    assert cluster.dispatcher.router.forecast is None
    assert await samples(cluster, "kvrelay_slo") == set()
    refused = await complete(cluster, {"slo": {"ttft_s": 1.0}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "slo")


# ---- groups: as wide as they are


@pytest.mark.parametrize(
    ("fields", "width"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": 2, "best_of": 5, "temperature": 1.0}, 5),
        ({"n": 2, "best_of": 4, "use_beam_search": True}, 4),
    ],
)
async def test_a_group_has_as_many_seats_as_it_has_sequences_until_they_end(make_cluster, fields, width):
    cluster = await make_cluster()
    decode = cluster.decode[0]
    decode.pause_at = 2
    asked = asyncio.create_task(complete(cluster, {"max_tokens": 8, **fields}))
    await decode.paused.wait()
    views = [view.load["sequences"] for view in cluster.dispatcher.router.workers() if view.role == "decode"]
    assert sum(views) == width
    decode.resume.set()
    assert (await asked).status_code == 200
    assert all(view.load["sequences"] == 0 for view in cluster.dispatcher.router.workers())
    await cluster.all_released()


# ---- a class's place in line

RANKED = {
    "classes": {
        "chat": {"ttft_s": OUT_OF_REACH_S, "degrade_to": "batch", "priority": -3},
        "batch": {"ttft_s": 60.0, "priority": 4},
        "plain": {"ttft_s": 60.0},
    }
}


@pytest.mark.parametrize("ask", [chat, complete])
@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({}, 0),
        ({"slo": {"class": "plain"}}, 0),
        ({"slo": {"class": "batch"}}, 4),
        ({"slo": {"class": "chat", "ttft_s": 60.0}}, -3),
        ({"slo": {"class": "chat"}}, 4),
        ({"slo": {"class": "batch"}, "priority": 1}, 1),
        ({"slo": {"class": "batch"}, "priority": 0}, 0),
    ],
)
async def test_a_class_says_where_its_requests_stand_in_line(make_cluster, ask, fields, priority):
    cluster = await measured(make_cluster, slo=RANKED)
    for worker in cluster.workers:
        worker.received.clear()
    assert (await ask(cluster, fields)).status_code == 200
    kinds = wire.Reserve | wire.Prefill | wire.Generate
    told = {m.request.priority for worker in cluster.workers for m in worker.received if isinstance(m, kinds)}
    assert told == {priority}
