"""Gaps between tokens of running streams while long prompts arrive: apart, together in chunks, together in one piece.

    python -m bench.engine.itl [--lengths 2048 4096 8000] [--streams 4] [--seconds 60] [--setups disaggregated chunked
    whole]
                        [--model M] [--json out.json]

Three clusters, one after the other, on the same two cores, without HTTP:

    disaggregated  a prefill worker on one core, a decode worker on the other
    chunked        one worker on both cores; a step computes up to `engine.token_budget` tokens (512)
    whole          the same, with a budget that takes the longest prompt in one step

In each, `--streams` streams decode all the time; for --seconds, fresh prompts come one after the other, lengths in turn
(the one under way is waited for), each followed by as long a pause as it took. A gap is the time between two outputs of
a stream, as its client sees them; `quiet` gaps are those of the pauses, since streams get slower as they get longer.
TTFT is the arriving prompts'. A machine with other work shows longer tails: leave it alone meanwhile.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.engine.inprocess import count_weights, prepare, random_prompt, request
from bench.figures import show
from kvrelay.cluster.launch.local import local_cluster
from kvrelay.config import Settings, settings_from
from kvrelay.serve.requests.dispatcher import Dispatcher

SETUPS = ("disaggregated", "chunked", "whole")
STREAM_PROMPT = 128
STREAM_TOKENS = 6000
WARM_UP_TOKENS = 32  # of each stream, before anything is counted
ARRIVAL_TOKENS = 4


@dataclass(slots=True)
class Seen:
    """One setup's figures, in seconds."""

    quiet: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    ttft: dict[int, list[float]] = field(default_factory=dict)


class Load:
    """Streams that decode, and prompts that arrive among them."""

    def __init__(self, dispatcher: Dispatcher, block_size: int, vocab_size: int, *, is_remote: bool) -> None:
        self._dispatcher, self._block_size, self._vocab_size = dispatcher, block_size, vocab_size
        self._path = "remote" if is_remote else "local"
        self._count = 0
        self.sink: list[float] | None = None  # where gaps go now

    def _request(self, length: int, max_tokens: int) -> Any:
        self._count += 1
        return request(self._count, random_prompt(self._count, length, self._vocab_size), max_tokens, self._block_size)

    async def stream(self, is_warm: Callable[[], None]) -> None:
        """Decode until cancelled; says once that it is under way."""
        count = 0
        while True:
            last_s = None
            async for _ in self._dispatcher.generate(self._request(STREAM_PROMPT, STREAM_TOKENS), force=self._path):
                now_s = time.perf_counter()
                if last_s is not None and self.sink is not None:
                    self.sink.append(now_s - last_s)
                last_s, count = now_s, count + 1
                if count == WARM_UP_TOKENS:
                    is_warm()

    async def arrive(self, length: int) -> float:
        """A fresh prompt, to its end; returns its TTFT."""
        began_s, ttft_s = time.perf_counter(), None
        async for _ in self._dispatcher.generate(self._request(length, ARRIVAL_TOKENS), force=self._path):
            if ttft_s is None:
                ttft_s = time.perf_counter() - began_s
        if ttft_s is None:
            raise SystemExit(f"a prompt of {length} tokens had no output")
        return ttft_s


def settings_of(setup: str, longest: int, streams: int) -> Settings:
    """`whole`: every prompt fits one step, beside the streams' tokens."""
    engine: dict[str, Any] = {"kv_memory": "2GiB"}
    if setup == "whole":
        engine["token_budget"] = longest + streams + 1
    return settings_from({"engine": engine})


async def measure(setup: str, folder: Path, options: argparse.Namespace) -> Seen:
    """One cluster's life."""
    seen = Seen(ttft={length: [] for length in options.lengths})
    settings = settings_of(setup, max(options.lengths), options.streams)
    cores = tuple(sorted(os.sched_getaffinity(0)))[:2]
    is_apart = setup == "disaggregated"
    pins = ((cores[0],), (cores[-1],)) if is_apart else (cores,)
    vocab_size = count_weights(folder).vocab_size
    async with local_cluster(
        settings, folder, num_prefill=int(is_apart), num_decode=1, num_inside=0, cores=pins
    ) as cluster:
        load = Load(cluster.dispatcher, settings.engine.block_size, vocab_size, is_remote=is_apart)
        await load.arrive(min(options.lengths))  # compiles, touches memory
        warm = [asyncio.Event() for _ in range(options.streams)]
        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(load.stream(event.set)) for event in warm]
            await asyncio.gather(*(event.wait() for event in warm))
            end_s, index = time.perf_counter() + options.seconds, 0
            while time.perf_counter() < end_s or index < len(options.lengths):
                length = options.lengths[index % len(options.lengths)]
                load.sink = seen.gaps
                seen.ttft[length].append(ttft_s := await load.arrive(length))
                load.sink = seen.quiet
                await asyncio.sleep(ttft_s)
                index += 1
            load.sink = None
            for stream in streams:
                stream.cancel()
    return seen


def quantile(values: list[float], share: float) -> float:
    """Milliseconds; NaN without values."""
    ordered = sorted(values)
    return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def row(setup: str, seen: Seen) -> dict[str, Any]:
    return {
        "setup": setup,
        "gaps": len(seen.gaps),
        "ITL p50 ms": quantile(seen.gaps, 0.5),
        "p90 ms": quantile(seen.gaps, 0.9),
        "p99 ms": quantile(seen.gaps, 0.99),
        "max ms": quantile(seen.gaps, 1.0),
        "quiet p50 ms": quantile(seen.quiet, 0.5),
        "quiet p99 ms": quantile(seen.quiet, 0.99),
    } | {f"TTFT {length} ms": quantile(times, 0.5) for length, times in seen.ttft.items()}


async def run(options: argparse.Namespace) -> None:
    folder = prepare(options.model)
    figures: dict[str, Seen] = {}
    for setup in options.setups:
        figures[setup] = await measure(setup, folder, options)
        print(row(setup, figures[setup]), flush=True)
    lengths = ", ".join(map(str, options.lengths))
    title = f"{options.streams} streams while prompts of {lengths} tokens arrive, {options.model}, two cores"
    show(title, [row(setup, seen) for setup, seen in figures.items()], options.json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8000])
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=list(SETUPS))
    parser.add_argument("--json", type=Path)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
