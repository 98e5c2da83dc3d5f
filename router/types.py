"""Inputs and outputs of a routing decision, service-level objectives of requests, and predictions of the latency they
will see: frozen records, no behaviour beyond arithmetic.

Never imports torch, Ray, sockets, a clock or a random source.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvrelay.types import ITL_SHARE

Path = Literal["disaggregated", "local", "prefill_only"]
OnMiss = Literal["refuse", "queue"]
VerdictKind = Literal["admitted", "degraded", "probe", "queued", "refused"]
RefusalReason = Literal["no_decode_worker", "no_prefill_worker", "full", "too_long", "incompatible", "slo"]

TERM_NAMES = (
    "prefill_compute",  # uncached prompt tokens, at the computing worker's prefill speed
    "prefill_queue",  # prompt tokens queued ahead of them there
    "prefill_pressure",  # harm to requests that queue behind
    "prefill_load",  # tokens from the worker's lower tiers or the cluster's store, at their bandwidth
    "handoff",  # reservation round trip and hand-over to another worker
    "transfer",  # the part of the KV transfer that prefill does not hide
    "decode_load",  # sequences already on the decode worker
    "decode_memory",  # share of its free blocks that the request takes
    "decode_wait",  # predicted wait for free blocks
    "stall",  # harm of a prefill on the decode worker to its running sequences
)
"""Every term of the common cost, in seconds. TTFT_TERMS are part of the request's own TTFT."""

TTFT_TERMS = ("prefill_compute", "prefill_queue", "prefill_load", "handoff", "decode_wait")


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted latency of one request on its workers. None: unknown (an unmeasured worker), or not applicable."""

    ttft_s: float | None
    tpot_s: float | None
    ttft_factor: float  # margin: observed over predicted TTFT stays below it with the configured confidence
    tpot_factor: float
    queue_s: float  # part of the TTFT: prompts ahead
    batch: float  # sequences expected on the decode worker when the prefill ends, this one included
    crowded_tpot_s: float | None = None  # another request's TPOT target there that this one would break
    is_ttft_stale: bool = False  # nothing was learned of the computing worker for a while
    is_tpot_stale: bool = False  # nothing was learned of the decode worker for a while
    raw_ttft_s: float = 0.0  # the model's, without the worker's bias
    raw_tpot_s: float = 0.0
    own_sequences: int = 1  # of the batch, those of this request and its companions
    bound_factor: float = 1.0  # margin: observed TPOT over `tpot_bound_s`
    excess_s: float = 0.0  # of its own prompt's time, what is beyond twice that of a mean prompt

    @property
    def safe_ttft_s(self) -> float:
        """With the margin; 0 if unknown."""
        return (self.ttft_s or 0.0) * self.ttft_factor

    def safe_tpot_s(self, target_s: float) -> float:
        """With the margin, of a request with this target."""
        return min((self.tpot_s or 0.0) * self.tpot_factor, tpot_bound_s(self.raw_tpot_s, target_s) * self.bound_factor)

    @property
    def idle_ttft_s(self) -> float:
        """With the margin, with an empty queue."""
        return self.safe_ttft_s * max(0.0, 1.0 - self.queue_s / self.raw_ttft_s) if self.raw_ttft_s else 0.0


BATCH_RISE = 2.0
LONG_PROMPT = 2.0
"""From how many times a mean prompt's uncached tokens on a prompt is long."""


def tpot_bound_s(raw_s: float, target_s: float) -> float:
    """The most seconds per token of a request with this target on a worker whose decode steps take `raw_s`.

    Workers hold steps with prompts to a part of the tightest target there. A batch may rise to `BATCH_RISE` times
    what was predicted, which costs a target that is not far above the decode step.
    """
    return max(BATCH_RISE * raw_s, ITL_SHARE * target_s)


@dataclass(frozen=True, slots=True)
class SloTarget:
    """A service class: longest TTFT, and longest time per token after it, in seconds. None: no target."""

    name: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    priority: int | None = None  # of its requests, in the workers' queues; None: the request's own


@dataclass(frozen=True, slots=True)
class SloRequirement:
    """A request's service class, then those that it may degrade to; and what happens if all are missed."""

    targets: tuple[SloTarget, ...]
    on_miss: OnMiss = "refuse"


@dataclass(frozen=True, slots=True)
class SloVerdict:
    """The decision under an SLO. `target` is the accepted target; None: none."""

    kind: VerdictKind
    wanted: SloTarget
    target: SloTarget | None
    prediction: Prediction
    missed: tuple[str, ...] = ()  # of the wanted target: "ttft", "tpot", "others" (the target of another request)
    retry_after_s: float = 0.0
    is_hopeless: bool = False  # idle workers would not meet it either
    rejected_candidates: tuple[tuple[tuple[str | None, str | None], "SloVerdict"], ...] = ()
    """Other candidates that were evaluated: ((prefill worker, decode worker), the verdict on it)."""


class IndexState(enum.StrEnum):
    """How far the prefix index of one worker can be trusted."""

    EXACT = "exact"  # snapshot and every event since
    DEGRADED = "degraded"  # may lack blocks; what it lists was announced
    STALE = "stale"  # an event is missing, or no snapshot yet: never gives a hit


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What the router knows of a request: no token ids, no text.

    `block_hashes` is the chain over its `num_tokens` tokens, one hash for every `tokens_per_hash` of the router's.
    `max_tokens` bounds the output. `excluded` are workers that must not be chosen (again). `force` sets where the
    prompt is computed: "local" on the decode worker, "remote" on a prefill worker.
    """

    request_id: str
    block_hashes: tuple[bytes, ...]
    num_tokens: int
    max_tokens: int
    needs_decode: bool = True
    excluded: frozenset[str] = frozenset()
    force: Literal["local", "remote"] | None = None
    width: int = 1  # sequences that it will decode as: a group's members, which share the prompt
    companions: int = 0  # sequences of other requests that arrive with it and will decode beside it
    slo: SloRequirement | None = None  # None: always admitted
    session: str = ""  # requests of a session follow each other; "": none
    tenant: str = ""
    weight: float = 1.0  # of its tenant, in fair shares
    priority: int = 0  # lower numbers are served earlier
    source: str = ""  # has the KV and sends it: only a decode worker is chosen, and nothing is computed; "": none
    is_new: bool = False  # not admitted before: it may be refused because too many queue
    may_wait: bool = False  # at the router, behind others: see deferral.py


class Candidate(NamedTuple):
    """One placement of a request: a row of the prefill and a row of the decode table. None: local, or prefill only.

    `score`: lower is better. `parts`: the values of the policy's `term_names`.
    """

    prefill: int | None
    decode: int | None
    score: float
    parts: tuple[float, ...]


class CandidateScore(NamedTuple):
    """One candidate with its workers and score; lower is better."""

    prefill: str | None
    decode: str | None
    path: Path
    score: float
    names: tuple[str, ...]  # the policy's terms
    parts: tuple[float, ...]  # their values

    @property
    def terms(self) -> dict[str, float]:
        return dict(zip(self.names, self.parts, strict=True))


class Ranking(NamedTuple):
    """A policy's candidates, best first, with the names of their rows and terms."""

    candidates: tuple[Candidate, ...]
    prefills: tuple[str, ...]
    decodes: tuple[str, ...]
    term_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Regret:
    """How much prefix overlap the choice gave up against the best among all workers that could compute the prompt."""

    worker: str  # that holds the most of it, or is expected to; the chosen one if none holds more
    tokens: int  # that the chosen one holds less
    seconds: float  # to compute those there


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen workers, and why. The request counts as their load until `Router.on_end`.

    `prefill` is None for the local path, `decode` is None for prefill_only. `terms` are of the common cost, whatever
    the policy; `score` and `policy_terms` are the policy's own, as is the `ranking`.
    """

    request_id: str
    prefill: str | None
    decode: str | None
    path: Path
    predicted_ttft_s: float
    cached_tokens_prefill: int  # of the prompt, expected in the computing worker's pool
    loaded_tokens_prefill: int  # of the prompt, that it is expected to load from lower tiers or the cluster's store
    cached_tokens_decode: int  # of the prompt, held by the decode worker: not transferred
    terms: dict[str, float]
    policy: str
    score: float
    policy_terms: dict[str, float]
    regret: Regret
    ranking: Ranking
    incompatible_pairs: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """(prefill, decode) pairs that were not considered, because no KV can be transferred between the two; and why."""
    forecast: Prediction | None = None  # where SLOs are configured
    verdict: SloVerdict | None = None  # for a request with an SLO
    tpot_target_s: float | None = None
    """Target for the mean time between two tokens: prefill chunks beside the request are sized to keep it."""
    ttft_target_s: float | None = None
    """Soft TTFT target, from now on. A request past its target yields to requests that can still meet theirs."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """The request waits at the router until `Router.take_ready` returns it: it will miss its TTFT target in any case,
    or others have waited for long. See deferral.py.

    It counts as no worker's load, and no worker reserves anything for it.
    """

    predicted_ttft_s: float  # if it were placed now
    longest_s: float  # ask again after so long, to be refused


@dataclass(frozen=True, slots=True)
class RoutingRefusal:
    """No worker can take the request. It counts as no load."""

    reason: RefusalReason
    message: str
    retry_after_s: float
    verdict: SloVerdict | None = None  # for reason "slo"


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as this router sees it; `kvrelay status --json` shows it."""

    worker_id: str
    role: str
    epoch: str
    index_state: IndexState
    indexed_blocks: int
    assigned_requests: int  # by this router, not ended; a group counts once
    assigned_tokens: int  # by this router, not computed yet
    reported_at_s: float | None  # on the caller's clock; None before the first report
    load: dict[str, str | float]  # as the cost model sees it: last report and our own assignments together
