"""A GPU's busy time in a step, and how often the host waits for it, from torch's profiler.

UNVERIFIED ON A GPU: the arithmetic is tested with made-up events only.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

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
