"""`kvrelay status --watch` against a real ingress over fake workers: tables, JSON lines, and how it ends."""

import asyncio
import io
import json
import re
import signal
import sys

import pytest
from rich.console import Console

from kvrelay.cluster.commands import watch as watching
from kvrelay.cluster.commands.watch import fetch, render, watch
from kvrelay.cluster.errors import ClusterError
from kvrelay.plane import messages as wire

KEY = "s3cret"
BODY = {"prompt": "hello world", "max_tokens": 4}
LOAD = {
    "seq": 9,
    "running": 3,
    "waiting": 41,
    "batch_sequences": 17,
    "batch_tokens": 523,
    "pinned_blocks": 5,
    "total_blocks": 640,
    "preemptions": 71,
    "kv_refused": {"checksum": 2},
    "tiers": [wire.TierLoad(tier="host", num_blocks=77)],
}


@pytest.fixture
async def url(make_cluster, serve_http):
    """An ingress with an API key over p0 and d0; d0 has told its load, and a request has been answered."""
    cluster = await make_cluster(serve={"api_key": KEY})
    cluster.decode[0].say_raw(wire.LoadReport(**LOAD))
    await cluster.client.post("/v1/completions", json=BODY, headers={"authorization": f"Bearer {KEY}"})
    url = await serve_http(cluster.app)
    async with asyncio.timeout(10):
        while worker(await asyncio.to_thread(fetch, url, KEY), "d0")["load"]["seq"] != 9:
            await asyncio.sleep(0)
    return url


def worker(view, worker_id):
    return next(one for one in view["workers"] if one["worker_id"] == worker_id)


def after(looks):
    """A sleep that is Ctrl-C after so many looks."""
    left = iter(range(looks - 1))

    def sleep(seconds):
        assert seconds == watching.PERIOD_S
        if next(left, None) is None:
            raise KeyboardInterrupt

    return sleep


def printed(renderable, width=80):
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()


async def test_without_a_terminal_it_prints_tables_until_ctrl_c(url):
    console = Console(file=io.StringIO(), width=80)
    await asyncio.to_thread(watch, console, url, KEY, as_json=False, sleep=after(2))
    text = console.file.getvalue()
    assert text.count("worker ") == 2 and "…" not in text.replace("…", "", 2)  # two ids of requests are cut, no cell is
    for shown in (
        "p0",
        "d0",
        "41",
        "17",
        "523",
        "host",
        "77",
        "p0 → d0",
        "fake 1.00 GB/s",
        "d0 71",
        "checksum 2",
        "length 1",
    ):
        assert shown in text, shown


async def test_on_a_terminal_it_is_drawn_in_place(url):
    console = Console(file=io.StringIO(), width=80, height=60, force_terminal=True)
    await asyncio.to_thread(watch, console, url, KEY, as_json=False, sleep=after(3))
    assert "\x1b[1A" in console.file.getvalue() and console.file.getvalue().endswith("\x1b[?25h")  # the cursor is back


async def test_json_is_one_object_a_line(url, capsys):
    await asyncio.to_thread(watch, Console(), url, KEY, as_json=True, sleep=after(3))
    views = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(views) == 3 and all(worker(view, "d0")["load"]["preemptions"] == 71 for view in views)


async def test_the_first_look_that_fails_ends_it_and_a_later_one_does_not(url, monkeypatch):
    with pytest.raises(ClusterError, match="API key"):
        await asyncio.to_thread(watch, Console(), url, "wrong", as_json=True)
    view = await asyncio.to_thread(fetch, url, KEY)
    looks = iter([view, ClusterError("gone for now"), view])

    def look(*_):
        if isinstance(answer := next(looks), Exception):
            raise answer
        return answer

    monkeypatch.setattr(watching, "fetch", look)
    console = Console(file=io.StringIO(), width=80)
    watch(console, url, KEY, as_json=False, sleep=after(3))
    assert console.file.getvalue().count("gone for now") == 1 and console.file.getvalue().count("worker ") == 3


async def test_rates_are_of_the_time_between_two_views(url):
    view = await asyncio.to_thread(fetch, url, KEY)
    later = {
        **view,
        "now_s": view["now_s"] + 2.0,
        "front": {**view["front"], "output_tokens": view["front"]["output_tokens"] + 30},
    }
    assert "15 output tokens/s" in printed(render(later, view))
    assert " 0 output tokens/s" in printed(render(view, later))  # a counter that fell was begun anew


async def test_counters_that_it_knows_nothing_of_are_shown_by_name(url):
    view = await asyncio.to_thread(fetch, url, KEY)
    assert "also" not in printed(render(view), 200)
    worker(view, "d0")["load"] |= {"dreams_swapped": 3, "dreams_by_kind": {"sweet": 2, "sour": 0}, "dreamt": 0}
    assert "d0 dreams swapped 3, d0 dreams by kind sweet 2" in printed(render(view), 200)
    assert "sour" not in printed(render(view), 200) and "dreamt" not in printed(render(view), 200)


async def test_who_is_in_line_what_was_pre_empted_and_who_was_served_have_lines_of_their_own(url):
    view = await asyncio.to_thread(fetch, url, KEY)
    worker(view, "d0")["load"] |= {
        "waiting_by_priority": {"3": 5, "-1": 2, "0": 0},
        "deadline_refusals": 4,
        "preempted": {"swap": 70, "recompute": 1},
        "recomputed_tokens": 99,
        "swap_out_s": 0.25,
        "swap_in_s": 0.5,
        "swapped_blocks": 18,
        "swapped_bytes": 1 << 20,
        "tenant_tokens": {"": 10, "abcdef0123": 40, "b": 30, "c": 20, "d": 5},
        "other_tenant_tokens": 7,
        "drafted_tokens": 50,
        "accepted_tokens": 20,
        "model_drafted_tokens": 10,
        "model_accepted_tokens": 8,
        "cascade_saved_tokens": 640,
    }
    told = printed(render(view), 200)
    assert "d0 priority -1: 2, priority 3: 5, 4 past their deadline" in told
    assert "d0 71 (swap 70, recompute 1; 99 tokens recomputed)" in told
    assert "d0 18 blocks now (250ms out, 500ms back)" in told
    assert "d0 50 tokens, 40% right; 10 of them by the draft model, 80% right" in told and "d0 640 tokens" in told
    assert "d0 abcdef 40, b 30, c 20, others 22" in told and "also" not in told


async def test_a_worker_that_is_down_has_a_line_and_no_figures(url):
    view = await asyncio.to_thread(fetch, url, KEY)
    down = {"worker_id": "d0", "role": "decode", "health": "down"}
    text = printed(render({**view, "workers": [worker(view, "p0"), down]}))
    assert re.search(r"d0 +down *\n", text) and "523" not in text


@pytest.mark.parametrize("way", ["interrupt", "pipe"])
async def test_the_command_ends_cleanly(url, way):
    command = (
        sys.executable,
        "-m",
        "kvrelay.cluster.commands.cli",
        "status",
        "--watch",
        "--json",
        "--url",
        url,
        "--api-key",
        KEY,
    )
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=pipe,
        stderr=pipe,
        limit=1 << 20,
        # tests in the background were told to ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert json.loads(await process.stdout.readline())["workers"]
    if way == "interrupt":
        process.send_signal(signal.SIGINT)
    else:
        process.stdout._transport.close()  # as `head -1` does
    assert await process.stderr.read() == b""
    assert await process.wait() == 0
