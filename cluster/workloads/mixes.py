"""Single requests of several kinds, each with one of its kind's shared prefixes. Pure, seeded."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice

from kvrelay.cluster.workloads.prefixes import GrowingPrompt
from kvrelay.cluster.workloads.trace import MOONCAKE_BLOCK_TOKENS, TraceEntry


@dataclass(frozen=True, slots=True)
class Kind:
    """Lengths are log-normal.

    Median and sigma of the logarithm. The k-th prefix is asked for 1/k as often as the first.
    """

    name: str
    weight: float
    input_tokens: tuple[float, float]  # behind the prefix
    output_tokens: tuple[float, float]
    prefix_tokens: int
    num_prefixes: int


MIX = (
    Kind("chat", 0.50, (250.0, 1.2), (250.0, 0.8), 1024, 10),
    Kind("documents", 0.20, (200.0, 0.8), (300.0, 0.7), 8192, 400),
    Kind("code", 0.25, (1200.0, 0.9), (30.0, 0.7), 4096, 100),
    Kind("batch", 0.05, (4000.0, 0.5), (1200.0, 0.4), 512, 1),
)
MAX_INPUT_TOKENS = 120_000


def mixed_entries(
    arrivals: Iterator[float], num_requests: int, *, seed: int, kinds: Sequence[Kind] = MIX
) -> list[TraceEntry]:
    """One request at each of the first arrivals. Its tenant is its kind's name."""
    draw, fresh = random.Random(f"mix:{seed}"), count()
    prefixes: dict[tuple[str, int], tuple[int, ...]] = {}
    weights = list(accumulate(kind.weight for kind in kinds))
    ranks = {kind.name: list(accumulate(1 / rank for rank in range(1, kind.num_prefixes + 1))) for kind in kinds}
    entries: list[TraceEntry] = []
    for arrival_s in islice(arrivals, num_requests):
        kind = draw.choices(kinds, cum_weights=weights)[0]
        rank = draw.choices(range(kind.num_prefixes), cum_weights=ranks[kind.name])[0]
        num_shared = kind.prefix_tokens // MOONCAKE_BLOCK_TOKENS
        if (kind.name, rank) not in prefixes:
            prefixes[kind.name, rank] = tuple(islice(fresh, num_shared))
        num_input = min(kind.prefix_tokens + _length(draw, kind.input_tokens), MAX_INPUT_TOKENS)
        ids = GrowingPrompt(fresh, prefixes[kind.name, rank]).ids(num_input)
        entries.append(TraceEntry(arrival_s, num_input, _length(draw, kind.output_tokens), ids, tenant=kind.name))
    return entries


def _length(draw: random.Random, shape: tuple[float, float]) -> int:
    return max(1, round(draw.lognormvariate(math.log(shape[0]), shape[1])))
