"""Decode speed of one engine against the memory's limit and Hugging Face generate, in one run.

    python -m bench.engine.decode [--model M] [--concurrency 1 4 16 32] [--threads N] [--quantization int8 int4]
        [--mapped] [--json FILE]

A decode step reads every weight once and the KV of every running sequence; the machine's measured
read bandwidth at the same number of threads turns that into the shortest possible step. Only pure
decode steps are timed (prompts are computed before); Hugging Face's prefill is taken off by
subtracting a one-token generate. Engines and Hugging Face alternate; medians count. With --quantization there is an
engine for each way of holding the weights, beside the unquantised one, and the step's bytes are its own. With --mapped
there is one whose weights are mapped from the file that a host's workers share.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from bench.engine import inprocess
from bench.figures import show
from bench.kernels.limits import measure_limits
from kvrelay.engine.step.engine import Engine


@dataclass(frozen=True, slots=True)
class Decoded:
    """One timed run of `concurrency` sequences. `mean_context` is the tokens of KV that a sequence read per step."""

    concurrency: int
    tokens: int
    seconds: float
    step_s: float  # median
    mean_context: float


def run_engine(engine: Engine, concurrency: int, prompt_tokens: int, output_tokens: int, salt: int) -> Decoded:
    """Compute the prompts, then time the steps that only decode."""
    vocab, block_size = engine.model.spec.vocab_size, engine.config.block_size
    for index in range(concurrency):
        prompt = inprocess.random_prompt(salt * 1000 + index, prompt_tokens, vocab)
        wanted = inprocess.request(salt * 1000 + index, prompt, output_tokens, block_size)
        if (refusal := engine.requests.refusal(wanted)) is not None:
            raise SystemExit(f"the engine refuses: {refusal}")
        engine.add(wanted)
    steps: list[float] = []
    tokens = seen = 0
    while engine.scheduler.has_work:
        start_s = time.perf_counter()
        result = engine.step()
        engine.reports.drain_events()
        seconds = time.perf_counter() - start_s
        seen += len(result.outputs)
        if result.num_decode == concurrency == result.num_tokens:
            steps.append(seconds)
            tokens += len(result.outputs)
    if seen != concurrency * output_tokens or not steps:
        raise SystemExit(f"{seen} of {concurrency * output_tokens} tokens came, {len(steps)} full decode steps")
    context = prompt_tokens + output_tokens - len(steps) / 2
    return Decoded(concurrency, tokens, sum(steps), statistics.median(steps), context)


def run_hugging_face(model: Any, concurrency: int, prompt_tokens: int, output_tokens: int, vocab: int) -> float:
    """Seconds of one decode step: generate(n) less generate(1), over n - 1 steps."""
    prompts = torch.tensor([inprocess.random_prompt(7000 + row, prompt_tokens, vocab) for row in range(concurrency)])

    def generate(count: int) -> None:
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            min_new_tokens=count,
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )

    with torch.inference_mode():
        one_s = inprocess.time_of(lambda: generate(1))
        all_s = inprocess.time_of(lambda: generate(output_tokens))
    return (all_s - one_s) / (output_tokens - 1)


def main() -> None:
    parser = inprocess.parser_for(__doc__ or "")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--hf", type=int, nargs="*", default=[1, 16], help="concurrencies for Hugging Face")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--output", type=int, default=64, help="tokens")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    folder = inprocess.prepare(options.model)
    count = inprocess.count_weights(folder)
    item = 2 if options.dtype == "bfloat16" else 4
    limit = measure_limits(options.threads)
    widest = max(options.concurrency)
    kv_memory = (widest + 1) * (options.prompt + options.output + 32) * count.kv_values_per_token * item
    engines = inprocess.build_engines(options, folder, token_budget=512, kv_memory=kv_memory)
    reference = inprocess.load_hugging_face(folder, options.hf_dtype or options.dtype) if options.hf else None

    for engine in engines.values():
        run_engine(engine, 1, options.prompt, 4, salt=99)
    rows = []
    for concurrency in options.concurrency:
        ours: dict[str, list[Decoded]] = {name: [] for name in engines}
        theirs: list[float] = []
        for repeat in range(options.repeats):
            for name, engine in engines.items():
                ours[name].append(run_engine(engine, concurrency, options.prompt, options.output, salt=repeat))
            if reference is not None and concurrency in options.hf:
                vocab = count.vocab_size
                theirs.append(run_hugging_face(reference, concurrency, options.prompt, options.output, vocab))
        steps_s = {name: statistics.median(run.step_s for run in runs) for name, runs in ours.items()}
        hf_s = statistics.median(theirs) if theirs else None
        for name, engine in engines.items():
            pairs = zip(ours["none"], ours[name], strict=True)
            context, step_s = ours[name][0].mean_context, steps_s[name]
            read = inprocess.step_bytes(engine, count, item) + item * concurrency * context * count.kv_values_per_token
            bound_s = read / (limit.read_gb_s * 1e9)
            rows.append(
                {
                    "concurrency": concurrency,
                    "weights": options.dtype if name == "none" else name,
                    "step ms": 1000 * step_s,
                    "tokens/s": statistics.median(run.tokens / run.seconds for run in ours[name]),
                    "x unquantised": steps_s["none"] / step_s,
                    "x in each round": " ".join(f"{a.step_s / b.step_s:.2f}" for a, b in pairs),
                    "MB read per step": read / 1e6,
                    "limit ms": 1000 * bound_s,
                    "share of limit": bound_s / step_s,
                    "HF step ms": 1000 * hf_s if hf_s else None,
                    "x HF": hf_s / step_s if hf_s else None,
                }
            )
    title = f"decode, {options.model}, {options.dtype}, {options.threads} threads, {limit.read_gb_s:.1f} GB/s read"
    show(title, rows, options.json)


if __name__ == "__main__":
    main()
