"""Priority, deadline and tenant over HTTP: what reaches the workers, what is refused, and what is told of a late
request.
"""

import asyncio

import msgspec
import pytest

from kvrelay.hashing import tenant_of
from kvrelay.plane import messages as wire
from kvrelay.plane.reports import LoadReport
from kvrelay.router.policies.cost import UNSET_SHARE
from tests.serve.api.test_api import chat, complete, post


def requests_seen(worker, kind=wire.Prefill):
    return [message.request for message in worker.received if isinstance(message, kind)]


def late(message):
    return wire.Refused(request_id=message.request.request_id, reason="deadline", message="still in line")


@pytest.mark.parametrize("ask", [chat, complete])
async def test_both_workers_are_told(make_cluster, ask):
    cluster = await make_cluster()
    answer = await ask(cluster, {"priority": -3, "deadline_s": 60, "user": "alice", "kv": {"priority": 5}})
    assert answer.status_code == 200
    [prefill], [reserve] = requests_seen(cluster.prefill[0]), requests_seen(cluster.decode[0], wire.Reserve)
    for seen in (prefill, reserve):
        assert (seen.priority, seen.tenant, seen.hints.priority) == (-3, tenant_of("alice"), 5)
    assert 0 < prefill.deadline_s <= reserve.deadline_s <= 60  # what is left of it: the clocks are not compared
    assert (
        0 < prefill.ttft_target_s <= reserve.ttft_target_s <= 5 and prefill.tpot_target_s == UNSET_SHARE * 0.1
    )  # the policy's, likewise


async def test_without_the_fields_everybody_is_alike(make_cluster):
    cluster = await make_cluster()
    await complete(cluster)
    [seen] = requests_seen(cluster.prefill[0])
    assert (seen.priority, seen.deadline_s, seen.tenant) == (0, None, "")


@pytest.mark.parametrize(
    ("tenant_by", "expected"), [("auto", "salt"), ("cache_salt", "salt"), ("user", "alice"), ("api_key", "key-1")]
)
async def test_the_tenant_is_who_the_settings_say(make_cluster, tenant_by, expected):
    cluster = await make_cluster(scheduler={"tenant_by": tenant_by})
    await complete(cluster, {"cache_salt": "salt", "user": "alice"}, authorization="Bearer key-1")
    assert requests_seen(cluster.prefill[0])[0].tenant == tenant_of(expected)


async def test_a_request_brings_its_tenants_weight_to_every_worker(make_cluster):
    cluster = await make_cluster(scheduler={"tenant_weights": {"alice": 3}})
    for user in ("alice", "bob"):
        await complete(cluster, {"user": user})
    for seen in (requests_seen(cluster.prefill[0]), requests_seen(cluster.decode[0], wire.Reserve)):
        assert [request.weight for request in seen] == [3.0, 1.0]


async def test_by_default_the_first_name_that_a_request_has_is_its_tenant(make_cluster):
    cluster = await make_cluster()
    await complete(cluster, {"user": "alice"}, authorization="Bearer key-1")
    await complete(cluster, authorization="Bearer key-1")
    tenants = [seen.tenant for seen in requests_seen(cluster.prefill[0])]
    assert tenants == [tenant_of("alice"), tenant_of("key-1")] and "alice" not in tenants[0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"priority": 9}, "priority"),
        ({"priority": -9}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"deadline_s": -1}, "deadline_s"),
        ({"deadline_s": 86401}, "deadline_s"),
        ({"deadline_s": "soon"}, "deadline_s"),
    ],
)
async def test_wrong_fields_are_refused_by_name(make_cluster, body, param):
    cluster = await make_cluster()
    for ask in (chat, complete):
        answer = await ask(cluster, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not requests_seen(cluster.decode[0], wire.Reserve)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_is_too_late_is_told_so_and_tried_nowhere_else(make_cluster, role, stream):
    cluster = await make_cluster(prefill=2, decode=2)
    workers = getattr(cluster, role)
    for worker in workers:
        worker.answers.append(late)
    answer = await complete(cluster, {"deadline_s": 30, "stream": stream})
    error = answer.json()["error"]
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
    assert (error["code"], error["param"], error["type"]) == ("deadline_passed", "deadline_s", "rate_limit_error")
    assert sum(len(worker.answers) for worker in workers) == 1
    assert cluster.dispatcher.stats.outcomes["deadline"] == 1
    await cluster.all_released()


async def test_what_is_left_of_the_deadline_is_spent_before_a_worker_is_asked(make_cluster):
    cluster = await make_cluster()
    now_s, told = cluster.dispatcher.clock(), []
    cluster.dispatcher.clock = lambda: now_s

    def reserved(message):
        nonlocal now_s
        told.append(message.request.deadline_s)
        now_s += 31.0  # so long it was in line for its blocks
        return wire.Reserved(request_id=message.request.request_id, ticket=b"d0", held_tokens=0)

    cluster.decode[0].answers.append(reserved)
    answer = await complete(cluster, {"deadline_s": 30})
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "deadline_passed"
    assert told == [30.0] and not requests_seen(cluster.prefill[0])


async def test_the_standing_survives_another_attempt(make_cluster):
    cluster = await make_cluster()
    cluster.prefill[0].answers.append(
        lambda m: wire.Failed(request_id=m.request.request_id, code="transfer", message="x", retryable=True)
    )
    answer = await complete(cluster, {"priority": 2, "deadline_s": 50, "user": "alice"})
    assert answer.status_code == 200
    seen = requests_seen(cluster.prefill[0]) + requests_seen(cluster.decode[0], wire.Generate)
    assert [(one.priority, one.tenant) for one in seen] == 2 * [(2, tenant_of("alice"))]
    assert seen[1].deadline_s is not None


async def test_after_the_first_token_there_is_no_deadline_any_more(make_cluster):
    cluster = await make_cluster(decode=2)
    for worker in cluster.decode:
        worker.pause_at = 4
    asking = asyncio.create_task(complete(cluster, {"deadline_s": 50}))
    pausing = [asyncio.create_task(worker.paused.wait()) for worker in cluster.decode]
    async with asyncio.timeout(10):
        _, pending = await asyncio.wait(pausing, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    for worker in cluster.decode:
        worker.pause_at = None
    await next(worker for worker in cluster.decode if worker.paused.is_set()).kill()
    assert (await asking).status_code == 200
    again = [m.request for worker in cluster.workers for m in worker.received if hasattr(m, "request")]
    again = [request for request in again if "~" in request.request_id]
    assert again and all(request.deadline_s is None for request in again)


async def test_metrics_tell_the_line_by_priority_and_the_service_by_tenant(make_cluster):
    cluster = await make_cluster()
    link = cluster.dispatcher.links.get("p0")
    link.load = msgspec.structs.replace(
        link.load or LoadReport(seq=1),
        waiting_by_priority={-1: 2, 0: 7},
        waiting_tenants=3,
        deadline_refusals=4,
        displaced=5,
        tenant_tokens={"": 10, "ab12": 20},
        other_tenant_tokens=30,
    )
    text = (await cluster.client.get("/metrics")).text
    for line in (
        'kvrelay_worker_waiting{priority="-1",role="prefill",worker="p0"} 2.0',
        'kvrelay_worker_waiting_tenants{role="prefill",worker="p0"} 3.0',
        'kvrelay_worker_deadline_refusals_total{role="prefill",worker="p0"} 4.0',
        'kvrelay_worker_displaced_total{role="prefill",worker="p0"} 5.0',
        'kvrelay_worker_tenant_tokens_total{role="prefill",tenant="none",worker="p0"} 10.0',
        'kvrelay_worker_tenant_tokens_total{role="prefill",tenant="ab12",worker="p0"} 20.0',
        'kvrelay_worker_tenant_tokens_total{role="prefill",tenant="other",worker="p0"} 30.0',
    ):
        assert line in text.splitlines()


async def test_prefetch_takes_the_body_of_a_request_with_all_its_fields(make_cluster):
    cluster = await make_cluster()
    body = {"prompt": "hello", "priority": 1, "deadline_s": 5, "user": "alice"}
    assert (await post(cluster, "/v1/kv/prefetch", body)).status_code == 200
