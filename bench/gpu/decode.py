"""Decode steps of a Llama-8B in bf16: against the memory's limit, the device's busy time, and the time beside it."""

import statistics
import time

from bench.gpu.engines import build, decoding, free_bytes
from bench.gpu.models import folder_of, step_parameters
from bench.gpu.section import Context
from kvrelay.engine.profiling.device_profile import profile_device
from kvrelay.engine.step.engine import Engine

TARGET_SHARE = 0.85  # of the memory's limit
TARGET_OVERHEAD_S = 100e-6  # at batch 64
_WARM_UP, _STEPS, _PROFILED = 4, 16, 6
_ROOM = _WARM_UP + _STEPS + _PROFILED + 8  # tokens that each sequence grows by


def run(context: Context) -> None:
    folder = folder_of(context, "llama-8b")
    engine = build(context, folder, kv_bytes=free_bytes(context) - 2 * (8 << 30) if context.is_cuda else 32 << 20)
    batches, lengths = ((1, 3), (16, 64)) if context.tiny else ((1, 16, 64, 256), (1024, 2048, 4096, 8192))
    for batch in batches:
        for length in lengths:
            measure(context, engine, batch, length)
    engine.close()


def measure(context: Context, engine: Engine, batch: int, length: int) -> None:
    layout = engine.memory.layout
    token_bytes = layout.block_bytes // layout.block_size
    blocks = batch * -(-(length + _ROOM) // layout.block_size)
    if blocks > layout.num_blocks:
        context.add(batch=batch, context=length, left_out=f"{blocks * layout.block_bytes / 1e9:.0f} GB of KV")
        return
    seconds: list[float] = []
    with decoding(engine, batch, length, _ROOM) as step:
        for _ in range(_WARM_UP):
            step()
        for _ in range(_STEPS):
            begin_s = time.perf_counter()
            result = step()
            seconds.append(time.perf_counter() - begin_s)
        full = result.num_decode == result.num_tokens == batch
        device = profile_device(step, _PROFILED) if context.is_cuda else None
    step_s = statistics.median(seconds)
    read = 2 * step_parameters(engine.model.spec) + batch * (length + _ROOM // 2) * token_bytes
    share = context.share_of("read_gb_s", read / step_s / 1e9)
    row: dict[str, object] = {
        "batch": batch, "context": length, "step_ms": 1e3 * step_s, "tokens_per_s": batch / step_s,
        "gb_read": read / 1e9, "share_of_memory_limit": share,
    }  # fmt: skip
    if device is not None:
        overhead_s = step_s - device.busy_s
        row |= {
            "kernels_ms": 1e3 * device.busy_s,
            "beside_kernels_us": 1e6 * overhead_s,
            "host_waits": device.num_waits,
        }
        if share is not None:
            row["meets"] = share >= TARGET_SHARE and (batch != 64 or overhead_s <= TARGET_OVERHEAD_S)
    context.add(**row, ok=full)
