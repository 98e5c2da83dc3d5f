"""The block pool and its prefix index beside vLLM's and SGLang's: microseconds per request.

    python -m bench.kvcache.pool [--vllm "COMMAND"] [--sglang "COMMAND"] [--lengths 128 1024 8192 14000 100000]
    [--rounds 3] [--requests 40] [--json out.json]

COMMAND starts a Python that can import that peer, for instance "env PYTHONPATH=/unpacked/wheel:/site-packages python3":
the unpacked wheel is enough where torch, pydantic and transformers are there too (standins.py stands in for the rest).
Without it the peer is left out. Every contender runs the same prompts in a process of its own; the contenders take
turns, length by length and round by round, and each keeps its best round's medians. What is timed is explained in
pool_side.py.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from bench.contenders import Contender
from bench.figures import show

SIDE = "bench.kvcache.pool_side"
STEPS = ("hash", "match", "allocate", "append", "free")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="COMMAND")
    parser.add_argument("--sglang", metavar="COMMAND")
    parser.add_argument("--lengths", type=int, nargs="*", default=[128, 1024, 8192, 14_000, 100_000])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    show(f"one request: the best of {arguments.rounds} rounds' medians", compare(arguments), arguments.json)


if __name__ == "__main__":
    main()
