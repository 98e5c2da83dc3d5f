"""A trace through a prefix cache: the product's own index and policies, no bytes. For bench/kvcache/eviction.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrelay.cluster.workloads.choose import parse_mooncake
from kvrelay.cluster.workloads.conversations import SessionSpec, conversation_entries
from kvrelay.cluster.workloads.trace import MOONCAKE_BLOCK_TOKENS, MOONCAKE_BUCKET_S, TraceEntry, spread_buckets
from kvrelay.kvcache.eviction.policies import EntryUsage, Lru
from kvrelay.kvcache.index.tier_index import TierIndex
from kvrelay.types import BlockHash

BLOCK_TOKENS = MOONCAKE_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request. `hashes`: of its full blocks; what does not fill a block is not cached."""

    arrival_s: float
    num_tokens: int
    hashes: tuple[BlockHash, ...]


def prompts_of(entries: Sequence[TraceEntry]) -> list[Prompt]:
    return [
        Prompt(
            entry.arrival_s,
            entry.input_tokens,
            tuple(
                BlockHash(number.to_bytes(8, "little") + _scramble(number))
                for number in entry.hash_ids[: entry.input_tokens // BLOCK_TOKENS]
            ),
        )
        for entry in entries
    ]


def _scramble(number: int) -> bytes:
    """Bytes as even as a real hash's: sketches take their places from them."""
    return (number * 0x9E3779B97F4A7C15 + 0x7F4A7C15 & (1 << 64) - 1).to_bytes(8, "big")


def load_prompts(trace: Path | None, *, num_requests: int, seed: int) -> list[Prompt]:
    """A Mooncake trace, its rounded times spread; without one, a generated trace."""
    if trace is None:
        return prompts_of(conversation_entries(SessionSpec(seed=seed), num_requests))
    with trace.open(encoding="utf-8") as lines:
        entries = list(parse_mooncake(lines))
    return prompts_of(spread_buckets(entries[:num_requests], bucket_s=MOONCAKE_BUCKET_S, seed=seed))


@dataclass(slots=True)
class Hits:
    """Tokens asked for and tokens found, in all and in the second half of the requests."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    late_prompt_tokens: int = 0
    late_hit_tokens: int = 0

    def add(self, prompt: Prompt, num_blocks: int, *, is_late: bool) -> None:
        self.prompt_tokens += prompt.num_tokens
        self.hit_tokens += num_blocks * BLOCK_TOKENS
        if is_late:
            self.late_prompt_tokens += prompt.num_tokens
            self.late_hit_tokens += num_blocks * BLOCK_TOKENS

    @property
    def ratio(self) -> float:
        return self.hit_tokens / max(self.prompt_tokens, 1)

    @property
    def late_ratio(self) -> float:
        return self.late_hit_tokens / max(self.late_prompt_tokens, 1)


def insert(index: TierIndex, hashes: Sequence[BlockHash], start: int, now_s: float) -> None:
    """Room for the blocks from `start` on, all of them at once as a prefill needs it, and their names."""
    rows = index.reserve(len(hashes) - start, now_s)
    if rows is None:
        return
    for position, row in enumerate(rows, start=start):
        parent = hashes[position - 1] if position else None
        index.put(hashes[position], row, now_s, parent=parent, end_tokens=(position + 1) * BLOCK_TOKENS)


def replay(prompts: Sequence[Prompt], index: TierIndex) -> Hits:
    """Each request: match, hold what matched, make room for the rest, name it, let go. Prompts over the cache's size
    are cut.
    """
    hits = Hits()
    for number, prompt in enumerate(prompts):
        hashes = prompt.hashes[: index.num_rows]
        matched = hashes[: len(index.match(hashes))]
        index.use(matched, prompt.arrival_s)
        rows = index.hold(matched)
        insert(index, hashes, len(matched), prompt.arrival_s)
        index.unhold(rows)
        hits.add(prompt, len(matched), is_late=2 * number >= len(prompts))
    return hits


class Belady(Lru):
    """The optimum: what is used again last goes first. It knows the trace; needs arrival times in order.

    Optimal for this replay (every block costs the same room, a request needs room for all of its blocks while it is
    served, hits are counted in blocks): evicting the furthest next use is optimal for intervals over a capacity that
    varies (here, what the request being served leaves), and a block's prefix is never used later than the block itself,
    so that the prefix constraint costs nothing.
    """

    name = "belady"

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._uses: dict[BlockHash, list[float]] = {}
        for prompt in reversed(prompts):
            for digest in prompt.hashes:
                self._uses.setdefault(digest, []).append(prompt.arrival_s)  # the next use is last

    def inserted(self, usage: EntryUsage, now_s: float) -> None:
        self.used(usage, now_s)

    def used(self, usage: EntryUsage, now_s: float) -> None:
        uses = self._uses[usage.digest]
        while uses and uses[-1] <= now_s:
            uses.pop()
        usage.rank = -uses[-1] if uses else float("-inf")

    def score(self, usage: EntryUsage, now_s: float) -> float:
        return usage.rank
