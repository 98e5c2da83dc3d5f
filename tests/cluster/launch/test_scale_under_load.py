"""`kvrelay scale` takes one of two decode workers away under load; bench/serving/drain.py measures what clients see."""

import asyncio

import aiohttp
import pytest

from bench.serving.drain import COUNTS, TIMEOUT_S, moves, scale
from bench.serving.survive import PROMPTS, Load, Outcome
from kvrelay.cluster.chaos.cluster import SETTINGS, ServeCluster
from kvrelay.cluster.launch.dashboard import RayDashboard
from kvrelay.cluster.launch.scale_down import running_workers
from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint
from kvrelay.errors import ModelNotFound
from kvrelay.settings.engine import ModelSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420), pytest.mark.alone]

CLIENTS, OUTPUT_TOKENS = 6, 400  # so that each worker has sequences with much left to do nearly always
MOVED = 'request_moves_total{outcome="moved"}'


async def scaled_away(cluster: ServeCluster) -> Outcome:
    """What the clients see from before one worker leaves until what ran then has ended."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        load = Load(cluster.url, cluster.model(), CLIENTS)
        await load.start(session)
        try:
            seen = load.begin()
            while len(seen.ttft_s) < CLIENTS // 2:  # as many stream
                await asyncio.sleep(0.05)
            for count in (1, 2, 1, 2, 1):  # again where the one that leaves has nothing to move
                await scale(cluster, count)
                if (await asyncio.to_thread(moves, cluster.url))[MOVED]:
                    break
            wanted = seen.requests + CLIENTS
            while seen.requests < wanted:
                await asyncio.sleep(0.05)
        finally:
            await load.aclose()
    return seen


def test_sequences_of_a_worker_that_leaves_move_with_their_kv_and_clients_notice_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("bench.serving.survive.PROMPTS", PROMPTS[:2])
    monkeypatch.setattr("bench.serving.survive.OUTPUT_TOKENS", OUTPUT_TOKENS)
    try:
        prepare_checkpoint(ModelSettings())
    except ModelNotFound as error:
        pytest.skip(f"the default model cannot be had here: {error}")
    settings = SETTINGS | {"engine.prefix_caching": False}  # so that no answer is another's KV
    with ServeCluster(ModelSettings().source, COUNTS, settings) as cluster:
        seen = asyncio.run(scaled_away(cluster))
        counters, details = moves(cluster.url), RayDashboard(cluster.dashboard_url).details()
    printed = capfd.readouterr().out
    assert (seen.failed, seen.wrong, seen.first_failure) == (0, 0, "")
    assert counters[MOVED] >= 1 and counters["request_moved_bytes_total"] > 0
    assert "has left after" in printed and "not left in time" not in printed, printed
    assert len(running_workers(details, "decode")) == 1
