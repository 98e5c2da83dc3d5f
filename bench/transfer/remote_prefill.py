"""What prefilling on another worker costs the first token: TTFT(remote) - TTFT(local), unloaded.

    python -m bench.transfer.remote_prefill [--core 1] [--lengths 128 512 2048] [--repeats 15] [--json FILE]
    python -m bench.transfer.remote_prefill --url http://127.0.0.1:8000 ...

Without --url it starts a prefill and a decode worker, both pinned to one core, so that both paths compute
on the same core; the router runs here. With --url it asks a running `kvrelay serve` over HTTP, where the two
workers have cores of their own, whose speeds differ too. Leave the machine alone meanwhile. Prompts are random
and never repeat, so nothing is cached; both paths take turns (each goes first every other time) and the cost is
the median of the paired differences, since a machine's speed drifts. "outside" is the TTFT without the engine's
own step time. Goal: 5 ms + 2 % of the local TTFT.
"""

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import aiohttp

from bench.engine.inprocess import count_weights, prepare, random_prompt, request
from bench.figures import show
from kvrelay.cluster.launch.local import local_cluster
from kvrelay.cluster.loadgen.client import (
    LoadRequest,
    LoadResult,
    LoadTarget,
    open_session,
    require_loopback,
    send,
    served_model,
)
from kvrelay.cluster.loadgen.prompts import PromptSpec, synthetic_prompt
from kvrelay.cluster.loadgen.stats import OK
from kvrelay.config import Settings, settings_from
from kvrelay.serve.requests.dispatcher import Dispatcher

GOAL_MS, GOAL_SHARE = 5.0, 0.02
DEFAULT_MODEL = "smollm2-135m-instruct"
OUTPUT_TOKENS = 4  # more than one, or no decode worker is needed at all


class First(NamedTuple):
    """When the first token came, and how much of that the engine computed where that is known."""

    ttft_s: float
    compute_s: float | None


class Prober(Protocol):
    """Sends one request at a time down a chosen path."""

    async def first(self, length: int, path: str) -> First:
        """A fresh prompt's first token. Exits when the request fails."""


class HttpProber:
    """Asks a running cluster."""

    def __init__(self, session: aiohttp.ClientSession, target: LoadTarget, seed: int) -> None:
        self._session, self._target, self._seed = session, target, seed
        self._index = 0

    async def first(self, length: int, path: str) -> First:
        self._index += 1
        prompt = synthetic_prompt(PromptSpec(input_tokens=length, seed=self._seed), self._index)
        result, headers = LoadResult(), {"x-kvrelay-prefill": path}
        record = await send(
            self._session,
            self._target,
            LoadRequest(self._index, prompt, OUTPUT_TOKENS),
            result,
            run_start_s=time.perf_counter(),
            headers=headers,
        )
        if record.outcome != OK or record.ttft_s is None:
            raise SystemExit(f"{path} request failed: {record.outcome} {result.first_failure}")
        if record.num_cached_tokens:
            raise SystemExit(f"{record.num_cached_tokens} tokens were cached: another --seed is needed")
        return First(record.ttft_s, None)


class SameCoreProber:
    """Asks two workers on one core, without HTTP. The cluster is new, so prompts need only differ among themselves."""

    def __init__(self, dispatcher: Dispatcher, settings: Settings, vocab_size: int) -> None:
        self._dispatcher, self._block_size, self._vocab_size = dispatcher, settings.engine.block_size, vocab_size
        self._index = 0

    async def first(self, length: int, path: str) -> First:
        self._index += 1
        prompt = random_prompt(self._index, length, self._vocab_size)
        began, first = time.perf_counter(), None
        asked = request(self._index, prompt, OUTPUT_TOKENS, self._block_size)
        async for output in self._dispatcher.generate(asked, force=path):
            if first is None:
                compute_s = output.timings.compute_s if output.timings else None
                first = First(time.perf_counter() - began, compute_s)
        if first is None:
            raise SystemExit(f"{path} request of {length} tokens had no output")
        return first


async def check_paths(session: aiohttp.ClientSession, target: LoadTarget) -> None:
    """Exit unless each forced path is the one that a request takes."""
    for forced, expected in (("remote", "disaggregated"), ("local", "local")):
        body = {"model": target.model, "prompt": list(range(2000, 2040)), "max_tokens": OUTPUT_TOKENS}
        headers = {"x-kvrelay-prefill": forced, "x-kvrelay-explain": "1"}
        async with session.post(f"{target.url}/v1/completions", json=body, headers=headers) as response:
            answer = await response.json()
        path = answer.get("kvrelay", {}).get("path") or answer
        if path != expected:
            raise SystemExit(f"x-kvrelay-prefill: {forced} took another path: {path}")


async def measure(prober: Prober, length: int, repeats: int) -> dict[str, Any]:
    """One row: both paths at one prompt length."""
    seen: dict[str, list[First]] = {"remote": [], "local": []}
    for path in seen:
        await prober.first(length, path)
    for repeat in range(repeats):
        for path in ("remote", "local") if repeat % 2 else ("local", "remote"):
            seen[path].append(await prober.first(length, path))
    local, remote = (1000 * statistics.median(first.ttft_s for first in seen[path]) for path in ("local", "remote"))
    costs = [1000 * (far.ttft_s - near.ttft_s) for far, near in zip(seen["remote"], seen["local"], strict=True)]
    low, cost, high = statistics.quantiles(costs, n=4)
    goal = GOAL_MS + GOAL_SHARE * local
    return {
        "prompt tokens": length,
        "local TTFT ms": local,
        "remote TTFT ms": remote,
        "remote prefill ms": cost,
        "quartiles ms": f"{low:.1f} .. {high:.1f}",
        "goal ms": goal,
        "met": "yes" if cost <= goal else "no",
        "outside, local ms": outside_ms(seen["local"]),
        "outside, remote ms": outside_ms(seen["remote"]),
    }


def outside_ms(firsts: list[First]) -> float | None:
    """Median of what the engine did not compute; None where it is not known."""
    remainders = [1000 * (first.ttft_s - first.compute_s) for first in firsts if first.compute_s is not None]
    return statistics.median(remainders) if remainders else None


@asynccontextmanager
async def over_http(options: argparse.Namespace) -> AsyncIterator[tuple[Prober, str]]:
    """A prober of the cluster at --url, and what was measured."""
    require_loopback(options.url, allow_remote=False)
    seed = options.seed if options.seed is not None else time.time_ns() % (1 << 31)
    target = LoadTarget(options.url, options.model or await served_model(options.url))
    async with open_session(target) as session:
        await check_paths(session, target)
        yield HttpProber(session, target, seed), f"{target.model} over HTTP"


@asynccontextmanager
async def on_one_core(options: argparse.Namespace) -> AsyncIterator[tuple[Prober, str]]:
    """A prober of two workers on --core, and what was measured."""
    folder, settings = prepare(options.model or DEFAULT_MODEL), settings_from({})
    cores = ((options.core,), (options.core,))
    async with local_cluster(settings, folder, num_decode=1, num_inside=0, cores=cores) as cluster:
        prober = SameCoreProber(cluster.dispatcher, settings, count_weights(folder).vocab_size)
        yield prober, f"both workers on core {options.core}"


async def run(options: argparse.Namespace) -> None:
    async with (over_http if options.url else on_one_core)(options) as (prober, what):
        rows = [await measure(prober, length, options.repeats) for length in options.lengths]
    show(f"remote prefill, {what}, unloaded, medians of {options.repeats} pairs", rows, options.json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running cluster; default: two workers of this script's own on one core")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--model", help="default: the served one, or the default model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seed", type=int, help="default: the time, so that a second run finds nothing cached")
    parser.add_argument("--json", type=Path)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
