"""The real side of bench/simulator/check.py: a small cluster of worker processes, a load, and what came of every
request.

Prefill and decode workers are processes of this machine without Ray; the ingress is the product's dispatcher in this
process, without HTTP.
"""

import asyncio
import contextlib
import math
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.simulator.check_figures import Answer, Outcome
from bench.simulator.step_log import LoggedStep, read_steps
from kvrelay.cluster.launch.local import LocalCluster, local_cluster
from kvrelay.cluster.workloads.trace import TraceEntry
from kvrelay.config import Settings
from kvrelay.errors import KvrelayError
from kvrelay.hashing import block_hashes
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.serve.requests.dispatcher import Dispatcher
from kvrelay.serve.telemetry.explain import Explain
from kvrelay.types import Role

LATE_S = 60.0  # after the last arrival the run ends
REPORTED_S = 3.0  # after a run the workers have reported everything
NUM_PROBES = 12  # single requests on an idle cluster, for the time of a message


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
    began_s: float  # on the machine's clock
    ended_s: float
    ingress_s: float  # of a core, that the ingress and the load's making took meanwhile


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
        self._began_s, cpu_s = time.monotonic(), time.process_time()
        tasks = []
        for entry, request in zip(self._entries, requests, strict=True):
            await asyncio.sleep(max(0.0, self._began_s + entry.arrival_s - time.monotonic()))
            tasks.append(asyncio.create_task(self._one(len(tasks), entry, request)))
        _, late = await asyncio.wait(tasks, timeout=LATE_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        answers = tuple(sorted(self._answers, key=lambda one: one.index))
        outcome = Outcome(answers, self._moved_bytes, {})
        ingress_s = time.process_time() - cpu_s
        return RealRun(outcome, tuple(one.arrival_s for one in answers), self._began_s, time.monotonic(), ingress_s)

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
            request_id=f"r{number}", token_ids=tokens, num_prompt_tokens=len(tokens),
            block_hashes=list(block_hashes(tokens, size)),
            sampling=Sampling(max_tokens=entry.output_tokens, temperature=0.0, ignore_eos=True),
        )  # fmt: skip


def _words(block: int, size: int, vocab_size: int) -> list[int]:
    """The tokens that a block of this id stands for."""
    return random.Random(f"block:{block}").choices(range(3, vocab_size), k=size)


@contextlib.asynccontextmanager
async def real_cluster(
    settings: Settings, folder: Path, logs: Path, cores: Sequence[tuple[int, ...] | None], pace: Path | None = None
) -> AsyncIterator[LocalCluster]:
    """Worker processes that write their steps to `logs` when they end. pace: a profile that their steps are drawn out
    to.
    """
    counts = settings.cluster
    paced = [] if pace is None else [str(pace)]
    async with local_cluster(
        settings, folder, num_prefill=counts.prefill, num_decode=counts.decode, num_inside=0, cores=cores,
        program=("-m", "bench.simulator.step_log", str(logs), *paced),
    ) as cluster:  # fmt: skip
        yield cluster


async def measure_ways(cluster: LocalCluster, settings: Settings, vocab_size: int) -> Ways:
    """Of an idle cluster that has computed a few prompts before."""
    size = settings.engine.block_size
    first = 1 << 40
    probes = [
        TraceEntry(0.0, 4 * size + 1, 2, tuple(range(first + 10 * n, first + 10 * n + 5)), size)
        for n in range(NUM_PROBES + 4)
    ]
    async with cluster.another_ingress(settings) as dispatcher:
        async with asyncio.timeout(60):
            await dispatcher.workers.wait_for(lambda d: d.pairs.book.is_settled())
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
    async with cluster.another_ingress(settings) as dispatcher:
        async with asyncio.timeout(60):
            await dispatcher.workers.wait_for(lambda d: d.pairs.book.is_settled())
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
    """Blocks since the workers' start, by what became of them, as in `Simulation.summary`; nothing without tiers below
    the pools.
    """
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


def steps_within(logs: Path, run: RealRun) -> dict[Role, list[list[LoggedStep]]]:
    """By role and worker, the steps that began while the run lasted."""
    found: dict[Role, list[list[LoggedStep]]] = {role: [] for role in Role}
    for file in sorted(logs.glob("*.json")):
        role = Role.PREFILL if file.stem.startswith(Role.PREFILL) else Role.DECODE
        found[role].append([step for step in read_steps(file) if run.began_s <= step.began_s <= run.ended_s])
    return found


def with_busy(run: RealRun, steps: dict[Role, list[list[LoggedStep]]]) -> Outcome:
    """Its outcome with the workers' busy shares."""
    lasted_s = run.ended_s - run.began_s
    busy = {
        role.value: sum(step.seconds for worker in workers for step in worker) / (lasted_s * max(1, len(workers)))
        for role, workers in steps.items()
    }
    return replace(run.outcome, busy=busy, ingress_busy=run.ingress_s / lasted_s)
