"""Measures steps of a real engine for a speed curve, and builds the profile. Runs on the engine's thread.

Every step counts: prompts alone, chunk by chunk; decode steps with fewer and fewer sequences of one length; prompts
beside decoding; repeated while there is time. Steps of the same work are one sample, their median.
"""

import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import torch

from kvrelay.cluster.profiles.profile import ConstantSource, Fit, FitError, SimulatorProfile, work_of
from kvrelay.engine.scheduling.plan import StepPlan
from kvrelay.engine.step.engine import Engine
from kvrelay.errors import ConfigError
from kvrelay.hashing import block_hashes
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.router.planning.speed_fit import Fitted, StepSample
from kvrelay.router.planning.types import StepWork

PASSES = 3  # over all kinds of work, so that other load of the machine spoils few samples of each
ROUNDS = 4  # decode steps of each number of sequences, in a pass
REPEATS = 2  # prompts of each length
CONTEXTS = (64, 512, 2048, 192, 1024, 4096)
PROMPTS = (512, 64, 16, 256, 32, 128)
LONG_PROMPT = 4096
BESIDE = (64, 384, 192)
MOST_CONTEXT = 16_384  # tokens of the sequences that decode together, in all
POOL_SHARE = 0.8
_SPARE = 24  # steps for prompts beside those that decode
_COPY_BYTES = 64 << 20
_CELLS_PER_OCTAVE = 4  # of context tokens
LINK_BYTES_PER_S = 1.25e9  # 10 Gb/s
REFERENCE_PROMPT, REFERENCE_SEQUENCES = 256, 4


def add_prompt(engine: Engine, number: int, num_tokens: int, *, max_tokens: int) -> str:
    """Add a unique prompt and return its request's id. Raises ConfigError: it is refused."""
    draw = torch.Generator().manual_seed(number)
    vocab = engine.model.spec.vocab_size
    prompt: list[int] = torch.randint(min(1000, vocab // 2), vocab, (num_tokens,), generator=draw).tolist()
    request = SequenceRequest(
        request_id=f"profile-{number}",
        token_ids=prompt,
        num_prompt_tokens=num_tokens,
        block_hashes=list(block_hashes(prompt, engine.config.block_size)),
        tokens_per_hash=engine.config.block_size,
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0, seed=number, ignore_eos=True),
    )
    if (refusal := engine.requests.refusal(request)) is not None:
        raise ConfigError(f"the engine refuses a prompt of {num_tokens} tokens: {refusal[1]}")
    engine.add(request)
    return request.request_id


def step_clock_of(engine: Engine) -> Callable[[], float]:
    """The clock for its steps in seconds: where one CPU thread computes them, that thread's own CPU time.

    Other load of the machine then does not make its steps seem longer.
    """
    computes_alone = engine.backend.asynchronous is None and torch.get_num_threads() == 1
    return time.thread_time if computes_alone else time.perf_counter


class _TimeIsOver(Exception):
    """Within the sampler only."""


def _cell_of(work: StepWork) -> tuple[float, ...]:
    """Equal for steps that count as the same work."""
    context = round(_CELLS_PER_OCTAVE * math.log2(work.context_tokens)) if work.context_tokens else -1
    return work.prompt_tokens, work.prompt_pairs, work.sequences, context


class StepSampler:
    """Drives one idle engine until all kinds of steps are measured, or for `budget_s`."""

    def __init__(
        self,
        engine: Engine,
        *,
        budget_s: float,
        clock: Callable[[], float] = time.perf_counter,
        step_clock: Callable[[], float] | None = None,
    ) -> None:
        """clock: for the budget. step_clock: for the steps; default: the same."""
        self._engine, self._clock, self._step_clock = engine, clock, step_clock or clock
        self._end_s = clock() + budget_s
        self._cells: defaultdict[tuple[float, ...], list[tuple[StepWork, float]]] = defaultdict(list)
        self._planned: deque[StepWork] = deque()
        self._num_requests = 0
        self._pool_tokens = int(POOL_SHARE * engine.pool.num_blocks * engine.config.block_size)

    def run(self) -> list[StepSample]:
        """One sample for each kind of work. The first steps, which record graphs and fill caches, are not counted."""
        with self._watched(), suppress(_TimeIsOver):
            self._prompts(min(64, self._engine.config.token_budget), 2)
            self._decode(16, min(4, self._engine.config.max_running))
            self._cells.clear()
            for _ in range(PASSES):
                for part in self._parts():
                    part()
        self._engine.check()
        return self.samples()

    def spread(self) -> float:
        """The spread of steps of the same work without the fastest and slowest tenth, as a share of their median.

        The mean over all kinds of work with at least four steps; 0: there is none.
        """
        found = [
            np.quantile([taken_s for _, taken_s in steps], (0.1, 0.5, 0.9))
            for steps in self._cells.values()
            if len(steps) >= 4
        ]
        return statistics.fmean((high - low) / middle for low, middle, high in found) if found else 0.0

    def samples(self) -> list[StepSample]:
        """Of all steps so far."""
        return [_sample(steps) for steps in self._cells.values()]

    def reference_s(self, rounds: int) -> dict[str, float]:
        """Mean time of reference steps in seconds, by kind: prefill and decode."""
        self._cells.clear()
        self._engine.reset_cache()  # an earlier sampler's prompts are the same
        with self._watched():
            for _ in range(rounds):
                self._prompts(REFERENCE_PROMPT, 1)
                self._decode(REFERENCE_PROMPT, REFERENCE_SEQUENCES)
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        for steps in self._cells.values():
            for work, taken_s in steps:
                seconds[StepSample(work, taken_s).kind].append(taken_s)
        return {kind: statistics.fmean(values) for kind, values in seconds.items()}

    def _parts(self) -> Iterator[Callable[[], None]]:
        """Short ones of each kind first, because time may run out."""
        budget, longest = self._engine.config.token_budget, min(self._engine.max_model_len - 2, self._pool_tokens)
        sizes = dict.fromkeys(min(size, budget, longest) for size in PROMPTS)
        long = min(LONG_PROMPT, longest)
        yield partial(self._decode, CONTEXTS[0])
        for size in sizes:
            yield partial(self._prompts, size, REPEATS)
        yield self._mixed
        yield partial(self._prompts, long, 1)
        for context in CONTEXTS[1:]:
            if context + self._output_tokens(1, context) < longest:
                yield partial(self._decode, context)
        yield partial(self._prompts, long, REPEATS - 1)

    # ---- kinds of work

    def _prompts(self, num_tokens: int, repeats: int) -> None:
        """Alone, one after another."""
        for _ in range(repeats):
            name = self._add(num_tokens, max_tokens=1)
            try:
                while self._engine.scheduler.has_work:
                    self._step()
            finally:
                self._end([name])

    def _decode(self, context: int, most: int | None = None) -> None:
        """The largest power of two of sequences of `context` tokens that fits, then half as many, down to one."""
        most = min(self._engine.config.max_running, most or MOST_CONTEXT // context)
        fits = self._pool_tokens // (context + self._output_tokens(most, context))
        count = 1 << (max(1, min(most, fits)).bit_length() - 1)
        with self._decoding(count, context) as names:
            while names:
                for _ in range(ROUNDS):
                    self._step()
                for name in names[len(names) // 2 :]:
                    self._engine.abort(name)
                del names[len(names) // 2 :]

    def _output_tokens(self, count: int, context: int) -> int:
        """Output tokens of a sequence while the others' prompts are computed and all are measured."""
        return -(-count * context // self._engine.config.token_budget) + ROUNDS * (count.bit_length() + 1) + _SPARE

    def _mixed(self) -> None:
        """Prompts beside few and many sequences."""
        budget = self._engine.config.token_budget
        for count, context in ((4, 256), (16, 128)):
            count = min(count, self._engine.config.max_running - 1)
            grown = context + self._output_tokens(max(count, 1), context)
            if count < 1 or count * grown + budget > self._pool_tokens or grown >= self._engine.max_model_len:
                continue
            with self._decoding(count, context):
                for size in BESIDE:
                    for _ in range(REPEATS):
                        self._add(min(size, budget - count), max_tokens=1)
                        self._step()
                        self._step()

    @contextmanager
    def _decoding(self, count: int, context: int) -> Iterator[list[str]]:
        """Sequences whose prompts are computed; yields their names."""
        output_tokens = self._output_tokens(count, context)
        names = [self._add(context, max_tokens=output_tokens) for _ in range(count)]
        try:
            for _ in range(output_tokens):
                if all(seq.num_uncomputed <= 1 for seq in self._engine.scheduler.sequences.values()):
                    break
                self._step()
            yield names
        finally:
            self._end(names)

    # ---- one step

    def _step(self) -> None:
        """Raises _TimeIsOver when the budget is spent."""
        if self._clock() >= self._end_s:
            raise _TimeIsOver
        self._step_now()

    def _step_now(self) -> None:
        begin_s = self._step_clock()
        result = self._engine.step()
        seconds = result.seconds if self._engine.looks_ahead else self._step_clock() - begin_s
        self._engine.reports.drain_events()
        if result.num_tokens:
            work = self._planned.popleft()  # the oldest that was planned
            if work.prompt_tokens + work.sequences == result.num_tokens:  # no sequence left meanwhile
                self._cells[_cell_of(work)].append((work, seconds))

    def _end(self, names: list[str]) -> None:
        """Abort these, and compute what else is left: the last prompt beside them."""
        for name in names:
            self._engine.abort(name)
        while self._engine.scheduler.has_work:
            self._step_now()
        self._engine.settle()
        self._planned.clear()

    def _add(self, num_tokens: int, *, max_tokens: int) -> str:
        self._num_requests += 1
        longest = self._engine.max_model_len - num_tokens
        return add_prompt(self._engine, self._num_requests, num_tokens, max_tokens=max(1, min(max_tokens, longest)))

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Record every plan that has work."""
        scheduler = self._engine.scheduler
        schedule = scheduler.schedule

        def noting() -> StepPlan:
            plan = schedule()
            if plan.work:
                self._planned.append(work_of(plan))
            return plan

        scheduler.schedule = noting  # type: ignore[method-assign]
        try:
            yield
        finally:
            del scheduler.schedule


def _sample(steps: list[tuple[StepWork, float]]) -> StepSample:
    first = steps[0][0]
    context = round(statistics.fmean(work.context_tokens for work, _ in steps))
    work = StepWork(first.prompt_tokens, first.prompt_pairs, first.sequences, context)
    return StepSample(work, statistics.median(seconds for _, seconds in steps))


def copy_bytes_per_s() -> float:
    """How fast this machine copies memory, which bounds a transfer between its workers."""
    source = np.ones(_COPY_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    best = math.inf
    for _ in range(5):
        begin_s = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - begin_s)
    return _COPY_BYTES / best


def profile_of(
    engine: Engine,
    fitted: Fitted,
    *,
    model: str,
    num_threads: int,
    date: str,
    spread: float | None = None,
    between_s: float = 0.0,
) -> SimulatorProfile:
    """A profile of workers like this engine. date: of the measurement; spread: see StepSampler.

    between_s: a worker's time between two steps, which is added to each.
    """
    curve = replace(fitted.curve, overhead_s=fitted.curve.overhead_s + between_s)
    compute_dtype, device = engine.cache.fingerprint.compute_dtype, engine.backend.device.type
    copied = copy_bytes_per_s()
    measured = f"{model}, {compute_dtype}, {device}, {date}"
    return SimulatorProfile(
        name=f"{model}-{device}",
        source=(
            _source("curve", fitted.curve.weights_s, f"fitted: {measured}", "s for weights_s"),
            _source("overhead_s", between_s, "of it between two steps: measured on a worker's thread", "s"),
            _source("local_bytes_per_s", copied, "measured: a copy in this machine's memory", "B/s"),
            _source("link_bytes_per_s", LINK_BYTES_PER_S, "assumed: 10 Gb/s; set your own", "B/s"),
            _source("cost_per_hour", 1.0, "assumed: one of whatever a worker costs"),
        ),
        fit=Fit(
            model=model,
            dtype=compute_dtype,
            device=device,
            threads=num_threads,
            date=date,
            spread=spread,
            errors={kind: FitError.model_validate(asdict(error)) for kind, error in fitted.errors.items()},
        ),
        prefill=curve,
        decode=curve,
        block_size=engine.config.block_size,
        num_blocks=engine.pool.num_blocks,
        token_budget=engine.config.token_budget,
        max_running=engine.config.max_running,
        max_model_len=engine.max_model_len,
        kv_bytes_per_token=round(engine.cache.memory.layout.block_bytes / engine.config.block_size),
        link_bytes_per_s=LINK_BYTES_PER_S,
        local_bytes_per_s=copied,
        load_bytes_per_s={"host": copied},
    )


def _source(constant: str, value: float, origin: str, unit: str = "") -> ConstantSource:
    return ConstantSource(constant=constant, value=value, unit=unit, origin=origin)
