"""Prompts of a Llama-8B in bf16 against the measured peak of dense products, chunks of 8k tokens."""

import time

from bench.gpu.engines import build, free_bytes, random_prompt, request
from bench.gpu.models import folder_of, linear_parameters
from bench.gpu.section import Context
from kvrelay.engine.step.engine import Engine

TARGET_SHARE = 0.60


def run(context: Context) -> None:
    folder = folder_of(context, "llama-8b")
    kv_bytes = min(free_bytes(context) // 2, 12 << 30) if context.is_cuda else 32 << 20
    engine = build(context, folder, kv_bytes=kv_bytes, token_budget=64 if context.tiny else 8192, max_running=4)
    lengths = (32, 100) if context.tiny else (2048, 4096, 8192, 16384, 32768)
    prompt_s(context, engine, lengths[0], 10_000)  # whatever is compiled or chosen at first use
    for length in lengths:
        seconds = min(prompt_s(context, engine, length, repeat) for repeat in range(2))
        operations = flops(engine, length)
        share = context.share_of("gemm_gflop_s", operations / seconds / 1e9)
        meets = None if share is None or not context.is_cuda else share >= TARGET_SHARE
        context.add(
            prompt=length, ms=1e3 * seconds, tokens_per_s=length / seconds, tflop_s=operations / seconds / 1e12,
            share_of_gemm_peak=share, meets=meets,
        )  # fmt: skip
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
