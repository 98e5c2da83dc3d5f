"""How fast KV comes from each connected prefill worker: reported to ingresses when it changed, and to the engine."""

from collections.abc import Callable

from kvrelay.engine.worker.thread import EngineThread
from kvrelay.plane.messages import PairReport, PairsSeen


class PathSpeeds:
    """`pairs`: the connected prefill workers and the paths from each, as measured now."""

    def __init__(self, thread: EngineThread, pairs: Callable[[], list[PairReport]]) -> None:
        self._thread, self._pairs = thread, pairs
        self._reported: list[PairReport] = []

    def changes(self) -> PairsSeen | None:
        """What differs from the last report, which the engine is given too; None: nothing."""
        pairs = self._pairs()
        if pairs == self._reported:
            return None
        self._reported = pairs
        self._note_transfer_speed(pairs)
        return PairsSeen(reports=pairs)

    def report_again(self) -> None:
        """There is a new subscriber, which knows nothing yet."""
        self._reported = []

    def _note_transfer_speed(self, pairs: list[PairReport]) -> None:
        """What returning a sequence to prefill costs the engine: over the slowest of the chosen paths."""
        paths = [path for pair in pairs if pair.ok for path in pair.paths if path.is_chosen and path.bytes_per_s > 0]
        if paths:
            speed, latency_s = min(path.bytes_per_s for path in paths), max(path.latency_s for path in paths)
            self._thread.post(lambda engine: engine.requests.note_transfer_speed(speed, latency_s))
