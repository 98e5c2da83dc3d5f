"""The figures that bench/simulator/check.py compares, and its real side: worker processes of this machine without Ray,
the product's dispatcher in this process without HTTP, a load, and what came of every request.
"""

import asyncio
import math
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvrelay.cluster.launch.local import LocalCluster, local_cluster
from kvrelay.cluster.workloads.trace import TraceEntry
from kvrelay.config import Settings
from kvrelay.errors import KvrelayError
from kvrelay.hashing import block_hashes
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.serve.requests.dispatcher import Dispatcher
from kvrelay.serve.telemetry.explain import Explain
from kvrelay.serve.workers.queries import make_router

LATE_S = 60.0  # after the last arrival the run ends
REPORTED_S = 3.0  # after a run the workers have reported everything
NUM_PROBES = 12  # single requests on an idle cluster, for the time of a message
QUANTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request that was made. Seconds, tokens, bytes; ttft_s is nan where no token came."""

    index: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    outcome: str  # done, or why not
    ttft_s: float = math.nan
    tpot_s: float = math.nan  # of outputs of more than one token
    cached_tokens: int = 0
    path: str = ""  # local: the decode worker computed the prompt, too
    workers: tuple[str, ...] = ()  # that it went to: prefill, decode


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: its answers in order of arrival, and what is only known of the whole."""

    answers: tuple[Answer, ...]
    moved_bytes: float
    tiers: dict[str, int] = field(default_factory=dict)  # blocks, by what became of them; see Simulation.summary

    def done(self) -> list[Answer]:
        return [one for one in self.answers if one.outcome == "done"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of both runs. `kind`: how its error is stated."""

    name: str
    unit: str  # ms, /s, MB, "" (a count), % (a share, stated in points)
    real: float
    simulated: float

    @property
    def error(self) -> float:
        """Of a share the difference; of anything else the ratio less 1. nan where there is nothing to compare with."""
        if self.unit == "%":
            return self.simulated - self.real
        return self.simulated / self.real - 1 if self.real else math.nan

    def row(self) -> dict[str, Any]:
        scale = {"ms": 1e3, "MB": 1e-6, "%": 100.0}.get(self.unit, 1.0)
        sign = "points" if self.unit == "%" else "%"
        return {
            "figure": ", ".join(filter(None, (self.name, self.unit))),
            "real": _short(scale * self.real),
            "simulated": _short(scale * self.simulated),
            "error": "-" if math.isnan(self.error) else f"{100 * self.error:+.1f} {sign}",
        }


def compare(real: Outcome, simulated: Outcome, *, ttft_s: float, tpot_s: float) -> list[Figure]:
    """All figures; goodput counts answers within both limits."""
    sides = [_figures(one, ttft_s, tpot_s) for one in (real, simulated)]
    return [Figure(name, unit, sides[0][name, unit], sides[1][name, unit]) for name, unit in sides[0]]


def _figures(run: Outcome, ttft_s: float, tpot_s: float) -> dict[tuple[str, str], float]:
    done = run.done()
    ttfts, tpots = [one.ttft_s for one in done], [one.tpot_s for one in done if not math.isnan(one.tpot_s)]
    kept = [one for one in done if one.ttft_s <= ttft_s and not one.tpot_s > tpot_s]
    span_s = max(one.arrival_s for one in run.answers) - min(one.arrival_s for one in run.answers)
    prompt = max(1, sum(one.prompt_tokens for one in done))
    return {
        **{(f"TTFT p{cut}", "ms"): _percentile(ttfts, cut) for cut in QUANTILES},
        **{(f"TPOT p{cut}", "ms"): _percentile(tpots, cut) for cut in QUANTILES},
        ("answered", "%"): len(done) / len(run.answers),
        ("goodput", "/s"): len(kept) / max(span_s, 1e-9),
        ("within the SLO", "%"): len(kept) / len(run.answers),
        ("hits", "%"): sum(one.cached_tokens for one in done) / prompt,
        ("prompts computed by decode workers", "%"): sum(one.path == "local" for one in done) / max(1, len(done)),
        ("KV moved", "MB"): run.moved_bytes,
        **{(name.replace("_", " "), ""): count for name, count in run.tiers.items()},
    }


def _percentile(values: Sequence[float], cut: float) -> float:
    return float(np.percentile(values, cut)) if values else math.nan


@dataclass(frozen=True, slots=True)
class PerRequest:
    """How far single requests are off: |simulated / real - 1| of those that both runs answered."""

    ttft_median: float
    ttft_p90: float
    tpot_median: float
    tpot_p90: float
    same_workers: float  # share of them that went the same way


def per_request(real: Outcome, simulated: Outcome) -> PerRequest:
    others = {one.index: one for one in simulated.done()}
    pairs = [(one, others[one.index]) for one in real.done() if one.index in others]
    ttft = [abs(other.ttft_s / one.ttft_s - 1) for one, other in pairs]
    tpot = [abs(other.tpot_s / one.tpot_s - 1) for one, other in pairs if one.tpot_s > 0 and other.tpot_s > 0]
    same = sum(one.workers == other.workers for one, other in pairs) / max(1, len(pairs))
    return PerRequest(_percentile(ttft, 50), _percentile(ttft, 90), _percentile(tpot, 50), _percentile(tpot, 90), same)


def worst(figures: Sequence[Figure], names: Sequence[str]) -> float:
    """The largest |error| among figures of these names."""
    return max(abs(one.error) for one in figures if one.name in names and not math.isnan(one.error))


def as_markdown(title: str, figures: Sequence[Figure], notes: str) -> str:
    """A section with one table."""
    lines = [f"### {title}", "", "| figure | real | simulated | error |", "|---|---|---|---|"]
    for figure in figures:
        row = figure.row()
        lines.append(f"| {row['figure']} | {row['real']} | {row['simulated']} | {row['error']} |")
    return "\n".join([*lines, "", notes, ""])


def stated(single: PerRequest) -> str:
    return (
        f"Single requests: TTFT is off by {single.ttft_median:.0%} at the median and {single.ttft_p90:.0%} at p90, "
        f"TPOT by {single.tpot_median:.0%} and {single.tpot_p90:.0%}; "
        f"{single.same_workers:.0%} went to the same workers."
    )


def _short(value: float) -> str:
    """Three digits."""
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Ways:
    """What the real cluster reports of itself beside its workers' steps, while it is idle."""

    message_s: float  # of a message: what a first token takes besides waiting and computing, by the number of messages
    kv_bytes_per_s: float  # between two workers, as their pairs report it; 0: they do not
    sizes: dict[str, int] = field(default_factory=dict)  # of a worker: what a profile has of these names


@dataclass(frozen=True, slots=True)
class RealRun:
    """answers: with the times at which requests really came."""

    outcome: Outcome
    arrivals_s: tuple[float, ...]  # of all entries, those of the warm-up too


class Player:
    """One load through one ingress."""

    def __init__(self, dispatcher: Dispatcher, entries: Sequence[TraceEntry], vocab_size: int) -> None:
        self._dispatcher, self._entries, self._vocab_size = dispatcher, entries, vocab_size
        self._answers: list[Answer] = []
        self._moved_bytes = 0
        self.messages_s: list[float] = []  # what a message took on average, of each request
        self._began_s = 0.0

    async def play(self) -> RealRun:
        """Every request at its time, whatever is under way."""
        requests = [self._request(number, entry) for number, entry in enumerate(self._entries)]
        self._began_s = time.monotonic()
        tasks = []
        for entry, request in zip(self._entries, requests, strict=True):
            await asyncio.sleep(max(0.0, self._began_s + entry.arrival_s - time.monotonic()))
            tasks.append(asyncio.create_task(self._one(len(tasks), entry, request)))
        _, late = await asyncio.wait(tasks, timeout=LATE_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        answers = tuple(sorted(self._answers, key=lambda one: one.index))
        outcome = Outcome(answers, self._moved_bytes)
        return RealRun(outcome, tuple(one.arrival_s for one in answers))

    async def _one(self, number: int, entry: TraceEntry, request: SequenceRequest) -> None:
        arrived_s = time.monotonic()
        explain = Explain(arrived_s)
        times: list[float] = []
        outcome, stream = "done", self._dispatcher.generate(request, explain=explain)
        try:
            async for output in stream:
                times += [time.monotonic()] * len(output.token_ids)
        except KvrelayError as error:
            outcome = type(error).__name__
            print(f"request {number}: {error}", file=sys.stderr)
        except asyncio.CancelledError:
            outcome = "late"
        finally:
            await stream.aclose()
            self._note(number, arrived_s, entry, outcome, times, explain)

    def _note(
        self, number: int, arrived_s: float, entry: TraceEntry, outcome: str, times: Sequence[float], explain: Explain
    ) -> None:
        decision = explain.decisions[-1] if explain.decisions else None
        if explain.transfer is not None:
            self._moved_bytes += explain.transfer.num_bytes
        if decision is not None and times:
            num_messages = 4 if decision.path == "disaggregated" else 2
            self.messages_s.append((explain.reserve_s + explain.network_s) / num_messages)
        self._answers.append(
            Answer(
                index=number,
                arrival_s=arrived_s - self._began_s,
                prompt_tokens=entry.input_tokens,
                output_tokens=len(times),
                outcome=outcome,
                ttft_s=times[0] - arrived_s if times else math.nan,
                tpot_s=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else math.nan,
                cached_tokens=explain.cached_tokens,
                path=decision.path if decision is not None else "",
                workers=() if decision is None else tuple(filter(None, (decision.prefill, decision.decode))),
            )
        )

    def _request(self, number: int, entry: TraceEntry) -> SequenceRequest:
        size = entry.block_tokens
        tokens = [token for block in entry.hash_ids for token in _words(block, size, self._vocab_size)]
        tokens = tokens[: entry.input_tokens]
        return SequenceRequest(
            request_id=f"r{number}",
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            block_hashes=list(block_hashes(tokens, size)),
            sampling=Sampling(max_tokens=entry.output_tokens, temperature=0.0, ignore_eos=True),
        )


def _words(block: int, size: int, vocab_size: int) -> list[int]:
    """The tokens that a block of this id stands for."""
    return random.Random(f"block:{block}").choices(range(3, vocab_size), k=size)


def real_cluster(
    settings: Settings, folder: Path, cores: Sequence[tuple[int, ...] | None]
) -> AbstractAsyncContextManager[LocalCluster]:
    """Worker processes."""
    counts = settings.cluster
    return local_cluster(
        settings, folder, num_prefill=counts.prefill, num_decode=counts.decode, num_inside=0, cores=cores
    )


@asynccontextmanager
async def another_ingress(cluster: LocalCluster, settings: Settings) -> AsyncIterator[Dispatcher]:
    """A second ingress over the same workers, with an empty state, once it has measured every path."""
    dispatcher, members = Dispatcher(make_router(settings), cluster.secret, settings), cluster.members
    try:
        await dispatcher.start()
        dispatcher.workers.set_members(members)
        async with asyncio.timeout(60):
            await dispatcher.workers.wait_for(lambda d: len(d.live_workers()) == len(members))
            await dispatcher.workers.wait_for(lambda d: d.pairs.book.is_settled())
        yield dispatcher
    finally:
        await dispatcher.aclose()


async def measure_ways(cluster: LocalCluster, settings: Settings, vocab_size: int) -> Ways:
    """Of an idle cluster that has computed a few prompts before."""
    size, first = settings.engine.block_size, 1 << 40
    probes = [
        TraceEntry(0.0, 4 * size + 1, 2, tuple(range(first + 10 * n, first + 10 * n + 5)), size)
        for n in range(NUM_PROBES + 4)
    ]
    async with another_ingress(cluster, settings) as dispatcher:
        player = Player(dispatcher, (), vocab_size)
        for number, probe in enumerate(probes):
            await player._one(number, probe, player._request(number, probe))
        speeds = [pair.path.bytes_per_s for pair in dispatcher.workers.pairs.book.pairs if pair.path is not None]
        info = dispatcher.workers.live_workers()[0][0]
    message_s = statistics.median(player.messages_s[-NUM_PROBES:])
    names = ("num_blocks", "block_size", "max_running", "max_model_len", "kv_bytes_per_token")
    return Ways(max(message_s, 0.0), min(speeds, default=0.0), {name: getattr(info, name) for name in names})


async def play(cluster: LocalCluster, settings: Settings, entries: Sequence[TraceEntry], vocab_size: int) -> RealRun:
    """From empty caches, through an ingress that knows nothing yet."""
    async with another_ingress(cluster, settings) as dispatcher:
        async with asyncio.timeout(60):
            for info, _ in dispatcher.workers.live_workers():
                await dispatcher.queries.reset_cache(info.worker_id)
            while any(view.indexed_blocks for view in dispatcher.router.workers()):
                await asyncio.sleep(0.01)
        before = moved_by_tiers(dispatcher)
        run = await Player(dispatcher, entries, vocab_size).play()
        await asyncio.sleep(REPORTED_S)
        tiers = {name: count - before[name] for name, count in moved_by_tiers(dispatcher).items()}
    return replace(run, outcome=replace(run.outcome, tiers=tiers))


def moved_by_tiers(dispatcher: Dispatcher) -> dict[str, int]:
    """Blocks since the workers' start, by what became of them; nothing without tiers below the pools."""
    tiers = [tier for _, load in dispatcher.workers.live_workers() for tier in load.tiers]
    hosts, stores = ([tier for tier in tiers if (tier.tier == "host") is is_host] for is_host in (True, False))
    if not hosts:
        return {}
    return {
        "loaded_blocks": sum(tier.loaded_blocks for tier in hosts),
        "saved_blocks": sum(tier.stored_blocks for tier in hosts),
        "fetched_blocks": sum(tier.loaded_blocks for tier in stores),
        "stored_blocks": sum(tier.stored_blocks for tier in stores),
    }
