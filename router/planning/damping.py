"""One role's worker count: up at once, down late, and a bound on how often it turns. Pure: the caller passes the time.

Rules and the proof of the bound: docs/design/planner.md.
"""

import math
from dataclasses import dataclass, field, replace

MOST_HOLDS = 2.0
MOST_DOWN = 0.5  # of the count, per change
GAP = 0.25  # of a hold: a longer gap between needs restarts it; also the time between two downs
LEAST_GAP_S = 30.0  # such a gap is at least so long: needs come every some ten seconds, however short the hold is


@dataclass(slots=True)
class Damper:
    """Holds one count, which changes only in `step`: plain data. Times are of the caller's clock; infinite: never."""

    count: int = field(compare=False)
    base_s: float = field(compare=False)  # of the hold
    rise_s: float = field(default=0.0, compare=False)
    hold_s: float = 0.0  # now; 0: base_s
    changed_s: float = -math.inf
    up_s: float = -math.inf
    down_s: float | None = None  # of the last down; None after an up
    since_s: float = -math.inf  # start of the uninterrupted run of needs
    now_s: float = -math.inf  # of the last need
    lows: list[tuple[float, int]] = field(default_factory=list)  # (time, low), falling: a maximum over a window
    needs: list[tuple[float, int]] = field(default_factory=list)  # (time, need), rising: a minimum over a window

    def __post_init__(self) -> None:
        self.hold_s = self.hold_s or self.base_s

    def step(self, need: int, low: int, now_s: float, *, most: int, may_fall: bool = True) -> int:
        """The count from now on.

        Args:
            need: workers that the load needs. low: workers that it needs with the margin; below it the count never
            falls. At least `need`, else taken as it. most: the count's upper limit now; where it is below the count,
            nothing is forced down, but nothing goes up. may_fall: False where the other role may take what is spared.
        """
        low, now_s = max(low, need), max(now_s, self.now_s)
        self._note(need, low, now_s)
        if need > self.count:
            if now_s - self.since_s >= self.rise_s:
                self._up(min(self.needs[0][1], most), now_s)
        elif low < self.count and may_fall and self._may_fall(now_s):
            self._down(now_s)
        elif self.hold_s > self.base_s and now_s - self.changed_s >= 4 * self.hold_s:
            self.hold_s, self.changed_s = max(self.base_s, self.hold_s / 2), now_s
        return self.count

    def spare(self, low: int, now_s: float, for_s: float) -> int:
        """How many it could give to the other role, if fewer must have been enough for the last `for_s`. None within
        the hold after an up, by which the bound on turns holds as for a down.
        """
        if now_s - self.up_s < self.hold_s:
            return 0
        recent = next((needed for at_s, needed in self.lows if at_s >= now_s - for_s), low)
        return max(0, self.count - max(recent, low))

    def give(self, num: int, now_s: float) -> None:
        """Workers that take the other role."""
        self.count, self.changed_s, self.down_s = self.count - num, now_s, now_s

    def resumed(self, learned: "Damper") -> "Damper":
        """With this one's count and durations, and what the other has learned."""
        hold_s = min(max(learned.hold_s, self.base_s), MOST_HOLDS * self.base_s)
        return replace(learned, count=self.count, base_s=self.base_s, rise_s=self.rise_s, hold_s=hold_s)

    def _may_fall(self, now_s: float) -> bool:
        is_held = now_s - max(self.up_s, self.since_s) < self.hold_s
        return not is_held and now_s - self.changed_s >= GAP * self.hold_s

    def _note(self, need: int, low: int, now_s: float) -> None:
        if now_s - self.now_s > max(GAP * self.hold_s, LEAST_GAP_S):
            self.since_s = now_s
        self.now_s = now_s
        while self.lows and self.lows[-1][1] <= low:
            self.lows.pop()
        self.lows.append((now_s, low))
        while self.lows[0][0] < now_s - self.hold_s:
            self.lows.pop(0)
        while self.needs and self.needs[-1][1] >= need:
            self.needs.pop()
        self.needs.append((now_s, need))
        while self.needs[0][0] < now_s - self.rise_s:
            self.needs.pop(0)

    def _up(self, count: int, now_s: float) -> None:
        if count <= self.count:
            return
        if self.down_s is not None and now_s - self.down_s < self.hold_s:
            self.hold_s = min(2 * self.hold_s, MOST_HOLDS * self.base_s)
        self.count, self.changed_s, self.up_s, self.down_s = count, now_s, now_s, None

    def _down(self, now_s: float) -> None:
        needed = self.lows[0][1]  # the maximum of the last hold_s
        if needed >= self.count:
            return
        least = self.count - max(1, int(self.count * MOST_DOWN))
        self.count, self.changed_s, self.down_s = max(needed, least), now_s, now_s
