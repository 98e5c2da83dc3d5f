"""What clients see while decode workers leave and come back: `kvrelay scale` under a steady load.

    .venv/bin/python -m bench.serving.drain --model smollm2-135m-instruct

One prefill and two decode workers serve closed-loop clients that stream. `kvrelay scale --decode 1` takes one away,
`--decode 2` brings it back. The baseline is the same cluster with a drain time of 0: sequences of the worker that
leaves are computed again elsewhere instead of moved. The two take turns, `--rounds` times each. Goal: no failed
request. ITL counts every gap between two chunks of a stream in the phase in which it ended, TTFT every stream in the
phase in which it began.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from kvrelay.cluster.chaos.cluster import ServeCluster
from kvrelay.cluster.launch.http_json import request_text

COUNTS = {"ingress": 1, "prefill": 1, "decode": 2}
DRAINS = {"moved": 60, "computed again": 0}
PHASES = ("before", "one leaves", "with one", "one comes", "after")
STEADY_S = 10.0
TIMEOUT_S = 120.0


@dataclass(slots=True)
class Seen:
    """What the clients of one run saw: (when, seconds) of each first token and of each gap. By `time.monotonic`."""

    firsts: list[tuple[float, float]] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    ends: list[tuple[float, bool]] = field(default_factory=list)  # when, and whether it was whole

    def within(self, start_s: float, end_s: float) -> dict[str, Any]:
        """The figures of one phase, milliseconds."""
        firsts = [value for at_s, value in self.firsts if start_s <= at_s < end_s]
        gaps = [value for at_s, value in self.gaps if start_s <= at_s < end_s]
        ends = [is_whole for at_s, is_whole in self.ends if start_s <= at_s < end_s]
        return {
            "seconds": end_s - start_s,
            "requests": len(ends),
            "failed": ends.count(False),
            **{f"ttft_p{share}_ms": percentile(firsts, share) for share in (50, 99)},
            **{f"itl_p{share}_ms": percentile(gaps, share) for share in (50, 99)},
            "longest_gap_ms": max(gaps, default=0.0) * 1e3,
        }


def percentile(values: list[float], share: int) -> float:
    """In milliseconds; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) * share // 100, len(ordered) - 1)] * 1e3 if ordered else 0.0


async def client(url: str, model: str, args: argparse.Namespace, seed: int, seen: Seen, stop: asyncio.Event) -> None:
    """Streams one request after the other."""
    draw = random.Random(seed)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        while not stop.is_set():
            prompt = [draw.randrange(100, 40_000) for _ in range(args.input)]
            body = {"model": model, "prompt": prompt, "max_tokens": args.output, "stream": True, "ignore_eos": True}
            started_s, last_s, num_chunks, is_whole = time.monotonic(), None, 0, False
            try:
                async with session.post(f"{url}/v1/completions", json=body | {"temperature": 0}) as answer:
                    async for line in answer.content:
                        if line.startswith(b"data: [DONE]"):
                            is_whole = answer.status == 200 and num_chunks > 0
                        elif line.startswith(b"data: ") and b'"error"' not in line:
                            now_s, num_chunks = time.monotonic(), num_chunks + 1
                            if last_s is None:
                                seen.firsts.append((now_s, now_s - started_s))
                            else:
                                seen.gaps.append((now_s, now_s - last_s))
                            last_s = now_s
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                print(f"  a request failed: {type(error).__name__}: {error}", file=sys.stderr)
            seen.ends.append((time.monotonic(), is_whole))
            if not is_whole:
                await asyncio.sleep(0.5)


async def scale(cluster: ServeCluster, count: int) -> None:
    command = [sys.executable, "-m", "kvrelay.cluster.commands.cli", "scale", "--decode", str(count)]
    where = ["--url", cluster.url, "--address", cluster.dashboard_url]
    process = await asyncio.create_subprocess_exec(*command, *where, env=cluster.environment)
    if await process.wait():
        raise SystemExit("kvrelay scale failed")


async def run(cluster: ServeCluster, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """One run; the figures by phase."""
    seen, stop, model = Seen(), asyncio.Event(), cluster.model()
    clients = [
        asyncio.create_task(client(cluster.url, model, args, number, seen, stop)) for number in range(args.clients)
    ]
    await asyncio.sleep(STEADY_S)  # the first prompts warm up
    marks = [time.monotonic()]
    await asyncio.sleep(STEADY_S)
    for count in (1, 2):
        marks.append(time.monotonic())
        await scale(cluster, count)
        marks.append(time.monotonic())
        await asyncio.sleep(STEADY_S)
    marks.append(time.monotonic())
    stop.set()
    await asyncio.gather(*clients)
    figures = {name: seen.within(*marks[index : index + 2]) for index, name in enumerate(PHASES)}
    figures["after"]["failed"] += sum(not is_whole for at_s, is_whole in seen.ends if at_s >= marks[-1])
    return figures


def moves(url: str) -> dict[str, float]:
    """The ingress's counters of moves."""
    text = request_text("GET", f"{url}/metrics", timeout_s=10.0)
    return {name: float(value) for name, value in re.findall(r"^kvrelay_(request_move\S+) (\S+)$", text, re.MULTILINE)}


def show(name: str, number: int, figures: dict[str, dict[str, Any]], counters: dict[str, float]) -> None:
    print(f"\n{name}, round {number + 1}")
    head = (
        f"{'phase':12}{'s':>7}{'requests':>10}{'failed':>8}{'TTFT p50':>10}{'p99':>8}{'ITL p50':>9}{'p99':>8}{'max':>8}"
    )
    print(head)
    for phase, row in figures.items():
        times = f"{row['ttft_p50_ms']:10.0f}{row['ttft_p99_ms']:8.0f}{row['itl_p50_ms']:9.1f}{row['itl_p99_ms']:8.1f}"
        counts = f"{row['seconds']:7.1f}{row['requests']:10d}{row['failed']:8d}"
        print(f"{phase:12}{counts}{times}{row['longest_gap_ms']:8.0f}")
    print("; ".join(f"{key} {value:g}" for key, value in counters.items()) or "nothing moved", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--input", type=int, default=300, help="prompt tokens")
    parser.add_argument("--output", type=int, default=150, help="output tokens")
    parser.add_argument("--only", choices=list(DRAINS), help="one of the two alone")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for number in range(args.rounds):
        for name, drain_s in DRAINS.items():
            if args.only in (None, name):
                settings = {"engine.kv_memory": "128MiB", "cluster.drain_timeout_s": drain_s}
                with ServeCluster(args.model, COUNTS, settings) as cluster:
                    figures = asyncio.run(run(cluster, args))
                    counters = moves(cluster.url)
                show(name, number, figures, counters)
                rows.append({"way": name, "round": number, "phases": figures, "moves": counters})
    failed = sum(phase["failed"] for row in rows for phase in row["phases"].values())
    print(f"\nfailed requests: {failed}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
