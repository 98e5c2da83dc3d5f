"""What the clients saw, and what was wrong with it: every position once, in order, with the unharmed cluster's token.

Pure: times come with the calls, in seconds of one clock.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

SETTLED_S = 1.0  # tokens that were on their way when a fault struck have arrived by then
CUT = "cut off"


@dataclass(slots=True)
class ClientStream:
    """One request as its client sees it. One time for each chunk that brings tokens; a reply that is not streamed is
    one chunk.
    """

    number: int
    wanted: Sequence[int]  # the unharmed cluster's tokens
    sent_s: float
    is_streamed: bool = True
    ingress: str = ""  # that answers; "" before the head of its answer
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    end_s: float | None = None
    error: str = ""  # what ended it
    has_left: bool = False  # its client closed the connection on purpose

    def take(self, tokens: Iterable[int], now_s: float) -> None:
        """A chunk."""
        self.tokens.extend(tokens)
        self.times_s.append(now_s)


def difference(wanted: Sequence[int], got: Sequence[int], *, is_whole: bool) -> str:
    """What is wrong with these tokens; "" where nothing is. Not `is_whole`: the answer may end early."""
    at = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), min(len(wanted), len(got)))
    rest = list(got[at:])
    if not rest:
        return f"ended after {len(got)} of {len(wanted)} tokens" if is_whole and len(got) < len(wanted) else ""
    for shift in range(1, len(wanted) + 1):
        if shift <= at and _matches(wanted[at - shift :], rest):
            return f"{shift} tokens twice, from position {at}"
        if _matches(wanted[at + shift :], rest):
            return f"{shift} tokens lost, from position {at}"
    return f"a wrong token at position {at}"


def _matches(wanted: Sequence[int], rest: Sequence[int]) -> bool:
    """Whether what came continues like this. A single token matches by chance: it proves no shift."""
    return min(len(wanted), len(rest)) > 1 and list(wanted[: len(rest)]) == rest[: len(wanted)]


def silence_s(stream: ClientStream, struck_s: float) -> float | None:
    """The longest time without a token, from the fault on, of a stream that ran then; None: not over yet, or it failed.

    Counts gaps that began at most SETTLED_S after the fault. The end counts as a token, the start as the first.
    """
    if stream.error or stream.has_left:
        return None
    times = [*stream.times_s, *([stream.end_s] if stream.end_s is not None else [])]
    if not times or (stream.end_s is None and times[-1] <= struck_s + SETTLED_S):
        return None
    gaps = zip([stream.sent_s, *times], times, strict=False)
    return max((b - max(a, struck_s) for a, b in gaps if b > struck_s and a <= struck_s + SETTLED_S), default=0.0)


@dataclass(frozen=True, slots=True)
class Problem:
    """A request that should have ended otherwise. `is_wrong`: its tokens are; otherwise it broke, without excuse."""

    number: int
    what: str
    is_wrong: bool


class StreamHistory:
    """Every request that has run, judged when it ends; those that failed once all is over, when the excuses are known.

    `running`: those that have not ended, by number. `tokens_per_s`: how many came in each second.
    """

    def __init__(self) -> None:
        self.running: dict[int, ClientStream] = {}
        self.counts: Counter[str] = Counter()
        self.tokens_per_s: Counter[int] = Counter()
        self._wrong: list[Problem] = []
        self._failed: list[ClientStream] = []
        self._heard_s: dict[str, float] = {}  # ingress -> its last token or end
        self._num_begun = 0

    def begin(self, wanted: Sequence[int], now_s: float, *, is_streamed: bool = True) -> ClientStream:
        """A request is sent."""
        self._num_begun += 1
        stream = ClientStream(self._num_begun, wanted, now_s, is_streamed)
        self.running[stream.number] = stream
        return stream

    def end(self, stream: ClientStream, now_s: float) -> None:
        """It is over, with whatever is recorded in it."""
        del self.running[stream.number]
        stream.end_s = now_s
        self.tokens_per_s[int(now_s)] += len(stream.tokens)
        last_s = now_s if not stream.error else max(stream.times_s, default=0.0)
        self._heard_s[stream.ingress] = max(self._heard_s.get(stream.ingress, 0.0), last_s)
        is_whole = not stream.error and not stream.has_left
        self.counts["requests"] += 1
        self.counts["left" if stream.has_left else "failed" if stream.error else "complete"] += 1
        if why := difference(stream.wanted, stream.tokens, is_whole=is_whole):
            self._wrong.append(Problem(stream.number, why, is_wrong=True))
        elif stream.error and not stream.has_left:
            self._failed.append(stream)

    def problems(self, ingress_kills_s: Sequence[tuple[float, float]] = ()) -> list[Problem]:
        """Wrong ones, and failures without an excuse. The only one: an ingress was killed, between two of these times,
        in the middle of the answer. A worker of each role lives at any time, so that no request need be refused.
        """
        excused = {stream.number for stream in self._failed if self._is_cut(stream, ingress_kills_s)}
        self.counts["excused"] = len(excused)
        broken = [Problem(one.number, one.error, is_wrong=False) for one in self._failed if one.number not in excused]
        return sorted(self._wrong + broken, key=lambda one: one.number)

    def _is_cut(self, stream: ClientStream, kills_s: Sequence[tuple[float, float]]) -> bool:
        """Whether its ingress was killed in its middle: it is not heard of again."""
        if not stream.error.startswith(CUT) or not stream.ingress or stream.end_s is None:
            return False
        heard_s, sent_s, end_s = self._heard_s[stream.ingress], stream.sent_s, stream.end_s
        return any(sent_s <= after and before <= end_s and heard_s <= after + SETTLED_S for before, after in kills_s)
