"""An ingress that leaves finishes its open streams: `kvrelay scale --ingress`, and SIGTERM of `kvrelay serve`."""

import asyncio
import json
import signal
import sys

import aiohttp
import psutil
import pytest

from kvrelay.cluster.chaos.served import running_serve
from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint
from kvrelay.errors import ModelNotFound
from kvrelay.settings.engine import ModelSettings
from tests.ports import open_ports

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]

DRAIN_S = 15
NUM_TOKENS = 100
FLAGS = ("--ingress", "2", "--dtype", "float32", "--set", "engine.kv_memory=256MiB")
PROMPTS = ["One two three", "The sun is", "Water flows", "A long time ago", "Red green", "In the city"]


async def stream(session, url, prompt, max_tokens, begun=None):
    """(the ingress's tag, text, error code of the last event): raises when the connection breaks."""
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    tag, text, error, is_done = "", "", None, False
    async with session.post(f"{url}/v1/completions", json=body | {"model": session.model, "stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.strip() == b"data: [DONE]":
                is_done = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    error = event["error"]["code"]
                    continue
                tag = event["id"].split("-")[1][:4]
                text += "".join(choice["text"] for choice in event["choices"])
                if begun is not None:
                    begun.release()
    assert is_done or error, "the stream broke"
    return tag, text, error


async def open_streams(session, url, num_tokens):
    """Streams of these lengths, each with its first token."""
    begun = [asyncio.Semaphore(0) for _ in num_tokens]
    tasks = [
        asyncio.create_task(stream(session, url, prompt, count, one))
        for prompt, count, one in zip(PROMPTS, num_tokens, begun, strict=False)
    ]
    for one in begun:
        await one.acquire()
    return tasks


async def scale_and_stop(served):
    url = served.url
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        async with session.get(f"{url}/v1/models") as answer:
            session.model = (await answer.json())["data"][0]["id"]
        alone = await asyncio.gather(*(stream(session, url, prompt, NUM_TOKENS) for prompt in PROMPTS))
        right = {prompt: text for prompt, (_, text, _) in zip(PROMPTS, alone, strict=True)}

        # ---- an ingress leaves
        tasks = await open_streams(session, url, [NUM_TOKENS] * len(PROMPTS))
        command = [sys.executable, "-m", "kvrelay.cluster.commands.cli", "scale", "--ingress", "1"]
        scaling = await asyncio.create_subprocess_exec(*command, "--url", url, "--address", served.dashboard)
        later = []
        while scaling.returncode is None or len(later) < 3:
            prompt = PROMPTS[len(later) % len(PROMPTS)]
            tag, text, error = await stream(session, url, prompt, 12)
            assert error is None and right[prompt].startswith(text)
            later.append(tag)
            await asyncio.sleep(0.1)
        assert await scaling.wait() == 0
        answers = [await task for task in tasks]
        assert [(text, error) for _, text, error in answers] == [(right[prompt], None) for prompt in PROMPTS]
        assert len({tag for tag, _, _ in answers}) == 2, "one ingress had no stream"
        assert len(set(later[-3:])) == 1, later

        # ---- kvrelay serve is stopped
        tasks = await open_streams(session, url, [25, 3000, 20])
        served.process.send_signal(signal.SIGTERM)
        short, too_long, other = [await task for task in tasks]
        for prompt, (_, text, error) in ((PROMPTS[0], short), (PROMPTS[2], other)):
            assert error is None and text and right[prompt].startswith(text)
        assert too_long[2] == "ingress_stops"
        assert too_long[1][:200] == right[PROMPTS[1]][:200]
    assert await asyncio.to_thread(served.process.wait, 30) == 0
    return later


def test_open_streams_end_whole_and_those_that_take_too_long_with_an_error(tmp_path):
    try:
        prepare_checkpoint(ModelSettings())
    except ModelNotFound as error:
        pytest.skip(f"the default model cannot be had here: {error}")
    with running_serve(tmp_path, *FLAGS, "--set", f"cluster.drain_timeout_s={DRAIN_S}") as served:
        family = psutil.Process(served.process.pid).children(recursive=True)
        assert open_ports(served.process.pid) == {}  # HAProxy's neither
        asyncio.run(scale_and_stop(served))
        assert f"within {DRAIN_S} s (Ctrl-C again to kill)" in served.log.read_text()
        assert psutil.wait_procs(family, timeout=0)[1] == []
