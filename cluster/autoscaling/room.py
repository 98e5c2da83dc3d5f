"""How many workers of a role the cluster has room for, seen by those that get no place. Pure.

Serve keeps a replica that fits nowhere pending for ever. A worker has a place once its process runs: it lists itself in
the registry then, as warming, long before its model is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

NOTICE = "planner notice"  # its key in the registry
WAIT_S = 60.0  # without one more worker that gets a place: there is no room
RETRY_S = 600.0  # then the planner may want more again: other applications may have left


@dataclass(slots=True)
class Room:
    """One role's, learned from observations in Serve's time. Plain data."""

    most: int | None = None  # the workers that have a place; None: as far as is known there is room
    short: int = 0  # wanted beyond those, when that was noticed
    until_s: float = 0.0  # of `most`
    since_s: float | None = None  # since when as many as now have lacked a place
    placed: int = 0
    resources: dict[str, float] = field(default_factory=dict)  # the cluster's when `most` was noticed

    @property
    def is_tight(self) -> bool:
        return self.most is not None or self.since_s is not None

    def observe(self, wanted: int, placed: int, resources: Mapping[str, float], now_s: float, retry_s: float) -> None:
        """
        Args:
            wanted: Serve's target.
            placed: workers that run or warm up.
            resources: of the whole cluster, used ones included; read only while `is_tight`.
            retry_s: for how long no more are tried.
        """
        has_grown = bool(self.resources) and any(
            amount > self.resources.get(name, 0.0) for name, amount in resources.items()
        )
        if self.most is not None and (now_s >= self.until_s or has_grown or placed > self.most):
            self.most = self.since_s = None
        if wanted <= placed:
            self.since_s = None
        elif self.since_s is None or placed > self.placed:
            self.since_s = now_s
        elif now_s - self.since_s >= WAIT_S:
            self.most, self.short, self.until_s = placed, wanted - placed, now_s + retry_s
            self.resources, self.since_s = dict(resources), None
        self.placed = placed

    def line(self, role: str, now_s: float) -> str:
        """Why there are not more, for people; empty: no limit is known."""
        if self.most is None:
            return ""
        again_s = max(0.0, self.until_s - now_s)
        return (
            f"{role} stays at {self.most}: {self.short} more had no place in the cluster for {WAIT_S:.0f} s; the "
            f"planner tries again in {again_s:.0f} s, or when the cluster grows"
        )
