"""Hugging Face's generate and its continuous batching on the same device and weights: the decode section's
neighbours.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu.engines import random_prompt
from bench.gpu.models import folder_of
from bench.gpu.section import Context

NUM_OUTPUT = 32


def run(context: Context) -> None:
    from transformers import AutoModelForCausalLM

    folder = folder_of(context, "llama-8b")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(context.device).eval()
    length = 32 if context.tiny else 1024
    for batch in (1, 3) if context.tiny else (1, 16, 64):
        prompts = [random_prompt(row, length, model.config.vocab_size) for row in range(batch)]
        row(context, "generate", batch, length, lambda count, prompts=prompts: generate(context, model, prompts, count))
    if not context.is_cuda:
        context.add(way="Hugging Face continuous batching", left_out="it does not come to an end on a CPU")
        return
    prompts = [random_prompt(row, length, model.config.vocab_size) for row in range(64)]
    row(
        context, "continuous batching", len(prompts), length,
        lambda count: continuous(context, model, prompts, count),
    )  # fmt: skip


def row(context: Context, way: str, batch: int, length: int, work: Callable[[int], int]) -> None:
    """One decode step is generate(n) less generate(1), over n - 1; what does not run here is printed, not counted."""
    try:
        work(1)
        one_s, all_s = seconds(context, work, 1), seconds(context, work, NUM_OUTPUT)
    except Exception as error:  # a peer may raise anything
        context.add(
            way=f"Hugging Face {way}", batch=batch, context=length, left_out=f"{type(error).__name__}: {error}"[:200]
        )
        return
    step_s = (all_s - one_s) / (NUM_OUTPUT - 1)
    context.add(
        way=f"Hugging Face {way}", batch=batch, context=length, step_ms=1e3 * step_s, tokens_per_s=batch / step_s,
        whole_tokens_per_s=batch * NUM_OUTPUT / all_s, prefill_ms=1e3 * one_s,
    )  # fmt: skip


def seconds(context: Context, work: Callable[[int], int], count: int) -> float:
    context.synchronize()
    began = time.perf_counter()
    made = work(count)
    context.synchronize()
    took = time.perf_counter() - began
    if made < count:
        raise RuntimeError(f"{made} tokens instead of {count}")
    return took


def generate(context: Context, model: Any, prompts: list[list[int]], count: int) -> int:
    ids = torch.tensor(prompts, device=context.device)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=count,
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    return int(out.shape[1] - ids.shape[1])


def continuous(context: Context, model: Any, prompts: list[list[int]], count: int) -> int:
    from transformers import GenerationConfig

    wanted = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
    answers = model.generate_batch(inputs=prompts, generation_config=wanted, progress_bar=False)
    return min(len(answer.generated_tokens) for answer in answers.values())
