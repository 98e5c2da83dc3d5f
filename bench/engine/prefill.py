"""Prefill speed of one engine against the GEMM peak and Hugging Face's forward, in one run.

    python -m bench.engine.prefill [--model M] [--lengths 512 2048] [--threads N] [--quantization int8 int4] [--json
    FILE]

Work is counted as 2 operations per weight of the linear layers and token, plus causal attention; its
rate over the measured GEMM peak at the same number of threads is the share of the peak (for bf16 the
better of bf16 and fp32: a CPU without bf16 instructions is fastest in fp32).
Time runs from adding the request to its first token. All sides alternate; medians count. With --quantization there is
an engine for each way of holding the weights, beside the unquantised one.
"""

import statistics
from typing import Any

import torch

from bench.engine import inprocess
from bench.figures import show
from bench.kernels.limits import measure_limits
from kvrelay.engine.step.engine import Engine


def run_engine(engine: Engine, index: int, length: int) -> float:
    """Seconds from a prompt's arrival to its first token."""
    prompt = inprocess.random_prompt(index, length, engine.model.spec.vocab_size)
    wanted = inprocess.request(index, prompt, 1, engine.config.block_size)
    if (refusal := engine.requests.refusal(wanted)) is not None:
        raise SystemExit(f"the engine refuses: {refusal}")
    outputs = []

    def run() -> None:
        engine.add(wanted)
        while engine.scheduler.has_work:
            outputs.extend(engine.step().outputs)

    seconds = inprocess.time_of(run)
    if len(outputs) != 1:
        raise SystemExit(f"expected one token, got {len(outputs)}")
    return seconds


def run_hugging_face(model: Any, index: int, length: int, vocab: int) -> float:
    prompt = torch.tensor([inprocess.random_prompt(index, length, vocab)])
    with torch.inference_mode():
        return inprocess.time_of(lambda: model(prompt, use_cache=True, logits_to_keep=1).logits.argmax())


def main() -> None:
    parser = inprocess.parser_for(__doc__ or "")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--token-budget", type=int, default=512, help="tokens in one step")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-hf", action="store_true")
    options = parser.parse_args()

    folder = inprocess.prepare(options.model)
    count = inprocess.count_weights(folder)
    limit = measure_limits(options.threads)
    peak = max(limit.fp32_gemm_gflop_s, limit.bf16_gemm_gflop_s if options.dtype == "bfloat16" else 0.0)
    item = 2 if options.dtype == "bfloat16" else 4
    kv_memory = 2 * (max(options.lengths) + 32) * count.kv_values_per_token * item
    engines = inprocess.build_engines(options, folder, token_budget=options.token_budget, kv_memory=kv_memory)
    reference = None if options.no_hf else inprocess.load_hugging_face(folder, options.hf_dtype or options.dtype)

    rows = []
    for length in options.lengths:
        for engine in engines.values():
            run_engine(engine, 1, length)
        ours: dict[str, list[float]] = {name: [] for name in engines}
        theirs: list[float] = []
        for repeat in range(options.repeats):
            for name, engine in engines.items():
                ours[name].append(run_engine(engine, 10 * length + repeat, length))
            if reference is not None:
                theirs.append(run_hugging_face(reference, 10 * length + repeat, length, count.vocab_size))
        hf_s = statistics.median(theirs) if theirs else None
        for name, times in ours.items():
            seconds = statistics.median(times)
            rate = inprocess.operations(count, length) / seconds / 1e9
            rows.append(
                {
                    "prompt tokens": length,
                    "weights": options.dtype if name == "none" else name,
                    "ms": 1000 * seconds,
                    "tokens/s": length / seconds,
                    "x unquantised": statistics.median(ours["none"]) / seconds,
                    "GFLOP/s": rate,
                    "share of peak": rate / peak,
                    "HF ms": 1000 * hf_s if hf_s else None,
                    "x HF": hf_s / seconds if hf_s else None,
                }
            )
    title = f"prefill, {options.model}, {options.dtype}, {options.threads} threads, GEMM peak {peak:.0f} GFLOP/s "
    title += f"(fp32 {limit.fp32_gemm_gflop_s:.0f}, bf16 {limit.bf16_gemm_gflop_s:.0f})"
    show(title, rows, options.json)


if __name__ == "__main__":
    main()
