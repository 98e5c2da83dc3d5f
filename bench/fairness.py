"""What a greedy tenant does to the others' time to first token: fair sharing against first come, first served, in one run.

    python bench/fairness.py [--real] [--model M] [--seconds S] [--seeds N] [--json FILE]

Eight tenants have an equal share of what the worker can do. Seven of them send a part of their share (--load), as Poisson
streams; the greedy one sends ten times its share. Four runs over the same arrivals: the seven alone and with the greedy
one, each first come first served (`scheduler.oldest_every: 1`) and with tenants' fair sharing. The ratio is the seven's
p99 (p50) against alone, fair; `p99_to_plain` against alone, first come first served. By default it is the real scheduler and pool with a modelled step: a fixed time, a time for each
decoding sequence, and a time for each prompt token (--step-ms, --decode-ms, --prompt-tokens-per-s). With --real it is a
real engine in this process, in real time; its capacity is measured first.
A sequence that is refused, or displaced from the full line, is not in the percentiles, but is counted.
"""

import argparse
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from figures import available_cores, show

import inprocess  # isort: skip
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.engine.scheduling.fair_share import QueueRules
from kvrelay.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from kvrelay.engine.step.engine import Engine, EngineConfig, load_engine
from kvrelay.kernels.select import select_backend
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.types import FinishReason

NUM_TENANTS = 8
GREEDY = "greedy"
GREED = 10.0  # times its share
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    tenant: str
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Outcome:
    """Seconds to the first token by tenant; what was refused or displaced."""

    ttft_s: dict[str, list[float]] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)

    def others(self) -> list[float]:
        return sorted(value for tenant, values in self.ttft_s.items() if tenant != GREEDY for value in values)

    def others_refused(self) -> int:
        return sum(count for tenant, count in self.refused.items() if tenant != GREEDY)


class World(Protocol):
    """A worker with a clock of its own."""

    def now_s(self) -> float: ...
    def wait_until(self, at_s: float) -> None: ...
    def add(self, request: SequenceRequest, at_s: float) -> bool:
        """False: refused."""
        ...

    def step(self) -> tuple[list[str], list[str]]:
        """(requests that have a new token, requests that left the line)."""
        ...

    @property
    def has_work(self) -> bool: ...


class Modelled:
    """The real scheduler and pool; a step takes what the model says."""

    def __init__(self, rules: QueueRules, options: argparse.Namespace) -> None:
        limits = SchedulerLimits(options.token_budget, options.max_running, options.max_waiting)
        blocks = options.max_running * -(-(options.prompt_tokens * 2 + options.output_tokens * 2) // BLOCK)
        self.scheduler = Scheduler(BlockPool(blocks, block_size=BLOCK, prefix_caching=False), BLOCK, limits, rules)
        self.options, self._now_s = options, 0.0

    def now_s(self) -> float:
        return self._now_s

    def wait_until(self, at_s: float) -> None:
        self._now_s = max(self._now_s, at_s)

    def add(self, request: SequenceRequest, at_s: float) -> bool:
        if self.scheduler.refusal(request) is not None:
            return False
        self.scheduler.add(request, at_s)
        return True

    def step(self) -> tuple[list[str], list[str]]:
        plan = self.scheduler.schedule()
        gone = [seq.request_id for seq, _ in self.scheduler.rejected]
        self.scheduler.rejected = []
        prompt_tokens = plan.num_tokens - plan.num_single
        options = self.options
        self._now_s += (options.step_ms + options.decode_ms * plan.num_single) / 1e3
        self._now_s += prompt_tokens / options.prompt_tokens_per_s
        said: list[str] = []
        for item in plan.work:
            samples = item.samples
            self.scheduler.advance(item)
            if samples:
                item.seq.token_ids.append(1)
                said.append(item.seq.request_id)
                if item.seq.num_output >= item.seq.max_output:
                    self.scheduler.finish(item.seq, FinishReason.LENGTH)
        self.scheduler.copied()
        return said, gone

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work


def build(folder: Path, options: argparse.Namespace) -> Engine:
    """An engine that has stepped every batch size once: what is compiled or recorded at first use is no part of a run."""
    config = EngineConfig(
        kv_memory_bytes=options.kv_memory << 20, token_budget=options.token_budget, block_size=BLOCK,
        max_running=options.max_running, max_waiting=options.max_waiting, prefix_caching=False,
    )  # fmt: skip
    backend = select_backend(options.backend, "auto", options.threads)
    engine = load_engine(folder, backend, inprocess.DTYPES[options.dtype], config)
    for number in range(options.max_running):
        engine.add(request_of(number, Arrival(0.0, "", options.prompt_tokens, number + 2)))
    while engine.scheduler.has_work:
        engine.step()
    return engine


class Real:
    """A real engine, in real time, with lines of its own."""

    def __init__(self, engine: Engine, rules: QueueRules) -> None:
        for name in list(engine.scheduler.sequences):
            engine.abort(name)
        old = engine.scheduler
        engine.scheduler = Scheduler(old.pool, old.block_size, old.limits, rules)
        self.engine, self._start_s = engine, time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._start_s

    def wait_until(self, at_s: float) -> None:
        time.sleep(max(0.0, at_s - self.now_s()))

    def add(self, request: SequenceRequest, at_s: float) -> bool:
        if self.engine.refusal(request) is not None:
            return False
        self.engine.add(request)
        return True

    def step(self) -> tuple[list[str], list[str]]:
        result = self.engine.step()
        return [output.request_id for output in result.outputs], [request_id for request_id, _, _ in result.refused]

    @property
    def has_work(self) -> bool:
        return self.engine.scheduler.has_work


def request_of(number: int, arrival: Arrival) -> SequenceRequest:
    return SequenceRequest(
        request_id=str(number), token_ids=[3 + (number * 7 + i) % 200 for i in range(arrival.prompt_tokens)],
        num_prompt_tokens=arrival.prompt_tokens, block_hashes=[], tenant=arrival.tenant,
        sampling=Sampling(max_tokens=arrival.output_tokens, temperature=0.0, ignore_eos=True),
    )  # fmt: skip


def run(world: World, arrivals: list[Arrival]) -> Outcome:
    """Every arrival at its time, to the end of the others' last; the greedy one's rest is left."""
    outcome, waiting = Outcome(), dict[str, Arrival]()
    pending = list(enumerate(sorted(arrivals, key=lambda one: one.at_s)))
    num_open = sum(one.tenant != GREEDY for one in arrivals) or len(arrivals)
    is_counted: Callable[[Arrival], bool] = lambda one: one.tenant != GREEDY or num_open == len(arrivals)  # noqa: E731
    pending.reverse()
    while num_open > 0:
        if not world.has_work and pending:
            world.wait_until(pending[-1][1].at_s)
        while pending and pending[-1][1].at_s <= world.now_s():
            number, arrival = pending.pop()
            if world.add(request_of(number, arrival), arrival.at_s):
                waiting[str(number)] = arrival
            else:
                outcome.refused[arrival.tenant] = outcome.refused.get(arrival.tenant, 0) + 1
                num_open -= is_counted(arrival)
        if not world.has_work:
            continue
        said, gone = world.step()
        for name in said:
            if (one := waiting.pop(name, None)) is not None:
                outcome.ttft_s.setdefault(one.tenant, []).append(world.now_s() - one.at_s)
                num_open -= is_counted(one)
        for name in gone:
            one = waiting.pop(name)
            outcome.refused[one.tenant] = outcome.refused.get(one.tenant, 0) + 1
            num_open -= is_counted(one)
    return outcome


def length(draw: random.Random, mean: int) -> int:
    """Between half and one and a half times the mean."""
    return max(1, draw.randint(mean // 2, mean + mean // 2))


def stream(seed: str, tenant: str, rate: float, seconds: float, options: argparse.Namespace) -> list[Arrival]:
    draw, at_s, arrivals = random.Random(seed), 0.0, []
    while (at_s := at_s + draw.expovariate(rate)) < seconds:
        arrivals.append(Arrival(at_s, tenant, length(draw, options.prompt_tokens), length(draw, options.output_tokens)))
    return arrivals


def capacity(world: World, options: argparse.Namespace) -> float:
    """Requests per second when the line is never empty."""
    draw, count, target = random.Random("capacity"), 0, options.max_running * 4
    started_s, done, open_tokens = world.now_s(), 0, dict[str, int]()
    while done < target:
        while len(open_tokens) < options.max_running + 4:
            arrival = Arrival(0.0, "", length(draw, options.prompt_tokens), length(draw, options.output_tokens))
            assert world.add(request_of(count, arrival), world.now_s())
            open_tokens[str(count)] = arrival.output_tokens
            count += 1
        for name in world.step()[0]:
            open_tokens[name] -= 1
            if not open_tokens[name]:
                del open_tokens[name]
                done += 1
    return done / (world.now_s() - started_s)


def percentile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, math.ceil(share * len(values)) - 1)] if values else math.nan


def measure(
    make: Callable[[QueueRules], World], rate: float, seed: int, options: argparse.Namespace
) -> dict[str, Outcome]:
    share = rate / NUM_TENANTS
    others = [
        one
        for number in range(NUM_TENANTS - 1)
        for one in stream(f"{seed} {number}", f"t{number}", options.load * share, options.seconds, options)
    ]
    greedy = stream(f"{seed} {GREEDY}", GREEDY, GREED * share, options.seconds, options)
    return {
        "alone, first come": run(make(QueueRules(oldest_every=1)), others),
        "alone, fair": run(make(QueueRules(oldest_every=options.oldest_every)), others),
        "fair": run(make(QueueRules(oldest_every=options.oldest_every)), others + greedy),
        "first come": run(make(QueueRules(oldest_every=1)), others + greedy),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--model", default="tiny", help="with --real: tiny, or as model.source")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--kv-memory", type=int, default=1024, help="MiB")
    parser.add_argument("--seconds", type=float, default=300.0, help="of arrivals")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--load", type=float, default=0.7, help="of their share that the others send")
    parser.add_argument("--oldest-every", type=int, default=QueueRules().oldest_every)
    parser.add_argument("--prompt-tokens", type=int, default=512, help="mean")
    parser.add_argument("--output-tokens", type=int, default=64, help="mean")
    parser.add_argument("--token-budget", type=int, default=512)
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--max-waiting", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=12.0)
    parser.add_argument("--decode-ms", type=float, default=0.3)
    parser.add_argument("--prompt-tokens-per-s", type=float, default=3700.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    if options.real:
        folder = (
            tiny_checkpoint("llama", Path("/tmp/kvrelay-bench-tiny-llama"))
            if options.model == "tiny"
            else inprocess.prepare(options.model)
        )
        engine = build(folder, options)

    def make(rules: QueueRules) -> World:
        return Real(engine, rules) if options.real else Modelled(rules, options)

    rate = capacity(make(QueueRules()), options)
    rows: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        outcomes = measure(make, rate, seed, options)
        alone, plain = outcomes["alone, fair"].others(), outcomes["alone, first come"].others()
        for name, outcome in outcomes.items():
            ttft = outcome.others()
            rows.append(
                {
                    "seed": seed,
                    "order": name,
                    "requests": len(ttft),
                    "refused": outcome.others_refused(),
                    "greedy_served": len(outcome.ttft_s.get(GREEDY, [])),
                    "greedy_refused": outcome.refused.get(GREEDY, 0),
                    "p50_s": round(percentile(ttft, 0.5), 4),
                    "p99_s": round(percentile(ttft, 0.99), 4),
                    "p50_ratio": round(percentile(ttft, 0.5) / percentile(alone, 0.5), 2),
                    "p99_ratio": round(percentile(ttft, 0.99) / percentile(alone, 0.99), 2),
                    "p99_to_plain": round(percentile(ttft, 0.99) / percentile(plain, 0.99), 2),
                }
            )
    what = f"{options.model}, real" if options.real else "modelled steps"
    show(f"others' time to first token; capacity {rate:.1f} requests/s; {what}", rows, options.json)


if __name__ == "__main__":
    main()
