"""What the ingress records of its requests: counters and histograms, and the one observer through which a sequence
reports.

Cheap enough for every token. The counters are plain numbers, which metrics.py reads when Prometheus asks.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.errors import KvrelayError
from kvrelay.plane import messages as wire
from kvrelay.router.objectives import SloVerdict
from kvrelay.router.types import Decision, RoutingRefusal
from kvrelay.serve.telemetry.explain import Explain, span_attributes
from kvrelay.serve.telemetry.request_log import RequestArrival, RequestLog
from kvrelay.tracing import spans_of

_TTFT_BOUNDS_S = (
    0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0,
    15.0, 20.0, 25.0, 30.0, 60.0,
)  # fmt: skip
_TPOT_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.125, 0.15,
    0.2, 0.25, 0.3, 0.4, 0.5, 1.0, 2.5,
)  # fmt: skip
"""Both close together where targets are: the planner asks which share kept one (cluster/autoscaling/feed.py)."""
_GAP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_TOTAL_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Histogram:
    """Counts per bucket, and the sum of all values. A value equal to a bound belongs to that bound's bucket."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Record `value`, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def cumulative(self) -> list[tuple[float, int]]:
        """(upper bound, observations at or below it), the last bound infinite."""
        running, pairs = 0, []
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            running += count
            pairs.append((bound, running))
        return pairs


@dataclass(slots=True)
class ServeStats:
    """The counters of one ingress since its start."""

    ttft_s: Histogram = field(default_factory=lambda: Histogram(_TTFT_BOUNDS_S))
    itl_s: Histogram = field(default_factory=lambda: Histogram(_GAP_BOUNDS_S))
    tpot_s: Histogram = field(default_factory=lambda: Histogram(_TPOT_BOUNDS_S))
    total_s: Histogram = field(default_factory=lambda: Histogram(_TOTAL_BOUNDS_S))
    transfer_s: Histogram = field(default_factory=lambda: Histogram(_GAP_BOUNDS_S))
    outcomes: Counter[str] = field(default_factory=Counter)  # of sequences
    decisions: Counter[str] = field(default_factory=Counter)  # by path
    slo_verdicts: Counter[tuple[str, str]] = field(default_factory=Counter)  # of requests, by class and verdict
    slo_outcomes: Counter[tuple[str, bool]] = field(default_factory=Counter)  # by promised class; True: it was met
    running: int = 0
    deferred: int = 0  # sequences that waited at the ingress, as their first token would miss its target anyway
    retries: int = 0
    prompt_tokens: int = 0
    prompt_squares: int = 0  # sum of squared prompt lengths: how much lengths vary
    output_tokens: int = 0
    cached_prefix_tokens: int = 0


class RequestObserver:
    """Records one sequence while it runs: in the counters, in the request log, as spans, and for `x-kvrelay-explain`.

    Times are seconds of `clock`. 14 attributes: the four places that it records in, and the sequence's own times.
    """

    def __init__(
        self,
        stats: ServeStats,
        log: RequestLog,
        request: wire.SequenceRequest,
        clock: Callable[[], float],
        *,
        explain: Explain | None,
        arrival: RequestArrival | None,
    ) -> None:
        self.started_s = clock()
        self._stats, self._log, self._clock, self._explain = stats, log, clock, explain
        self._num_sequences, self._is_group = request.num_sequences, request.group is not None
        self._record = log.begin(request, self.started_s, arrival)
        self._spans = spans_of(request.traceparent, request_id=request.request_id)
        self._first_s = self._last_s = 0.0
        self._last_of: dict[int, float] = {}  # when each choice's last tokens came
        self.num_tokens = 0
        self._phase_s = 0.0  # when the phase began that is measured now: placing, deferred or reserving
        stats.running += self._num_sequences
        stats.prompt_tokens += request.num_prompt_tokens
        stats.prompt_squares += request.num_prompt_tokens**2

    def now_s(self) -> float:
        return self._clock()

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 for one token, and for groups, whose choices come side by side."""
        gaps = self.num_tokens - 1
        return (self._last_s - self._first_s) / gaps if gaps > 0 and not self._is_group else 0.0

    @property
    def ttft_s(self) -> float:
        return self._first_s - self.started_s

    # ---- place

    def placing(self, attempt: int) -> None:
        self._phase_s = self._clock()
        if self._spans is not None:
            self._spans.begin("route", attempt=attempt)

    def deferred(self, predicted_ttft_s: float) -> float:
        """The router has deferred the request. Returns when."""
        now_s = self._clock()
        self._stats.deferred += 1
        self._record.note("deferred", now_s, predicted_ttft_s=predicted_ttft_s)
        if self._spans is not None:
            self._spans.begin("deferred", predicted_ttft_s=predicted_ttft_s)
        return now_s

    def resumed(self, deferred_s: float) -> None:
        """A request that was deferred then may be placed now."""
        waited_s = self._clock() - deferred_s
        self._phase_s += waited_s
        if self._spans is not None:
            self._spans.end("deferred")
        if self._explain is not None:
            self._explain.deferred_s += waited_s

    def placed(self, decision: Decision | RoutingRefusal, previous_failure: str) -> None:
        if self._spans is not None:
            self._spans.end("route", **span_attributes(decision, previous_failure))
        if isinstance(decision, RoutingRefusal):
            return
        self._stats.decisions[decision.path] += 1
        self._record.routed(decision, self._clock())
        if self._explain is not None:
            self._explain.route_s += self._clock() - self._phase_s
            self._explain.decisions.append(decision)

    def judged(self, verdict: SloVerdict) -> None:
        self._stats.slo_verdicts[verdict.wanted.name, verdict.kind] += 1

    # ---- reserve, prefill, commit

    def reserving(self, worker_id: str) -> None:
        self._phase_s = self._clock()
        if self._spans is not None:
            self._spans.begin("reserve", worker=worker_id)

    def reserved(self, message: wire.Reserved) -> None:
        now_s = self._clock()
        self._record.reserved(message, now_s)
        if self._spans is not None:
            self._spans.end("reserve")
        if self._explain is not None:
            self._explain.held_tokens = message.held_tokens
            self._explain.reserve_s += now_s - self._phase_s

    def submitted(self, worker_id: str, message: object) -> None:
        now_s = self._clock()
        if self._explain is not None and self._explain.first_token_s is None:
            self._explain.dispatched_s = now_s
        self._record.submitted(worker_id, message, now_s)

    def first_token(self, output: wire.TokenOutput) -> float:
        """An attempt's first token has come from a worker. Returns when."""
        now_s = self._clock()
        self._stats.cached_prefix_tokens += output.cached_tokens or 0
        self._record.first_token(output, now_s)
        if self._explain is not None:
            self._explain.on_first_token(output, now_s)
        return now_s

    def transferred(self, message: wire.Transferred) -> None:
        self._stats.transfer_s.observe(message.seconds)
        self._record.transferred(message, self._clock())
        if self._explain is not None:
            self._explain.transfer = message

    # ---- decode, and the end

    def delivered(self, output: wire.TokenOutput) -> None:
        """Tokens leave for the client."""
        stats, now_s, count = self._stats, self._clock(), len(output.token_ids)
        stats.output_tokens += count
        self.num_tokens += count
        self._record.tokens(count, now_s)
        last_s = self._last_of.get(output.choice)
        if self._last_s == 0.0:
            self._first_s = now_s
            stats.ttft_s.observe(now_s - self.started_s)
        elif count and last_s is not None:
            stats.itl_s.observe((now_s - last_s) / count, count)
        self._last_s = self._last_of[output.choice] = now_s

    def attempt_failed(self, worker_id: str, code: str, why: str) -> None:
        if self._spans is not None:
            self._spans.close(code)
        self._record.attempt_failed(worker_id, code, why, self._clock())

    def retried(self, *, is_fault: bool) -> None:
        """Another attempt follows; is_fault: after a worker's fault."""
        self._stats.retries += is_fault

    def failed(self, error: KvrelayError) -> None:
        """The error that is about to end it."""
        self._log.failed(self._record, error)

    def promise_kept(self, class_name: str, *, is_kept: bool) -> None:
        self._stats.slo_outcomes[class_name, is_kept] += 1

    def ended(self, outcome: str) -> None:
        stats, now_s = self._stats, self._clock()
        if self._spans is not None:
            self._spans.close(outcome)
        self._log.end(self._record, outcome, now_s)
        stats.running -= self._num_sequences
        stats.outcomes[outcome] += self._num_sequences
        stats.total_s.observe(now_s - self.started_s)
        if self.num_tokens > 1 and not self._is_group and outcome in ("stop", "length"):
            stats.tpot_s.observe(self.tpot_s)
