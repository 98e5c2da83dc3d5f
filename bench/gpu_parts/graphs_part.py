"""Decode steps with and without graphs: the same hidden states, and how much faster; then where a step's time goes."""

import statistics
import time
from typing import Any

import torch

from gpu_parts.engines import build, decoding
from gpu_parts.models import folder_of
from gpu_parts.section import Context
from kvrelay.engine.engine import Engine
from kvrelay.engine.step_profile import StepProfiler, Workload
from kvrelay.types import BlockId

_STEPS = 12


def run(context: Context) -> None:
    folder = folder_of(context, "llama-8b, 2 layers")
    engine = build(
        context, folder, kv_bytes=(32 << 20) if context.tiny else (4 << 30), token_budget=64 if context.tiny else 8192
    )
    if engine._runner._graphs is None:
        context.add(check="graphs", ok=False, note="this backend captures no graphs")
        return
    for batch in (1, 3) if context.tiny else (1, 2, 3, 8, 17, 64, 100, 128):
        compare(context, engine, batch, 40 if context.tiny else 500)
    profile(context, engine)
    engine.close()


def compare(context: Context, engine: Engine, batch: int, length: int) -> None:
    """Twice the same sequences over the same cache; without graphs, with them."""
    plain, plain_s, _ = tokens_of(engine, batch, length, with_graphs=False)
    graphed, graphed_s, captured = tokens_of(engine, batch, length, with_graphs=True)
    if why := getattr(engine._runner._graphs, "why_not", None):
        context.add(check=f"batch {batch}", left_out=why)
        return
    same = sum(a == b for a, b in zip(plain, graphed, strict=True))
    context.add(
        check=f"batch {batch}: the same tokens with graphs", same=same, of=len(plain), plain_ms=1e3 * plain_s,
        graphs_ms=1e3 * graphed_s, ok=same == len(plain) > 0 and captured,
    )  # fmt: skip


def tokens_of(engine: Engine, batch: int, length: int, *, with_graphs: bool) -> tuple[list[int], float, bool]:
    """(tokens of all steps, the median step's seconds, whether a graph ran). The context is the same each time,
    in whatever blocks."""
    cache = engine.storage.tensor

    def fill(blocks: list[BlockId]) -> None:
        generator = torch.Generator(cache.device).manual_seed(3)
        noise = torch.empty(cache.shape[0], len(blocks), *cache.shape[2:], dtype=cache.dtype, device=cache.device)
        cache[:, blocks] = noise.uniform_(-1.0, 1.0, generator=generator)

    runner: Any = engine._runner
    graphs, found, seconds = runner._graphs, [], []
    runner._graphs = graphs if with_graphs else None
    try:
        with decoding(engine, batch, length, _STEPS + 2, fill) as step:
            for _ in range(_STEPS):
                begin_s = time.perf_counter()
                result = step()
                seconds.append(time.perf_counter() - begin_s)
                found += [
                    token
                    for output in sorted(result.outputs, key=lambda one: one.request_id)
                    for token in output.token_ids
                ]
    finally:
        runner._graphs = graphs
    return found, statistics.median(seconds), bool(graphs._graphs)


def profile(context: Context, engine: Engine) -> None:
    """As `kvrelay profile --step` measures it."""
    profiler = StepProfiler(engine, context_tokens=16 if context.tiny else 128, num_steps=3 if context.tiny else 20)
    for batch in (1, 3) if context.tiny else (1, 16, 64):
        found = profiler.run(Workload(batch, 0))
        phases = {phase.name: round(1e6 * phase.outside_s) for phase in found.phases}
        context.add(
            check=f"{found.workload}: step", step_us=1e6 * found.step_s, kernels_us=1e6 * found.kernels_s,
            beside_us=1e6 * found.outside_s, host_waits=found.host_waits, host_us_by_phase=phases,
        )  # fmt: skip
