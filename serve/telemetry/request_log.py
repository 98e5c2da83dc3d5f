"""The last requests of this ingress, with the time of each stage. For `/ui`.

Keeps no prompt text and no tokens, only counts. Running requests are bounded by admission, ended ones by REQUESTS_KEPT.
Pure: times are arguments, seconds of one clock.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvrelay.errors import KvrelayError
from kvrelay.plane.messages import Prefill, Reserve, Reserved, SequenceRequest, TokenOutput, Transferred
from kvrelay.router.types import Decision

REQUESTS_KEPT = 512
STAGES_KEPT = 48  # of a request; after many retries the stages in the middle are dropped
CANDIDATES_KEPT = 4
WHY_CHARS = 240


@dataclass(frozen=True, slots=True)
class RequestArrival:
    """When a request's head was read, and when its prompt was tokenised."""

    arrived_s: float
    tokenised_s: float


@dataclass(frozen=True, slots=True)
class Stage:
    """`at_s` counts from the request's arrival. `facts` are numbers and names, never the client's text."""

    name: str
    at_s: float
    facts: dict[str, Any]


@dataclass(slots=True)
class RequestRecord:
    """The log of one sequence, written by its RequestObserver. None: not reached yet. A record of 19 attributes."""

    request_id: str
    number: int  # serial number at this ingress
    started_s: float
    prompt_tokens: int
    max_tokens: int
    stages: list[Stage] = field(default_factory=list)
    path: str | None = None
    prefill: str | None = None
    decode: str | None = None
    outcome: str | None = None
    why: str = ""
    attempts: int = 0
    num_tokens: int = 0
    cached_tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    ended_s: float | None = None
    is_transferring: bool = False  # its KV is being transferred from P to D, or will be as soon as it is computed
    submitted_s: float = 0.0

    # ---- events

    def routed(self, decision: Decision, now_s: float) -> None:
        """The router has decided. `why`: the non-zero terms of the policy's score."""
        self.attempts += 1
        self.path, self.prefill, self.decode = decision.path, decision.prefill, decision.decode
        others = [
            {"path": other.path, "prefill": other.prefill, "decode": other.decode, "score_s": other.score}
            for other in decision.candidates[:CANDIDATES_KEPT]
        ]
        self._add(
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
            candidates=others,
        )

    def submitted(self, worker_id: str, message: object, now_s: float) -> None:
        """The sequence is sent to a worker, to reserve blocks or to compute it."""
        self.submitted_s = now_s
        self.is_transferring = isinstance(message, Prefill) and message.ticket is not None
        self._add(
            "reservation requested" if isinstance(message, Reserve) else "prefill requested", now_s, worker=worker_id
        )

    def reserved(self, message: Reserved, now_s: float) -> None:
        self._add("reserved", now_s, worker=self.decode, held_tokens=message.held_tokens, waited_s=message.waited_s)

    def first_token(self, output: TokenOutput, now_s: float) -> None:
        """The start of the prefill follows from the worker's compute time: the worker reports nothing before the
        first token.
        """
        self.cached_tokens = output.cached_tokens or 0
        queue_s, compute_s, chunks = 0.0, 0.0, 0
        if output.timings is not None:
            queue_s, compute_s, chunks = output.timings.queue_s, output.timings.compute_s, output.timings.num_chunks
        prefill_s = min(max(now_s - compute_s, self.submitted_s), now_s)
        worker = self.prefill or self.decode
        self._add("prefill started", prefill_s, worker=worker, queued_s=queue_s, cached_tokens=self.cached_tokens)
        self._add("first token", now_s, worker=worker, compute_s=compute_s, chunks=chunks)

    def transferred(self, message: Transferred, now_s: float) -> None:
        self.is_transferring = False
        self._add(
            "KV transferred",
            now_s,
            source=self.prefill,
            target=self.decode,
            over=message.transport,
            blocks=message.blocks,
            bytes=message.num_bytes,
            read_s=message.seconds,
            exposed_s=message.exposed_s,
        )

    def tokens(self, count: int, now_s: float) -> None:
        """`count` more tokens are delivered."""
        self.num_tokens += count
        if self.first_s is None:
            self.first_s = now_s
        self.last_s = now_s

    def attempt_failed(self, worker_id: str, code: str, why: str, now_s: float) -> None:
        self.is_transferring = False
        self._add("attempt failed", now_s, worker=worker_id, code=code, because=why[:WHY_CHARS])

    def note(self, name: str, now_s: float, **facts: Any) -> None:
        """Add any other stage."""
        self._add(name, now_s, **facts)

    def _add(self, name: str, now_s: float, **facts: Any) -> None:
        if len(self.stages) == STAGES_KEPT:
            del self.stages[STAGES_KEPT // 2]
        given = {key: value for key, value in facts.items() if value is not None}
        self.stages.append(Stage(name, now_s - self.started_s, given))

    # ---- views

    @property
    def state(self) -> str:
        """Its outcome, or its current stage."""
        if self.outcome is not None:
            return self.outcome
        if self.num_tokens:
            return "KV in transfer" if self.is_transferring else "decoding"
        return self.stages[-1].name if self.stages else "arrived"

    def row(self, now_s: float) -> dict[str, Any]:
        """One row of the table; durations in seconds, `age_s` since it arrived."""
        end_s = now_s if self.ended_s is None else self.ended_s
        return {
            "id": self.request_id,
            "state": self.state,
            "is_live": self.ended_s is None,
            "path": self.path,
            "prefill": self.prefill,
            "decode": self.decode,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "tokens": self.num_tokens,
            "max_tokens": self.max_tokens,
            "attempts": self.attempts,
            "age_s": now_s - self.started_s,
            "total_s": end_s - self.started_s,
            "ttft_s": None if self.first_s is None else self.first_s - self.started_s,
            "why": self.why,
        }

    def detail(self, now_s: float) -> dict[str, Any]:
        """The row and every stage, ordered by time."""
        stages = [
            {"name": stage.name, "at_s": stage.at_s, **stage.facts}
            for stage in sorted(self.stages, key=lambda stage: stage.at_s)
        ]
        gaps = self.num_tokens - 1
        tpot_s = (self.last_s - self.first_s) / gaps if self.first_s and self.last_s and gaps > 0 else None
        return {**self.row(now_s), "tpot_s": tpot_s, "stages": stages}


class RequestLog:
    """The running sequences, and the last `limit` that have ended."""

    def __init__(self, limit: int = REQUESTS_KEPT) -> None:
        self.refusals: Counter[str] = Counter()  # failed sequences by the error's code
        self._live: dict[str, RequestRecord] = {}
        self._ended: deque[RequestRecord] = deque(maxlen=limit)
        self._count = 0

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)

    def begin(self, request: SequenceRequest, now_s: float, arrival: RequestArrival | None = None) -> RequestRecord:
        """A sequence runs from now until `end`."""
        self._count += 1
        started_s = arrival.arrived_s if arrival is not None else now_s
        counts = request.num_prompt_tokens, request.sampling.max_tokens
        record = RequestRecord(request.request_id, self._count, started_s, *counts, submitted_s=started_s)
        record.note("arrived", record.started_s)
        if arrival is not None:
            record.note("tokenised", arrival.tokenised_s, prompt_tokens=request.num_prompt_tokens)
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
        because = {"because": record.why} if record.why else {}
        record.note("ended", now_s, outcome=outcome, tokens=record.num_tokens, **because)
        if self._live.get(record.request_id) is record:
            del self._live[record.request_id]
        self._ended.append(record)

    def refuse(
        self,
        request: SequenceRequest,
        error: KvrelayError,
        outcome: str,
        now_s: float,
        arrival: RequestArrival | None = None,
    ) -> None:
        """A sequence that is refused before it starts."""
        record = self.begin(request, now_s, arrival)
        self.failed(record, error)
        self.end(record, outcome, now_s)

    # ---- queries

    def newest(self, limit: int) -> list[RequestRecord]:
        """Running sequences, then ended ones, each newest first."""
        live = sorted(self._live.values(), key=lambda record: -record.number)[:limit]
        return live + [record for record, _ in zip(reversed(self._ended), range(limit - len(live)), strict=False)]

    def find(self, request_id: str) -> list[RequestRecord]:
        """The sequence of this id, or all sequences of the HTTP request of this id."""
        return [
            record
            for record in self._all()
            if record.request_id == request_id or record.request_id.rpartition("-")[0] == request_id
        ]

    def num_transfers(self) -> Counter[tuple[str, str]]:
        """KV transfers in flight, by (prefill worker, decode worker)."""
        return Counter(
            (record.prefill, record.decode)
            for record in self._live.values()
            if record.is_transferring and record.prefill is not None and record.decode is not None
        )

    def _all(self) -> Iterator[RequestRecord]:
        yield from self._live.values()
        yield from self._ended
