"""The paths between two workers: in what order they are tried, how fast they are, which one rests after a failure.

Pure: times are arguments, nothing here connects or reads.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from kvrelay.kvtransfer.protocol.types import PathReport

FIRST_REST_S, LAST_REST_S = 1.0, 60.0
CLEARLY_FASTER = 1.25  # a measured path overtakes a better-ranked one from here on
_TYPICAL_BYTES = 4 << 20  # about what one announcement brings
_WORTH_MEASURING_BYTES = 256 << 10  # smaller reads tell latency, not bandwidth
_WEIGHT = 0.2  # of a new observation in the moving average


@dataclass(slots=True)
class Path:
    """One way to move bytes, and what is known of it."""

    name: str
    why: str  # why it is ranked where it is
    bytes_per_s: float = 0.0  # moving average; 0: not measured
    latency_s: float = 0.0
    failures: int = 0  # in a row
    rests_until_s: float = 0.0
    problem: str = ""  # the last failure, until it has worked again

    def seconds_for(self, num_bytes: int) -> float:
        """Predicted; infinite where nothing was measured."""
        return self.latency_s + num_bytes / self.bytes_per_s if self.bytes_per_s else float("inf")


class PathTable:
    """Best first. A path that fails rests, twice as long each time; the next one is taken meanwhile."""

    def __init__(self, ranked: Sequence[tuple[str, str]]) -> None:
        self._paths = [Path(name, why) for name, why in ranked]

    def __getitem__(self, name: str) -> Path:
        return next(path for path in self._paths if path.name == name)

    @property
    def names(self) -> list[str]:
        return [path.name for path in self._paths]

    def best(self, now_s: float, tried: Collection[str] = ()) -> Path | None:
        """The path to take, none of `tried`; where all rest, the one whose rest ends first."""
        left = [path for path in self._paths if path.name not in tried]
        awake = [path for path in left if path.rests_until_s <= now_s]
        return awake[0] if awake else min(left, key=lambda path: path.rests_until_s, default=None)

    def failed(self, name: str, why: str, now_s: float) -> None:
        """It could not be opened, or a read over it failed."""
        path = self[name]
        path.problem = why
        if path.rests_until_s <= now_s:  # several reads may fail of the same cause
            path.rests_until_s = now_s + min(FIRST_REST_S * 2**path.failures, LAST_REST_S)
            path.failures = min(path.failures + 1, 16)

    def moved(self, name: str, num_bytes: int, seconds: float) -> None:
        """A read over it ended well."""
        path = self[name]
        path.failures, path.problem, path.rests_until_s = 0, "", 0.0
        if num_bytes >= _WORTH_MEASURING_BYTES and seconds > 0:
            speed = num_bytes / seconds
            path.bytes_per_s += _WEIGHT * (speed - path.bytes_per_s) if path.bytes_per_s else speed

    def probed(self, name: str, bytes_per_s: float, latency_s: float) -> None:
        """What a probe measured."""
        path = self[name]
        path.bytes_per_s, path.latency_s = bytes_per_s, latency_s

    def reorder(self) -> None:
        """After a probe: a path goes before a better-ranked one that is clearly slower."""
        ordered: list[Path] = []
        for path in self._paths:
            seconds = path.seconds_for(_TYPICAL_BYTES) * CLEARLY_FASTER
            place = next(
                (i for i, other in enumerate(ordered) if seconds < other.seconds_for(_TYPICAL_BYTES)), len(ordered)
            )
            ordered.insert(place, path)
        self._paths = ordered

    def reports(self, now_s: float) -> list[PathReport]:
        """For people, best first. The chosen one is that which the next read takes."""
        chosen = self.best(now_s)
        return [
            PathReport(
                path=path.name, why=path.why, is_chosen=path is chosen, bytes_per_s=path.bytes_per_s,
                latency_s=path.latency_s, problem=path.problem,
            )
            for path in self._paths
        ]  # fmt: skip


def untried(table: PathTable, clock: Callable[[], float]) -> Iterator[str]:
    """The paths to try one after the other: each twice, for a second connection may do what a broken one did not."""
    for _ in range(2):
        tried: set[str] = set()
        while (path := table.best(clock(), tried)) is not None:
            tried.add(path.name)
            yield path.name
