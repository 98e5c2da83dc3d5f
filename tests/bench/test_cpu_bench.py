"""bench/serving/cpu.py's parts: rates from arrival times, ratios, and that no process of a server is left."""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import sys
import textwrap

import pytest
from aiohttp import web

from bench.serving import cpu
from bench.serving import cpu_goals as goals
from bench.serving import cpu_load as load
from bench.serving import cpu_servers as servers
from bench.serving.cpu_load import Arrivals, Wave
from kvrelay.cluster.chaos import processes

pytestmark = pytest.mark.alone


def steady(first_s, gap_s, tokens, per_chunk=1):
    """A request sent at 0 whose chunks come at equal gaps."""
    return Arrivals(0.0, [first_s + gap_s * i for i in range(tokens // per_chunk)], tokens)


# ---- figures


def test_a_lone_request_decodes_at_one_over_its_gap():
    assert goals.decode_rate([steady(1.0, 0.02, 64)]) == pytest.approx(50.0)


def test_only_the_time_when_all_decode_counts():
    # from 3.0 (the second's first token) to 4.0 (the first's last): 10 tokens of one, 4 of the other
    early, late = steady(0.0, 0.1, 41), steady(3.0, 0.25, 9)
    assert goals.decode_rate([early, late]) == pytest.approx(14.0)


def test_a_chunk_of_several_tokens_counts_as_many():
    assert goals.decode_rate([steady(0.0, 0.1, 64, per_chunk=2)]) == pytest.approx(20.0)


def test_requests_that_never_decode_together_have_no_decode_rate():
    assert goals.decode_rate([steady(0.0, 0.1, 5), steady(2.0, 0.1, 5)]) is None
    assert goals.decode_rate([steady(0.0, 0.1, 5), Arrivals(0.0)]) is None


def test_a_cell_has_the_whole_rate_and_the_time_to_first_token():
    cell = goals.decode_cell("x", Wave((steady(1.0, 0.1, 11), steady(1.5, 0.1, 11)), is_cut=False))
    assert (cell.size, cell.ttft_s) == (2, 1.25)
    assert cell.whole_rate == pytest.approx(22 / 2.5)
    assert goals.prefill_cell("x", 512, Wave((steady(2.0, 0.1, 1),), False)).prefill_rate == 256
    assert goals.prefill_cell("x", 512, Wave((Arrivals(0.0),), True)).prefill_rate is None


# ---- ratios

WEIGHTS = {
    "kvrelay": "16 bits",
    "kvrelay drafting": "16 bits",
    "vllm": "16 bits",
    "llama.cpp f16": "16 bits",
    "kvrelay int8": "int8",
    "llama.cpp q8_0": "int8",
}


def decoded(peer, *rates):
    """One client, a cell for each round."""
    return [goals.Cell(peer, "decode", 1, whole_rate=rate) for rate in rates]


def ratios(*cells, weights=WEIGHTS):
    found = goals.ratios(goals.summaries(cells), weights)
    return {text.removeprefix("decode, 1 client: "): one for text, one in found.items()}


def test_each_peer_is_compared_with_every_kvrelay_of_its_weights_over_the_whole_run():
    cells = [*decoded("kvrelay", 50.0), *decoded("vllm", 40.0), *decoded("llama.cpp f16", 100.0)]
    cells += [*decoded("kvrelay drafting", 80.0), *decoded("kvrelay int8", 99.0), *decoded("llama.cpp q8_0", 90.0)]
    assert {text: one.value for text, one in ratios(*cells).items()} == {
        "kvrelay over vllm": 1.25,
        "kvrelay over llama.cpp f16": 0.5,
        "kvrelay drafting over vllm": 2.0,
        "kvrelay drafting over llama.cpp f16": 0.8,
        "kvrelay int8 over llama.cpp q8_0": pytest.approx(1.1),
    }
    fast_while_all_decode = goals.Cell("vllm", "decode", 1, whole_rate=40.0, decode_rate=500.0)
    assert ratios(*decoded("kvrelay", 50.0), fast_while_all_decode)["kvrelay over vllm"].value == 1.25


def test_what_has_no_figure_has_no_ratio():
    assert ratios(*decoded("kvrelay", 50.0))["kvrelay over vllm"].value is None


def test_there_are_no_ratios_to_peers_whose_kvrelay_is_left_out():
    cells = [*decoded("kvrelay", 50.0), *decoded("llama.cpp q8_0", 90.0)]
    assert ratios(*cells, weights={"kvrelay": "16 bits", "llama.cpp q8_0": "int8"}) == {}


def test_a_difference_inside_the_rounds_ranges_is_none():
    apart = ratios(*decoded("kvrelay", 50.0, 48.0, 52.0), *decoded("vllm", 40.0, 47.0, 45.0))
    assert not apart["kvrelay over vllm"].is_none
    within = ratios(*decoded("kvrelay", 50.0, 46.0, 52.0), *decoded("vllm", 40.0, 47.0, 45.0))
    assert within["kvrelay over vllm"].is_none
    assert "1.11, no difference" in goals.ratios_table(within, {})


def test_turns_are_compared_with_each_other_and_rounds_make_the_range():
    """The machine is twice as slow in the second turn of each round: medians over all turns would overlap."""
    cells = []
    for number, gain in enumerate((1.5, 1.2, 1.3)):
        for repeat, pace in enumerate((100.0, 50.0, 100.0)):
            turn = {"turn": (number, repeat)}
            cells += [goals.Cell("kvrelay", "prefill", 512, prefill_rate=pace * gain, **turn)]
            cells += [goals.Cell("vllm", "prefill", 512, prefill_rate=pace, **turn)]
    name = "prefill, 512 tokens: kvrelay over vllm"
    assert goals.ratios(goals.summaries(cells), WEIGHTS)[name].is_none  # the control
    ratio = goals.ratios_of_turns(cells, WEIGHTS)[name]
    assert ratio.spread == pytest.approx((1.3, 1.2, 1.5)) and not ratio.is_none
    assert "1.30 (1.20–1.50) |" in goals.ratios_table({name: ratio}, {})


def test_turns_that_one_peer_missed_do_not_count_and_a_range_with_one_in_it_is_no_difference():
    def cell(peer, rate, turn):
        return goals.Cell(peer, "decode", 1, whole_rate=rate, turn=turn)

    cells = [cell("kvrelay", 9.0, (0, 0)), cell("kvrelay", 12.0, (1, 0)), cell("kvrelay", 99.0, (2, 0))]
    cells += [cell("vllm", 10.0, (0, 0)), cell("vllm", 10.0, (1, 0)), cell("vllm", None, (2, 0))]
    ratio = goals.ratios_of_turns(cells, WEIGHTS)["decode, 1 client: kvrelay over vllm"]
    assert ratio.spread == pytest.approx((1.05, 0.9, 1.2)) and ratio.is_none


def test_shares_of_the_limits_and_that_none_is_above_all():
    limits = goals.Limits(20.0, 100.0, {"16 bits": 0.2e9, "int8": 0.1e9}, {512: 100e9})
    prefill = goals.Cell("kvrelay", "prefill", 512, prefill_rate=300.0)
    cells = [goals.Cell("kvrelay", "decode", 1, whole_rate=50.0, decode_rate=75.0), prefill]
    cells += [goals.Cell("kvrelay int8", "decode", 1, whole_rate=150.0, decode_rate=220.0)]
    cells += [goals.Cell("kvrelay drafting", "decode", 1, whole_rate=150.0, decode_rate=900.0)]  # not bound by it
    found = goals.shares(goals.summaries(cells), WEIGHTS, limits)
    assert found == {
        "decode, 1 client: kvrelay, share of the memory's limit": 0.75,
        "decode, 1 client: kvrelay int8, share of the memory's limit": pytest.approx(1.1),
        "prefill, 512 tokens: kvrelay, share of the GEMM peak": pytest.approx(300 / 512),
    }
    text = goals.ratios_table({}, found)
    assert "| 59 % |" in text and "110 %: AN ERROR OF THE BENCH" in text


def test_medians_and_ranges_over_rounds_leave_out_holes():
    found = goals.summaries(goals.Cell("x", "decode", 4, whole_rate=rate) for rate in (10.0, None, 30.0, 11.0))
    assert found["x", "decode", 4].rate == (11.0, 10.0, 30.0)
    found = goals.summaries([goals.Cell("x", "decode", 4, 12.0, 6.0, ttft_s=0.5, is_cut=True)])
    assert "| x | 6.0 (6.0–6.0) / 500 (cut) |" in goals.rates_table(found, ["x"], "decode", "clients")


# ---- the load


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


async def wave_of(aiohttp_handler, **shape):
    """One wave against a server of one route."""
    app = web.Application()
    app.router.add_post("/v1/completions", aiohttp_handler)
    runner = web.AppRunner(app, shutdown_timeout=0.05)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        wanted = {"clients": 2, "prompt": 8, "output": 3, "limit_s": 20.0} | shape
        return await load.wave(f"http://127.0.0.1:{port}", 7, **wanted)
    finally:
        await runner.cleanup()


def answering(*events, then_hang=False):
    async def handler(request):
        body = await request.json()
        assert len(body["prompt"]) == 8 and body["ignore_eos"]
        response = web.StreamResponse()
        await response.prepare(request)
        for one in events:
            await response.write(one)
        if then_hang:
            await asyncio.Event().wait()
        return response

    return handler


TOKEN = event(choices=[{"text": "a", "finish_reason": None}])
HIDDEN = event(choices=[{"text": "", "finish_reason": None}])
LAST = event(choices=[{"text": "", "finish_reason": "length"}])


def usage(tokens):
    return event(choices=[], usage={"completion_tokens": tokens})


async def test_chunks_and_tokens_of_a_wave():
    found = await wave_of(answering(TOKEN, HIDDEN, TOKEN, LAST, usage(3), b"data: [DONE]\n\n"))
    assert [(len(one.chunks_s), one.num_tokens) for one in found.requests] == [(3, 3)] * 2 and not found.is_cut


@pytest.mark.parametrize("events", [(TOKEN, usage(2)), (TOKEN, event(error={"message": "broken"}))])
async def test_a_short_or_failed_answer_is_no_figure(events):
    with pytest.raises(load.LoadFailed):
        await wave_of(answering(*events))


async def test_a_wave_is_cut_off_at_its_limit():
    found = await wave_of(answering(TOKEN, TOKEN, then_hang=True), limit_s=0.3)
    assert found.is_cut and all(one.num_tokens == len(one.chunks_s) for one in found.requests)


# ---- servers


SERVER = """
import http.server, os, signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={})
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def peer(code):
    return servers.Peer("fake", "16 bits", 16.0, (sys.executable, "-c", textwrap.dedent(code), "{port}"))


def start(code, tmp_path, monkeypatch):
    """The server's context, and without patience: these servers ignore Ctrl-C."""
    whole = servers.Server.stop
    monkeypatch.setattr(servers.Server, "stop", lambda self: whole(self, 0.05))
    return servers.running(peer(code.replace("{", "{{").replace("}", "}}")), {}, tmp_path / "log", limit_s=60)


def test_no_process_of_a_server_is_left_even_after_ctrl_c(tmp_path, monkeypatch):
    """Neither one in a session of its own nor one without the mark, when the server ignores Ctrl-C."""
    with pytest.raises(KeyboardInterrupt), start(SERVER, tmp_path, monkeypatch) as server:
        family = server.members()
        assert len(family) == 3 and server.niceness() == {os.getpriority(os.PRIO_PROCESS, 0): 3}
        raise KeyboardInterrupt
    assert not server.members() and not any(map(processes.is_alive, family))


def test_a_server_that_ends_early_says_its_last_words(tmp_path, monkeypatch):
    failing = start("raise SystemExit('no such model')", tmp_path, monkeypatch)
    with pytest.raises(servers.ServerFailed, match="no such model"), failing:
        raise AssertionError("it never ran")


def test_a_peer_is_left_out_when_a_file_of_it_is_missing(tmp_path):
    (tmp_path / "f16.gguf").touch()
    files = servers.files_of(tmp_path, None, str(tmp_path / "f16.gguf"))
    found = {one.name: servers.missing(one, files) for one in servers.PEERS}
    assert found["llama.cpp f16"] == "" and "q8_0" in found["llama.cpp q8_0"] and "checkpoint" in found["kvrelay"]


# ---- a run


@pytest.fixture
def visit(tmp_path, monkeypatch):
    """One visit to a server that is none, with shapes measured by the given function; what came of it."""

    def run(measure, found):
        async def measured(server, shape, seed, options):
            return measure(*shape)

        monkeypatch.setattr(cpu, "running", lambda *args, **more: contextlib.nullcontext(server))
        monkeypatch.setattr(cpu, "measure", measured)
        one = peer("")
        server = argparse.Namespace(peer=one, niceness=lambda: {5: 2})
        numbers = {"prompt": 128, "output": 64, "repeats": 1, "cell_s": 1.0, "start_s": 1.0}
        options = argparse.Namespace(clients=[1, 4, 16], lengths=[512], **numbers)
        cpu.visit(one, {}, 0, tmp_path / "log", found, options)

    return run


def test_ctrl_c_leaves_what_was_measured(visit):
    def measure(kind, size):
        if size == 4:
            raise KeyboardInterrupt
        return goals.Cell("fake", kind, size, 10.0)

    found = cpu.Measured()
    with pytest.raises(KeyboardInterrupt):
        visit(measure, found)
    assert [cell.size for cell in found.cells] == [1]
    (start,) = found.starts
    assert start["niceness"] == {5: 2} and len(start["load_average"]) == 3


def test_after_a_wave_that_was_cut_off_larger_ones_are_left_out(visit):
    found = cpu.Measured()
    visit(lambda kind, size: goals.Cell("fake", kind, size, is_cut=size == 4), found)
    assert [(cell.kind, cell.size) for cell in found.cells] == [("decode", 1), ("decode", 4), ("prefill", 512)]


def test_a_failed_request_ends_the_visit_but_not_the_run(visit, capsys):
    def measure(kind, size):
        raise load.LoadFailed("HTTP 500")

    found = cpu.Measured()
    visit(measure, found)
    assert found.cells == [] and "HTTP 500" in capsys.readouterr().out


def test_servers_side_by_side_take_turns_that_begin_with_each_in_turn(tmp_path, monkeypatch):
    order, paused = [], []

    async def measured(server, shape, seed, options):
        order.append((server.peer.name, shape, seed))
        return goals.Cell(server.peer.name, *shape, whole_rate=10.0)

    def fake(one, values, log, *, limit_s):
        return contextlib.nullcontext(argparse.Namespace(peer=one, niceness=dict))

    monkeypatch.setattr(cpu, "running", fake)
    monkeypatch.setattr(cpu, "measure", measured)
    monkeypatch.setattr(cpu.time, "sleep", paused.append)
    names = ("kvrelay", "vllm")
    numbers = {"rounds": 2, "repeats": 2, "seed": 5, "start_s": 1.0, "prompt": 128, "output": 64}
    options = argparse.Namespace(clients=[4], lengths=[512], **numbers)
    found = cpu.Measured()
    cpu.take_turns([one for one in servers.PEERS if one.name in names], {}, tmp_path / "log", found, options)
    for kind, size in (("decode", 4), ("prefill", 512)):
        turns = [(name, seed) for name, shape, seed in order if shape == (kind, size)]
        assert [name for name, _ in turns] == [*names, *names[::-1], *names[::-1], *names]
        assert [a[1] == b[1] for a, b in itertools.pairwise(turns)] == [True, False] * 3 + [True]
    assert paused.count(cpu.SETTLE_S) == len(order) == len(found.cells) == 16
    assert [cell.turn for cell in found.cells][:4] == [(0, 0), (0, 0), (0, 1), (0, 1)]


def test_llama_cpp_starts_anew_for_each_shape_with_room_for_its_sequences():
    options = argparse.Namespace(clients=[1, 32], lengths=[512, 2048], prompt=128, output=64)
    llama = next(one for one in servers.PEERS if one.name == "llama.cpp f16")
    assert cpu.starts(llama, options) == [
        ([("decode", 1)], 1, 256),
        ([("decode", 32)], 32, 32 * 256),
        ([("prefill", 512), ("prefill", 2048)], 1, 2304),
    ]
    assert len(cpu.starts(servers.PEERS[0], options)) == 1
