"""What one scheduling step costs beside vLLM's v1 scheduler: microseconds per sequence of the batch.

    python -m bench.engine.scheduler [--vllm "COMMAND"] [--sequences 1 64 256 1024] [--mixed 64 256] [--rounds 5]
    [--steps 200]
                              [--json out.json]

COMMAND starts a Python that can import vLLM, as for bench/kvcache/pool.py; without it vLLM is left out. Both run the
same batches, each in a process of its own; they take turns, batch by batch and round by round, and each keeps its best
round. What is timed is explained in scheduler_side.py. `step` is schedule and apply together. "drafting" is kvrelay
with speculation on, where no draft pays.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from bench.contenders import Contender
from bench.figures import show

SIDE = "bench.engine.scheduler_side"


def compare(
    contenders: list[Contender], batches: list[tuple[int, bool]], steps: int, rounds: int
) -> list[dict[str, Any]]:
    """One row for each batch and contender."""
    best: dict[tuple[int, bool, str], dict[str, float]] = {}
    for _ in range(rounds):
        for num_decodes, is_mixed in batches:
            for contender in list(contenders):
                times = contender.query(num_decodes, is_mixed, steps)
                if times is None:
                    contenders.remove(contender)
                    continue
                key = num_decodes, is_mixed, contender.name
                if key not in best or step_s(times) < step_s(best[key]):
                    best[key] = times
    names = [contender.name for contender in contenders]
    return [
        _row(
            num_decodes,
            name,
            best[num_decodes, is_mixed, name],
            best[num_decodes, is_mixed, "kvrelay"],
            is_mixed=is_mixed,
        )
        for num_decodes, is_mixed in batches
        for name in names
    ]


def step_s(times: dict[str, float]) -> float:
    return times["schedule"] + times["apply"]


def _row(
    num_decodes: int, name: str, times: dict[str, float], ours: dict[str, float], *, is_mixed: bool
) -> dict[str, Any]:
    def each(seconds: float) -> float:
        return round(1e6 * seconds / times["rows"], 2)

    return {
        "running": f"{num_decodes} + chunks" if is_mixed else str(num_decodes),
        "contender": name,
        "schedule µs": each(times["schedule"]),
        "apply µs": each(times["apply"]),
        "step µs per sequence": each(step_s(times)),
        "whole step µs": round(1e6 * step_s(times)),
        "times ours": round(step_s(times) / times["rows"] / step_s(ours) * ours["rows"], 2),
        "batch tensors µs": each(times["batch"]) if "batch" in times else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="COMMAND")
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 64, 256, 1024])
    parser.add_argument("--mixed", type=int, nargs="*", default=[64, 256], help="decodes beside a prompt in chunks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    contenders = [Contender(name, sys.executable, SIDE) for name in ("kvrelay", "kvrelay, drafting")]
    if arguments.vllm:
        contenders.append(Contender("vLLM v1", arguments.vllm, SIDE))
    else:
        print("vLLM: no interpreter given, left out")
    batches = [(count, False) for count in arguments.sequences] + [(count, True) for count in arguments.mixed]
    rows = compare(contenders, batches, arguments.steps, arguments.rounds)
    for contender in contenders:
        contender.close()
    show(
        f"one scheduling step: CPU time, the best of {arguments.rounds} rounds of {arguments.steps} steps",
        rows,
        arguments.json,
    )


if __name__ == "__main__":
    main()
