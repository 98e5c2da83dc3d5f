"""One role's worker count: up at once, down late, and a bound on how often it turns. Pure: the caller passes the time.

Rules. (1) Up: when more workers are needed than there are, to the number that was needed throughout the last `rise_s`:
where a start takes minutes, a spike of seconds is over before it could be answered. (2) Down: only when fewer would
have sufficed for `hold_s` without a gap, with the caller's margin on the load (`low`); never within `hold_s` after the
last up, nor within GAP of it after the last down; to the maximum needed in that time, and by a share of the count at
most. (3) A down that is reversed (an up within `hold_s` after it) doubles the hold, up to MOST_HOLDS times; a quiet `4
x hold` halves it again. The multiple is small, because an idle worker that is kept much longer than a start takes costs
more than the start.

Bound. A turn is a change whose direction differs from that of the change before. Between two turns from up to down lies
an up, and by (2) the second of them is at least `hold_s` after that up: turns from up to down are at least `hold_s`
apart, so a span of T seconds has at most floor(T / hold_s) + 1 of them. Turns from down to up alternate with them: at
most one more. So whatever the needs are, a span of T seconds has at most 2 floor(T / hold_s) + 3 turns.

Constant load. Let the need be u, with the margin d >= u, forever. Above d, rule 2 brings the count to d, never lower;
below u, rule 1 brings it to u; from u to d nothing changes. So after the last of a run of downs, no count changes any
more.
"""

import math
from dataclasses import dataclass, field, replace

MOST_HOLDS = 2.0
MOST_DOWN = 0.5  # of the count, per change
GAP = 0.25  # of a hold: a longer gap between needs restarts it; also the time between two downs


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

    def step(self, need: int, low: int, now_s: float, *, most: int) -> int:
        """The count from now on.

        Args:
            need: workers that the load needs. low: workers that it needs with the margin; below it the count never
            falls. At least `need`, else taken as it. most: the count's upper limit now; where it is below the count,
            nothing is forced down, but nothing goes up.
        """
        low, now_s = max(low, need), max(now_s, self.now_s)
        self._note(need, low, now_s)
        if need > self.count:
            if now_s - self.since_s >= self.rise_s:
                self._up(min(self.needs[0][1], most), now_s)
        elif low < self.count and self._may_fall(now_s):
            self._down(now_s)
        elif self.hold_s > self.base_s and now_s - self.changed_s >= 4 * self.hold_s:
            self.hold_s, self.changed_s = max(self.base_s, self.hold_s / 2), now_s
        return self.count

    def resumed(self, learned: "Damper") -> "Damper":
        """With this one's count and durations, and what the other has learned."""
        hold_s = min(max(learned.hold_s, self.base_s), MOST_HOLDS * self.base_s)
        return replace(learned, count=self.count, base_s=self.base_s, rise_s=self.rise_s, hold_s=hold_s)

    def _may_fall(self, now_s: float) -> bool:
        is_held = now_s - max(self.up_s, self.since_s) < self.hold_s
        return not is_held and now_s - self.changed_s >= GAP * self.hold_s

    def _note(self, need: int, low: int, now_s: float) -> None:
        if now_s - self.now_s > GAP * self.hold_s:
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
