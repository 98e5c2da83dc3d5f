"""The load generator against a small OpenAI server in the same loop, and its command line."""

import asyncio
import itertools
import json
import threading
import time
from contextlib import contextmanager

import pytest
from aiohttp import web
from typer import Typer
from typer.testing import CliRunner

from kvrelay.cluster.loadgen.cli import LoadPlan, command
from kvrelay.cluster.loadgen.client import (
    LoadRequest,
    LoadResult,
    LoadTarget,
    request_body,
    require_loopback,
    run_load,
    served_model,
    sse_events,
)
from kvrelay.cluster.loadgen.prompts import PromptSpec
from kvrelay.cluster.loadgen.stats import LATE_S, OK, UNFINISHED
from kvrelay.cluster.workloads.choose import load_trace
from kvrelay.cluster.workloads.trace import scale_entries
from kvrelay.errors import ConfigError
from tests.fakes import until

pytestmark = pytest.mark.pure


class Server:
    """Streams `max_tokens` tokens, two a chunk; what else it does depends on the model's name."""

    def __init__(self):
        self.bodies = []
        self.running = self.most_running = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/v1/completions", self.answer)
        app.router.add_post("/v1/chat/completions", self.answer)
        app.router.add_get("/v1/models", self.models)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        self.gate.set()
        await self.runner.cleanup()

    async def models(self, request):
        return web.json_response({"object": "list", "data": [{"id": "plain-model", "object": "model"}]})

    async def answer(self, request):
        body = await request.json()
        self.bodies.append(body)
        kind = body["model"]
        if kind.startswith("status-"):
            return web.json_response({"error": {"message": "no"}}, status=int(kind.removeprefix("status-")))
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            return await self.stream(request, body, kind)
        finally:
            self.running -= 1

    async def stream(self, request, body, kind):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        is_chat = "messages" in body

        async def write(data):
            await response.write(b"data: " + json.dumps(data).encode() + b"\n\n")

        await self.gate.wait()
        if is_chat:
            await write({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for done in range(2, body["max_tokens"] + 1, 2):
            end = "length" if done == body["max_tokens"] else None
            if kind.startswith("no-text") and not end:
                continue
            shown = "" if kind.startswith("no-text") else "ab"
            text = {"delta": {"content": shown}} if is_chat else {"text": shown}
            await write({"choices": [{"index": 0, **text, "finish_reason": end, "logprobs": None}]})
            if kind == "error-event":
                await write({"error": {"message": "engine died"}})
                return response
            if kind == "cut":
                request.transport.close()
                return response
        if body.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": len(body.get("prompt", "")), "completion_tokens": body["max_tokens"]}
            if kind == "no-text-no-tokens":
                usage["completion_tokens"] = 0
            await write({"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 2}}})
        await response.write(b"data: [DONE]\n\n")
        return response


def jobs(count, *, output_tokens=8, gap_s=0.0):
    return (LoadRequest(index, [1, 2, 3, 4], output_tokens, arrival_s=index * gap_s) for index in range(count))


async def parts(*chunks):
    for chunk in chunks:
        yield chunk


async def test_events_survive_any_cut_of_the_byte_stream():
    whole = b'data: {"a": 1}\r\n\r\n: comment\n\ndata:{"b": 2}\n\ndata: [DONE]\n\n'
    expected = [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]
    for size in (1, 2, 3, 7, len(whole)):
        cut = parts(*(whole[at : at + size] for at in range(0, len(whole), size)))
        assert [event async for events in sse_events(cut) for event in events] == expected


async def test_a_closed_loop_keeps_exactly_its_clients_busy():
    async with Server() as server:
        server.gate.clear()  # nobody is answered until all clients wait
        run = asyncio.create_task(run_load(LoadTarget(server.url, "m"), jobs(12), concurrency=3))
        await until(lambda: server.running == 3)
        server.gate.set()
        result = await run
    assert [one.outcome for one in result.records] == [OK] * 12
    assert server.most_running == 3
    assert {one.num_output_tokens for one in result.records} == {8}
    assert {one.num_cached_tokens for one in result.records} == {2}
    assert {one.num_chunks for one in result.records} == {4}
    assert len(result.gaps_s) == 12 * 7


async def test_an_open_loop_never_waits_for_answers():
    async with Server() as server:
        server.gate.clear()  # nobody is answered until all have arrived
        run = asyncio.create_task(run_load(LoadTarget(server.url, "m"), jobs(20, gap_s=0.001)))
        await until(lambda: server.running == 20)
        server.gate.set()
        result = await run
    assert [one.outcome for one in result.records] == [OK] * 20
    assert result.summary().max_concurrency == 20
    assert result.summary().late_s.count == 20


def slow_jobs(count, delay_s):
    """Each takes that long to make: the generator's own fault."""
    for job in jobs(count):
        time.sleep(delay_s)
        yield job


@pytest.mark.parametrize("concurrency", [None, 1], ids=["open", "closed"])
async def test_a_generator_that_is_slow_itself_knows_how_late_it_sent(concurrency):
    async with Server() as server:
        result = await run_load(LoadTarget(server.url, "m"), slow_jobs(3, 2 * LATE_S), concurrency=concurrency)
    assert result.summary().is_late
    assert result.summary().late_s.max >= 2 * LATE_S


async def test_a_generator_whose_server_is_slow_is_not_late():
    async with Server() as server:
        server.gate.clear()
        run = asyncio.create_task(run_load(LoadTarget(server.url, "m"), jobs(4), concurrency=2))
        await until(lambda: server.running == 2)
        asyncio.get_running_loop().call_later(4 * LATE_S, server.gate.set)
        result = await run
    assert result.summary().ttft_s.max >= 4 * LATE_S
    assert max(one.started_s - one.scheduled_s for one in result.records) < 4 * LATE_S


@pytest.mark.parametrize(
    ("model", "outcome"),
    [
        ("status-429", "http 429"),
        ("status-500", "http 500"),
        ("error-event", "error event"),
        ("cut", "cut off"),
        ("no-text-no-tokens", "empty answer"),
    ],
)
async def test_each_failure_has_its_name(model, outcome):
    async with Server() as server:
        result = await run_load(LoadTarget(server.url, model), jobs(2), concurrency=1)
    summary = result.summary()
    assert summary.errors == {outcome: 2}
    assert summary.num_rejected == (2 if model == "status-429" else 0)
    assert summary.num_ok == 0
    assert len(result.gaps_s) == 0


async def test_tokens_of_no_text_are_an_answer_without_a_first_text():
    async with Server() as server:
        result = await run_load(LoadTarget(server.url, "no-text"), jobs(2), concurrency=1)
    assert [(one.outcome, one.ttft_s, one.num_output_tokens) for one in result.records] == [(OK, None, 8)] * 2


async def test_a_server_that_is_not_there_is_an_outcome_and_no_exception():
    result = await run_load(LoadTarget("http://127.0.0.1:9", "m"), jobs(2), concurrency=1)
    assert all(one.outcome.startswith("connection") for one in result.records)


async def test_a_timeout_is_an_outcome():
    async with Server() as server:
        server.gate.clear()
        result = await run_load(LoadTarget(server.url, "m", timeout_s=0.1), jobs(1), concurrency=1)
    assert [one.outcome for one in result.records] == ["timeout"]


async def test_cancelling_keeps_what_there_is():
    result = LoadResult()
    async with Server() as server:
        run = asyncio.create_task(run_load(LoadTarget(server.url, "m"), jobs(100), concurrency=2, result=result))
        await until(lambda: len(result.records) >= 4)
        server.gate.clear()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    outcomes = [one.outcome for one in result.records]
    assert outcomes.count(OK) >= 4
    assert set(outcomes) <= {OK, UNFINISHED}
    assert len(outcomes) < 100
    assert result.summary().num_failed == 0


async def test_no_request_starts_after_the_duration():
    async with Server() as server:
        server.gate.clear()
        endless = (LoadRequest(index, [1], 2) for index in itertools.count())
        run = asyncio.create_task(run_load(LoadTarget(server.url, "m"), endless, concurrency=2, duration_s=0.2))
        asyncio.get_running_loop().call_later(0.25, server.gate.set)  # the rule is about real time
        result = await run
    assert [one.outcome for one in result.records] == [OK, OK]


async def test_chat_times_the_first_text_and_not_the_role():
    async with Server() as server:
        result = await run_load(LoadTarget(server.url, "m", endpoint="chat"), jobs(1), concurrency=1)
    assert [one.num_chunks for one in result.records] == [4]
    assert server.bodies[0]["messages"][0]["role"] == "user"


async def test_without_usage_tokens_are_chunks_and_marked_so():
    async with Server() as server:
        result = await run_load(
            LoadTarget(server.url, "m", extra_body={"stream_options": None}), jobs(1), concurrency=1
        )
    assert [(one.num_output_tokens, one.is_estimated) for one in result.records] == [(4, True)]


def test_a_token_prompt_asks_for_exactly_its_length():
    body = request_body(LoadTarget("http://x", "m", extra_body={"top_k": 5}), LoadRequest(0, [7, 8], 9))
    assert (body["prompt"], body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == ([7, 8], 9, 9, True)
    assert body["top_k"] == 5


async def test_the_first_listed_model_is_the_default():
    async with Server() as server:
        assert await asyncio.to_thread(served_model, server.url) == "plain-model"
    with pytest.raises(ConfigError, match="--model"):
        await asyncio.to_thread(served_model, server.url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"])
def test_this_machine_may_be_loaded(url):
    require_loopback(url, allow_remote=False)


@pytest.mark.parametrize("url", ["http://192.0.2.1:80", "http://0.0.0.0:80", "ftp://127.0.0.1", "nothing"])
def test_another_machine_may_not(url):
    with pytest.raises(ConfigError):
        require_loopback(url, allow_remote=False)


def test_another_machine_may_when_allowed():
    require_loopback("http://192.0.2.1:80", allow_remote=True)


def test_a_plan_makes_as_many_jobs_as_asked():
    plan = LoadPlan(PromptSpec(input_tokens=16), output_tokens=4, num_requests=5, rate=10.0)
    made = list(plan.jobs())
    assert [len(job.prompt) for job in made] == [16] * 5
    assert [job.arrival_s for job in made] == sorted(job.arrival_s for job in made)


def test_a_trace_file_becomes_entries(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 3000, "input_length": 1024, "output_length": 8, "hash_ids": [0, 1]}\n' * 3)
    entries = scale_entries(load_trace(path, limit=2), time_scale=2.0, length_scale=0.5)
    assert [(one.arrival_s, one.input_tokens) for one in entries] == [(6.0, 512)] * 2


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--url", "http://192.0.2.1:80"], "another machine"),
        (["--rate", "1", "--concurrency", "2"], "choose one"),
        (["--token-range", "9:3", "--model", "m"], "range of token ids"),
        (["--extra-body", "[]", "--model", "m"], "JSON object"),
        (["--endpoint", "embeddings"], "completions or chat"),
        (["--trace", "does-not-exist.jsonl"], "does-not-exist"),
    ],
)
def test_a_wrong_flag_is_one_clear_line(arguments, word):
    app = Typer()
    app.command()(command)
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 2
    assert word in found.output
    assert len(found.output.strip().splitlines()) == 1


@contextmanager
def server_elsewhere():
    """The server in a thread of its own, as the command owns the main thread and its signals."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = Server.__new__(Server)
    try:
        asyncio.run_coroutine_threadsafe(_entered(server), loop).result()
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _entered(server):
    server.__init__()
    await server.__aenter__()


def invoke(server, *arguments):
    app = Typer()
    app.command()(command)
    return CliRunner().invoke(app, ["--url", server.url, *arguments])


@pytest.mark.slow
def test_the_command_writes_table_json_and_plot(tmp_path):
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    with server_elsewhere() as server:
        flags = ["--requests", "6", "--rate", "1000", "--output-tokens", "4", "--slo-ttft-ms", "60000"]
        found = invoke(server, *flags, "--json", str(out), "--plot", str(picture))
    assert found.exit_code == 0, found.output
    assert "6 ok" in found.output
    data = json.loads(out.read_text())
    assert data["target"]["model"] == "plain-model"
    assert data["summary"]["num_ok"] == 6
    assert data["summary"]["goodput_per_s"] > 0
    assert len(data["requests"]) == 6
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_fails_when_no_request_succeeds():
    with server_elsewhere() as server:
        found = invoke(server, "--model", "status-429", "--requests", "6", "--concurrency", "2")
    assert found.exit_code == 1
    assert "6 rejected (429)" in found.output
    assert "error       6 x http 429" in found.output
