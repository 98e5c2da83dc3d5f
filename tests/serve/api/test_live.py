"""The live view: what a snapshot says, who may see it, and that viewers share what is made and leave nothing behind."""

import asyncio
import contextlib
import json

import httpx
import pytest

from kvrelay.errors import Overloaded
from kvrelay.plane import messages as wire
from kvrelay.plane.reports import LoadReport, TierLoad
from kvrelay.serve.api.endpoint import INGRESS
from kvrelay.serve.api.ui import LiveFeed
from kvrelay.serve.workers.worker_link import Member
from tests.fakes import until
from tests.serve.conftest import hold_in_line

BODY = {"model": "fake-model", "prompt": "hello world", "max_tokens": 4}
DATA = ["/kvrelay/live", "/kvrelay/live/events", "/kvrelay/history", "/kvrelay/requests", "/kvrelay/requests/cmpl-1"]


async def snapshot(cluster):
    return (await cluster.client.get("/kvrelay/live")).json()


async def complete(cluster, **body):
    answer = await cluster.client.post("/v1/completions", json=BODY | body)
    return answer.json()


def feed(*, tick_s=0.001, max_viewers=4):
    return LiveFeed(lambda num_viewers: {"viewers": num_viewers}, tick_s=tick_s, max_viewers=max_viewers)


def told(event: bytes):
    assert event.startswith(b"data: ") and event.endswith(b"\n\n")
    return json.loads(event[6:])


# ---- what it says


async def test_a_snapshot_has_every_worker_with_every_figure_of_its_load(make_cluster):
    cluster = await make_cluster(prefill=2, decode=1)
    load = {
        "running": 3,
        "batch_sequences": 2,
        "batch_tokens": 9,
        "pinned_blocks": 5,
        "preemptions": 7,
        "kv_refused": {"checksum": 1},
    }
    tier = TierLoad(tier="host", num_blocks=4)
    cluster.decode[0].say_raw(LoadReport(seq=9, total_blocks=64, tiers=[tier], **load))
    await until_seen(cluster, lambda workers: workers["d0"]["load"]["seq"] == 9)
    workers = {worker["worker_id"]: worker for worker in (await snapshot(cluster))["workers"]}
    assert {name: (one["role"], one["health"]) for name, one in workers.items()} == {
        "p0": ("prefill", "up"),
        "p1": ("prefill", "up"),
        "d0": ("decode", "up"),
    }
    shown = workers["d0"]["load"]
    assert set(shown) == set(LoadReport.__struct_fields__)
    assert {name: shown[name] for name in load} == load
    assert (shown["tiers"][0]["tier"], shown["tiers"][0]["failures"]) == ("host", 0)


async def until_seen(cluster, condition):
    async with asyncio.timeout(10):
        while not condition({worker["worker_id"]: worker for worker in (await snapshot(cluster))["workers"]}):
            await asyncio.sleep(0)


async def test_a_worker_that_has_gone_or_is_leaving_is_told_as_such(make_cluster):
    cluster = await make_cluster(prefill=1, decode=2)
    await cluster.decode[1].kill()
    cluster.prefill[0].say_raw(LoadReport(seq=9, is_draining=True))
    await until_seen(
        cluster, lambda workers: workers["d1"]["health"] == "down" and workers["p0"]["health"] == "leaving"
    )
    workers = {worker["worker_id"]: worker for worker in (await snapshot(cluster))["workers"]}
    assert "load" not in workers["d1"] and workers["d0"]["health"] == "up"


async def test_a_worker_that_loads_its_model_is_shown_as_warming_and_connected_to_once_it_has_a_port(make_cluster):
    cluster = await make_cluster(decode=2)
    workers, members = cluster.dispatcher.workers, [link.member for link, _ in cluster.dispatcher.workers.all_links()]
    last = next(member for member in members if member.worker_id == "d1")
    workers.set_members([*members, Member("d9", "decode", "127.0.0.1", 0)])
    shown = {worker["worker_id"]: worker for worker in (await snapshot(cluster))["workers"]}
    assert shown["d9"] == {"worker_id": "d9", "role": "decode", "health": "warming"}
    assert "d9" not in {link.worker_id for link, _ in workers.all_links()}
    since_s = workers.warming["d9"][1]
    workers.set_members([*members, Member("d9", "decode", "127.0.0.1", 0)])
    assert workers.warming["d9"][1] == since_s
    workers.set_members([*members, Member("d9", "decode", "127.0.0.1", last.port)])
    assert not workers.warming and "d9" in {link.worker_id for link, _ in workers.all_links()}


async def test_a_silent_worker_is_told_as_such(make_cluster):
    cluster = await make_cluster()
    link = next(link for link, _ in cluster.dispatcher.workers.all_links() if link.worker_id == "d0")
    link._connection._reader.heard_s -= 60.0
    workers = {worker["worker_id"]: worker["health"] for worker in (await snapshot(cluster))["workers"]}
    assert workers == {"p0": "up", "d0": "silent"}


async def test_a_transfer_under_way_is_counted_for_its_pair_until_it_has_ended(make_cluster):
    cluster = await make_cluster()
    cluster.prefill[0].hold_first_token.clear()
    asking = asyncio.create_task(complete(cluster))
    await cluster.prefill[0].until(lambda w: w.count(wire.Prefill))
    (pair,) = (await snapshot(cluster))["pairs"]
    assert (pair["source"], pair["target"], pair["path"], pair["in_flight"]) == ("p0", "d0", "fake", 1)
    cluster.prefill[0].hold_first_token.set()
    await asking
    assert (await snapshot(cluster))["pairs"][0]["in_flight"] == 0


# ---- the stream


async def test_the_stream_has_the_workers_and_goes_on(make_cluster, serve_http):
    cluster = await make_cluster()
    url = await serve_http(cluster.app)
    async with httpx.AsyncClient(timeout=30) as client, client.stream("GET", f"{url}/kvrelay/live/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (line async for line in answer.aiter_lines() if line)
        events = [json.loads((await anext(lines)).removeprefix("data: ")) for _ in range(2)]
    assert [worker["worker_id"] for worker in events[0]["workers"]] == ["p0", "d0"]
    assert events[1]["now_s"] > events[0]["now_s"] and events[0]["viewers"] == 1


async def test_a_viewer_that_leaves_a_real_connection_is_counted_no_more(make_cluster, serve_http):
    cluster = await make_cluster()
    url = await serve_http(cluster.app)
    feeds = feed_of(cluster)
    async with httpx.AsyncClient(timeout=30) as client:
        async with client.stream("GET", f"{url}/kvrelay/live/events") as answer:
            await anext(answer.aiter_lines())
            assert feeds.num_viewers == 1
        await until(lambda: not feeds.num_viewers)


def feed_of(cluster):
    """The app's own feed."""
    route = next(route for route in cluster.app.routes if route.path == "/kvrelay/live/events")
    (stream,) = [cell.cell_contents for cell in route.endpoint.__closure__ if hasattr(cell.cell_contents, "__self__")]
    return stream.__self__


async def test_all_viewers_get_the_same_snapshot_within_a_tick():
    live = feed(tick_s=0.05)
    async with contextlib.aclosing(live.watch()) as one, contextlib.aclosing(live.watch()) as other:
        await anext(one), await anext(other)
        first, second = await asyncio.gather(anext(one), anext(other))
        assert first is second and told(first) == {"viewers": 2}
    assert live.num_viewers == 0


async def test_a_slow_viewer_misses_ticks_and_gets_the_newest():
    seen = iter(range(10**6))
    live = LiveFeed(lambda _: {"tick": next(seen)}, tick_s=0.0)
    async with contextlib.aclosing(live.watch()) as slow, contextlib.aclosing(live.watch()) as fast:
        await anext(slow)
        for _ in range(50):
            newest = told(await anext(fast))["tick"]
        assert told(await anext(slow))["tick"] in (newest, newest + 1)  # not 1: nothing was queued for it


async def test_one_viewer_leaving_leaves_the_others_alone():
    live = feed()
    staying = live.watch()
    async with contextlib.aclosing(live.watch()) as leaving:
        await anext(leaving)
        await anext(staying)
        waiting = asyncio.ensure_future(anext(staying))
    assert told(await waiting)["viewers"] in (1, 2) and live.num_viewers == 1
    await staying.aclose()
    assert not live.num_viewers


async def test_a_viewer_cancelled_while_it_waits_frees_its_place():
    live = feed(tick_s=60.0, max_viewers=1)

    async def look():
        async with contextlib.aclosing(live.watch()) as events:
            async for _ in events:
                pass

    looking = asyncio.create_task(look())
    await until(lambda: live.num_viewers)
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    assert live.num_viewers == 0
    again = live.watch()
    await anext(again)
    await again.aclose()


async def test_one_viewer_too_many_is_refused_and_the_next_is_not():
    live = feed(max_viewers=1)
    first, second = live.watch(), live.watch()
    await anext(first)
    with pytest.raises(Overloaded):
        await anext(second)
    await first.aclose()
    third = live.watch()
    assert told(await anext(third)) == {"viewers": 1}
    await third.aclose()


async def test_a_snapshot_that_fails_once_does_not_end_the_stream(caplog):
    outcomes = iter([None, RuntimeError("once"), None])

    def make(_):
        if (outcome := next(outcomes, None)) is not None:
            raise outcome
        return {}

    async with contextlib.aclosing(LiveFeed(make, tick_s=0.0).watch()) as events:
        await anext(events), await anext(events)
    assert "no snapshot for the viewers" in caplog.text


async def test_a_client_that_reads_nothing_is_let_go(make_cluster, monkeypatch):
    monkeypatch.setattr("kvrelay.serve.api.ui.STALL_S", 0.0)
    cluster = await make_cluster()
    never = asyncio.Event()

    async def receive():
        await never.wait()

    async def send(message):
        await never.wait()

    scope = {"type": "http", "method": "GET", "path": "/kvrelay/live/events", "headers": [], "query_string": b""}
    async with asyncio.timeout(10):
        await cluster.app(scope, receive, send)
    assert not feed_of(cluster).num_viewers


# ---- who may see it


async def test_the_bare_address_leads_to_the_page(make_cluster):
    cluster = await make_cluster(serve={"api_key": "s3cret"})
    answer = await cluster.client.get("/", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "/ui")


@pytest.mark.parametrize("path", DATA)
async def test_data_needs_the_key_and_the_page_has_none(make_cluster, path):
    cluster = await make_cluster(serve={"api_key": "s3cret"})
    for headers in ({}, {"authorization": "Bearer wrong"}):
        answer = await cluster.client.get(path, headers=headers)
        assert answer.status_code == 401 and "d0" not in answer.text
    page = await cluster.client.get("/ui")
    assert page.status_code == 200 and "s3cret" not in page.text and "d0" not in page.text


async def test_the_right_key_opens_it(make_cluster):
    cluster = await make_cluster(serve={"api_key": "s3cret"})
    answer = await cluster.client.get("/kvrelay/live", headers={"authorization": "Bearer s3cret"})
    assert [worker["worker_id"] for worker in answer.json()["workers"]] == ["p0", "d0"]


async def test_the_page_stands_alone_and_runs_nothing_but_itself(make_cluster):
    cluster = await make_cluster()
    page = await cluster.client.get("/ui")
    policy = page.headers["content-security-policy"]
    assert page.headers["content-type"].startswith("text/html") and "default-src 'none'" in policy
    assert "unsafe" not in policy and policy.count("'sha256-") == 2
    assert page.text.count("<script") == 1 and "src=" not in page.text and "localStorage" not in page.text
    assert "innerHTML" not in page.text


# ---- one request


async def test_a_requests_story_has_its_stages_in_order_and_no_text(make_cluster):
    cluster = await make_cluster()
    request_id = (await complete(cluster, prompt="a secret prompt"))["id"]
    answer = await cluster.client.get(f"/kvrelay/requests/{request_id}")
    (story,) = answer.json()["requests"]
    stages = {stage["name"]: stage for stage in story["stages"]}
    names = [name for name in stages if name != "KV transferred"]  # it may come before or after the first token
    assert names == [
        "arrived",
        "tokenised",
        "routed",
        "reservation requested",
        "reserved",
        "prefill requested",
        "prefill started",
        "first token",
        "ended",
    ]
    assert (stages["routed"]["prefill"], stages["routed"]["decode"]) == ("p0", "d0") and stages["routed"]["why"]
    assert (stages["KV transferred"]["source"], stages["KV transferred"]["target"]) == ("p0", "d0")
    assert [stage["at_s"] for stage in story["stages"]] == sorted(stage["at_s"] for stage in story["stages"])
    assert (story["tokens"], story["state"], story["is_live"]) == (4, "length", False)
    assert "secret" not in answer.text and "token_ids" not in answer.text


async def test_a_live_request_can_be_followed(make_cluster):
    cluster = await make_cluster()
    cluster.decode[0].pause_at = 3
    asking = asyncio.create_task(complete(cluster, max_tokens=9))
    await cluster.decode[0].paused.wait()
    await until_tokens(cluster, 3)
    (row,) = (await snapshot(cluster))["requests"]
    assert (row["is_live"], row["state"], row["tokens"], row["max_tokens"]) == (True, "decoding", 3, 9)
    cluster.decode[0].resume.set()
    await asking
    (row,) = (await snapshot(cluster))["requests"]
    assert (row["is_live"], row["state"], row["tokens"]) == (False, "length", 9)


async def until_tokens(cluster, count):
    async with asyncio.timeout(10):
        while (await snapshot(cluster))["requests"][0]["tokens"] < count:
            await asyncio.sleep(0)


async def test_a_retry_and_its_cause_are_in_the_story(make_cluster):
    cluster = await make_cluster(decode=2)
    cluster.prefill[0].answers = [
        lambda m: wire.Failed(request_id=m.request.request_id, code="transfer", message="x", retryable=True)
    ]
    request_id = (await complete(cluster))["id"]
    (story,) = (await cluster.client.get(f"/kvrelay/requests/{request_id}")).json()["requests"]
    (failed,) = [stage for stage in story["stages"] if stage["name"] == "attempt failed"]
    assert (failed["worker"], failed["code"], story["attempts"]) == ("p0", "transfer", 2)


async def test_a_client_that_leaves_and_a_refusal_are_told(make_cluster):
    cluster = await make_cluster(router={"max_inflight": 1})
    cluster.decode[0].answers = [hold_in_line(cluster.decode[0])]
    asking = asyncio.create_task(complete(cluster))
    await cluster.decode[0].until(lambda w: w.holding)
    assert (await complete(cluster))["error"]["code"] == "overloaded"
    live, refused = (await snapshot(cluster))["requests"]
    assert (live["state"], refused["state"], refused["is_live"]) == ("reservation requested", "overloaded", False)
    assert "in flight already" in refused["why"] and (await snapshot(cluster))["front"]["refusals"] == {"overloaded": 1}
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert {row["state"] for row in (await snapshot(cluster))["requests"]} == {"client", "overloaded"}


async def test_all_samples_of_a_request_are_found_by_its_id(make_cluster):
    cluster = await make_cluster()
    request_id = (await complete(cluster, prompt=["a", "b", "c"], n=2))["id"]  # samples of one prompt are one group
    stories = (await cluster.client.get(f"/kvrelay/requests/{request_id}")).json()["requests"]
    assert [story["id"] for story in stories] == [f"{request_id}-{index}" for index in (0, 2, 4)]


async def test_who_else_has_a_request_is_told_from_its_id(make_cluster):
    cluster = await make_cluster()
    other = f"{int(INGRESS, 16) ^ 1:04x}"
    elsewhere = await cluster.client.get(f"/kvrelay/requests/cmpl-{other}{'0' * 20}-0")
    unknown = await cluster.client.get(f"/kvrelay/requests/cmpl-{INGRESS}{'0' * 20}-0")
    assert elsewhere.status_code == unknown.status_code == 404
    assert elsewhere.json()["error"]["message"].startswith(f"ingress {other} served this request")
    assert unknown.json()["error"]["message"].startswith(f"ingress {INGRESS} does not know")


# ---- the last 15 minutes


async def test_the_history_has_what_was_served_and_the_kv_flows(make_cluster):
    cluster = await make_cluster()
    cluster.history.record(cluster.dispatcher.stats, cluster.dispatcher.clock() - 5.0)
    await complete(cluster)
    await until(lambda: cluster.dispatcher.stats.kv_flows)  # the transfer may end after the answer
    cluster.history.record(cluster.dispatcher.stats, cluster.dispatcher.clock())
    answer = await cluster.client.get("/kvrelay/history")
    view = answer.json()
    assert (view["ingress"], answer.headers["cache-control"]) == (INGRESS, "no-store")
    served = view["points"]
    assert served["requests_per_s"] == [pytest.approx(0.2, rel=0.2)]
    assert served["output_tokens_per_s"] == [pytest.approx(0.8, rel=0.2)]
    assert served["ttft_p50_s"][0] > 0 and served["failed_per_s"] == [0.0]
    (flow,) = view["flows"]
    assert (flow["source"], flow["target"], flow["transport"]) == ("p0", "d0", "fake") and flow["bytes_per_s"] > 0


async def test_an_ingress_that_has_just_started_has_an_empty_history(make_cluster):
    cluster = await make_cluster()
    view = (await cluster.client.get("/kvrelay/history")).json()
    assert set(map(len, view["points"].values())) == {0} and view["flows"] == []
