"""When requests arrive.

Poisson, Gamma and Markov-modulated Poisson processes, in seconds, without end. Pure, seeded.
"""

import random
from collections.abc import Iterator

from kvrelay.errors import ConfigError


def poisson_arrivals(rate_per_s: float, *, seed: int) -> Iterator[float]:
    """Exponential gaps with mean 1 / rate."""
    _check(rate_per_s)
    draw = random.Random(f"arrivals:{seed}")
    now_s = 0.0
    while True:
        now_s += draw.expovariate(rate_per_s)
        yield now_s


def gamma_arrivals(rate_per_s: float, *, variation: float, seed: int) -> Iterator[float]:
    """Independent gaps with mean 1 / rate.

    Their standard deviation is `variation` times that. 1: Poisson; more: bursts.
    """
    _check(rate_per_s)
    if variation <= 0:
        raise ConfigError("the variation of gaps must be positive")
    shape = variation**-2
    draw = random.Random(f"gamma:{seed}")
    now_s = 0.0
    while True:
        now_s += draw.gammavariate(shape, 1 / (rate_per_s * shape))
        yield now_s


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
