"""What the ingress records of moves: running sequences that change their decode worker, with their KV."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvrelay.plane import messages as wire


@dataclass(slots=True)
class MoveStats:
    """Counters of one ingress since its start."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """moved; ended: the sequence ended first; failed: it stayed, or continued from its text."""
    seconds: float = 0.0  # of those that moved, from the choice of the worker until it decodes
    num_bytes: int = 0  # of KV that they moved
    computed_tokens: int = 0  # by the worker that was left, of sequences that moved: the rest was cached there


class MoveRecord:
    """One move, as a SequenceAttempt reports it; what its sequence's own observer records is left as it is."""

    def __init__(self, stats: MoveStats, num_tokens: int, clock: Callable[[], float]) -> None:
        """num_tokens: of the sequence, prompt and output."""
        self._stats, self._num_tokens, self.now_s = stats, num_tokens, clock
        self.started_s = clock()
        self.target = ""  # the worker that was asked last
        self.facts: dict[str, Any] = {}  # of the stage in the request's log

    def reserving(self, worker_id: str) -> None:
        """The worker that it moves to is asked for blocks."""
        self.target = worker_id

    def reserved(self, message: wire.Reserved) -> None:
        self.facts["held_tokens"] = message.held_tokens

    def submitted(self, worker_id: str, message: object) -> None:
        """A worker has been sent its part."""

    def first_token(self, output: wire.TokenOutput) -> float:
        """The worker that it leaves has all its KV. Returns when."""
        self.facts["computed_tokens"] = self._num_tokens - (output.cached_tokens or 0)
        return self.now_s()

    def transferred(self, message: wire.Transferred) -> None:
        self.facts |= {"over": message.transport, "blocks": message.blocks, "bytes": message.num_bytes}

    def ended(self, outcome: str) -> None:
        """Count it; see MoveStats."""
        self._stats.outcomes[outcome] += 1
        if outcome == "moved":
            self.facts["seconds"] = self.now_s() - self.started_s
            self._stats.seconds += self.facts["seconds"]
            self._stats.num_bytes += self.facts.get("bytes", 0)
            self._stats.computed_tokens += self.facts.get("computed_tokens", 0)
