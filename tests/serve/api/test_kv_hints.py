"""The field `kv`, sessions and prefetch over HTTP, with fake workers behind."""

import asyncio

import openai
import pytest

from kvrelay.hashing import block_hashes
from kvrelay.plane import messages as wire
from kvrelay.plane.messages import KvHints, Prefetched
from kvrelay.plane.reports import KvEvents
from tests.fakes import until
from tests.serve.api.test_api import chat, complete, post
from tests.serve.conftest import MODEL, hold_in_line

SALT = "x-kvrelay-cache-salt"
SESSION = "/v1/kv/sessions/chat-7"


def hints_seen(worker, kind=wire.Prefill):
    return [message.request.hints for message in worker.received if isinstance(message, kind)]


@pytest.mark.parametrize("ask", [chat, complete])
async def test_the_hints_reach_both_workers(make_cluster, ask):
    cluster = await make_cluster()
    given = {"keep": True, "priority": -3, "pin_s": 90}
    assert (await ask(cluster, {"kv": given})).status_code == 200
    expected = KvHints(keep=True, priority=-3, pin_s=90.0)
    assert hints_seen(cluster.prefill[0]) == hints_seen(cluster.decode[0], wire.Reserve) == [expected]


async def test_without_the_field_there_are_no_hints(make_cluster):
    cluster = await make_cluster()
    await chat(cluster)
    assert hints_seen(cluster.prefill[0]) == [KvHints()]


async def test_hints_survive_another_attempt(make_cluster):
    """Lost on a retry, "do not keep" would be kept."""
    cluster = await make_cluster()
    cluster.prefill[0].answers.append(
        lambda m: wire.Failed(request_id=m.request.request_id, code="transfer", message="x", retryable=True)
    )
    assert (await complete(cluster, {"kv": {"keep": False}})).status_code == 200
    assert hints_seen(cluster.prefill[0]) + hints_seen(cluster.decode[0], wire.Generate) == 2 * [KvHints(keep=False)]


@pytest.mark.parametrize(
    ("kv", "param"),
    [
        ({"priority": 9}, "kv.priority"),
        ({"priority": -9}, "kv.priority"),
        ({"priority": 1.5}, "kv.priority"),
        ({"pin_s": -1}, "kv.pin_s"),
        ({"pin_s": 86401}, "kv.pin_s"),
        ({"pin_s": "60"}, "kv.pin_s"),
        ({"keep": "yes"}, "kv.keep"),
        ({"keep": False, "pin_s": 5}, "kv"),
        ({"session": ""}, "kv.session"),
        ({"session": "a/b"}, "kv.session"),
        ({"session": "x" * 129}, "kv.session"),
        ({"pin_seconds": 5}, "kv.pin_seconds"),
        (7, "kv"),
    ],
)
async def test_wrong_hints_are_refused_by_name(make_cluster, kv, param):
    cluster = await make_cluster()
    for answer in (await chat(cluster, {"kv": kv}), await post(cluster, "/v1/kv/prefetch", {"prompt": "hi", "kv": kv})):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
    assert not hints_seen(cluster.prefill[0])


async def test_the_official_client_can_send_hints(make_cluster, serve_http):
    cluster = await make_cluster()
    url = await serve_http(cluster.app)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], extra_body={"kv": {"priority": 5}}
        )
    assert hints_seen(cluster.prefill[0]) == [KvHints(priority=5)]


# ---- sessions


async def put(cluster, path=SESSION, **fields):
    headers = {SALT: fields.pop("salt")} if "salt" in fields else {}
    return await cluster.client.put(path, json=fields, headers=headers)


async def test_a_session_is_made_read_replaced_and_deleted(make_cluster):
    cluster = await make_cluster()
    made = (await put(cluster, priority=2, pin_s=60)).json()
    assert made == {
        "object": "kv.session",
        "name": "chat-7",
        "keep": True,
        "priority": 2,
        "pin_s": 60.0,
        "expires_after_idle_s": 3600.0,
    }
    assert (await cluster.client.get(SESSION)).json() == made
    assert (await put(cluster, priority=4)).json()["pin_s"] == 0
    assert (await cluster.client.delete(SESSION)).json()["deleted"] is True
    for gone in (await cluster.client.get(SESSION), await cluster.client.delete(SESSION)):
        assert gone.status_code == 404
        assert gone.json()["error"]["code"] == "session_not_found"


async def test_requests_inherit_and_their_own_fields_win(make_cluster):
    cluster = await make_cluster()
    await put(cluster, priority=2, pin_s=60)
    await chat(cluster, {"kv": {"session": "chat-7"}})
    await chat(cluster, {"kv": {"session": "chat-7", "priority": 0, "pin_s": 0}})
    first, second = hints_seen(cluster.prefill[0])
    assert (first.priority, first.pin_s) == (2, 60.0)
    assert first.session.startswith("/chat-7#")
    assert second == KvHints(session=first.session)


async def test_the_policy_session_sends_all_requests_of_a_session_to_the_same_workers(make_cluster):
    cluster = await make_cluster(prefill=4, decode=4, router={"policy": "session"})
    await put(cluster)
    for number in range(8):
        given = {"kv": {"session": "chat-7"}, "messages": [{"role": "user", "content": f"{number} " * 40}]}
        assert (await chat(cluster, given)).status_code == 200
    assert sorted(worker.count(wire.Prefill) for worker in cluster.prefill) == [0, 0, 0, 8]
    assert sorted(worker.count(wire.Reserve) for worker in cluster.decode) == [0, 0, 0, 8]


async def test_a_session_that_is_not_there_is_said_to_be(make_cluster):
    cluster = await make_cluster()
    answer = await chat(cluster, {"kv": {"session": "chat-7"}})
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "kv.session"
    assert "PUT /v1/kv/sessions/chat-7" in answer.json()["error"]["message"]


async def test_a_tenant_neither_sees_nor_ends_anothers_session(make_cluster):
    cluster = await make_cluster()
    await put(cluster, salt="one", priority=2)
    assert (await cluster.client.get(SESSION)).status_code == 404
    assert (await cluster.client.delete(SESSION, headers={SALT: "two"})).status_code == 404
    assert (await chat(cluster, {"kv": {"session": "chat-7"}, "cache_salt": "two"})).status_code == 404
    assert (await chat(cluster, {"kv": {"session": "chat-7"}, "cache_salt": "one"})).status_code == 200
    assert (await cluster.client.get(SESSION, headers={SALT: "one"})).status_code == 200
    await cluster.client.put(SESSION, json={}, headers={SALT: "für".encode()})
    assert (await chat(cluster, {"kv": {"session": "chat-7"}, "cache_salt": "für"})).status_code == 200


async def test_deleting_a_session_tells_every_worker_by_the_name_that_its_pins_have(make_cluster):
    cluster = await make_cluster()
    await put(cluster, pin_s=60)
    await chat(cluster, {"kv": {"session": "chat-7"}})
    await cluster.client.delete(SESSION)
    named = hints_seen(cluster.prefill[0])[0].session
    for worker in cluster.workers:
        await worker.until(lambda w: w.count(wire.EndPins) == 1)
        assert wire.EndPins(session=named) in worker.received
    await put(cluster, pin_s=60)
    await chat(cluster, {"kv": {"session": "chat-7"}})
    assert hints_seen(cluster.prefill[0])[1].session != named


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (SESSION, {"priority": 20}, "priority"),
        (SESSION, {"session": "x"}, "session"),
        (SESSION, {"keep": False, "pin_s": 1}, None),
        ("/v1/kv/sessions/a%20b", {}, "name"),
        ("/v1/kv/sessions/" + "x" * 129, {}, "name"),
    ],
)
async def test_wrong_sessions_are_refused(make_cluster, path, fields, param):
    answer = await put(await make_cluster(), path, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"].get("param") == param


async def test_sessions_and_prefetch_need_the_api_key(make_cluster):
    cluster = await make_cluster(serve={"api_key": "k"})
    for method, path in (("PUT", SESSION), ("GET", SESSION), ("DELETE", SESSION), ("POST", "/v1/kv/prefetch")):
        assert (await cluster.client.request(method, path, json={})).status_code == 401


# ---- prefetch


async def prefetch(cluster, **body):
    return await post(cluster, "/v1/kv/prefetch", body, **{"x-kvrelay-prefill": "remote"})


async def test_prefetch_says_where_the_prompt_is_and_leaves_no_load(make_cluster):
    cluster = await make_cluster()
    cluster.prefill[0].prefetched = Prefetched(query_id=0, pool_tokens=16, host_tokens=32, coming_tokens=16)
    answer = await prefetch(cluster, prompt="x" * 100, kv={"priority": 2}, cache_salt="one")
    assert answer.json() == {
        "object": "kv.prefetch",
        "prompt_tokens": 100,
        "pool_tokens": 16,
        "host_tokens": 32,
        "coming_tokens": 16,
        "missing_tokens": 36,
        "hold_s": 30.0,
        "workers": ["p0"],
    }
    [asked] = [message for message in cluster.prefill[0].received if isinstance(message, wire.Prefetch)]
    assert asked.hold_s == 30.0
    assert asked.request.block_hashes == list(block_hashes([ord("x")] * 100, 16, "one"))
    assert asked.request.hints == KvHints(priority=2)
    await cluster.all_released()


async def test_a_chats_prefetch_has_the_chats_hashes(make_cluster):
    cluster = await make_cluster()
    body = {"messages": [{"role": "user", "content": "a long story " * 9}]}
    assert (await prefetch(cluster, **body, hold_s=5)).json()["hold_s"] == 5
    await chat(cluster, body)
    sent = {type(message): message.request for message in cluster.prefill[0].received if hasattr(message, "request")}
    assert sent[wire.Prefetch].block_hashes == sent[wire.Prefill].block_hashes


async def test_it_asks_the_worker_that_would_compute(make_cluster):
    cluster = await make_cluster(prefill=2)
    tokens = list(b"y" * 64)
    cluster.prefill[1].say_raw(KvEvents(seq=1, stored=list(block_hashes(tokens, 16))))
    router = cluster.dispatcher.router
    await until(lambda: any(view.worker_id == "p1" and view.indexed_blocks for view in router.workers()))
    assert (await prefetch(cluster, prompt="y" * 64)).json()["workers"] == ["p1"]


async def test_several_prompts_are_summed(make_cluster):
    cluster = await make_cluster()
    cluster.prefill[0].prefetched = Prefetched(query_id=0, host_tokens=16)
    answer = (await prefetch(cluster, prompt=["a" * 20, "b" * 20])).json()
    assert (answer["prompt_tokens"], answer["host_tokens"], answer["missing_tokens"]) == (40, 32, 8)


@pytest.mark.parametrize(("problem", "status"), [("full", 429), ("draining", 429), ("invalid", 400)])
async def test_a_workers_problem_is_told(make_cluster, problem, status):
    cluster = await make_cluster()
    cluster.prefill[0].prefetched = Prefetched(query_id=0, problem=problem, message="why")
    assert (await prefetch(cluster, prompt="hi")).status_code == status


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "hi", "hold_s": 0},
        {"prompt": "hi", "hold_s": 601},
        {"prompt": "hi", "kv": {"keep": False}},
        {},
        {"messages": []},
        {"prompt": "x" * 600},
    ],
)
async def test_wrong_prefetches_are_refused(make_cluster, body):
    cluster = await make_cluster()
    assert (await prefetch(cluster, **body)).status_code == 400
    assert not cluster.prefill[0].count(wire.Prefetch)


async def test_a_worker_that_dies_or_is_silent_is_an_error_and_no_leak(make_cluster):
    cluster = await make_cluster()
    worker = cluster.prefill[0]
    worker.prefetched = None
    asking = asyncio.create_task(prefetch(cluster, prompt="hi"))
    await worker.until(lambda w: w.count(wire.Prefetch))
    await worker.kill()
    assert (await asking).status_code == 503
    assert not cluster.dispatcher.queries._open


async def test_without_workers_there_is_nobody_to_ask(make_cluster):
    cluster = await make_cluster(prefill=0, decode=0)
    assert (await prefetch(cluster, prompt="hi")).status_code == 503


async def test_a_request_in_line_is_not_in_the_way(make_cluster):
    """The other questions to workers stand in one table with it."""
    cluster = await make_cluster()
    cluster.decode[0].answers.append(hold_in_line(cluster.decode[0]))
    asking = asyncio.create_task(complete(cluster))
    await cluster.decode[0].until(lambda w: w.count(wire.Reserve))
    assert (await prefetch(cluster, prompt="hi")).status_code == 200
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
