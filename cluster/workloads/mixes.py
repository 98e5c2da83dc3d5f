"""Single requests of several kinds, each with one of its kind's shared prefixes; and when they arrive: Poisson, Gamma
and Markov-modulated Poisson processes, in seconds, without end. Pure, seeded.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice

from kvrelay.cluster.workloads.trace import MOONCAKE_BLOCK_TOKENS, GrowingPrompt, LogNormal, TraceEntry, length
from kvrelay.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Kind:
    """The k-th prefix is asked for 1/k as often as the first."""

    name: str
    weight: float
    input_tokens: LogNormal  # behind the prefix
    output_tokens: LogNormal
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
        num_input = min(kind.prefix_tokens + length(draw, kind.input_tokens), MAX_INPUT_TOKENS)
        ids = GrowingPrompt(fresh, prefixes[kind.name, rank]).ids(num_input)
        entries.append(TraceEntry(arrival_s, num_input, length(draw, kind.output_tokens), ids, tenant=kind.name))
    return entries


def poisson_arrivals(rate_per_s: float, *, seed: int) -> Iterator[float]:
    """Exponential gaps with mean 1 / rate."""
    _check(rate_per_s)
    draw = random.Random(f"arrivals:{seed}")
    yield from accumulate(draw.expovariate(rate_per_s) for _ in count())


def gamma_arrivals(rate_per_s: float, *, variation: float, seed: int) -> Iterator[float]:
    """Independent gaps with mean 1 / rate.

    Their standard deviation is `variation` times that. 1: Poisson; more: bursts.
    """
    _check(rate_per_s)
    if variation <= 0:
        raise ConfigError("the variation of gaps must be positive")
    shape = variation**-2
    draw = random.Random(f"gamma:{seed}")
    yield from accumulate(draw.gammavariate(shape, 1 / (rate_per_s * shape)) for _ in count())


def switching_arrivals(
    rate_per_s: float, *, burst_factor: float = 6.0, calm_s: float = 60.0, burst_s: float = 10.0, seed: int
) -> Iterator[float]:
    """A Markov-modulated Poisson process of two states: in a burst, `burst_factor` times the calm rate.

    calm_s, burst_s: mean durations, exponential. The long-run mean is `rate_per_s`.
    """
    _check(rate_per_s)
    if min(burst_factor, calm_s, burst_s) <= 0:
        raise ConfigError("a burst's factor and both durations must be positive")
    calm_rate = rate_per_s * (calm_s + burst_s) / (calm_s + burst_factor * burst_s)
    draw = random.Random(f"switching:{seed}")
    now_s, is_burst = 0.0, False
    end_s = draw.expovariate(1 / calm_s)
    while True:
        gap_s = draw.expovariate(calm_rate * (burst_factor if is_burst else 1.0))
        if now_s + gap_s < end_s:
            now_s += gap_s
            yield now_s
        else:  # exponential gaps have no memory: what is left of this one is drawn anew in the next state
            now_s, is_burst = end_s, not is_burst
            end_s += draw.expovariate(1 / (burst_s if is_burst else calm_s))


def _check(rate_per_s: float) -> None:
    if rate_per_s <= 0:
        raise ConfigError("an arrival rate must be positive")
