"""How much of a sudden excess of load is left later. Pure."""

from collections import deque
from dataclasses import dataclass

STAY_HALF_LIFE_S = 4 * 3600.0  # of the memory of past excesses
STAY_SIGMAS = 2.0  # deviations above the usual level from which a level is an excess
STAY_MOST = 2.0  # times the usual level: a larger excess counts as so much
STAY_BELIEF = 300.0  # prior: an excess of the usual level's size that stayed for so many seconds


@dataclass(frozen=True, slots=True)
class ExcessState:
    """The usual level, recent (time, usual level, excess), and regression sums over finished excesses."""

    usual: float | None
    recent: tuple[tuple[float, float, float], ...]
    then: float
    later: float


class ExcessMemory:
    """The share of a sudden excess that is left a horizon later, learned from past ones (the slope of a regression
    through 0).

    Requests that arrive together are gone before a worker started for them serves; a step of the load stays.
    """

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._usual: float | None = None  # the slowly averaged level
        self._recent: deque[tuple[float, float, float]] = deque()  # (time, usual level, excess), of the last horizon
        self._then = self._later = 0.0  # regression sums, relative to the usual level, in seconds

    @property
    def share(self) -> float:
        """Of an excess, a horizon later."""
        return min(max((self._later + STAY_BELIEF) / (self._then + STAY_BELIEF), 0.0), 1.0)

    def left(self, level: float) -> float:
        """The part of this level that is left a horizon later."""
        if self._usual is None or level <= self._usual:
            return level
        return self._usual + self.share * (level - self._usual)

    def observe(self, level: float, deviation: float, now_s: float, seconds: float) -> None:
        if self._usual is None:
            self._usual = level
        while self._recent and self._recent[0][0] <= now_s - self._horizon_s:
            _, usual, excess = self._recent.popleft()
            most = STAY_MOST * usual
            then = min(excess, most) / usual
            later = min(max(level - usual, 0.0), excess, most) / usual
            self._then += then * then * seconds
            self._later += then * later * seconds
        keep = 0.5 ** (seconds / STAY_HALF_LIFE_S)
        self._then, self._later = keep * self._then, keep * self._later
        self._usual += (1.0 - 0.5 ** (seconds / max(self._horizon_s, seconds))) * (level - self._usual)
        excess = level - self._usual
        if self._usual > 0.0 and excess > STAY_SIGMAS * deviation:
            self._recent.append((now_s, self._usual, excess))

    def state(self, now_s: float) -> ExcessState:
        recent = tuple((now_s - at_s, usual, excess) for at_s, usual, excess in self._recent)
        return ExcessState(self._usual, recent, self._then, self._later)

    def resume(self, state: ExcessState, now_s: float) -> None:
        self._usual, self._then, self._later = state.usual, state.then, state.later
        self._recent = deque((now_s - ago_s, usual, excess) for ago_s, usual, excess in state.recent)
