"""Clocks around the parts of one engine: a step's time by phase, kernels apart from the Python between them.

Wraps methods of the engine's parts for the duration of a measurement. The wrappers' own cost is measured once and
subtracted. Times are seconds.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvrelay.engine.step.engine import Engine

SCHEDULING, METADATA, MODEL = "scheduling", "batch metadata", "model"
LOGITS, SAMPLING, OUTPUTS = "logits", "sampling", "output processing"
REST, EVENTS, ENCODING = "rest of step", "events", "encoding"
PHASES = (SCHEDULING, METADATA, MODEL, LOGITS, SAMPLING, OUTPUTS, REST, EVENTS, ENCODING)
# sampling: includes waiting for the device. output processing: includes advancing sequences. rest of step: Engine.step
# outside of the other phases. encoding: on the event loop in a worker.
_NOWHERE = ""
_CALIBRATION_CALLS = 2000


@dataclass(slots=True)
class MeteredStep:
    """One round's seconds by phase: inside kernels, and outside them."""

    outside_s: dict[str, float] = field(default_factory=dict)
    kernels_s: dict[str, float] = field(default_factory=dict)
    num_kernels: int = 0


class Meter:
    """Charges time to the innermost running phase, and kernel calls separately. For one thread. Its attributes are
    running totals.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._stack = [_NOWHERE]
        self._since = 0.0
        self._outside: defaultdict[str, float] = defaultdict(float)
        self._kernels: defaultdict[str, float] = defaultdict(float)
        self._num_phases: Counter[str] = Counter()  # by the phase around them
        self._num_kernels: Counter[str] = Counter()
        self._num_ops: Counter[str] = Counter()
        self._num_watched: Counter[str] = Counter()
        # a wrapper's cost per call
        self.phase_cost_s = self.kernel_cost_s = self.op_cost_s = self.watch_cost_s = 0.0

    def phase(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time is charged to `name` except for phases and kernels within."""
        stack, outside, clock = self._stack, self._outside, self._clock

        def timed(*args: Any, **kwargs: Any) -> Any:
            now_s, around = clock(), stack[-1]
            outside[around] += now_s - self._since
            self._num_phases[around] += 1
            self._since = now_s
            stack.append(name)
            try:
                return function(*args, **kwargs)
            finally:
                now_s = clock()
                outside[name] += now_s - self._since
                self._since = now_s
                stack.pop()

        return timed

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time is charged as a kernel's."""
        clock, stack, kernels, count = self._clock, self._stack, self._kernels, self._num_kernels

        def timed(*args: Any) -> Any:
            begin_s = clock()
            result = function(*args)
            seconds = clock() - begin_s
            kernels[stack[-1]] += seconds
            count[stack[-1]] += 1
            self._since += seconds
            return result

        return timed

    def operator(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run a torch operator; one that only makes a view is not a kernel."""
        self._num_ops[self._stack[-1]] += 1
        begin_s = self._clock()
        result = function(*args, **kwargs)
        seconds = self._clock() - begin_s
        if not (function.is_view and _is_view(result, args[0])):
            self._kernels[self._stack[-1]] += seconds
            self._since += seconds
        return result

    def with_operators(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with every torch operator that it runs timed as a kernel."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._num_watched[self._stack[-1]] += 1
            with _TimedOperators(self):
                return function(*args, **kwargs)

        return run

    def begin(self) -> None:
        """Clear all times and start the clock."""
        counts = (self._num_phases, self._num_kernels, self._num_ops, self._num_watched)
        for totals in (self._outside, self._kernels, *counts):
            totals.clear()
        self._since = self._clock()

    def taken(self) -> MeteredStep:
        """Times since `begin`, less the wrappers' cost."""
        outside = {
            name: max(0.0, seconds - self._cost_s(name)) for name, seconds in self._outside.items() if name != _NOWHERE
        }
        num_kernels = sum(self._num_kernels.values())
        return MeteredStep(outside, dict(self._kernels), num_kernels)

    def _cost_s(self, name: str) -> float:
        return (
            self._num_phases[name] * self.phase_cost_s
            + self._num_kernels[name] * self.kernel_cost_s
            + self._num_ops[name] * self.op_cost_s
            + self._num_watched[name] * self.watch_cost_s
        )

    def calibrate(self) -> None:
        """Measure the wrappers' cost: the least of a few rounds, since load only adds."""
        row = torch.zeros(4)

        def nothing(*args: Any) -> None:
            return None

        def seconds(function: Callable[..., Any], *args: Any) -> float:
            rounds = []
            for _ in range(5):
                begin_s = self._clock()
                for _ in range(_CALIBRATION_CALLS):
                    function(*args)
                rounds.append(self._clock() - begin_s)
            return min(rounds) / _CALIBRATION_CALLS

        bare = seconds(nothing, 1, 2, 3)
        self.phase_cost_s = max(0.0, seconds(self.phase("calibration", nothing), 1, 2, 3) - bare)
        self.kernel_cost_s = max(0.0, seconds(self.kernel(nothing), 1, 2, 3) - bare)
        self.watch_cost_s = max(0.0, seconds(self.with_operators(nothing), 1, 2, 3) - bare)
        plain = seconds(row.view, -1)
        with _TimedOperators(self):
            self.op_cost_s = max(0.0, seconds(row.view, -1) - plain)


def _is_view(result: Any, source: Any) -> bool:
    """For operators that may copy (to, contiguous, reshape): whether this call returned a view."""
    if not isinstance(result, Tensor) or not isinstance(source, Tensor):
        return True  # split and the like
    return result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


class _TimedOperators(TorchDispatchMode):
    """Run every torch operator inside through the meter."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._meter.operator(func, args, kwargs or {})


class _Library:
    """Replaces the library of compiled kernels, each of its functions wrapped at first use."""

    def __init__(self, lib: Any, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        self._lib, self._wrap = lib, wrap

    def __getattr__(self, name: str) -> Callable[..., Any]:
        wrapped = self._wrap(name, getattr(self._lib, name))
        setattr(self, name, wrapped)
        return wrapped


@contextmanager
def _replaced(changes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes of these objects, and restore them afterwards."""
    before = [(owner, name, owner.__dict__.get(name, _NOWHERE)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            if value is _NOWHERE:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _library(engine: Engine, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> list[Any]:
    native = engine.backend.compiled_kernels
    return [] if native is None else [(native, "lib", _Library(native.lib, wrap))]


def _computes_in_torch(engine: Engine, *, has_library: bool) -> bool:
    """Whether torch operators count as kernels here. Otherwise they are not timed: they are rare, thus cold in every
    step, and timing them would cost more than calibration measures.
    """
    spec, backend = engine.model.spec, engine.backend
    other_parts = spec.latent is not None or spec.final_softcap is not None
    other_linears = engine.config.quantization is None and not backend.is_batch_invariant(engine.model.dtype)
    return not has_library or other_parts or other_linears


@contextmanager
def metered(engine: Engine, meter: Meter) -> Iterator[None]:
    """Charge the engine's phases to `meter`. Call it on the engine's thread, between two steps."""
    scheduler, runner, model = engine.scheduler, engine.runner, engine.model
    seams: list[tuple[Any, str, str]] = [
        (engine, "step", REST),
        (engine, "drain_events", EVENTS),
        (engine, "advance", OUTPUTS),
        (engine.executor, "sample", OUTPUTS),
        (engine.executor, "take", OUTPUTS),
        (engine.executor, "wait", SAMPLING),
        (scheduler, "reject_overdue", SCHEDULING),
        (scheduler, "grant_reservations", SCHEDULING),
        (scheduler, "schedule", SCHEDULING),
        (runner, "run", MODEL),
        (runner, "batch", METADATA),
        (runner, "logits", LOGITS),
        (engine.executor.sampler, "sample", SAMPLING),
        (engine.executor.sampler, "draw", SAMPLING),
    ]

    changes = [(owner, name, meter.phase(phase, getattr(owner, name))) for owner, name, phase in seams]
    if engine.backend.asynchronous is None:  # elsewhere a call returns before its kernel has run: see profile_device
        library = _library(engine, lambda name, function: meter.kernel(function))
        if _computes_in_torch(engine, has_library=bool(library)):
            watched = [(model, "forward"), (model, "logits")] + (
                [] if library else [(engine.backend, "sample_on_device")]
            )
            changes += [(owner, name, meter.with_operators(getattr(owner, name))) for owner, name in watched]
        changes += library
    with _replaced(changes):
        yield


@contextmanager
def named_kernels(engine: Engine) -> Iterator[None]:
    """Run each compiled kernel in a Python frame with the kernel's name, visible to a stack sampler."""

    def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            return function(*args)

        code = call.__code__.replace(co_name=name, co_qualname=name)
        return FunctionType(code, call.__globals__, name, None, call.__closure__)

    with _replaced(_library(engine, named)):
        yield


# CUDA runtime and driver calls in which the host waits; so does a copy without "Async"
_WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventSynchronize",
)
_COPIES = ("cudaMemcpy", "cudaMemcpy2D", "cuMemcpyDtoH", "cuMemcpyHtoD")


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Averages of one step: seconds in which the device computed or copied, kernels, and waits of the host."""

    busy_s: float
    num_kernels: float
    num_waits: float


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals (begin, end), in their unit."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def is_wait(name: str) -> bool:
    """Whether this call of the CUDA runtime or driver blocks the host until the device has finished."""
    return name.startswith(_WAITS) or name.partition("_v")[0] in _COPIES


def device_times(events: Iterable[tuple[str, bool, float, float]], num_steps: int) -> DeviceTimes:
    """events: (name, whether it ran on the device, begin, end), in microseconds."""
    busy: list[tuple[float, float]] = []
    num_kernels = num_waits = 0
    for name, on_device, begin, end in events:
        if on_device:
            busy.append((begin, end))
            num_kernels += not name.startswith(("Memcpy", "Memset"))
        else:
            num_waits += is_wait(name)
    return DeviceTimes(covered(busy) / 1e6 / num_steps, num_kernels / num_steps, num_waits / num_steps)


def profile_device(run_step: Callable[[], object], num_steps: int) -> DeviceTimes:
    """Run this many steps under torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as session:
        for _ in range(num_steps):
            run_step()
        torch.cuda.synchronize()
    found: Any = session.events() or []
    return device_times(
        (
            (event.name, event.device_type.name == "CUDA", event.time_range.start, event.time_range.end)
            for event in found
            if not getattr(event, "is_user_annotation", False)  # spans the kernels of a named range
        ),
        num_steps,
    )
