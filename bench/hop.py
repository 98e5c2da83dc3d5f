"""What prefilling on another worker costs the first token: TTFT(remote) - TTFT(local), unloaded.

    python bench/hop.py --url http://127.0.0.1:8000 [--lengths 128 512 2048] [--repeats 15] [--json FILE]

Start `kvrelay serve` before, with one prefill and one decode worker of equally many cores, and nothing
else on the machine. The header x-kvrelay-prefill forces the path of each request. Prompts are random
and never repeat, so nothing is cached; both paths take turns (each goes first every other time) and
medians count. One explained request per path checks that the header is obeyed. Goal: 5 ms + 2 % of the local TTFT.
"""

import argparse
import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp
from figures import show

from kvrelay.cluster.loadgen import Job, Result, Target, open_session, require_loopback, send, served_model
from kvrelay.cluster.loadgen_stats import OK
from kvrelay.cluster.loadgen_traces import PromptSpec, synthetic_prompt

GOAL_MS, GOAL_SHARE = 5.0, 0.02
OUTPUT_TOKENS = 4  # more than one, or no decode worker is needed at all


class Prober:
    """Sends one request at a time down a chosen path."""

    def __init__(self, session: aiohttp.ClientSession, target: Target, seed: int) -> None:
        self._session, self._target, self._seed = session, target, seed
        self._index = 0

    async def ttft_s(self, length: int, path: str) -> float:
        """The first token's time of a fresh prompt. Exits when the request fails."""
        self._index += 1
        prompt = synthetic_prompt(PromptSpec(input_tokens=length, seed=self._seed), self._index)
        result, headers = Result(), {"x-kvrelay-prefill": path}
        record = await send(
            self._session,
            self._target,
            Job(self._index, prompt, OUTPUT_TOKENS),
            result,
            run_start_s=time.perf_counter(),
            headers=headers,
        )
        if record.outcome != OK or record.ttft_s is None:
            raise SystemExit(f"{path} request failed: {record.outcome} {result.first_failure}")
        if record.num_cached_tokens:
            raise SystemExit(f"{record.num_cached_tokens} tokens were cached: another --seed is needed")
        return record.ttft_s


async def check_paths(session: aiohttp.ClientSession, target: Target) -> None:
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
    """One row: medians of both paths at one prompt length."""
    times: dict[str, list[float]] = {"remote": [], "local": []}
    for path in times:
        await prober.ttft_s(length, path)
    for repeat in range(repeats):
        for path in ("remote", "local") if repeat % 2 else ("local", "remote"):
            times[path].append(1000 * await prober.ttft_s(length, path))
    remote, local = statistics.median(times["remote"]), statistics.median(times["local"])
    paired = [far - near for far, near in zip(times["remote"], times["local"], strict=True)]
    goal = GOAL_MS + GOAL_SHARE * local
    return {
        "prompt tokens": length,
        "local TTFT ms": local,
        "remote TTFT ms": remote,
        "hop ms": remote - local,
        "median of pairs ms": statistics.median(paired),
        "goal ms": goal,
        "remote / local": remote / local,
        "met": "yes" if remote - local <= goal else "no",
    }


async def run(options: argparse.Namespace) -> None:
    require_loopback(options.url, allow_remote=False)
    target = Target(options.url, options.model or await served_model(options.url))
    async with open_session(target) as session:
        await check_paths(session, target)
        prober = Prober(session, target, options.seed if options.seed is not None else time.time_ns() % (1 << 31))
        rows = [await measure(prober, length, options.repeats) for length in options.lengths]
    show(f"P -> D hop, {target.model}, unloaded, medians of {options.repeats}", rows, options.json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seed", type=int, help="default: the time, so that a second run finds nothing cached")
    parser.add_argument("--json", type=Path)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
