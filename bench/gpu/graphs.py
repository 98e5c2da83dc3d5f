"""Decode steps with and without graphs: the same hidden states, and how much faster; then where a step's time goes."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.gpu.engines import build, decoding, profiled, seconds_of
from bench.gpu.kernels import KernelStep, batch_of
from bench.gpu.models import folder_of
from bench.gpu.section import Context
from kvrelay.engine.step.engine import Engine
from kvrelay.types import BlockId

_STEPS = 12
_TOLERANCE = 2e-2  # bf16: a graph is padded to another batch size, for which the kernels may sum in another order


def run(context: Context) -> None:
    folder = folder_of(context, "llama-8b, 2 layers")
    kv_bytes, token_budget = (32 << 20, 64) if context.tiny else (context.room(4 << 30), 8192)
    engine = build(context, folder, kv_bytes=kv_bytes, token_budget=token_budget)
    if engine.runner._graphs is None:
        context.add(check="graphs", ok=False, note="this backend captures no graphs")
        return
    for batch in (1, 3) if context.tiny else (1, 2, 3, 8, 17, 64, 100, 128):
        compare(context, engine, batch, 40 if context.tiny else 500)
    for tokens in (20,) if context.tiny else (7, 64, 300, 512):
        compare_mixed(context, engine, tokens)
    profile(context, engine)
    engine.close()


@dataclass(frozen=True, slots=True)
class Run:
    """Each step's tokens [batch] and hidden states [batch, hidden], in the batch's order; the median step's seconds."""

    tokens: list[list[int]]
    hidden: list[Tensor]
    step_s: float

    def same_rows(self, other: "Run", step: int) -> list[int]:
        """The sequences whose tokens before this step are the same in both."""
        own, others = self.tokens[:step], other.tokens[:step]
        rows = range(len(self.tokens[0]))
        return [row for row in rows if all(a[row] == b[row] for a, b in zip(own, others, strict=True))]


def compare(context: Context, engine: Engine, batch: int, length: int) -> None:
    """The same sequences twice: without graphs, with them. A sequence is compared for as long as its tokens agree."""
    plain = run_steps(engine, batch, length, with_graphs=False)
    graphed = run_steps(engine, batch, length, with_graphs=True)
    graphs: Any = engine.runner._graphs
    if why := getattr(graphs, "why_not", None):
        context.add(check=f"batch {batch}", left_out=why)
        return
    compared = [plain.same_rows(graphed, step) for step in range(_STEPS)]
    states = zip(plain.hidden, graphed.hidden, compared, strict=False)  # one more may have been launched
    errors = [error(found[rows], expected[rows]) for expected, found, rows in states if rows]
    same = sum(len(rows) == batch for rows in compared)
    within = max(errors) <= (_TOLERANCE if context.is_cuda else 0.0)
    context.add(
        check=f"batch {batch}: graphs on and off",
        same_steps=same,
        of=_STEPS,
        worst_relative_error=max(errors),
        plain_ms=1e3 * plain.step_s,
        graphs_ms=1e3 * graphed.step_s,
        ok=within and graphs.has_captures and (context.is_cuda or same == _STEPS),
    )


def compare_mixed(context: Context, engine: Engine, num_tokens: int) -> None:
    """A step of two decoding sequences and a prompt of so many tokens, plain and in pieces: hidden states and the
    cache.
    """
    runner: Any = engine.runner
    if runner._pieces is None:
        context.add(check="a mixed step in pieces", left_out="this backend has none")
        return
    model, shape, pieces, cache = (
        engine.model,
        engine.model.attention_shape,
        runner._pieces,
        engine.cache.storage.tensor,
    )
    step = KernelStep("", ((1, 33), (1, 500), (num_tokens - 2, 600 + num_tokens)))
    batch, num_blocks = batch_of(step, shape.block_size, torch.Generator().manual_seed(num_tokens))
    ids = torch.randint(3, model.spec.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(1))
    ids = ids.to(cache.device)

    def plain() -> Tensor:
        plan = engine.backend.plan(batch, shape)
        return model.forward(ids, batch, plan, engine.cache.storage.layers)

    with torch.inference_mode():
        expected, stored = plain().clone(), cache[:num_blocks].clone()
        found = pieces.run(ids, batch, runner._forward).clone()
        errors = [error(found, expected), error(cache[:num_blocks], stored)]
        seconds = {
            name: statistics.median(seconds_of(context, way, _STEPS))
            for name, way in (("plain", plain), ("pieces", lambda: pieces.run(ids, batch, runner._forward)))
        }
    context.add(
        check=f"a mixed step of {num_tokens} tokens, plain and in pieces",
        worst_relative_error=max(errors),
        plain_ms=1e3 * seconds["plain"],
        graphs_ms=1e3 * seconds["pieces"],
        ok=max(errors) <= _TOLERANCE,
    )


def error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest number."""
    size = max(float(expected.abs().max()), 1e-6)
    return float((found - expected).abs().max()) / size


def run_steps(engine: Engine, batch: int, length: int, *, with_graphs: bool) -> Run:
    """Of sequences whose context is the same each time, in whatever blocks."""
    cache = engine.cache.storage.tensor

    def fill(blocks: list[BlockId]) -> None:
        generator = torch.Generator(cache.device).manual_seed(3)
        noise = torch.empty(len(blocks), *cache.shape[1:], dtype=cache.dtype, device=cache.device)
        cache[blocks] = noise.uniform_(-1.0, 1.0, generator=generator)

    runner: Any = engine.runner
    graphs, pieces, run, seconds = runner._graphs, runner._pieces, runner.run, []
    tokens: list[list[int]] = []
    hidden: list[Tensor] = []

    def kept(*args: Any) -> Tensor:
        out: Tensor = run(*args)
        hidden.append(out.to(torch.float32, copy=True))  # the next replay overwrites it
        return out

    runner.run = kept
    if not with_graphs:
        runner._graphs = runner._pieces = None
    try:
        with decoding(engine, batch, length, _STEPS + 2, fill) as step:
            while len(tokens) < _STEPS:
                begin_s = time.perf_counter()
                result = step()
                seconds.append(time.perf_counter() - begin_s)
                if result.outputs:  # a device that looks ahead has none of its first step yet
                    tokens.append([one.token_ids[0] for one in result.outputs])
    finally:
        runner._graphs, runner._pieces = graphs, pieces
        del runner.run
    return Run(tokens, hidden, statistics.median(seconds))


def profile(context: Context, engine: Engine) -> None:
    """A decode step beside the device's busy time in it."""
    for batch in (1, 3) if context.tiny else (1, 16, 64):
        with decoding(engine, batch, 16 if context.tiny else 128, 3 * _STEPS) as step:
            step_s = statistics.median(seconds_of(context, step, _STEPS))
            busy_s, host_waits, _ = profiled(step, _STEPS) if context.is_cuda else (0.0, 0.0, "")
        beside = {"beside_us": 1e6 * (step_s - busy_s), "host_waits": host_waits}
        context.add(check=f"decode {batch}: step", step_us=1e6 * step_s, kernels_us=1e6 * busy_s, **beside)
