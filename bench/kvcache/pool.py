"""The block pool and its prefix index beside vLLM's and SGLang's: microseconds per request; how they grow.

    python -m bench.kvcache.pool [--vllm "COMMAND"] [--sglang "COMMAND"] [--lengths 128 1024 8192 14000 100000]
    [--rounds 3]
                         [--requests 40] [--sizes 10000 100000 1000000 10000000] [--json out.json]

COMMAND starts a Python that can import that peer, for instance "env PYTHONPATH=/unpacked/wheel:/site-packages python3":
the unpacked wheel is enough where torch, pydantic and transformers are there too (standins.py stands in for the rest).
Without it the peer is left out. Every contender runs the same prompts in a process of its own; the contenders take
turns, length by length and round by round, and each keeps its best round's medians. What is timed is explained in
pool_side.py.
"""

import argparse
import gc
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.contenders import Contender
from bench.figures import show
from kvrelay.hashing import HashChain, root_hash
from kvrelay.kvcache.pool.block_pool import BlockPool

SIDE = "bench.kvcache.pool_side"
STEPS = ("hash", "match", "allocate", "append", "free")
BLOCK = 16
PROMPT_BLOCKS = 512  # of the prompts that fill a pool


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each length and contender: microseconds of each step, of all, of all without hashing."""
    commands = {"kvrelay": sys.executable}
    for name, command in (
        ("vLLM", arguments.vllm),
        ("SGLang RadixCache", arguments.sglang),
        ("SGLang Rust core", arguments.sglang),
    ):
        if command:
            commands[name] = command
        else:
            print(f"{name}: no interpreter given, left out")
    contenders = [Contender(name, command, SIDE) for name, command in commands.items()]
    best: dict[tuple[int, str], dict[str, float]] = {}
    for _ in range(arguments.rounds):
        for length in arguments.lengths:
            for contender in list(contenders):
                times = contender.query(length, arguments.requests)
                if times is None:
                    contenders.remove(contender)
                    continue
                known = best.get((length, contender.name))
                if known is None or sum(times.values()) < sum(known.values()):
                    best[length, contender.name] = times
    for contender in contenders:
        contender.close()
    return [
        _row(length, name, best[length, name], best[length, "kvrelay"]) for length, name in sorted(best, key=_order)
    ]


def _order(key: tuple[int, str]) -> tuple[int, bool, str]:
    return key[0], key[1] != "kvrelay", key[1]


def _row(length: int, name: str, times: dict[str, float], ours: dict[str, float]) -> dict[str, Any]:
    def total(steps: dict[str, float], *, with_hash: bool) -> float:
        return 1e6 * sum(value for step, value in steps.items() if with_hash or step != "hash")

    row: dict[str, Any] = {"prompt tokens": length, "contender": name}
    row |= {f"{step} µs": round(1e6 * times[step], 1) if step in times else None for step in STEPS}
    row["all µs"] = round(total(times, with_hash=True), 1)
    row["without hash µs"] = round(total(times, with_hash=False), 1)
    with_hash = "hash" in times
    row["times ours"] = round(total(times, with_hash=True) / total(ours, with_hash=with_hash), 2)
    return row


def resident_bytes() -> int:
    """Of this process's own memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def grow(num_blocks: int, requests: int) -> dict[str, Any]:
    """A pool whose every block is cached; then prompts that share half of one of them and evict as much as they add."""
    gc.collect()
    before = resident_bytes()
    pool = BlockPool(num_blocks, block_size=BLOCK)
    rng = np.random.default_rng(1)
    shared: list[bytes] = []
    for index in range(num_blocks // PROMPT_BLOCKS):
        packed = rng.integers(0, 150_000, PROMPT_BLOCKS * BLOCK, dtype=np.int32).tobytes()
        _request(pool, packed)
        if index % max(1, num_blocks // PROMPT_BLOCKS // 16) == 0:
            shared.append(packed)
    gc.collect()
    per_block = (resident_bytes() - before) / num_blocks
    times: list[tuple[float, float]] = []
    for index in range(requests):
        half = shared[index % len(shared)][: PROMPT_BLOCKS * BLOCK * 2]
        times.append(
            _request(pool, half + rng.integers(0, 150_000, PROMPT_BLOCKS * BLOCK // 2, dtype=np.int32).tobytes())
        )
    pool.check()
    tokens = PROMPT_BLOCKS * BLOCK
    hashing, rest = (1e9 * sorted(column)[len(times) // 2] / tokens for column in zip(*times, strict=True))
    return {
        "cached blocks": num_blocks,
        "ns per token, hashing": round(hashing, 2),
        "ns per token, the rest": round(rest, 2),
        "bytes per block": round(per_block, 1),
    }


def _request(pool: BlockPool, packed: bytes) -> tuple[float, float]:
    """Seconds of hashing, and of all the rest."""
    began = time.perf_counter()
    chain = HashChain(root_hash())
    chain.extend(packed, BLOCK)
    hashed = time.perf_counter()
    match = pool.match(chain)
    pool.acquire(match.blocks)
    fresh = pool.allocate(len(chain) - len(match))
    assert fresh is not None
    pool.use(match)
    blocks = match.blocks + fresh
    pool.insert(chain, blocks, len(match), len(chain), packed[len(match) * 4 * BLOCK :])
    pool.release(blocks)
    return hashed - began, time.perf_counter() - hashed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="COMMAND")
    parser.add_argument("--sglang", metavar="COMMAND")
    parser.add_argument("--lengths", type=int, nargs="*", default=[128, 1024, 8192, 14_000, 100_000])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="*", default=[10_000, 100_000, 1_000_000, 10_000_000])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sizes = [grow(num_blocks, 200) for num_blocks in arguments.sizes]
    rows = compare(arguments) if arguments.lengths else []
    if rows:
        show(f"one request: the best of {arguments.rounds} rounds' medians", rows, arguments.json)
    if sizes:
        where = arguments.json and arguments.json.with_stem(arguments.json.stem + "-sizes")
        show(f"prompts of {PROMPT_BLOCKS * BLOCK} tokens in a full pool", sizes, where)


if __name__ == "__main__":
    main()
