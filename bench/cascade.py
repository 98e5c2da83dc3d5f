"""Decode attention over a shared prefix, read once for all rows against once for each, in one run.

    python bench/cascade.py [--rows 4 16 32 64] [--shared 0 512 2048 8000] [--no-engine] [--json FILE]

Attention: one layer of SmolLM2's shape over random KV, alternating calls with and without sharing; the shortest of each
count. Shared 0 is the control: nothing in common, the schedule is looked for in vain, and must cost nothing. Engine: whole
decode steps of SmolLM2 with every other step sharing, the same sequences, medians; all rows wait in one batch over one
system prompt in the prefix cache. The results are equal bit for bit, which the run checks.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from figures import available_cores, show

import inprocess  # isort: skip
from kvrelay.engine.step.engine import Engine, EngineConfig, load_engine
from kvrelay.kernels.backend import AttentionBatch, AttentionShape
from kvrelay.kernels.cpu.backend import CpuBackend

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16  # SmolLM2's
CACHE_BYTES = 64 << 20  # layers of KV are gone through until so much has been read: more than the processor's caches
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2


def batch_of(rows: int, shared: int, tail: int) -> tuple[AttentionBatch, int]:
    """Decode rows whose first `shared` tokens lie in the same blocks, and the number of blocks in use."""
    common, own = shared // BLOCK_SIZE, -(-tail // BLOCK_SIZE)
    blocks = torch.randperm(common + rows * own, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    tables = torch.cat((blocks[:common].expand(rows, -1), blocks[common:].view(rows, own)), dim=1).contiguous()
    context = common * BLOCK_SIZE + tail
    batch = AttentionBatch(
        query_starts=torch.arange(rows + 1, dtype=torch.int32),
        context_lens=torch.full((rows,), context, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.zeros(rows, dtype=torch.int64),
        positions=torch.full((rows,), context - 1),
        num_decode=rows,
        max_query_len=1,
        max_context_len=context,
    )
    return batch, len(blocks)


def seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def compared(rows: int, shared: int, tail: int, alone_s: float, together_s: float) -> dict[str, Any]:
    """What both tables begin with."""
    sizes = {"rows": rows, "shared": shared, "own": tail}
    return {**sizes, "alone ms": 1e3 * alone_s, "together ms": 1e3 * together_s, "x": alone_s / together_s}


def attention(backend: CpuBackend, rows: int, shared: int, tail: int, repeats: int) -> dict[str, Any]:
    """One layer's attention of `rows` sequences, both ways."""
    native = backend.native
    assert native is not None
    batch, num_blocks = batch_of(rows, shared, tail)
    shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, torch.bfloat16)
    count = max(1, min(30, CACHE_BYTES // (num_blocks * BLOCK_SIZE * TOKEN_BYTES)))
    sizes = (num_blocks, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    layers = [torch.randn(sizes).to(torch.bfloat16) for _ in range(count)]
    q = torch.randn(rows, HEADS, HEAD_DIM).to(torch.bfloat16)
    plans, times = {}, {True: [], False: []}
    for shares in (True, False):
        backend.share_prefixes(enabled=shares)
        plans[shares] = native.plan(batch, shape)
    backend.share_prefixes(enabled=True)
    schedule = plans[True].schedule
    found_s = min(seconds(lambda: native.share(schedule, batch, shape)) for _ in range(30))

    def run(shares: bool) -> list[torch.Tensor]:
        plan = plans[shares]
        return [native.attention(q, layer, plan, scale=0.125, window=None, softcap=None) for layer in layers]

    if any(not torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True)):
        raise SystemExit("sharing changed a result")
    for repeat in range(repeats):
        for shares in (repeat % 2 == 0, repeat % 2 == 1):
            times[shares].append(seconds(lambda shares=shares: run(shares)) / count)
    return {
        **compared(rows, shared, tail, min(times[False]), min(times[True])),
        "tokens spared": plans[True].schedule.saved_tokens,
        "finding out us": 1e6 * found_s,
    }


def run_steps(engine: Engine, rows: int, shared: int, tail: int, output: int) -> dict[str, Any]:
    """Whole decode steps, every other one sharing."""
    vocab, size = engine.model.spec.vocab_size, engine.config.block_size
    salt = 1000 * (rows + 100 * shared)
    begin = inprocess.random_prompt(salt, shared, vocab)

    def add(index: int, tokens: int) -> None:
        prompt = begin + inprocess.random_prompt(salt + index, tail, vocab)
        engine.add(inprocess.request(salt + index, prompt, tokens, size))

    add(1, 1)  # leaves the beginning in the cache
    while engine.scheduler.has_work:
        engine.step()
    num_mixed = 2 + rows * (tail + size) // engine.config.token_budget  # steps until the last of them decodes
    for index in range(rows):
        add(index + 2, output + num_mixed)
    times: dict[bool, list[float]] = {True: [], False: []}
    before, number = engine.backend.spared_kv_tokens, 0
    while engine.scheduler.has_work:
        number += 1
        engine.backend.share_prefixes(enabled=number % 2 == 0)
        start_s = time.perf_counter()
        result = engine.step()
        if result.num_decode == rows == result.num_tokens:
            times[number % 2 == 0].append(time.perf_counter() - start_s)
        engine.drain_events()
    alone_s, together_s = (statistics.median(times[shares][2:]) for shares in (False, True))
    return {
        **compared(rows, shared, tail, alone_s, together_s),
        "steps": len(times[True]) + len(times[False]),
        "tokens spared": engine.backend.spared_kv_tokens - before,
    }


def build(folder: Path, backend: CpuBackend, dtype: str, tokens: int) -> Engine:
    """An engine with a prefix cache that holds so many tokens."""
    count = inprocess.count_weights(folder)
    num_bytes = (tokens + 1024) * count.kv_values_per_token * (2 if dtype == "bfloat16" else 4)
    config = EngineConfig(kv_memory_bytes=num_bytes, token_budget=512, max_running=64)
    return load_engine(folder, backend, inprocess.DTYPES[dtype], config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the engine")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 16, 32, 64])
    parser.add_argument("--shared", type=int, nargs="+", default=[0, 512, 2048, 8000], help="tokens")
    parser.add_argument("--tail", type=int, default=100, help="tokens of each row's own")
    parser.add_argument("--output", type=int, default=24, help="tokens, of the engine's sequences")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--engine", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    backend = CpuBackend(options.threads)
    if backend.native is None:
        raise SystemExit("no compiled kernels here: nothing is shared")
    rows = []
    for shared in options.shared:
        for count in options.rows:
            tail = options.tail if shared else 1000  # the control: as much to read, of nobody else's
            rows.append({"what": "attention"} | attention(backend, count, shared, tail, options.repeats))
            print(rows[-1], flush=True)
    if options.engine:
        folder = inprocess.prepare(options.model)
        widest, longest = max(options.rows), max(options.shared)
        engine = build(
            folder, backend, options.dtype, longest + widest * (1000 + 2 * options.output + 3 * options.tail)
        )
        for shared in options.shared:
            for count in options.rows:
                found = run_steps(engine, count, shared, options.tail if shared else 500, options.output)
                rows.append({"what": "decode step"} | found)
                print(rows[-1], flush=True)
    show(f"shared prefixes, {options.threads} threads, {options.dtype}", rows, options.json)


if __name__ == "__main__":
    main()
