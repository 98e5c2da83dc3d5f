"""A Llama-8B in bf16: decode steps beside the memory's limit and the device's busy time; prompts beside the peak of
dense products.
"""

import statistics
import time

from bench.engine.inprocess import random_prompt
from bench.gpu.engines import build, decoding, free_bytes, profiled, request
from bench.gpu.models import folder_of, linear_parameters, step_parameters
from bench.gpu.section import Context
from kvrelay.engine.step.engine import Engine

DECODE_SHARE = 0.85  # of the memory's limit
TARGET_OVERHEAD_S = 100e-6  # at batch 64
PREFILL_SHARE = 0.60  # of the measured peak of dense products
_WEIGHTS = 17 << 30  # a Llama-8B's bytes in bf16
_WARM_UP, _STEPS, _PROFILED = 4, 16, 6
_ROOM = _WARM_UP + _STEPS + _PROFILED + 8  # tokens that each sequence grows by


def run_decode(context: Context) -> None:
    folder = folder_of(context, "llama-8b")
    engine = build(context, folder, kv_bytes=free_bytes(context, _WEIGHTS))
    batches, lengths = ((1, 3), (16, 64)) if context.tiny else ((1, 16, 64, 256), (1024, 2048, 4096, 8192))
    for batch in batches:
        measure(context, engine, batch, lengths[0], temperature=0.8, top_p=0.95)
        for length in lengths:
            measure(context, engine, batch, length)
    engine.close()


def measure(context: Context, engine: Engine, batch: int, length: int, **sampling: float) -> None:
    layout = engine.cache.memory.layout
    token_bytes = layout.block_bytes // layout.block_size
    blocks = batch * -(-(length + _ROOM) // layout.block_size)
    if blocks > layout.num_blocks:
        context.add(batch=batch, context=length, left_out=f"{blocks * layout.block_bytes / 1e9:.0f} GB of KV")
        return
    seconds: list[float] = []
    with decoding(engine, batch, length, _ROOM, **sampling) as step:
        for _ in range(_WARM_UP):
            step()
        for _ in range(_STEPS):
            begin_s = time.perf_counter()
            result = step()
            seconds.append(time.perf_counter() - begin_s)
        full = result.num_decode == result.num_tokens == batch
        device = profiled(step, _PROFILED) if context.is_cuda else None
    step_s = statistics.median(seconds)
    read = 2 * step_parameters(engine.model.spec) + batch * (length + _ROOM // 2) * token_bytes
    share = context.share_of("read_gb_s", read / step_s / 1e9)
    row: dict[str, object] = {
        "batch": batch, "context": length, "tokens": "drawn" if sampling else "greedy", "step_ms": 1e3 * step_s,
        "tokens_per_s": batch / step_s,
        "gb_read": read / 1e9, "share_of_memory_limit": share,
    }  # fmt: skip
    if device is not None:
        busy_s, host_waits, longest = device
        overhead_s = step_s - busy_s
        row |= {"kernels_ms": 1e3 * busy_s, "beside_kernels_us": 1e6 * overhead_s, "host_waits": host_waits}
        row |= {"longest": longest} if length == 2048 else {}
        if share is not None and not sampling:
            row["meets"] = share >= DECODE_SHARE and (batch != 64 or overhead_s <= TARGET_OVERHEAD_S)
    context.add(**row, ok=full)


def run_prefill(context: Context) -> None:
    """Chunks of 8k tokens."""
    folder = folder_of(context, "llama-8b")
    kv_bytes = min(free_bytes(context, _WEIGHTS), 12 << 30)
    engine = build(context, folder, kv_bytes=kv_bytes, token_budget=64 if context.tiny else 8192, max_running=4)
    lengths = (32, 100) if context.tiny else (2048, 4096, 8192, 16384, 32768)
    prompt_s(context, engine, lengths[0], 10_000)  # kernels are compiled and chosen at first use
    for length in lengths:
        seconds = min(prompt_s(context, engine, length, repeat) for repeat in range(2))
        operations = flops(engine, length)
        share = context.share_of("gemm_gflop_s", operations / seconds / 1e9)
        meets = None if share is None or not context.is_cuda else share >= PREFILL_SHARE
        context.add(
            prompt=length,
            ms=1e3 * seconds,
            tokens_per_s=length / seconds,
            tflop_s=operations / seconds / 1e12,
            share_of_gemm_peak=share,
            meets=meets,
        )
    engine.close()


def flops(engine: Engine, length: int) -> float:
    """Of the layers' products and of causal attention; the one row of logits is not counted."""
    spec = engine.model.spec
    attention = 2 * length * length * spec.num_heads * spec.head_dim * spec.num_layers  # half of QK and half of PV
    return 2.0 * linear_parameters(spec) * length + attention


def prompt_s(context: Context, engine: Engine, length: int, salt: int) -> float:
    """Seconds from the first step to the first token."""
    index = 100_000 + 10 * length + salt
    engine.add(request(index, random_prompt(index, length, engine.model.spec.vocab_size), 1))
    context.synchronize()
    begin_s, num_outputs = time.perf_counter(), 0
    while engine.scheduler.has_work:
        num_outputs += len(engine.step().outputs)
    if num_outputs != 1:
        raise RuntimeError(f"a prompt of {length} tokens brought {num_outputs} outputs")
    return time.perf_counter() - begin_s
