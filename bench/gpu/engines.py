"""An engine in this process, and sequences behind a context that was not computed here, as on a decode worker."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.engine.inprocess import random_prompt
from bench.gpu.section import Context
from kvrelay.engine.checkpoints.loading import load_model
from kvrelay.engine.step.build import make_engine
from kvrelay.engine.step.config import EngineConfig, StepResult
from kvrelay.engine.step.engine import Engine
from kvrelay.hashing import block_hashes
from kvrelay.kernels.select import select_backend
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.types import BlockId

BLOCK_SIZE = 16
_NUM_KERNELS = 8


def build(context: Context, folder: Path, *, kv_bytes: int, token_budget: int = 8192, max_running: int = 256) -> Engine:
    """bf16, on the section's device."""
    backend = select_backend("cuda" if context.is_cuda else "cpu", context.device)
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        kv_memory_bytes=kv_bytes,
        token_budget=token_budget,
        max_running=max_running,
        max_waiting=4 * max_running,
        prefix_caching=False,
    )
    model = load_model(
        folder,
        backend,
        torch.bfloat16,
        block_size=BLOCK_SIZE,
        kv_layout="NHD",
        kv_dtype=torch.bfloat16,
        quantization=None,
    )
    engine = make_engine(model, backend, config)  # load_engine would choose kernels and capture every graph
    engine.runner.choose_kernels()
    engine.cache.storage.tensor.uniform_(-1.0, 1.0)  # noise in place of a computed context
    return engine


def free_bytes(context: Context, weights: int) -> int:
    """Memory that a KV pool may take beside so many bytes of weights; on the CPU a little."""
    if not context.is_cuda:
        return 32 << 20
    free, _ = torch.cuda.mem_get_info()
    return free - weights - (6 << 30) if not context.rehearse else 5 << 30  # activations, workspaces, graphs


def request(index: int, prompt: list[int], output_tokens: int, **sampling: Any) -> SequenceRequest:
    """Greedy unless `sampling` says otherwise, exactly `output_tokens` long."""
    return SequenceRequest(
        request_id=f"gpu-{index}",
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        block_hashes=list(block_hashes(prompt, BLOCK_SIZE)),
        tokens_per_hash=BLOCK_SIZE,
        sampling=Sampling(**{"max_tokens": output_tokens, "temperature": 0.0, "ignore_eos": True} | sampling),
    )


@contextmanager
def decoding(
    engine: Engine,
    batch: int,
    context_tokens: int,
    output_tokens: int,
    fill: Callable[[list[BlockId]], None] | None = None,
    **sampling: Any,
) -> Iterator[Callable[[], StepResult]]:
    """So many sequences that decode behind `context_tokens`: blocks are reserved and taken for arrived.

    `fill` may write their blocks, which it is given sequence by sequence. Yields what runs one step. Raises
    RuntimeError: the pool has no room for them.
    """
    vocab = engine.model.spec.vocab_size
    names: list[str] = []
    for index in range(batch):
        wanted = request(index, random_prompt(index, context_tokens, vocab), output_tokens, **sampling)
        if (refusal := engine.requests.refusal(wanted)) is not None:
            raise RuntimeError(f"the engine refuses: {refusal}")
        engine.reserve(wanted)
        names.append(wanted.request_id)
    try:
        granted: dict[str, tuple[BlockId, ...]] = {}
        while new := engine.step().reservations:
            granted |= {reservation.request_id: reservation.target_blocks for reservation in new}
        if len(granted) != batch:
            raise RuntimeError(f"room for {len(granted)} of {batch} sequences of {context_tokens} tokens")
        if fill is not None:
            fill([block for name in names for block in granted[name]])
        for name in names:
            engine.requests.activate(name, [7])
        yield engine.step
    finally:
        for name in names:
            engine.abort(name)


def seconds_of(context: Context, action: Callable[[], object], repeats: int) -> list[float]:
    """Each run's seconds, the device waited for."""
    found: list[float] = []
    for _ in range(repeats):
        context.synchronize()
        begin_s = time.perf_counter()
        action()
        context.synchronize()
        found.append(time.perf_counter() - begin_s)
    return found


def profiled(step: Callable[[], object], num_steps: int) -> tuple[float, float, str]:
    """Of one step, by torch's profiler: seconds in which the device computes or copies, waits of the host, and the
    kernels that take most of the time, with their µs.
    """
    with torch.profiler.profile() as session:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
    rows = session.key_averages()
    kernels = [row for row in rows if row.device_type == torch.profiler.DeviceType.CUDA]
    busy_us = sum(row.self_device_time_total for row in kernels)
    num_waits = sum(row.count for row in rows if row.key.endswith(("StreamSynchronize", "EventSynchronize", "Memcpy")))
    longest = sorted(kernels, key=lambda row: -row.self_device_time_total)[:_NUM_KERNELS]
    named = (
        f"{row.key[:60]} x{row.count // num_steps} {row.self_device_time_total / num_steps:.0f}" for row in longest
    )
    return busy_us / 1e6 / num_steps, num_waits / num_steps, "; ".join(named)
