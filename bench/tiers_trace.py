"""What each further tier saves: a multi-turn trace through device, host, disk and remote store, one to four of them.

    python -m bench.tiers_trace --trace conversation_trace.jsonl --json tiers.json
    python -m bench.tiers_trace --requests 12000 --sizes 0.5,2,8,32   # a trace of our own

Pure bookkeeping with the product's index and policies. A block is written through to every tier below when it is full, to disk
and remote where `wants` lets it (with --admit-after 2: at its second offer, so that prompts that come once cost no
write). A prompt's longest prefix counts whose every block is in some tier; what is found below comes up to the device and
into the host tier. Saved: prompt tokens that need no prefill.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.cache_replay import BLOCK_TOKENS, Prompt, insert, load_prompts
from kvrelay.kvcache.eviction.registry import make_policy, policy_names
from kvrelay.kvcache.eviction.sketch import FrequencySketch
from kvrelay.kvcache.index.tier_index import TierIndex
from kvrelay.types import BlockHash

NAMES = ("device", "host", "disk", "remote")
FILTERED = ("disk", "remote")


@dataclass(slots=True)
class Tiers:
    """Tiers from the fastest down, and what they did. Counts are blocks."""

    indexes: list[TierIndex]
    found: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)

    def serve(self, prompt: Prompt) -> int:
        """One request; how many of its blocks were found."""
        now_s, device = prompt.arrival_s, self.indexes[0]
        hashes = prompt.hashes[: device.num_slots]
        count = 0
        for digest in hashes:
            tier = next((number for number, index in enumerate(self.indexes) if digest in index), None)
            if tier is None:
                break
            self.found[tier] += 1
            count += 1
        for index in self.indexes:
            index.use(hashes[:count], now_s)
        on_device = hashes[: len(device.match(hashes))]
        slots = device.hold(on_device)
        insert(device, hashes, len(on_device), now_s)
        device.unhold(slots)
        for number in range(1, len(self.indexes)):
            self._write(number, hashes, now_s)
        return count

    def _write(self, number: int, hashes: Sequence[BlockHash], now_s: float) -> None:
        index = self.indexes[number]
        for position, digest in enumerate(hashes):
            if digest in index or not index.wants(digest):
                continue
            slots = index.reserve(1, now_s)
            if slots is None:
                return
            parent = hashes[position - 1] if position else None
            index.put(digest, slots[0], now_s, parent=parent, end_tokens=(position + 1) * BLOCK_TOKENS)
            self.written[number] += 1


def build(sizes: Sequence[float], policy: str, admit_after: int) -> Tiers:
    """Tiers of so many million tokens each."""
    indexes = []
    for name, size in zip(NAMES, sizes, strict=False):
        num_slots = max(1, int(size * 1e6) // BLOCK_TOKENS)
        admission = FrequencySketch(num_slots) if name in FILTERED and admit_after > 1 else None
        chosen = make_policy(policy, num_slots)
        indexes.append(TierIndex(num_slots, chosen, admission=admission, admit_after=admit_after))
    return Tiers(indexes, [0] * len(indexes), [0] * len(indexes))


def run(prompts: Sequence[Prompt], sizes: Sequence[float], policy: str, admit_after: int) -> dict[str, Any]:
    tiers = build(sizes, policy, admit_after)
    saved = sum(tiers.serve(prompt) for prompt in prompts) * BLOCK_TOKENS
    asked = sum(prompt.num_tokens for prompt in prompts)
    for index in tiers.indexes:
        index.check()
    return {
        "policy": policy,
        "admit_after": admit_after,
        "tiers": {name: f"{size:g}" for name, size in zip(NAMES, sizes, strict=False)},
        "ratio": saved / asked,
        "saved_tokens": saved,
        "prompt_tokens": asked,
        "found_tokens": [count * BLOCK_TOKENS for count in tiers.found],
        "written_tokens": [count * BLOCK_TOKENS for count in tiers.written],
    }


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    print("| tiers (Mtok) | policy | written at offer | tokens found | prefill saved, Mtok | of it from device / host / disk / remote |"
          " written to host / disk / remote, Mtok |\n|---|---|---|---|---|---|---|")  # fmt: skip
    for row in rows:
        sizes = " + ".join(f"{name} {size}" for name, size in row["tiers"].items())
        found = " / ".join(f"{tokens / 1e6:.1f}" for tokens in row["found_tokens"])
        written = " / ".join(f"{tokens / 1e6:.0f}" for tokens in row["written_tokens"][1:]) or "-"
        print(f"| {sizes} | {row['policy']} | {row['admit_after']} | {row['ratio']:.1%} | {row['saved_tokens'] / 1e6:.1f} "
              f"of {row['prompt_tokens'] / 1e6:.1f} | {found} | {written} |")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="a Mooncake .jsonl; default: a generated trace")
    parser.add_argument("--requests", type=int, default=1_000_000, help="most requests; of a generated trace: how many")
    parser.add_argument("--sizes", default="0.5,2,8,32", help="million tokens of device, host, disk and remote store")
    parser.add_argument("--policies", default="lru,survival", help=f"with commas, of {', '.join(policy_names())}")
    parser.add_argument("--admit-after", default="1,2", help="offers after which disk and remote take a block")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    sizes = [float(text) for text in asked.sizes.split(",")]
    num_requests = asked.requests if asked.trace or asked.requests < 1_000_000 else 12_000
    prompts = load_prompts(asked.trace, num_requests=num_requests, seed=asked.seed)
    rows = []
    for policy in asked.policies.split(","):
        for count in range(1, len(sizes) + 1):
            for admit_after in map(int, asked.admit_after.split(",") if count > 2 else ["1"]):
                rows.append(run(prompts, sizes[:count], policy, admit_after))
    print_table(rows)
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
