"""Measures a real engine's steps by phase, inside and outside kernels: decode, prefill and mixed steps.

Runs on the thread that owns the engine and adds sequences of its own; the engine must be idle before. Plain steps
alternate with instrumented ones (engine/profiling/instruments.py): plain steps give the duration, instrumented ones its
composition. Times are seconds.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvrelay.engine.profiling.instruments import (
    ENCODING,
    PHASES,
    DeviceTimes,
    Meter,
    MeteredStep,
    metered,
    named_kernels,
    profile_device,
)
from kvrelay.engine.step.config import StepResult
from kvrelay.engine.step.engine import Engine
from kvrelay.errors import ConfigError
from kvrelay.hashing import block_hashes
from kvrelay.plane.messages import Sampling, SequenceRequest, Tokens, encode

_WARM_UP = 4  # rounds: recordings, graphs, caches
_DEVICE_STEPS = 8
_MOST_ROUNDS = 1 << 20


@dataclass(frozen=True, slots=True)
class StepWorkload:
    """The work of each step: one token of `num_decode` sequences and a new prompt of `prompt_tokens` (0: none)."""

    num_decode: int
    prompt_tokens: int

    @property
    def name(self) -> str:
        parts = [f"decode {self.num_decode}"] if self.num_decode else []
        parts += [f"prefill {self.prompt_tokens}"] if self.prompt_tokens else []
        return " + ".join(parts)


@dataclass(frozen=True, slots=True)
class Phase:
    """Medians over the measured steps, seconds."""

    name: str
    kernels_s: float
    outside_s: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One workload. step_s: a plain step; outside_s: its part outside kernels, the sum over `phases`.

    On a GPU kernels_s is the device's busy time and outside_s the rest of the step, while the phases are host time.
    ahead_s: host time spent on the next step while the device computes; None: there is no such device.
    waited_s: host time spent waiting after that.
    """

    workload: str
    num_steps: int
    step_s: float
    kernels_s: float
    outside_s: float
    kernel_calls: float
    phases: tuple[Phase, ...]
    host_waits: float | None = None  # per step; None: there is no device to wait for
    ahead_s: float | None = None
    waited_s: float | None = None

    @property
    def share(self) -> float:
        """Share of the step outside kernels."""
        return self.outside_s / self.step_s


@dataclass(frozen=True, slots=True)
class Round:
    """One step's seconds; see StepResult."""

    seconds: float
    ahead_s: float
    waited_s: float


class StepProfiler:
    """Drives one engine. context_tokens: context of each decoding sequence at the first measurement."""

    def __init__(self, engine: Engine, *, context_tokens: int, num_steps: int, temperature: float = 0.0) -> None:
        self._engine, self._context_tokens, self._num_steps = engine, context_tokens, num_steps
        self._temperature = temperature
        self._num_requests = 0
        self._meter = Meter()
        self._meter.calibrate()

    def check(self, workload: StepWorkload, more_rounds: int = 0) -> None:
        """Raises ConfigError: the engine cannot run the workload as a step; the text names the limit."""
        engine = self._engine
        budget, longest = engine.config.token_budget, self._longest(workload, more_rounds)
        if workload.num_decode + bool(workload.prompt_tokens) > engine.config.max_running:
            raise ConfigError(
                f"--batch {workload.num_decode}: the engine runs up to {engine.config.max_running} sequences"
            )
        if workload.num_decode + workload.prompt_tokens > budget:
            raise ConfigError(f"{workload.name}: a step takes up to {budget} tokens (engine.token_budget)")
        if max(longest * bool(workload.num_decode), workload.prompt_tokens + 1) > engine.max_model_len:
            raise ConfigError(
                f"{workload.name}: sequences of {longest} tokens, but the longest is {engine.max_model_len}; "
                "lower --context, --steps or --prompt"
            )
        size = engine.config.block_size
        blocks = workload.num_decode * -(-longest // size) + -(-(workload.prompt_tokens + 1) // size) + 1
        if blocks > engine.pool.num_blocks:
            raise ConfigError(f"{workload.name}: needs {blocks} blocks of KV, the pool has {engine.pool.num_blocks}")

    def _longest(self, workload: StepWorkload, more_rounds: int) -> int:
        """Tokens that a decoding sequence may reach; the first ones decode while others' prompts are computed."""
        prompts = -(-workload.num_decode * self._context_tokens // self._engine.config.token_budget)
        return self._context_tokens + prompts + 2 * self._num_steps + _WARM_UP + _DEVICE_STEPS + more_rounds + 2

    def run(self, workload: StepWorkload) -> StepProfile:
        """Measure one workload. Raises ConfigError: see `check`."""
        with self._running(workload, 0):
            rounds: list[Round] = []
            times: list[MeteredStep] = []
            for _ in range(self._num_steps):
                rounds.append(self._round(workload))
                times.append(self._metered(workload))
            device = self._device(workload)
        return _summary(workload, rounds, times, device, looks_ahead=self._engine.looks_ahead)

    def sample(self, workload: StepWorkload, num_rounds: int, watch: Callable[[Callable[[], None]], None]) -> None:
        """Call `watch` with a function that runs this many steps, kernels in frames with their names; fewer steps if
        the sequences cannot grow that long.
        """
        num_rounds = max(1, min(num_rounds, self._spare(workload)))

        def run_rounds() -> None:
            for _ in range(num_rounds):
                self._round(workload)

        with self._running(workload, num_rounds), named_kernels(self._engine):
            watch(run_rounds)

    def _spare(self, workload: StepWorkload) -> int:
        """Tokens by which each decoding sequence could be longer than those of `run`."""
        if not workload.num_decode:
            return _MOST_ROUNDS
        engine, size = self._engine, self._engine.config.block_size
        blocks = engine.pool.num_blocks - 1 - -(-(workload.prompt_tokens + 1) // size)
        longest = min(engine.max_model_len, blocks // workload.num_decode * size)
        return longest - self._longest(workload, 0)

    @contextmanager
    def _running(self, workload: StepWorkload, more_rounds: int) -> Iterator[None]:
        self.check(workload, more_rounds)
        with self._sequences(workload, self._longest(workload, more_rounds)):
            for _ in range(_WARM_UP):
                self._take_step(workload)
            yield
        self._engine.check()

    # ---- one step

    def _take_step(self, workload: StepWorkload) -> tuple[StepResult, Round]:
        """One step like the engine thread's, outputs encoded. The prompt is added before.

        An engine that looks ahead returns the step that the previous call launched.
        """
        if workload.prompt_tokens:
            self._add(workload.prompt_tokens, max_tokens=1)
        begin_s = time.perf_counter()
        result = self._step()
        return result, Round(time.perf_counter() - begin_s, result.ahead_s, result.waited_s)

    def _round(self, workload: StepWorkload) -> Round:
        """One step, which must be of this workload."""
        result, taken = self._take_step(workload)
        if result.num_decode != workload.num_decode + (workload.prompt_tokens == 1):
            raise ConfigError(
                f"{workload.name}: a step decoded {result.num_decode} sequences; lower --batch or --context"
            )
        return taken

    def _step(self) -> StepResult:
        engine = self._engine
        result = engine.step()
        result.events = engine.drain_events()
        encode_result(result)
        return result

    def _metered(self, workload: StepWorkload) -> MeteredStep:
        if workload.prompt_tokens:
            self._add(workload.prompt_tokens, max_tokens=1)
        encoding = self._meter.phase(ENCODING, encode_result)
        with metered(self._engine, self._meter):
            self._meter.begin()
            result = self._engine.step()
            result.events = self._engine.drain_events()
            encoding(result)
            return self._meter.taken()

    def _device(self, workload: StepWorkload) -> DeviceTimes | None:
        if self._engine.backend.device.type != "cuda":  # torch profiles no other
            return None
        return profile_device(lambda: self._round(workload), _DEVICE_STEPS)

    # ---- sequences

    @contextmanager
    def _sequences(self, workload: StepWorkload, longest: int) -> Iterator[None]:
        """Add `num_decode` sequences and compute their prompts; abort them at the end."""
        engine = self._engine
        names = [self._add(self._context_tokens, max_tokens=longest) for _ in range(workload.num_decode)]
        try:
            while any(seq.num_uncomputed > 1 for seq in engine.scheduler.sequences.values()):
                engine.step()
            yield
        finally:
            for name in names:
                engine.abort(name)
            while engine.scheduler.has_work:  # the last prompt
                engine.step()

    def _add(self, num_tokens: int, *, max_tokens: int) -> str:
        self._num_requests += 1
        return add_prompt(
            self._engine, self._num_requests, num_tokens, max_tokens=max_tokens, temperature=self._temperature
        )


def add_prompt(engine: Engine, number: int, num_tokens: int, *, max_tokens: int, temperature: float = 0.0) -> str:
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
        sampling=Sampling(max_tokens=max_tokens, temperature=temperature, seed=number, ignore_eos=True),
    )
    if (refusal := engine.refusal(request)) is not None:
        raise ConfigError(f"the engine refuses a prompt of {num_tokens} tokens: {refusal[1]}")
    engine.add(request)
    return request.request_id


def encode_result(result: StepResult) -> None:
    """Encode outputs and events as the worker does on the event loop's thread."""
    encode(Tokens(outputs=result.outputs))
    if result.events is not None:
        encode(result.events)


def _summary(
    workload: StepWorkload,
    rounds: list[Round],
    times: list[MeteredStep],
    device: DeviceTimes | None,
    *,
    looks_ahead: bool,
) -> StepProfile:
    def median(by_phase: list[dict[str, float]], name: str) -> float:
        return statistics.median(one.get(name, 0.0) for one in by_phase)

    phases = tuple(
        Phase(name, median([one.kernels_s for one in times], name), median([one.outside_s for one in times], name))
        for name in PHASES
    )
    step_s = statistics.median(one.seconds for one in rounds)
    kernels_s = statistics.median(sum(one.kernels_s.values()) for one in times)
    # not the median of sums: one interrupted phase spoils a sum
    outside_s = sum(phase.outside_s for phase in phases)
    calls = statistics.median(one.num_kernels for one in times)
    if device is not None:
        kernels_s, calls = device.busy_s, device.num_kernels
        outside_s = max(0.0, step_s - device.busy_s)
    return StepProfile(
        workload.name,
        len(rounds),
        step_s,
        kernels_s,
        outside_s,
        calls,
        phases,
        host_waits=None if device is None else device.num_waits,
        ahead_s=statistics.median(one.ahead_s for one in rounds) if looks_ahead else None,
        waited_s=statistics.median(one.waited_s for one in rounds) if looks_ahead else None,
    )
