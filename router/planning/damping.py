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
most one more. So whatever the needs are, a span of T seconds has at most `most_turns(T)` = 2 floor(T / hold_s) + 3
turns.

Constant load. Let the need be u, with the margin d >= u, forever. Above d, rule 2 brings the count to d, never lower;
below u, rule 1 brings it to u; from u to d nothing changes. So after the last of a run of downs, no count changes any
more.
"""

import math
from collections import deque
from dataclasses import dataclass

MOST_HOLDS = 2.0
MOST_DOWN = 0.5  # of the count, per change
GAP = 0.25  # of a hold: a longer gap between needs restarts it; also the time between two downs


def most_turns(span_s: float, hold_s: float) -> int:
    """The bound: changes of direction that any `span_s` seconds have at most."""
    return 2 * math.floor(span_s / hold_s) + 3


@dataclass(frozen=True, slots=True)
class DamperState:
    """The state of a damper without its count. Times are seconds before the moment it was taken; infinite: never."""

    hold_s: float
    changed_ago_s: float
    up_ago_s: float
    down_ago_s: float | None
    since_ago_s: float
    looked_ago_s: float
    lows: tuple[tuple[float, int], ...]
    needs: tuple[tuple[float, int], ...]


class Damper:
    """Holds one count, which changes only in `step`."""

    def __init__(self, count: int, hold_s: float, rise_s: float = 0.0) -> None:
        self.count, self._base_s, self.hold_s, self._rise_s = count, hold_s, hold_s, rise_s
        self._changed_s = self._up_s = -math.inf
        self._down_s: float | None = None  # of the last down; None after an up
        self._lows: deque[tuple[float, int]] = deque()  # (time, low), falling: a maximum over a window
        self._needs: deque[tuple[float, int]] = deque()  # (time, need), rising: a minimum over a window
        self._since_s = self._now_s = -math.inf  # start of the uninterrupted run of needs, and the last one

    def step(self, need: int, low: int, now_s: float, *, most: int) -> int:
        """The count from now on.

        Args:
            need: workers that the load needs. low: workers that it needs with the margin; below it the count never
            falls. At least `need`, else taken as it. most: the count's upper limit now; where it is below the count,
            nothing is forced down, but nothing goes up.
        """
        low, now_s = max(low, need), max(now_s, self._now_s)
        self._note(need, low, now_s)
        if need > self.count:
            if now_s - self._since_s >= self._rise_s:
                self._up(min(self._needs[0][1], most), now_s)
        elif low < self.count and self._may_fall(now_s):
            self._down(now_s)
        elif self.hold_s > self._base_s and now_s - self._changed_s >= 4 * self.hold_s:
            self.hold_s, self._changed_s = max(self._base_s, self.hold_s / 2), now_s
        return self.count

    def state(self, now_s: float) -> DamperState:
        """The state, for `resume` elsewhere."""
        down_ago_s = None if self._down_s is None else now_s - self._down_s
        lows, needs = (tuple((now_s - at_s, one) for at_s, one in window) for window in (self._lows, self._needs))
        return DamperState(
            self.hold_s,
            now_s - self._changed_s,
            now_s - self._up_s,
            down_ago_s,
            now_s - self._since_s,
            now_s - self._now_s,
            lows,
            needs,
        )

    def resume(self, state: DamperState, now_s: float) -> None:
        """Continue from that state; the count stays."""
        self.hold_s = min(max(state.hold_s, self._base_s), MOST_HOLDS * self._base_s)
        self._changed_s, self._since_s = now_s - state.changed_ago_s, now_s - state.since_ago_s
        self._up_s = now_s - state.up_ago_s
        self._down_s = None if state.down_ago_s is None else now_s - state.down_ago_s
        self._now_s = now_s - state.looked_ago_s
        self._lows = deque((now_s - ago_s, low) for ago_s, low in state.lows)
        self._needs = deque((now_s - ago_s, need) for ago_s, need in state.needs)

    def _may_fall(self, now_s: float) -> bool:
        is_held = now_s - max(self._up_s, self._since_s) < self.hold_s
        return not is_held and now_s - self._changed_s >= GAP * self.hold_s

    def _note(self, need: int, low: int, now_s: float) -> None:
        if now_s - self._now_s > GAP * self.hold_s:
            self._since_s = now_s
        self._now_s = now_s
        while self._lows and self._lows[-1][1] <= low:
            self._lows.pop()
        self._lows.append((now_s, low))
        while self._lows[0][0] < now_s - self.hold_s:
            self._lows.popleft()
        while self._needs and self._needs[-1][1] >= need:
            self._needs.pop()
        self._needs.append((now_s, need))
        while self._needs[0][0] < now_s - self._rise_s:
            self._needs.popleft()

    def _up(self, count: int, now_s: float) -> None:
        if count <= self.count:
            return
        if self._down_s is not None and now_s - self._down_s < self.hold_s:
            self.hold_s = min(2 * self.hold_s, MOST_HOLDS * self._base_s)
        self.count, self._changed_s, self._up_s, self._down_s = count, now_s, now_s, None

    def _down(self, now_s: float) -> None:
        needed = self._lows[0][1]  # the maximum of the last hold_s
        if needed >= self.count:
            return
        least = self.count - max(1, int(self.count * MOST_DOWN))
        self.count, self._changed_s, self._down_s = max(needed, least), now_s, now_s
