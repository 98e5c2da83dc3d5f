"""What requests are like: lengths, cached share, burstiness. Pure."""

from dataclasses import dataclass

from kvrelay.router.planning.types import Interval, Workload

SHAPE_HALF_LIFE_S = 600.0
SWING_SIGMAS = 4.0  # bound of a count's difference to the one before: a larger one is a jump, not burstiness
FEWEST_ENDED = 5  # answers before anything is known of requests
BURST_LIMITS = (0.5, 32.0)


@dataclass(frozen=True, slots=True)
class ShapeState:
    """Fading stats, and the swings of the rate."""

    stats: tuple[float, ...]
    last: float | None
    swings: float
    counts: float
    burstiness: float
    is_known: bool


class RequestShape:
    """Lengths and cached share of requests as fading stats, and their burstiness."""

    def __init__(self) -> None:
        self._stats = [0.0] * 6  # arrivals, tokens, squares, cached, ended, output tokens
        self._last: float | None = None  # rate of the previous interval
        self._swings = self._counts = 0.0
        self.burstiness = 1.0
        self._is_known = False

    def state(self) -> ShapeState:
        return ShapeState(tuple(self._stats), self._last, self._swings, self._counts, self.burstiness, self._is_known)

    def resume(self, state: ShapeState) -> None:
        self._stats, self._last = list(state.stats), state.last
        self._swings, self._counts, self.burstiness = state.swings, state.counts, state.burstiness
        self._is_known = state.is_known

    def observe(self, seen: Interval) -> None:
        keep: float = 0.5 ** (seen.seconds / SHAPE_HALF_LIFE_S)
        new = (seen.arrivals, seen.input_tokens, seen.input_squares, seen.cached_tokens, seen.ended, seen.output_tokens)
        self._stats = [old * keep + value for old, value in zip(self._stats, new, strict=True)]
        self._swing(seen, keep)

    def _swing(self, seen: Interval, keep: float) -> None:
        """Differences of neighbouring intervals: a slow change of the rate is no burst, and a jump counts as one at
        most.
        """
        rate = seen.arrivals / seen.seconds
        if self._last is not None:
            swing = ((rate - self._last) * seen.seconds) ** 2 / 2.0
            most = SWING_SIGMAS**2 * max(seen.arrivals, 1) * self.burstiness / 2.0
            self._swings = self._swings * keep + min(swing, most)
            self._counts = self._counts * keep + seen.arrivals
        self._last = rate
        if self._counts >= 1.0:
            low, high = BURST_LIMITS
            weight = self._counts / (self._counts + 100.0)  # small counts say little
            self.burstiness = min(max(1.0 + weight * (self._swings / self._counts - 1.0), low), high)

    def workload(self, rate: float) -> Workload | None:
        arrivals, tokens, squares, cached, ended, output = self._stats
        self._is_known = self._is_known or ended >= FEWEST_ENDED
        if not self._is_known or arrivals < 1e-9 or tokens <= 0:
            return None
        mean = tokens / arrivals
        hits = cached / max(ended, 1e-9)  # per request: running requests have not reported theirs
        cv2 = max(0.0, squares / arrivals / mean**2 - 1.0) if squares > 0 else 1.0
        return Workload(
            rate=rate,
            input_tokens=max(1.0, mean),
            output_tokens=max(1.0, output / max(ended, 1e-9)),
            cached_share=min(max(hits / mean, 0.0), 0.99),
            input_cv2=min(cv2, 100.0),
            burstiness=self.burstiness,
        )
