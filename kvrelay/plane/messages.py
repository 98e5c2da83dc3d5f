"""Requests to workers and their answers: typed, versioned, msgpack, never pickle. What workers report: reports.py.

Every message is a frozen msgspec Struct with a short tag. Durations cross processes,
timestamps never do. Unknown fields of a newer minor version are ignored by msgspec.
"""

from collections.abc import Callable
from typing import Literal, Union

import msgspec

from kvrelay.plane.reports import (
    AssignedByOthers,
    Audited,
    KvEvents,
    KvSnapshot,
    LoadReport,
    Paired,
    PairsSeen,
    Status,
    WireMessage,
    WorkerInfo,
)

PROTOCOL_VERSION = 8
MAX_PRIORITY = 8  # of SequenceRequest.priority, either sign: each is a class in queues and metrics
DRAINED = "drained"  # Failed.code of a sequence that outlasted its worker's drain: no fault
PREEMPTED = "preempted"  # Failed.code of a sequence that its decode worker returns to prefill: no fault


class GrammarSpec(msgspec.Struct, frozen=True):
    """What an output's text must match: see kvrelay/grammar. Checked at the ingress.

    text: a JSON schema or a structural tag as JSON, else a regular expression or a Lark grammar.
    """

    kind: Literal["json_schema", "regex", "lark", "structural_tag"]
    text: str


class Thinking(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How reasoning stands in an output. A grammar binds what follows it.

    start, end: token ids of the markers around reasoning. is_open: the prompt ends inside reasoning.
    start_like, end_like: where a model may write a marker in other tokens: all that stand for each of the marker's.
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    is_open: bool = False
    budget: int | None = None  # most tokens of reasoning: then `end` is forced
    start_like: tuple[tuple[int, ...], ...] = ()
    end_like: tuple[tuple[int, ...], ...] = ()


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen. Validated at the ingress; engines trust it.

    `seed` is always set (drawn at the ingress when the client gave none): token i of the output
    depends on (seed, i) alone, so any worker can continue the stream.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: the sampled token's and the k most likely ones'
    prompt_logprobs: int | None = None  # the same for every prompt token but the first (echo)
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()  # none: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    grammar: GrammarSpec | None = None
    thinking: Thinking | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether what is drawn depends on the tokens before it by more than the model."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_constrained(self) -> bool:
        """Whether some tokens may not be drawn, whatever the model: see engine/execution/constraints.py."""
        has_budget = self.thinking is not None and self.thinking.budget is not None
        return self.grammar is not None or bool(self.allowed_token_ids or self.bad_words) or has_budget


class KvHints(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client knows of its prompt's future. Respected by every tier, within the tenant's quotas."""

    keep: bool = True  # False: this KV will not be reused
    priority: int = 0  # eviction priority of its blocks: higher stays longer
    pin_s: float = 0.0  # how long the prompt's blocks are pinned, from when they are full
    session: str = ""  # tenant included; routing policies may follow it, `EndPins` ends its pins; "": none
    pin_share: float | None = None  # of a worker's pool, that its tenant may pin; None: as every tenant


class Beams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A beam search; see engine/scheduling/beam.py.

    The other sampling parameters but max_tokens, min_tokens and stops have no effect.
    """

    width: int
    num_returned: int  # results, best first
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


class Group(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Several choices that fork from one prompt: its KV is computed once, held once, sent once.

    Choice k is what a single request with `seeds[k]` would return. When a group is continued on another worker,
    `emitted` has each choice's output so far; `ended` are the choices that need no more tokens.
    """

    seeds: tuple[int, ...] = ()
    emitted: list[list[int]] = []
    ended: tuple[int, ...] = ()
    beams: Beams | None = None  # then there are no seeds, and results come at the end

    @property
    def num_choices(self) -> int:
        return self.beams.num_returned if self.beams is not None else len(self.seeds)

    @property
    def num_sequences(self) -> int:
        """Sequences that run at once."""
        return self.beams.width if self.beams is not None else len(self.seeds) - len(self.ended)


class SequenceRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to compute, or a group of them. Token ids and hashes travel; text does not.

    `token_ids` is the prompt, followed, when a stream is continued on another worker, by the
    output so far; the first `num_prompt_tokens` are the prompt. `block_hashes` is the chain over `token_ids`,
    one for every `tokens_per_hash` whole tokens (0: for every block of the worker that gets it); `salt`
    is the tenant's. A worker with k times larger blocks identifies them by every k-th hash.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    block_hashes: list[bytes]
    sampling: Sampling
    salt: str = ""
    tokens_per_hash: int = 0
    traceparent: str = ""  # W3C trace context of the request's span; "": not traced
    hints: KvHints = KvHints()
    priority: int = 0  # queue priority, as in vLLM: a lower number is served earlier; not that of `hints`
    deadline_s: float | None = None
    """Seconds from arrival to the first token, at most; after that the request is refused."""
    ttft_target_s: float | None = None
    """Soft target, seconds from arrival to the first token. A request past its target yields to requests that can still
    meet theirs; none is refused."""
    tpot_target_s: float | None = None
    """Target for the mean time between two tokens, seconds: prefill chunks in the same batch are sized to keep it."""
    tenant: str = ""  # a digest; tenants share workers fairly
    weight: float = 1.0  # of its tenant: its share of the computing time, against that of the others
    num_prefill_returns: int = 0  # times that a decode worker has returned it to prefill
    group: Group | None = None  # then `token_ids` is the prompt alone

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_sequences(self) -> int:
        """Sequences that it runs in a worker's batch."""
        return 1 if self.group is None else self.group.num_sequences


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token's log-probability and the most likely alternatives, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []
    rank: int | None = None  # among all tokens, from 1; only those of prompts are counted


# ---- ingress -> worker


class Reserve(WireMessage, frozen=True, tag="reserve"):
    """Decode: reserve blocks for this sequence before its prefill starts."""

    request: SequenceRequest
    timeout_s: float  # longest wait in the queue for blocks
    prefill_tokens_per_s: float = 0.0  # of its prefill worker, to which it may be returned; 0: it may not be returned


class Prefill(WireMessage, frozen=True, tag="prefill"):
    """Prefill: compute the prompt, sample one token, announce the KV to the ticket's decode worker.

    Without a ticket only the one token is computed. `moves`: the id of a sequence that this one continues and that runs
    on the worker itself: it moves to the ticket's decode worker, and a worker that drains takes it, too.
    """

    request: SequenceRequest
    ticket: bytes | None = None
    moves: str = ""


class Generate(WireMessage, frozen=True, tag="generate"):
    """Compute the prompt here and decode it here (local prefill)."""

    request: SequenceRequest


class Abort(WireMessage, frozen=True, tag="abort"):
    """Free everything that this request holds, or one choice of a group. Idempotent; never answered."""

    request_id: str
    reason: str = "client"
    choice: int | None = None


class Ping(WireMessage, frozen=True, tag="ping"):
    """Answered by Pong at once."""


class Subscribe(WireMessage, frozen=True, tag="subscribe"):
    """From now on send KvEvents and LoadReport; first a KvSnapshot, or its first part."""


class StatusQuery(WireMessage, frozen=True, tag="status?"):
    """Answered by Status."""

    query_id: int


class CacheReset(WireMessage, frozen=True, tag="cache-reset"):
    """Drop every cached block that no sequence uses. Answered by Status."""

    query_id: int


class Prefetch(WireMessage, frozen=True, tag="prefetch"):
    """Load this prompt's blocks from stores into host memory and keep them for `hold_s`. Answered by Prefetched."""

    query_id: int
    request: SequenceRequest
    hold_s: float


class Audit(WireMessage, frozen=True, tag="audit"):
    """Report in which tier these blocks are now. Answered by Audited."""

    query_id: int
    hashes: list[bytes]


class EndPins(WireMessage, frozen=True, tag="end-pins"):
    """Ends the pins of requests with this `KvHints.session`; no more are made for it. Never answered."""

    session: str


SHARE_LOAD_S = 0.002
"""Shortest time between two Assigned, or two AssignedByOthers, of a sender: a decision's time, far below a step's."""


class Assigned(WireMessage, frozen=True, tag="assigned"):
    """The load that this ingress has assigned to the worker and that has not ended, counted from the routing decision
    on.

    Sent on change, if other ingresses are connected to the worker. Never answered; the worker passes the total on to
    the others.
    """

    tokens: int = 0  # of prompts, to be computed there
    prompts: int = 0  # not yet computed there
    sequences: int = 0
    blocks: int = 0  # of requests without a first token


class Pair(WireMessage, frozen=True, tag="pair"):
    """Prefill: check whether KV can travel to this decode worker, and how fast. Answered by Paired.

    The address is the one that the decode worker announced, never a client's.
    """

    worker_id: str
    epoch: str
    host: str
    kv_port: int
    is_probe: bool = False  # measure again


class SetRole(WireMessage, frozen=True, tag="set-role"):
    """Change the worker's role. What the new one does not take moves or ends within `drain_s`. Answered at once by
    Status: the facts of the change, or {"error": why}.
    """

    query_id: int
    role: str
    drain_s: float


# ---- worker -> ingress


class Welcome(WireMessage, frozen=True, tag="welcome"):
    """First message on every connection, from the worker."""

    protocol: int
    info: WorkerInfo


class Pong(WireMessage, frozen=True, tag="pong"):
    """The answer to Ping."""


class RoleNow(WireMessage, frozen=True, tag="role"):
    """The worker's role from now on, one of types.WORKER_ROLES. What it has of an earlier one is to move away."""

    role: str


class Reserved(WireMessage, frozen=True, tag="reserved"):
    """The blocks are reserved; `ticket` admits one transfer."""

    request_id: str
    ticket: bytes
    held_tokens: int  # of the prompt, already in this worker's cache
    waited_s: float = 0.0


class Refused(WireMessage, frozen=True, tag="refused"):
    """The request is refused; nothing is held here for it."""

    request_id: str
    reason: str  # "full" | "too_long" | "draining" | "duplicate" | "invalid" | "grammar" | "deadline"
    message: str = ""
    retry_after_s: float = 1.0


class Prefetched(WireMessage, frozen=True, tag="prefetched"):
    """In which tier the prompt's tokens are, in whole blocks from its start; the rest is cached nowhere."""

    query_id: int
    pool_tokens: int = 0
    host_tokens: int = 0
    coming_tokens: int = 0  # being loaded from a store into host memory
    problem: str = ""  # "full" | "invalid" | "draining" when nothing was done
    message: str = ""


class Timings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a worker spent the time until a first token; the parts add up to the request's time there."""

    queue_s: float = 0.0  # arrival to first scheduled
    compute_s: float = 0.0  # first scheduled to sampled
    num_chunks: int = 0


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """New tokens of one sequence, or of one choice. `position` is the output index of the first of them."""

    request_id: str
    position: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] = []
    finish_reason: str | None = None  # "stop" | "length" when these are the last
    stop_token: int | None = None  # the id that stopped it, when one did
    cached_tokens: int | None = None  # with a first token: prompt tokens not computed
    prompt_logprobs: list[TokenLogprob] = []  # with a first token: of prompt tokens 1..n-1
    timings: Timings | None = None  # with a first token
    choice: int = 0  # of a group
    num_left: int = 0  # choices that still run; a request is over with a finish reason and none left
    candidates: list[tuple[int, float]] = []  # of a beam search's first step, for the decode worker

    @property
    def ends_request(self) -> bool:
        return self.finish_reason is not None and not self.num_left


class Tokens(WireMessage, frozen=True, tag="tokens"):
    """All new tokens of one step for one ingress."""

    outputs: list[TokenOutput]


class Failed(WireMessage, frozen=True, tag="failed"):
    """The sequence failed; nothing is held here for it any more."""

    request_id: str
    code: str  # "transfer" | "lease" | "engine" | "grammar" | "aborted" | "preempted" | "drained"
    message: str
    retryable: bool


class Transferred(WireMessage, frozen=True, tag="transferred"):
    """Decode committed the prompt's KV. Figures are for explain and for the router."""

    request_id: str
    transport: str
    blocks: int
    num_bytes: int
    seconds: float  # spent reading and verifying
    exposed_s: float  # after the prefill had ended


# ---- prefill worker -> decode worker, with the last block


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What the decode worker needs besides the blocks to continue from the prefill's first token."""

    request_id: str
    num_tokens: int  # tokens whose KV was transferred
    position: int  # output index of the first of token_ids
    token_ids: list[int]  # of a group: each live choice's first token, in order
    candidates: list[tuple[int, float]] = []  # instead of tokens, for a beam search


ToWorker = Union[
    Reserve,
    Prefill,
    Generate,
    Abort,
    Ping,
    Subscribe,
    StatusQuery,
    CacheReset,
    Pair,
    Prefetch,
    EndPins,
    Audit,
    Assigned,
    SetRole,
]
FromWorker = Union[
    Welcome,
    Pong,
    RoleNow,
    Reserved,
    Refused,
    Tokens,
    Failed,
    Transferred,
    KvEvents,
    KvSnapshot,
    LoadReport,
    Status,
    Paired,
    PairsSeen,
    Prefetched,
    Audited,
    AssignedByOthers,
]

encode: Callable[[msgspec.Struct], bytes] = msgspec.msgpack.Encoder().encode
# these raise msgspec.DecodeError (ValidationError included) on anything unexpected
decode_to_worker: Callable[[bytes], ToWorker] = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker: Callable[[bytes], FromWorker] = msgspec.msgpack.Decoder(FromWorker).decode
decode_manifest: Callable[[bytes], Manifest] = msgspec.msgpack.Decoder(Manifest).decode
