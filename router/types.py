"""What goes into a routing decision and what comes out: frozen records, no behaviour beyond arithmetic.

Never imports torch, Ray, sockets, a clock or a random source.
"""

import enum
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvrelay.router.objectives import Prediction, SloRequirement, SloVerdict

Path = Literal["disaggregated", "local", "prefill_only"]
RefusalReason = Literal["no_decode_worker", "no_prefill_worker", "full", "too_long", "incompatible", "slo"]

TERM_NAMES = (
    "prefill_compute",  # the uncached prompt tokens, at the computing worker's speed
    "prefill_queue",  # the prompt tokens ahead of them there
    "prefill_pressure",  # harm to those who queue behind
    "prefill_load",  # tokens from the worker's lower tiers or the cluster's store, at their bandwidth
    "handoff",  # reserve round trip and hand-over to another worker
    "transfer",  # the part of the KV transfer that prefill does not hide
    "decode_load",  # sequences already on the decode worker
    "decode_memory",  # share of its free blocks that the request takes
    "decode_wait",  # predicted wait for blocks that are not free yet
    "stall",  # harm that a prefill on the decode worker does to its running sequences
)
"""Every term of the common cost, in seconds. Which of them are seconds of the request's own TTFT: see TTFT_TERMS."""

TTFT_TERMS = ("prefill_compute", "prefill_queue", "prefill_load", "handoff", "decode_wait")


class IndexState(enum.StrEnum):
    """How far the index of one worker's cached blocks can be trusted."""

    EXACT = "exact"  # snapshot and every event since
    DEGRADED = "degraded"  # may lack blocks; what it claims is still announced by the worker
    STALE = "stale"  # an event is missing, or no snapshot yet: never gives a hit
    APPROXIMATE = "approximate"  # it tells nothing: what this router saw computed there, for a time


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What the router may know of a sequence: no token ids, no text.

    `block_hashes` is the chain over its `num_tokens` tokens, one hash for every `tokens_per_hash` of the router's.
    `max_tokens` bounds the output that may follow. `excluded` are workers not to be tried (again).
    `force` overrides where the prompt is computed: "local" on the decode worker, "remote" on a prefill worker.
    """

    request_id: str
    block_hashes: tuple[bytes, ...]
    num_tokens: int
    max_tokens: int
    needs_decode: bool = True
    excluded: frozenset[str] = frozenset()
    force: Literal["local", "remote"] | None = None
    width: int = 1  # sequences that it will decode as: of a group, its members, which share the prompt
    companions: int = 0  # sequences of other requests that come with it and will decode beside it
    slo: SloRequirement | None = None  # None: admitted whatever is predicted
    session: str = ""  # whose requests follow each other; "": none
    tenant: str = ""
    priority: int = 0  # lower numbers are served earlier
    may_wait: bool = False  # at the router, while its first token will be late in any case: see deferral.py


class Candidate(NamedTuple):
    """One way to serve a request: rows of the prefill and the decode side; None: there is none (local, or prefill only).

    `score`: the less, the better. `parts`: of the policy's `term_names`, in that order.
    """

    prefill: int | None
    decode: int | None
    score: float
    parts: tuple[float, ...]

    @property
    def path(self) -> Path:
        return "prefill_only" if self.decode is None else "local" if self.prefill is None else "disaggregated"


class CandidateScore(NamedTuple):
    """One way that was considered, as the policy sees it: the less the score, the better."""

    prefill: str | None
    decode: str | None
    path: Path
    score: float
    names: tuple[str, ...]  # of the policy's terms
    parts: tuple[float, ...]  # their values

    @property
    def terms(self) -> dict[str, float]:
        return dict(zip(self.names, self.parts, strict=True))


class Ranking(NamedTuple):
    """What a policy answered, best first, with the names that its rows and its terms stand for."""

    candidates: tuple[Candidate, ...]
    prefills: tuple[str, ...]
    decodes: tuple[str, ...]
    term_names: tuple[str, ...]

    def workers(self, candidate: Candidate) -> tuple[str | None, str | None]:
        """(prefill worker, decode worker)."""
        return (
            None if candidate.prefill is None else self.prefills[candidate.prefill],
            None if candidate.decode is None else self.decodes[candidate.decode],
        )

    def scores(self) -> tuple[CandidateScore, ...]:
        return tuple(
            CandidateScore(*self.workers(candidate), candidate.path, candidate.score, self.term_names, candidate.parts)
            for candidate in self.candidates
        )


@dataclass(frozen=True, slots=True)
class Regret:
    """What the choice gave away of the best overlap among all workers that could compute the prompt."""

    worker: str  # that holds the most of it, or will; the chosen one if none holds more
    tokens: int  # that the chosen one holds less
    seconds: float  # to compute those there


@dataclass(frozen=True, slots=True)
class IncompatiblePair:
    """A pair that was not considered, since no KV can travel between the two."""

    prefill: str
    decode: str
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Where the request goes, and why. Its load is counted from now until `Router.on_end`.

    `prefill` is None for the local path, `decode` is None for prefill_only. `terms` are of the common cost, whatever the
    policy; `score` and `policy_terms` are the policy's own, as are the `candidates`: the ways that it ranked, best first.
    """

    request_id: str
    prefill: str | None
    decode: str | None
    path: Path
    predicted_ttft_s: float
    cached_tokens_prefill: int  # of the prompt, expected in the computing worker's cache
    loaded_tokens_prefill: int  # of the prompt, that it is expected to load from lower tiers or the cluster's store
    cached_tokens_decode: int  # of the prompt, held by the decode worker: not transferred
    terms: dict[str, float]
    policy: str
    score: float
    policy_terms: dict[str, float]
    regret: Regret
    ranking: Ranking
    incompatible_pairs: tuple[IncompatiblePair, ...] = ()
    forecast: Prediction | None = None  # where SLOs are configured
    verdict: SloVerdict | None = None  # for a request with an SLO
    tpot_target_s: float | None = None
    """Between two tokens: where it decodes, prompts are computed in pieces that keep to it."""
    ttft_target_s: float | None = None
    """To the first token, from now on: in a worker's line who cannot have it gives way to who can."""

    @property
    def candidates(self) -> tuple[CandidateScore, ...]:
        return self.ranking.scores()


@dataclass(frozen=True, slots=True)
class Deferred:
    """It waits at the router until `Router.take_ready` names it: its first token will be late in any case. See deferral.py.

    Nothing is counted for it, and no worker keeps anything for it.
    """

    predicted_ttft_s: float  # had it gone at once


@dataclass(frozen=True, slots=True)
class Refusal:
    """No worker can take the request. Nothing is counted for it."""

    reason: RefusalReason
    message: str
    retry_after_s: float
    verdict: SloVerdict | None = None  # of reason "slo"


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker's load as the cost sees it: last report and our own assignments together.

    Rates are 0 while unmeasured. `turn` grows with each assignment: the tie-breaker.
    """

    worker_id: str
    node_id: str
    max_model_len: int
    num_blocks: int
    block_size: int
    kv_bytes_per_token: int
    prefill_tokens_per_s: float
    decode_step_s: float
    kv_bytes_per_s: float
    queued_tokens: int  # prompt tokens not yet computed
    queued_requests: int  # prompts not yet computed
    sequences: int  # running, waiting or receiving
    waiting: int  # of those, in line
    free_blocks: int
    turn: int


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as this router sees it; `kvrelay status --json` shows it."""

    worker_id: str
    role: str
    epoch: str
    index_state: IndexState
    indexed_blocks: int
    assigned_requests: int  # by this router, not ended; a group is one
    assigned_tokens: int  # by this router, not yet computed
    reported_at_s: float | None  # on the caller's clock; None before the first report
    load: WorkerLoad
