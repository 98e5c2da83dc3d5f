"""What the ingress records of its requests: counters and histograms, the log of the last requests with the time of each
stage, and the one observer through which a sequence reports.

Cheap enough for every token. metrics.py, history.py and api/ui.py read what is recorded here. The log keeps no prompt
text and no tokens, only counts; running requests are bounded by admission, ended ones by REQUESTS_KEPT.
"""

import logging
import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from kvrelay.config import Settings
from kvrelay.errors import KvrelayError
from kvrelay.logs import with_facts
from kvrelay.plane import messages as wire
from kvrelay.router.decision.snapshot import candidate_scores
from kvrelay.router.types import Decision, RoutingRefusal, SloVerdict
from kvrelay.serve.telemetry.explain import Explain, span_attributes
from kvrelay.serve.telemetry.moves import MoveStats
from kvrelay.tracing import Spans

logger = logging.getLogger(__name__)
REQUESTS_KEPT = 512
STAGES_KEPT = 48  # of a request; after many retries the stages in the middle are dropped
CANDIDATES_KEPT = 4
WHY_CHARS = 240
Flow = tuple[str, str, str]  # source, target and transport of KV
Arrival = tuple[float, float]  # when a request's head was read, and when its prompt was tokenised

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
STATUSES = ("200", "400", "429", "500", "503")  # counted from 0
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
        return list(zip((*self.bounds, math.inf), accumulate(self.counts), strict=True))


@dataclass(slots=True)
class ServeStats:
    """The counters of one ingress since its start."""

    ttft_s: Histogram = field(default_factory=lambda: Histogram(_TTFT_BOUNDS_S))
    itl_s: Histogram = field(default_factory=lambda: Histogram(_TPOT_BOUNDS_S))
    tpot_s: Histogram = field(default_factory=lambda: Histogram(_TPOT_BOUNDS_S))
    total_s: Histogram = field(default_factory=lambda: Histogram(_TOTAL_BOUNDS_S))
    transfer_s: Histogram = field(default_factory=lambda: Histogram(_GAP_BOUNDS_S))
    outcomes: Counter[str] = field(default_factory=Counter)  # of sequences
    decisions: Counter[str] = field(default_factory=Counter)  # by path
    slo_verdicts: Counter[tuple[str, str]] = field(default_factory=Counter)  # of requests, by class and verdict
    hopeless: int = 0  # sequences refused for an SLO that idle workers would miss, too
    slo_outcomes: Counter[tuple[str, bool]] = field(default_factory=Counter)  # by promised class; True: it was met
    ignored_fields: Counter[str] = field(default_factory=Counter)  # of requests' bodies, by name
    responses: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(STATUSES, 0)))  # by HTTP status
    running: int = 0
    deferred: int = 0  # sequences that waited at the ingress: see router/decision/deferral.py
    retries: int = 0
    moves: MoveStats = field(default_factory=MoveStats)
    taken: int = 0  # sequences whose prompts are counted: not those refused because router.max_inflight run
    refuses_late: bool = False  # requests whose first token would be late; for the planner, as the next
    prefills_on_decode: bool = False  # prompts are computed on decode workers while these have time to spare
    prompt_tokens: int = 0
    prompt_squares: int = 0  # sum of squared prompt lengths: how much lengths vary
    output_tokens: int = 0
    reasoning_tokens: int = 0
    looked_up_tokens: int = 0  # of prompts that were computed, at their first tokens
    cached_prefix_tokens: int = 0  # of those
    kv_flows: Counter[Flow] = field(default_factory=Counter)  # KV bytes moved since history.py took them out

    @classmethod
    def with_targets(cls, settings: Settings) -> "ServeStats":
        """The settings' TTFT and TPOT targets are bounds, too: the share of requests that kept them is exact."""
        given = settings.slo, settings.planner
        ttft = tuple(sorted({*_TTFT_BOUNDS_S, *filter(None, (section.ttft_s for section in given))}))
        tpot = tuple(sorted({*_TPOT_BOUNDS_S, *filter(None, (section.tpot_s for section in given))}))
        found = cls(Histogram(ttft), Histogram(tpot), Histogram(tpot))
        found.refuses_late = settings.slo.ttft_s is not None
        found.prefills_on_decode = settings.router.policy == "joint" and settings.router.local_prefill_tokens > 0
        return found


# ---- the log of requests


@dataclass(slots=True)
class RequestRecord:
    """The log of one sequence, written by its RequestObserver. None: not reached yet. A record of 19 attributes."""

    request_id: str
    number: int  # serial number at this ingress
    started_s: float
    prompt_tokens: int
    max_tokens: int
    stages: list[dict[str, Any]] = field(default_factory=list)  # name, at_s from the request's arrival, facts
    path: str | None = None
    prefill: str | None = None
    decode: str | None = None
    outcome: str | None = None
    why: str = ""
    attempts: int = 0
    num_tokens: int = 0  # delivered
    cached_tokens: int = 0
    first_s: float | None = None  # of the first and last delivered tokens
    last_s: float | None = None
    ended_s: float | None = None
    is_transferring: bool = False  # its KV is being transferred from P to D, or will be as soon as it is computed
    submitted_s: float = 0.0

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None before the second."""
        if self.first_s is None or self.last_s is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)

    def note(self, name: str, now_s: float, **facts: Any) -> None:
        """Add a stage. Facts are numbers and names, never the client's text; those that are None are left out."""
        if len(self.stages) == STAGES_KEPT:
            del self.stages[STAGES_KEPT // 2]
        given = {key: value for key, value in facts.items() if value is not None}
        self.stages.append({"name": name, "at_s": now_s - self.started_s, **given})
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("request %s: %s%s", self.request_id, name, with_facts(given))


class RequestLog:
    """The running sequences, and the last `limit` that have ended."""

    def __init__(self, limit: int = REQUESTS_KEPT) -> None:
        self.refusals: Counter[str] = Counter()  # failed sequences by the error's code
        self._live: dict[str, RequestRecord] = {}
        self._ended: deque[RequestRecord] = deque(maxlen=limit)
        self._count = 0

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)

    def begin(self, request: wire.SequenceRequest, now_s: float, arrival: Arrival | None) -> RequestRecord:
        """A sequence runs from now until `end`."""
        self._count += 1
        started_s, tokenised_s = arrival or (now_s, None)
        counts = request.num_prompt_tokens, request.sampling.max_tokens
        record = RequestRecord(request.request_id, self._count, started_s, *counts, submitted_s=started_s)
        record.note("arrived", record.started_s)
        if tokenised_s is not None:
            record.note("tokenised", tokenised_s, prompt_tokens=request.num_prompt_tokens)
        self._live[record.request_id] = record
        return record

    def failed(self, record: RequestRecord, error: KvrelayError) -> None:
        """Note the error that is about to end it."""
        self.refusals[getattr(error, "code", None) or type(error).__name__] += 1
        record.why = str(error)[:WHY_CHARS]

    def end(self, record: RequestRecord, outcome: str, now_s: float) -> None:
        """It has ended. Idempotent."""
        if record.outcome is not None:
            return
        record.outcome, record.ended_s, record.is_transferring = outcome, now_s, False
        record.note("ended", now_s, outcome=outcome, tokens=record.num_tokens, because=record.why or None)
        if self._live.get(record.request_id) is record:
            del self._live[record.request_id]
        self._ended.append(record)

    def newest(self, limit: int) -> list[RequestRecord]:
        """Running sequences, then ended ones, each newest first."""
        live = sorted(self._live.values(), key=lambda record: -record.number)
        return [*live, *reversed(self._ended)][:limit]

    def find(self, request_id: str) -> list[RequestRecord]:
        """The sequence of this id, or all sequences of the HTTP request of this id."""
        records = [*self._live.values(), *self._ended]
        return [one for one in records if request_id in (one.request_id, one.request_id.rpartition("-")[0])]

    def num_transfers(self) -> Counter[tuple[str, str]]:
        """KV transfers in flight, by (prefill worker, decode worker)."""
        return Counter(
            (record.prefill, record.decode)
            for record in self._live.values()
            if record.is_transferring and record.prefill is not None and record.decode is not None
        )


class RequestObserver:
    """Records one sequence while it runs: in the counters, in the request log, as spans, and for `x-kvrelay-explain`.

    Times are seconds of `clock`.
    """

    def __init__(
        self,
        stats: ServeStats,
        log: RequestLog,
        request: wire.SequenceRequest,
        clock: Callable[[], float],
        *,
        explain: Explain | None,
        arrival: Arrival | None,
    ) -> None:
        self.now_s, self.started_s = clock, clock()
        self._stats, self._log, self._explain = stats, log, explain or Explain(self.started_s)
        self._is_explained = explain is not None
        self._num_sequences, self._is_group = request.num_sequences, request.group is not None
        self._record = log.begin(request, self.started_s, arrival)
        # without a traceparent it is not traced: no span is made, not even an empty one
        self._spans = Spans(request.traceparent, request_id=request.request_id) if request.traceparent else None
        self._last_of: dict[int, float] = {}  # when each choice's last tokens came
        self._phase_s = 0.0  # when the phase began that is measured now: placing, deferred or reserving
        stats.running += self._num_sequences
        stats.taken += self._num_sequences
        stats.prompt_tokens += request.num_prompt_tokens
        stats.prompt_squares += request.num_prompt_tokens**2

    @property
    def num_tokens(self) -> int:
        """Delivered."""
        return self._record.num_tokens

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 for one token, and for groups, whose choices come side by side."""
        return 0.0 if self._is_group else self._record.tpot_s or 0.0

    @property
    def ttft_s(self) -> float:
        return (self._record.first_s or 0.0) - self.started_s

    # ---- place

    def placing(self, attempt: int) -> None:
        self._phase_s = self.now_s()
        if self._spans is not None:
            self._spans.begin("route", attempt=attempt)

    def deferred(self, predicted_ttft_s: float) -> float:
        """The router has deferred the request. Returns when."""
        now_s = self.now_s()
        self._stats.deferred += 1
        self._record.note("deferred", now_s, predicted_ttft_s=predicted_ttft_s)
        if self._spans is not None:
            self._spans.begin("deferred", predicted_ttft_s=predicted_ttft_s)
        return now_s

    def resumed(self, deferred_s: float) -> None:
        """A request that was deferred then may be placed now."""
        waited_s = self.now_s() - deferred_s
        self._phase_s += waited_s
        if self._spans is not None:
            self._spans.end("deferred")
        self._explain.deferred_s += waited_s

    def placed(self, decision: Decision | RoutingRefusal, previous_failure: str) -> None:
        """The router has decided. The stage's `why`: the non-zero terms of the policy's score."""
        if self._spans is not None:
            self._spans.end("route", **span_attributes(decision, previous_failure))
        if isinstance(decision, RoutingRefusal):
            return
        now_s, record = self.now_s(), self._record
        self._stats.decisions[decision.path] += 1
        record.attempts += 1
        record.path, record.prefill, record.decode = decision.path, decision.prefill, decision.decode
        record.note(
            "routed",
            now_s,
            path=decision.path,
            prefill=decision.prefill,
            decode=decision.decode,
            predicted_ttft_s=decision.predicted_ttft_s,
            cached_tokens=decision.cached_tokens_prefill,
            held_tokens=decision.cached_tokens_decode,
            score_s=decision.score,
            why={name: value for name, value in decision.policy_terms.items() if value},
            candidates=[
                {"path": other.path, "prefill": other.prefill, "decode": other.decode, "score_s": other.score}
                for other in candidate_scores(decision, CANDIDATES_KEPT)
            ],
        )
        self._explain.route_s += now_s - self._phase_s
        self._explain.decisions.append(decision)

    def judged(self, verdict: SloVerdict) -> None:
        self._stats.slo_verdicts[verdict.wanted.name, verdict.kind] += 1
        self._stats.hopeless += self._num_sequences * verdict.is_hopeless

    # ---- reserve, prefill, commit

    def reserving(self, worker_id: str) -> None:
        self._phase_s = self.now_s()
        if self._spans is not None:
            self._spans.begin("reserve", worker=worker_id)

    def reserved(self, message: wire.Reserved) -> None:
        now_s, held = self.now_s(), message.held_tokens
        self._record.note("reserved", now_s, worker=self._record.decode, held_tokens=held, waited_s=message.waited_s)
        if self._spans is not None:
            self._spans.end("reserve")
        self._explain.held_tokens = held
        self._explain.reserve_s += now_s - self._phase_s

    def submitted(self, worker_id: str, message: object) -> None:
        """The sequence is sent to a worker, to reserve blocks or to compute it."""
        record = self._record
        record.submitted_s = now_s = self.now_s()
        record.is_transferring = isinstance(message, wire.Prefill) and message.ticket is not None
        what = "reservation requested" if isinstance(message, wire.Reserve) else "prefill requested"
        record.note(what, now_s, worker=worker_id)
        if self._explain.first_token_s is None:
            self._explain.dispatched_s = now_s

    def first_token(self, output: wire.TokenOutput) -> float:
        """An attempt's first token has come from a worker. Returns when.

        The start of the prefill follows from the worker's compute time: it reports nothing before the first token.
        """
        now_s, cached, record = self.now_s(), output.cached_tokens or 0, self._record
        queue_s, compute_s, chunks = 0.0, 0.0, 0
        if output.timings is not None:
            queue_s, compute_s, chunks = output.timings.queue_s, output.timings.compute_s, output.timings.num_chunks
        prefill_s = min(max(now_s - compute_s, record.submitted_s), now_s)
        worker, record.cached_tokens = record.prefill or record.decode, cached
        record.note("prefill started", prefill_s, worker=worker, queued_s=queue_s, cached_tokens=cached)
        record.note("first token", now_s, worker=worker, compute_s=compute_s, chunks=chunks)
        self._stats.looked_up_tokens += record.prompt_tokens
        self._stats.cached_prefix_tokens += cached
        if self._is_explained:
            self._explain.on_first_token(output, now_s)
        return now_s

    def transferred(self, message: wire.Transferred) -> None:
        record = self._record
        record.is_transferring = False
        ends = {"source": record.prefill, "target": record.decode, "over": message.transport}
        size = {"blocks": message.blocks, "bytes": message.num_bytes}
        record.note("KV transferred", self.now_s(), **ends, **size, read_s=message.seconds, exposed_s=message.exposed_s)
        self._stats.transfer_s.observe(message.seconds)
        self._stats.kv_flows[record.prefill or "", record.decode or "", message.transport] += message.num_bytes
        self._explain.transfer = message

    # ---- decode, and the end

    def delivered(self, output: wire.TokenOutput) -> None:
        """Tokens leave for the client."""
        stats, record, now_s, count = self._stats, self._record, self.now_s(), len(output.token_ids)
        stats.output_tokens += count
        record.num_tokens += count
        last_s = self._last_of.get(output.choice)
        if record.first_s is None:
            record.first_s = now_s
            stats.ttft_s.observe(now_s - self.started_s)
        elif count and last_s is not None:
            stats.itl_s.observe((now_s - last_s) / count, count)
        record.last_s = self._last_of[output.choice] = now_s

    def attempt_failed(self, worker_id: str, code: str, why: str) -> None:
        if self._spans is not None:
            self._spans.close(code)
        self._record.is_transferring = False
        self._record.note("attempt failed", self.now_s(), worker=worker_id, code=code, because=why[:WHY_CHARS])

    def retried(self, *, is_fault: bool) -> None:
        """Another attempt follows; is_fault: after a worker's fault."""
        self._stats.retries += is_fault

    def moved(self, decode: str, **facts: Any) -> None:
        """The sequence and its KV are on another decode worker."""
        source, self._record.decode = self._record.decode or "", decode
        if "bytes" in facts:
            self._stats.kv_flows[source, decode, facts["over"]] += facts["bytes"]
        self._record.note("moved", self.now_s(), **facts)

    def failed(self, error: KvrelayError) -> None:
        """The error that is about to end it."""
        self._log.failed(self._record, error)

    def promise_kept(self, class_name: str, *, is_kept: bool) -> None:
        self._stats.slo_outcomes[class_name, is_kept] += 1

    def ended(self, outcome: str) -> None:
        stats, now_s = self._stats, self.now_s()
        if self._spans is not None:
            self._spans.close(outcome)
        self._log.end(self._record, outcome, now_s)
        stats.running -= self._num_sequences
        stats.outcomes[outcome] += self._num_sequences
        stats.total_s.observe(now_s - self.started_s)
        if self.num_tokens > 1 and not self._is_group and outcome in ("stop", "length"):
            stats.tpot_s.observe(self.tpot_s)
