"""How much of the KV transfer is hidden behind the prefill's compute: 1 - exposed / total.

    python -m bench.transfer.hidden [--lengths 512 2048] [--repeats 7] [--model M] [--json FILE]

A prefill and a decode worker, a core each, as processes of this script's own; prompts are random and never repeat,
one at a time. "exposed" is what the prefill worker sees: from its last layer being done (commit) until the
decode worker has everything, verified and committed; checksums, announcements and answers that are then still under
way are in it, nothing is taken off. Two totals:

  work      reading and verifying at the decode worker, as the workers account it
  unhidden  what is exposed by a second pair of workers that may announce only at the end (one chunk, one group of
            layers), so that nothing can be hidden: what the transfer would have cost

Goal: 90 % of either total for prompts of 2,048 tokens. Leave the machine alone meanwhile.
"""

import argparse
import asyncio
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from bench.engine.inprocess import count_weights, prepare, random_prompt, request
from bench.figures import show
from kvrelay.cluster.launch.local import LocalCluster, local_cluster
from kvrelay.config import Settings, settings_from
from kvrelay.serve.telemetry.explain import Explain

DEFAULT_MODEL = "smollm2-135m-instruct"
GOAL, GOAL_TOKENS = 0.9, 2048
OUTPUT_TOKENS = 4  # more than one, or no decode worker is needed at all


class Transfer(NamedTuple):
    """One prompt's KV. `exposed_s` and `work_s` as above; `at_target_s`: exposed, as the decode worker sees it."""

    num_bytes: int
    work_s: float
    exposed_s: float
    at_target_s: float
    compute_s: float


class Prober:
    """Sends prompts, one at a time, and reads what their transfers took."""

    def __init__(self, cluster: LocalCluster, settings: Settings, vocab_size: int) -> None:
        self._dispatcher = cluster.dispatcher
        self._prefill = cluster.prefill[0].member.worker_id
        self._block_size, self._vocab_size = settings.engine.block_size, vocab_size
        self._index = 0

    async def transfer(self, length: int) -> Transfer:
        self._index += 1
        prompt = random_prompt(self._index, length, self._vocab_size)
        before, explain, compute_s = await self._totals(), Explain(0.0), 0.0
        asked = request(self._index, prompt, OUTPUT_TOKENS, self._block_size)
        async for output in self._dispatcher.generate(asked, force="remote", explain=explain):
            if output.timings is not None:
                compute_s = compute_s or output.timings.compute_s
        after = await self._totals()
        if explain.transfer is None or after["transfers"] != before["transfers"] + 1:
            raise SystemExit(f"the prompt of {length} tokens was not transferred exactly once")
        return Transfer(
            num_bytes=after["num_bytes"] - before["num_bytes"],
            work_s=after["seconds"] - before["seconds"],
            exposed_s=after["exposed_s"] - before["exposed_s"],
            at_target_s=explain.transfer.exposed_s,
            compute_s=compute_s,
        )

    async def _totals(self) -> dict[str, Any]:
        """The prefill worker's account of its transfers."""
        totals: dict[str, Any] = json.loads(await self._dispatcher.queries.status(self._prefill))["transfer"]
        return totals


async def measure(
    settings: Settings, folder: Path, lengths: list[int], repeats: int, cores: list[int]
) -> dict[int, list[Transfer]]:
    """Transfers by prompt length, one of each to warm up left out. Lengths take turns."""
    found: dict[int, list[Transfer]] = {length: [] for length in lengths}
    pins = [(core,) for core in cores] if len(cores) > 1 else []
    async with local_cluster(settings, folder, num_decode=1, num_inside=0, cores=pins) as cluster:
        prober = Prober(cluster, settings, count_weights(folder).vocab_size)
        for repeat in range(repeats + 1):
            for length in lengths:
                transfer = await prober.transfer(length)
                if repeat:
                    found[length].append(transfer)
    return found


def summary(length: int, seen: list[Transfer], plain: list[Transfer], transport: str) -> dict[str, Any]:
    """One row: totals over all prompts, and the worst one."""
    exposed, work = sum(t.exposed_s for t in seen), sum(t.work_s for t in seen)
    unhidden = sum(t.exposed_s for t in plain) / len(plain) * len(seen) if plain else None
    return {
        "prompt tokens": length,
        "transport": transport,
        "MB": seen[0].num_bytes / 1e6,
        "prefill ms": 1000 * sum(t.compute_s for t in seen) / len(seen),
        "work ms": 1000 * work / len(seen),
        "exposed ms": 1000 * exposed / len(seen),
        "at the target ms": 1000 * sum(t.at_target_s for t in seen) / len(seen),
        "unhidden ms": None if unhidden is None else 1000 * unhidden / len(seen),
        "hidden of work": 1 - exposed / work,
        "lowest": min(1 - t.exposed_s / t.work_s for t in seen),
        "hidden of unhidden": None if unhidden is None else 1 - exposed / unhidden,
    }


async def run(options: argparse.Namespace) -> None:
    folder = prepare(options.model)
    cores = sorted(os.sched_getaffinity(0))[:2]
    rows = []
    for transport in options.transports:
        given = {"transfer": {"transport": transport}}
        found = await measure(settings_from(given), folder, options.lengths, options.repeats, cores)
        for length, seen in found.items():
            for index, t in enumerate(seen):
                print(
                    f"{transport}, {length} tokens, prompt {index + 1}: {1000 * t.exposed_s:.2f} of "
                    f"{1000 * t.work_s:.2f} ms exposed, {1 - t.exposed_s / t.work_s:.1%} hidden",
                    flush=True,
                )  # fmt: skip
        late = {
            "engine": {"token_budget": max(512, *options.lengths)},
            "transfer": {"transport": transport, "layers_per_announce": 1 << 16},
        }
        plain = (
            await measure(settings_from(late), folder, options.lengths, options.unhidden, cores)
            if options.unhidden
            else {}
        )
        rows += [summary(length, seen, plain.get(length, []), transport) for length, seen in found.items()]
    show(f"KV transfer hidden behind prefill, 1P + 1D, {options.repeats} prompts each", rows, options.json)
    for row in rows:
        if row["prompt tokens"] >= GOAL_TOKENS:
            share = min(row["hidden of work"], row["hidden of unhidden"] or 1.0)
            verdict = "met" if share >= GOAL else "MISSED"
            what = f"{row['transport']}, {row['prompt tokens']} tokens, {GOAL:.0%} hidden"
            print(f"goal: {what}: {verdict} ({share:.1%}, the lower of the two)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--unhidden", type=int, default=3, help="prompts that may hide nothing; 0: leave that out")
    parser.add_argument("--transports", nargs="+", default=["auto"])
    parser.add_argument("--json", type=Path)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
