"""Clients against a server that is right at first and then errs: each error is found in the history."""

import asyncio
import json
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from kvrelay.cluster.chaos.clients import ChaosClients, ChaosRequest, catalogue
from kvrelay.cluster.chaos.history import StreamHistory
from kvrelay.cluster.errors import ClusterError

REQUEST = ChaosRequest((5, 6, 7), 6)
RIGHT = [21, 22, 23, 24, 25, 26]


class Server:
    """Answers every completion with `tokens`, one event each, then `end`."""

    def __init__(self):
        self.tokens, self.end, self.status, self.bodies = list(RIGHT), b"data: [DONE]\n\n", 200, []

    async def answer(self, request):
        self.bodies.append(body := await request.json())
        if self.status != 200:
            return web.json_response({"error": {"message": "full"}}, status=self.status)
        head = {"x-request-id": "cmpl-abcd12"}
        if not body["stream"]:
            return web.json_response({"choices": [{"token_ids": self.tokens}]}, headers=head)
        response = web.StreamResponse(headers=head)
        await response.prepare(request)
        for token in self.tokens:
            event = {"choices": [{"token_ids": [token]}]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(self.end)
        return response


@asynccontextmanager
async def served():
    """The server, clients that have learned its answers, and their history."""
    server, history, app = Server(), StreamHistory(), web.Application()
    app.router.add_post("/v1/completions", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with ChaosClients(url, "m", [REQUEST], history, time.monotonic, 0) as clients:
            await clients.learn()
            yield server, clients, history
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_right_answers_are_complete(is_streamed):
    async with served() as (_, clients, history):
        await clients.send(REQUEST, is_streamed=is_streamed)
    assert history.problems() == [] and history.counts["complete"] == 1 and not history.running


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("tokens", [[*RIGHT[:3], *RIGHT[2:]], RIGHT[1:], [*RIGHT[:5], 99], RIGHT[:-1]])
async def test_a_doubled_lost_wrong_or_missing_token_is_found(tokens, is_streamed):
    async with served() as (server, clients, history):
        server.tokens = tokens
        await clients.send(REQUEST, is_streamed=is_streamed)
    (problem,) = history.problems()
    assert problem.is_wrong


@pytest.mark.parametrize(
    "end, what",
    [
        (b"", "cut off"),
        (b'data: {"error": {"message": "lost"}}\n\n', "error event: lost"),
        (b"data: {\n\n", "unreadable"),
    ],
)
async def test_a_stream_without_its_end_is_broken(end, what):
    async with served() as (server, clients, history):
        server.end = end
        await clients.send(REQUEST)
    (problem,) = history.problems()
    assert not problem.is_wrong and problem.what.startswith(what)


@pytest.mark.parametrize("tokens", [RIGHT[:2], []])
async def test_an_answer_is_cut_by_the_kill_of_the_ingress_that_its_head_names(tokens):
    async with served() as (server, clients, history):
        server.end, server.tokens = b"", tokens
        await clients.send(REQUEST)
    now_s = time.monotonic()
    assert history.problems([(now_s - 0.1, now_s)]) == []


async def test_a_refusal_is_broken():
    async with served() as (server, clients, history):
        server.status = 503
        await clients.send(REQUEST)
    assert [one.what[:8] for one in history.problems()] == ["http 503"]


async def test_a_client_that_leaves_is_recorded_as_such():
    async with served() as (server, clients, history):
        server.end, server.tokens = b"", RIGHT[:2]
        await clients.leave_before_first_token(0.0, num_requests=3)
    assert history.problems() == [] and history.counts["left"] == 3 and not history.running


async def test_an_unharmed_cluster_that_errs_is_refused():
    async with served() as (server, clients, _):
        server.status = 503
        with pytest.raises(ClusterError, match="503"):
            await clients.learn()


async def test_clients_run_until_it_is_over():
    async with served() as (server, clients, history):
        load = asyncio.create_task(clients.run(2))
        while history.counts["requests"] < 4:
            await asyncio.sleep(0)
        clients.is_over = True
        await load
    assert {body["stream"] for body in server.bodies} == {True, False} and not history.running


def shapes(max_model_len):
    return [(len(one.prompt), one.num_tokens) for one in catalogue(max_model_len, seed=0)]


def test_requests_have_every_shape():
    assert {(1, 40), (16, 1), (16, 48), (960, 64)} <= set(shapes(1024))
    assert len({one.prompt[:64] for one in catalogue(1024, seed=0)}) < len(shapes(1024))  # prefixes in common


@pytest.mark.parametrize("max_model_len", [64, 352, 1024])
def test_every_request_fits_the_context(max_model_len):
    assert shapes(max_model_len)
    assert all(0 < length < length + count <= max_model_len for length, count in shapes(max_model_len))
