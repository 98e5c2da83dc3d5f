"""Tenants over HTTP: each path that names KV goes through the namespace of the request's key, quotas are refusals in
OpenAI's form, and nothing without the operator's key shows a tenant.
"""

import ast
import asyncio
import logging
from pathlib import Path

import msgspec
import pytest

from kvrelay.hashing import block_hashes, tenant_of
from kvrelay.logs import ACCESS_LOGGER
from kvrelay.plane import messages as wire
from kvrelay.plane.reports import KvEvents, LoadReport
from tests.fakes import scripted, until
from tests.serve.api.test_api import chat, complete, events, post
from tests.serve.conftest import hold_in_line
from tests.serve.tenants.test_access import OPERATOR, written

SERVE = Path(__file__).resolve().parents[3] / "serve"
SESSION, SALT = "/v1/kv/sessions/chat-7", "x-kvrelay-cache-salt"
PROMPT = "a system prompt that no other tenant may find " * 3


def key(name):
    """The header with a tenant's key."""
    return {"authorization": f"Bearer {OPERATOR if name == 'operator' else f'key of {name}'}"}


@pytest.fixture
def make_tenants(make_cluster, tmp_path):
    """A cluster whose keys are the operator's and those of the tenants a, b (own namespaces), c and d (shared)."""

    async def make(limits=None, **sections):
        file = written(tmp_path / "keys.yaml", a=limits or {}, b={}, c={"shared": True}, d={"shared": True})
        return await make_cluster(serve={"api_key": OPERATOR, "api_keys_file": file}, **sections)

    return make


def requests_seen(worker, *kinds):
    return [message.request for message in worker.received if isinstance(message, kinds)]


# ---- namespaces, path by path


async def hashes_of_completion(cluster, name, salt):
    await complete(cluster, {"prompt": PROMPT, "cache_salt": salt}, **key(name))
    return requests_seen(cluster.prefill[0], wire.Prefill)[-1].block_hashes


async def hashes_of_chat(cluster, name, salt):
    body = {"messages": [{"role": "user", "content": PROMPT}], "cache_salt": salt, "stream": True}
    await chat(cluster, body, **key(name))
    return requests_seen(cluster.prefill[0], wire.Prefill)[-1].block_hashes


async def hashes_of_batch(cluster, name, salt):
    before = len(requests_seen(cluster.prefill[0], wire.Prefill))
    await complete(cluster, {"prompt": [PROMPT[1:], PROMPT], "n": 2, "cache_salt": salt}, **key(name))
    seen = requests_seen(cluster.prefill[0], wire.Prefill)[before:]
    return [digest for one in seen for digest in one.block_hashes]


async def hashes_of_prefetch(cluster, name, salt):
    headers = key(name) | {"x-kvrelay-prefill": "remote"}
    await post(cluster, "/v1/kv/prefetch", {"prompt": PROMPT, "cache_salt": salt}, **headers)
    return requests_seen(cluster.prefill[0], wire.Prefetch)[-1].block_hashes


async def hashes_of_retry(cluster, name, salt):
    """Of the second attempt, after the prefill worker has failed."""
    cluster.prefill[0].answers.append(
        lambda m: wire.Failed(request_id=m.request.request_id, code="transfer", message="x", retryable=True)
    )
    await complete(cluster, {"prompt": PROMPT, "cache_salt": salt}, **key(name))
    return [*requests_seen(cluster.prefill[0], wire.Prefill), *requests_seen(cluster.decode[0], wire.Generate)][
        -1
    ].block_hashes


PATHS = [hashes_of_completion, hashes_of_chat, hashes_of_batch, hashes_of_prefetch, hashes_of_retry]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
@pytest.mark.parametrize("salt", [None, "known to all"])
async def test_two_tenants_with_the_same_prompt_and_salt_share_no_hash(make_tenants, path, salt):
    cluster = await make_tenants()
    found = {name: set(await path(cluster, name, salt)) for name in ("a", "b", "c", "d", "operator")}
    assert all(found.values())
    assert not found["a"] & found["b"] and not (found["a"] | found["b"]) & found["c"]
    assert found["c"] == found["d"] == found["operator"]  # their namespace is the shared one


async def test_one_tenants_requests_share_hashes_on_all_paths_and_its_salts_do_not(make_tenants):
    cluster = await make_tenants()
    one, other, salted = [await hashes_of_completion(cluster, "a", salt) for salt in ("x", "x", "y")]
    assert one == other == await hashes_of_prefetch(cluster, "a", "x") and not {*one} & {*salted}


async def test_the_worker_gets_the_salt_from_which_its_own_hashes_follow(make_tenants):
    """It hashes the output, and what it returns to prefill."""
    cluster = await make_tenants()
    await complete(cluster, {"prompt": PROMPT, "cache_salt": "x"}, **key("a"))
    [seen] = requests_seen(cluster.prefill[0], wire.Prefill)
    assert seen.block_hashes == list(block_hashes(seen.token_ids, 16, seen.salt)) and seen.salt != "x"


def test_every_salt_of_a_client_goes_through_its_namespace():
    """In all of serve/: `….cache_salt` stands in a call of Caller.salt; fair shares without keys alone may read it."""
    found = []
    for path in SERVE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call) and ast.unparse(one.func).endswith(".salt")]
        inside = {id(node) for call in calls for node in ast.walk(call)}
        named = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "cache_salt"]
        found += [f"{path.name}: {ast.unparse(node)}" for node in named if id(node) not in inside]
    assert found == ["parameters.py: body.cache_salt"]


async def test_a_cache_salt_cannot_imitate_a_namespace(make_tenants):
    cluster = await make_tenants()
    await complete(cluster, **key("a"))
    [seen] = requests_seen(cluster.prefill[0], wire.Prefill)
    for name in ("b", "c", "operator"):
        for ask in (complete, chat):
            answer = await ask(cluster, {"cache_salt": seen.salt}, **key(name))
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt"


async def test_the_router_finds_a_tenants_blocks_for_that_tenant_alone(make_tenants):
    """A guess that the router followed to the worker which holds it would show in the time to first token."""
    cluster = await make_tenants()
    hashes = await hashes_of_completion(cluster, "a", None)
    cluster.prefill[0].say_raw(KvEvents(seq=1, stored=hashes))
    router = cluster.dispatcher.router
    await until(lambda: any(view.worker_id == "p0" and view.indexed_blocks for view in router.workers()))

    place, decisions = cluster.dispatcher.placer.place, []
    cluster.dispatcher.placer.place = lambda query: decisions.append(place(query)) or decisions[-1]
    for name in ("a", "b", "c", "operator"):
        await complete(cluster, {"prompt": PROMPT}, **key(name))
    assert [decision.cached_tokens_prefill for decision in decisions] == [16 * len(hashes), 0, 0, 0]


# ---- sessions


async def test_a_session_is_its_tenants_alone_whatever_salt_another_names(make_tenants):
    cluster = await make_tenants()
    assert (await cluster.client.put(SESSION, json={"pin_s": 60}, headers=key("a") | {SALT: "s"})).status_code == 200
    for name in ("b", "c", "operator"):
        for salt in ("", "s"):
            headers = key(name) | {SALT: salt}
            assert (await cluster.client.get(SESSION, headers=headers)).status_code == 404
            assert (await cluster.client.delete(SESSION, headers=headers)).status_code == 404
            body = {"kv": {"session": "chat-7"}, "cache_salt": salt}
            assert (await chat(cluster, body, **key(name))).status_code == 404
            assert (await post(cluster, "/v1/kv/prefetch", {"prompt": "x", **body}, **key(name))).status_code == 404
    assert (await chat(cluster, {"kv": {"session": "chat-7"}, "cache_salt": "s"}, **key("a"))).status_code == 200


# ---- fair shares and pins


async def test_the_key_is_the_tenant_of_fair_shares_whatever_the_body_says(make_tenants):
    cluster = await make_tenants()
    for name in ("a", "c", "operator"):
        await complete(cluster, {"user": "b", "cache_salt": "b"}, **key(name))
    seen = [one.tenant for one in requests_seen(cluster.prefill[0], wire.Prefill)]
    assert seen == [tenant_of("a"), tenant_of("c"), tenant_of("default")]


@pytest.mark.parametrize("body", [{}, {"kv": {"pin_s": 60}}, {"kv": {"session": "chat-7"}}])
async def test_the_share_of_pins_reaches_the_workers(make_tenants, body):
    cluster = await make_tenants({"pin_share": 0.1})
    for name in ("a", "b"):
        await cluster.client.put(SESSION, json={}, headers=key(name))
        await chat(cluster, body, **key(name))
        await post(cluster, "/v1/kv/prefetch", {"prompt": "x", **body}, **key(name), **{"x-kvrelay-prefill": "remote"})
    seen = requests_seen(cluster.prefill[0], wire.Prefill, wire.Prefetch)
    assert [one.hints.pin_share for one in seen] == [0.1, 0.1, None, None]


# ---- quotas


async def refusal(asking):
    """(code, type, Retry-After) of a 429."""
    answer = await asking
    assert answer.status_code == 429, answer.text
    error = answer.json()["error"]
    return error["code"], error["type"], int(answer.headers["retry-after"])


@pytest.mark.parametrize("stream", [False, True])
async def test_one_sequence_too_many_is_refused_until_one_ends_and_others_are_not(make_tenants, stream):
    cluster = await make_tenants({"max_running": 2})
    cluster.decode[0].answers.append(hold_in_line(cluster.decode[0]))
    asking = asyncio.create_task(complete(cluster, {"n": 2}, **key("a")))
    await cluster.decode[0].until(lambda w: w.count(wire.Reserve))
    refused = await refusal(chat(cluster, {"stream": stream}, **key("a")))
    assert refused == ("rate_limit_exceeded", "rate_limit_error", 1)
    assert (await complete(cluster, **key("b"))).status_code == 200
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert (await complete(cluster, {"n": 2}, **key("a"))).status_code == 200
    assert (await complete(cluster, {"n": 3}, **key("a"))).status_code == 400
    assert cluster.access.ledger.report() == {}


async def test_prompts_and_outputs_are_charged_and_retry_after_is_when_there_is_room(make_tenants):
    cluster = await make_tenants({"tokens_per_minute": 60})
    assert (await complete(cluster, {"prompt": "x" * 40, "max_tokens": 30}, **key("a"))).status_code == 200
    code, _, retry_after_s = await refusal(complete(cluster, {"prompt": "x" * 10}, **key("a")))
    assert code == "rate_limit_exceeded" and 15 < retry_after_s <= 20
    assert cluster.access.ledger.report() == {"a": (0, 70)}


async def test_a_streams_tokens_are_charged_as_they_come(make_tenants):
    cluster = await make_tenants({"tokens_per_minute": 60}, script=scripted("Hello!", then_eos=True))
    assert events(await complete(cluster, {"stream": True, "max_tokens": 20}, **key("a")))
    assert cluster.access.ledger.report() == {"a": (0, len("hello") + len("Hello!") + 1)}


@pytest.mark.usefixtures("short_waits")
async def test_a_request_that_no_worker_takes_costs_no_tokens(make_tenants):
    cluster = await make_tenants({"max_running": 1, "tokens_per_minute": 60})
    for worker in cluster.workers:
        await worker.kill()
    await until(lambda: not cluster.dispatcher.workers.live_workers())
    for _ in range(3):
        assert (await complete(cluster, {"prompt": "x" * 40}, **key("a"))).status_code == 503
    assert cluster.access.ledger.report() == {}


async def test_prefetches_run_within_the_quota_of_sequences_and_cost_no_tokens(make_tenants):
    cluster = await make_tenants({"max_running": 1, "tokens_per_minute": 60})
    prefetch = {"prompt": "x" * 40}
    with cluster.access.meter(cluster.access.caller("key of a")).running(1, 0):
        assert (await refusal(post(cluster, "/v1/kv/prefetch", prefetch, **key("a"))))[0] == "rate_limit_exceeded"
    for _ in range(2):
        assert (await post(cluster, "/v1/kv/prefetch", prefetch, **key("a"))).status_code == 200
    assert cluster.access.ledger.report() == {}


# ---- what the operator's key alone opens, and what none does


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/kvrelay/pairs"),
        ("POST", "/kvrelay/pairs"),
        ("GET", "/kvrelay/live"),
        ("GET", "/kvrelay/live/events"),
        ("GET", "/kvrelay/history"),
        ("GET", "/kvrelay/requests"),
        ("GET", "/kvrelay/requests/cmpl-1"),
    ],
)
async def test_a_tenant_sees_nothing_of_what_belongs_to_all(make_tenants, method, path):
    answer = await (await make_tenants()).client.request(method, path, headers=key("a"))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (403, "operator_key_required", "permission_error")


async def test_only_the_operators_metrics_show_tenants(make_tenants):
    cluster = await make_tenants()
    link, digest = cluster.dispatcher.links.get("p0"), tenant_of("a")
    link.load = msgspec.structs.replace(link.load or LoadReport(seq=1), tenant_tokens={digest: 20})
    texts = [
        (await cluster.client.get("/metrics", headers=headers)).text for headers in ({}, key("a"), key("operator"))
    ]
    assert [digest in text for text in texts] == ["tenant=" in text for text in texts] == [False, False, True]
    assert all("kvrelay_worker_waiting_tenants" in text for text in texts)


async def test_the_access_log_shows_the_tenant_and_never_the_key(make_tenants, caplog):
    caplog.set_level(logging.INFO, ACCESS_LOGGER)
    cluster = await make_tenants()
    for name in ("a", "operator", "unknown"):
        await complete(cluster, **key(name))
    lines = [record.getMessage() for record in caplog.records if record.name == ACCESS_LOGGER]
    assert [line.partition(" ms")[2] for line in lines] == [", tenant=a", ", tenant=default", ""]
    assert not any("key of" in line or OPERATOR in line for line in lines)


async def test_the_files_weight_comes_before_the_settings_and_a_new_one_holds_from_the_next_request_on(
    make_tenants, tmp_path
):
    cluster = await make_tenants({"weight": 3.0}, scheduler={"tenant_weights": {"a": 9, "b": 2, "default": 4}})

    async def weights():
        before = len(cluster.prefill[0].received)
        for name in ("a", "b", "operator"):
            await complete(cluster, {"user": "b"}, **key(name))
        return [m.request.weight for m in cluster.prefill[0].received[before:] if isinstance(m, wire.Prefill)]

    assert await weights() == [3.0, 2.0, 4.0]
    written(tmp_path / "keys.yaml", a={"weight": 0.5}, b={})
    cluster.access.reload()
    assert await weights() == [0.5, 2.0, 4.0]


async def test_a_removed_key_stops_working_and_what_it_runs_goes_on(make_tenants, tmp_path):
    cluster = await make_tenants()
    cluster.decode[0].pause_at = 4
    asking = asyncio.create_task(complete(cluster, **key("a")))
    await cluster.decode[0].paused.wait()
    written(tmp_path / "keys.yaml", b={})
    cluster.access.reload()
    assert (await complete(cluster, **key("a"))).status_code == 401
    cluster.decode[0].resume.set()
    assert (await asking).status_code == 200
