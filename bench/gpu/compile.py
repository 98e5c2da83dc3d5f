"""FlashInfer's kernels, compiled side by side before anything is measured: one after the other they would take all the
time.

Kernels that a wheel brings, or that an earlier run left in FlashInfer's cache, are only loaded.
"""

import multiprocessing
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu.kernels import Grid, KernelStep, batch_of
from bench.gpu.section import FA3_IS_BUILT, Context
from kvrelay.kernels.backend import AttentionShape

HOPPER = "prefill attention of Hopper, 128"
_LEFT_S = 15.0  # of the section's time, when what is not built yet is given up


def norm_and_activation(grid: Grid) -> None:
    x = grid.random(3, 128, dtype=torch.bfloat16)
    grid.backend.add_rms_norm(x.clone(), x.clone(), x[0].clone(), 1e-5)
    for kind in ("silu", "gelu_tanh"):
        grid.backend.gated_activation(x, kind)


def rope(grid: Grid) -> None:
    q = grid.random(3, 2, 128, dtype=torch.bfloat16)
    table = torch.rand(8, 128).to(grid.context.device)
    grid.backend.rope(q, q.clone(), table, torch.tensor([0, 1, 2]))


def append(grid: Grid) -> None:
    k = grid.random(3, 2, 128, dtype=torch.bfloat16)
    cache = torch.zeros(2, 2, 16, 2, 128, dtype=torch.bfloat16, device=grid.context.device)
    grid.backend.store_kv(k, k.clone(), cache, torch.tensor([0, 1, 2]))


def attention(sequences: tuple[tuple[int, int], ...], head_dim: int) -> Callable[[Grid], None]:
    def run(grid: Grid) -> None:
        shape = AttentionShape(8, 2, head_dim, 16, torch.bfloat16)
        batch, num_blocks = batch_of(KernelStep("", sequences), 16, grid.generator)
        kv = grid.random(num_blocks, 2, 16, 2, head_dim, dtype=torch.bfloat16)
        q = grid.random(int(batch.query_starts[-1]), 8, head_dim, dtype=torch.bfloat16)
        grid.attend(grid.backend, shape, batch, q, kv, None, None)

    return run


def latent_attention(grid: Grid) -> None:
    shape = AttentionShape(16, 1, 576, 16, torch.bfloat16, latent_dim=512)
    batch, num_blocks = batch_of(KernelStep("", ((1, 20),)), 16, grid.generator)
    kv = grid.random(num_blocks, 1, 16, 1, 576, dtype=torch.bfloat16)
    grid.attend(grid.backend, shape, batch, grid.random(1, 16, 576, dtype=torch.bfloat16), kv, None, None)


def prefill_of_hopper(grid: Grid) -> None:
    """fa3: up to 12 minutes of one processor, in parallel where there are more."""
    kernels: Any = grid.backend
    if not grid.context.is_cuda:
        attention(((5, 20),), 128)(grid)
    elif (
        len(kernels.paged.prefill_kernels.try_out(AttentionShape(8, 2, 128, 16, torch.bfloat16), (0.1, None, None)))
        == 2
    ):
        (grid.context.scratch / FA3_IS_BUILT).touch()


TASKS: dict[str, Callable[[Grid], None]] = {
    "norm, activation": norm_and_activation,
    "rope": rope,
    "append": append,
    "decode attention, 128": attention(((1, 20), (1, 3)), 128),
    "prefill attention, 128": attention(((5, 20),), 128),
    "decode attention, 64": attention(((1, 20), (1, 3)), 64),
    "prefill attention, 64": attention(((5, 20),), 64),
    "latent attention": latent_attention,
    HOPPER: prefill_of_hopper,
}


def one(name: str, order: str) -> None:
    """A process: builds or loads one module by using it."""
    context = Context.from_json(order)
    timed(name, context, lambda: Grid(context))


def timed(name: str, context: Context, grid: Callable[[], Grid]) -> None:
    began = time.perf_counter()
    try:
        with torch.inference_mode():
            TASKS[name](grid())
            context.synchronize()
    except Exception as error:  # a process edge
        traceback.print_exc()
        context.add(
            kernel=name, seconds=time.perf_counter() - began, ok=False, note=f"{type(error).__name__}: {error}"[:300]
        )
    else:
        context.add(kernel=name, seconds=time.perf_counter() - began, ok=True)


def run(context: Context) -> None:
    """On the CPU the same calls, in this process: there is nothing to compile side by side."""
    if not context.is_cuda:
        grid = Grid(context)
        for name in TASKS:
            timed(name, context, lambda: grid)
        return
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=one, args=(name, context.to_json()), daemon=True) for name in TASKS]
    for worker in workers:
        worker.start()
    for name, worker in zip(TASKS, workers, strict=True):
        worker.join(max(context.left_s - _LEFT_S, 1.0) if name == HOPPER else None)
        if worker.is_alive():
            worker.terminate()
            worker.join()
            context.add(kernel=name, left_out="not built in the time that there is: fa2 is used")
