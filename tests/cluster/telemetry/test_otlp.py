"""Spans end to end: ingress, prefill and decode workers, each in its own process, export over OTLP to a receiver."""

import asyncio
import contextlib
import gc
import os
import signal
import time

import httpx
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install 'kvrelay[tracing]'")
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan

from kvrelay import tracing
from kvrelay.cluster.launch.local import local_cluster
from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.serve.api.app import ModelCard, create_app
from kvrelay.serve.tenants.access import Access
from kvrelay.serve.text.tokenizer import Tokenizer
from tests.cluster.telemetry.otlp_receiver import Receiver, values
from tests.fakes import OwnSessions

pytestmark = [pytest.mark.slow, pytest.mark.processes]

CLIENTS_SPAN = "b7ad6b7169203331"
UNDISTURBED, ABORTED, CRASHED = (f"{digit}af7651916cd43dd8448eb211c80319c" for digit in "123")  # trace ids


def headers(trace_id):
    return {"traceparent": f"00-{trace_id}-{CLIENTS_SPAN}-01", "x-kvrelay-prefill": "remote"}


HEADERS = headers(UNDISTURBED)
QUEUE = 64
SETTINGS = {
    "model": {"dtype": "float32", "max_model_len": 2048},
    "engine": {"kv_memory": "8MiB", "num_threads": 1, "backend": "reference"},
    "transfer": {"transport": "shm"},
    "router": {"local_prefill_tokens": 0},
}


@pytest.fixture
def receiver():
    made = Receiver()
    yield made
    made.close()


async def until(receiver, trace_id, condition):
    """The trace's spans by name, once the condition on these lists holds. Spans of a request come in any order."""
    deadline_s = time.monotonic() + 60
    while not condition(found := receiver.by_name(trace_id)):
        assert time.monotonic() < deadline_s, {name: len(spans) for name, spans in found.items()}
        await asyncio.sleep(0.05)
    return found


@contextlib.contextmanager
def exporting(monkeypatch, url, *, timeout_s=10):
    """This process exports as an ingress of the product does, and no longer afterwards."""
    for name, value in {
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_BSP_MAX_QUEUE_SIZE": str(QUEUE),
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "32",
        "OTEL_EXPORTER_OTLP_TIMEOUT": str(timeout_s),
    }.items():
        monkeypatch.setenv(name, value)
    providers = []
    monkeypatch.setattr(tracing, "_provider", None)
    monkeypatch.setattr(trace, "set_tracer_provider", providers.append)
    tracing.configure("ingress-0", "ingress")
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: providers[0])
    monkeypatch.setattr(tracing, "_tracer", providers[0].get_tracer("kvrelay"))
    yield
    tracing.shutdown()


@contextlib.asynccontextmanager
async def ingress_of(folder, *, num_decode=1):
    """(HTTP client of an ingress in this process, its cluster of workers in processes of their own)."""
    settings = settings_from(SETTINGS)
    async with local_cluster(settings, folder, num_decode=num_decode, num_inside=0) as cluster:
        async with asyncio.timeout(60):
            await cluster.dispatcher.workers.wait_for(lambda workers: workers.pairs.book.is_settled())
        card = ModelCard("tiny", 2048, 0)
        app = create_app(cluster.dispatcher, Tokenizer(folder), settings, card, OwnSessions(time.monotonic), Access())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            yield client, cluster


def body(**changes):
    messages = [{"role": "user", "content": "Where does the time of this request go? " * 4}]
    return {"model": "tiny", "messages": messages, "max_tokens": 6, "ignore_eos": True, "temperature": 0} | changes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


async def test_one_trace_of_three_processes_also_after_an_abort_and_a_crash(folder, receiver, monkeypatch):
    with exporting(monkeypatch, receiver.url):
        async with ingress_of(folder, num_decode=2) as (client, cluster):
            assert (await client.post("/v1/chat/completions", json=body(), headers=HEADERS)).status_code == 200
            names = {"request", "route", "reserve", "prefill", "kv send", "kv transfer", "decode"}
            found = await until(receiver, UNDISTURBED, lambda found: found.keys() >= names)
            assert found.keys() == names and all(len(spans) == 1 for spans in found.values())
            of_one_trace(found)

            await leave_early(cluster)
            found = await until(receiver, ABORTED, lambda found: "decode" in found)
            _, given_up = found["decode"][0]
            assert (given_up.status.code, given_up.status.message) == (2, "given up")

            await crash_in_the_middle(client, cluster)
            found = await until(receiver, CRASHED, lambda found: "request" in found and len(found.get("route", ())) > 1)
            first, second = sorted((values(span) for _, span in found["route"]), key=lambda one: one["kvrelay.attempt"])
            assert (first["kvrelay.attempt"], second["kvrelay.attempt"]) == (1, 2)
            assert second["kvrelay.previous_failure"] and first["kvrelay.decode"] != second["kvrelay.decode"]


def of_one_trace(found):
    """Of one undisturbed request: who made which span, their parents, and what moved."""
    spans = {name: span for name, [(_, span)] in found.items()}
    root = spans["request"]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (UNDISTURBED, CLIENTS_SPAN)
    assert {span.parent_span_id for name, span in spans.items() if name != "request"} == {root.span_id}
    decode = values(spans["route"])["kvrelay.decode"]
    assert {name: instance for name, [(instance, _)] in found.items()} == {
        **dict.fromkeys(("request", "route", "reserve"), "ingress-0"),
        **dict.fromkeys(("prefill", "kv send"), "prefill-0"),
        **dict.fromkeys(("kv transfer", "decode"), decode),
    }
    for name in ("kv send", "kv transfer"):
        moved = values(spans[name])
        assert moved["kvrelay.path"] == "shm" and moved["kvrelay.bytes"] > 10_000
    assert values(spans["decode"])["kvrelay.output_tokens"] == 6
    ids = {values(span)["kvrelay.request_id"] for name, span in spans.items() if name != "request"}
    assert len(ids) == 1
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in spans.values())
    assert root.start_time_unix_nano <= min(span.start_time_unix_nano for span in spans.values())


async def leave_early(cluster):
    """A client that is gone after its first tokens."""
    from kvrelay.hashing import block_hashes
    from kvrelay.plane.messages import Sampling, SequenceRequest

    ids = [3 + index % 200 for index in range(100)]
    request = SequenceRequest(
        request_id="gone",
        token_ids=ids,
        num_prompt_tokens=100,
        block_hashes=list(block_hashes(ids, 16)),
        sampling=Sampling(max_tokens=1500, temperature=0.0, ignore_eos=True),
        traceparent=headers(ABORTED)["traceparent"],
    )
    async with contextlib.aclosing(cluster.dispatcher.generate(request, force="remote")) as outputs:
        count = 0
        async for output in outputs:
            count += len(output.token_ids)
            if count > 3:
                break


async def crash_in_the_middle(client, cluster):
    """The decode worker of a running request is killed; another goes on."""
    asking = asyncio.create_task(
        client.post("/v1/chat/completions", json=body(max_tokens=1500), headers=headers(CRASHED))
    )
    async with asyncio.timeout(60):
        while not (
            live := [one for one in cluster.dispatcher.requests.newest(1) if not one.outcome and one.num_tokens > 5]
        ):
            await asyncio.sleep(0.01)
    (victim,) = [worker for worker in cluster.decode if worker.name == live[0].decode]
    os.kill(victim.pid, signal.SIGKILL)
    answer = await asking
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 1500


async def test_a_collector_that_hangs_or_is_gone_costs_no_request_and_little_memory(folder, receiver, monkeypatch):
    receiver.is_answering.clear()
    with exporting(monkeypatch, receiver.url, timeout_s=1):
        async with ingress_of(folder) as (client, _):
            for _ in range(20):
                answer = await client.post("/v1/chat/completions", json=body(), headers=HEADERS)
                assert answer.status_code == 200
            started_s = time.monotonic()
            for number in range(3000):
                spans = tracing.Spans(HEADERS["traceparent"], request_id=str(number))
                spans.begin("route")
                spans.close()
            assert time.monotonic() - started_s < 10.0  # 3 ms each would already be a wait
            gc.collect()
            assert sum(issubclass(type(one), ReadableSpan) for one in gc.get_objects()) <= 2 * QUEUE + 32
            receiver.is_answering.set()
            await until(receiver, UNDISTURBED, lambda found: found)
            receiver.close()
            assert (await client.post("/v1/chat/completions", json=body(), headers=HEADERS)).status_code == 200
        started_s = time.monotonic()
        tracing.shutdown()
        assert time.monotonic() - started_s < 10.0  # spans that nobody takes are given up
