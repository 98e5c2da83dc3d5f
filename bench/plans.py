"""What planning costs: microseconds per block for 10,000 blocks, from block lists to the list of copies.

    python bench/plans.py [--blocks 10000] [--rounds 15] [--json out.json]

One plan covers every layer. "blocks" are the source's; scattered ones lie anywhere, a run lies side by side in both
pools. 8 KV heads of 128 in bfloat16 (Llama 3 8B's), 16 tokens a block unless a row says otherwise.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout works uninstalled

from figures import show

from kvrelay.kvtransfer.plans.copy_plan import pair
from kvrelay.kvtransfer.plans.shards import shard
from kvrelay.types import KvLayout

MODEL = KvLayout(num_layers=32, num_blocks=1, block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
CASES = {
    "equal layouts": (MODEL, MODEL),
    "16 to 32 tokens": (MODEL, dataclasses.replace(MODEL, block_size=32)),
    "32 to 16 tokens": (dataclasses.replace(MODEL, block_size=32), MODEL),
    "NHD to HND": (MODEL, dataclasses.replace(MODEL, order="HND")),
    "one to two ranks, NHD": (MODEL, shard(MODEL, tensor_parallel=2)),
    "one to two ranks, HND": (
        dataclasses.replace(MODEL, order="HND"),
        shard(dataclasses.replace(MODEL, order="HND"), tensor_parallel=2),
    ),
}


def measure(source: KvLayout, target: KvLayout, num_blocks: int, rounds: int, *, is_run: bool) -> dict[str, Any]:
    """Best seconds of planning `num_blocks` of the source's blocks, atoms and sorting included."""
    num_targets = -(-num_blocks * source.block_size // target.block_size)
    rng = np.random.default_rng(1)
    both = pair(
        dataclasses.replace(source, num_blocks=2 * num_blocks), dataclasses.replace(target, num_blocks=2 * num_targets)
    )
    source_blocks = np.arange(num_blocks) if is_run else rng.permutation(2 * num_blocks)[:num_blocks]
    target_blocks = np.arange(num_targets) if is_run else rng.permutation(2 * num_targets)[:num_targets]
    ids, where = source_blocks.tolist(), target_blocks.tolist()
    num_atoms = both.num_atoms(num_blocks * source.block_size)
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        begins, lands = both.source.atoms(ids, 0, num_atoms), both.target.atoms(where, 0, num_atoms)
        order = np.argsort(begins, kind="stable")
        copies = both.copies(begins[order], lands[order], range(MODEL.num_layers))
        best = min(best, time.perf_counter() - began)
    return {
        "pieces per atom": both.pieces_per_atom,
        "copies per layer": len(copies.num_bytes),
        "us per block": best / num_blocks * 1e6,
        "ns per copy": best / len(copies.num_bytes) * 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [
        {"layouts": name, "blocks": "a run" if is_run else "scattered"}
        | measure(source, target, args.blocks, args.rounds, is_run=is_run)
        for name, (source, target) in CASES.items()
        for is_run in (False, True)
    ]
    show(f"Planning {args.blocks:,} blocks", rows, args.json)


if __name__ == "__main__":
    main()
