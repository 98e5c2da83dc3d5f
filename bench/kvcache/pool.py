"""The block pool, its prefix index and its events beside vLLM's and SGLang's: microseconds per request.

    python -m bench.kvcache.pool [--vllm "COMMAND"] [--sglang "COMMAND"] [--lengths 1024 8192 100000] [--cached 0 50]
    [--rounds 5] [--requests 40] [--json out.json]

COMMAND starts a Python that can import that peer, for instance "env PYTHONPATH=/unpacked/wheel:/site-packages python3":
the unpacked wheel is enough where torch, pydantic, transformers and (vLLM) cachetools are there too (standins.py stands
in for the rest). Without it the peer is left out. Every contender runs the same requests in a process of its own; the
contenders take turns, prompt by prompt and round by round. A step's figure is the median over the rounds of each
round's median request. What is timed is explained in pool_side.py.
"""

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

from bench.contenders import Contender
from bench.figures import show
from bench.kvcache.pool_side import STEPS

SIDE = "bench.kvcache.pool_side"
SGLANG = ("SGLang RadixCache", "SGLang Rust core", "SGLang Rust core, events")
Rounds = list[dict[str, float]]  # seconds of each step


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each prompt and contender: microseconds of each step and of all, beside ours."""
    commands = {"kvrelay": sys.executable, "vLLM": arguments.vllm} | dict.fromkeys(SGLANG, arguments.sglang)
    for name in [name for name, command in commands.items() if not command]:
        print(f"{name}: no interpreter given, left out")
        del commands[name]
    contenders = [Contender(name, command, SIDE) for name, command in commands.items()]
    found: dict[tuple[int, int, str], Rounds] = {}
    for _ in range(arguments.rounds):
        for length in arguments.lengths:
            for cached in arguments.cached:
                for contender in list(contenders):
                    times = contender.query(length, cached, arguments.requests)
                    if times is None:
                        contenders.remove(contender)
                    else:
                        found.setdefault((length, cached, contender.name), []).append(times)
    for contender in contenders:
        contender.close()
    order = sorted(found, key=lambda key: (key[:2], list(commands).index(key[2])))
    return [_row(key, found[key], found[*key[:2], "kvrelay"]) for key in order]


def _row(key: tuple[int, int, str], rounds: Rounds, ours: Rounds) -> dict[str, Any]:
    totals, own = ([1e6 * sum(times.values()) for times in each] for each in (rounds, ours))
    row: dict[str, Any] = dict(zip(("prompt tokens", "cached %", "contender"), key, strict=True))
    row |= {f"{step} µs": round(1e6 * median(times[step] for times in rounds), 1) for step in STEPS}
    row |= {"all µs": round(median(totals), 1), "range": f"{min(totals):.0f} - {max(totals):.0f}"}
    return row | {"times ours": round(median(totals) / median(own), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="COMMAND")
    parser.add_argument("--sglang", metavar="COMMAND")
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 8192, 100_000])
    parser.add_argument("--cached", type=int, nargs="*", default=[0, 50], help="percent of each prompt")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    show(f"one request: medians of {arguments.rounds} rounds", compare(arguments), arguments.json)


if __name__ == "__main__":
    main()
