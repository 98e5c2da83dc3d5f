"""What workers report of themselves: identity, paths to other workers, load, and which blocks they have.

Typed msgpack, as the requests and answers in messages.py, which travel over the same connections.
"""

import msgspec

from kvrelay.types import Fingerprint

NOWHERE, BELOW_POOL, IN_POOL, CHANGING = range(4)  # of Audited.tiers


class WireMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all messages of the request and event planes."""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's identity and capacity, sent when a peer connects."""

    worker_id: str
    role: str  # now: "prefill" | "decode" | "both" | "changing"
    epoch: str  # new at every start
    host: str
    port: int
    node_id: str
    model: str  # served model name
    fingerprint: Fingerprint
    block_size: int
    num_blocks: int
    max_model_len: int
    max_running: int
    kv_bytes_per_token: int
    device: str
    transports: list[str]
    kv_port: int = 0  # decode: where prefill workers connect, at `host`


class PathReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One transfer path between two workers, as probed and as measured since."""

    path: str
    why: str  # the reason for its rank
    is_chosen: bool = False
    bytes_per_s: float = 0.0  # measured; 0: not yet
    latency_s: float = 0.0  # of one block; 0: not measured
    problem: str = ""  # why it cannot be used now


class PairReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether KV can travel from one prefill worker to one decode worker, and over which paths."""

    source: str
    target: str
    target_epoch: str
    ok: bool
    reason: str = ""  # a kvtransfer.tickets.Reason, "lost" or "timeout" when not ok
    detail: str = ""  # the field that differs, or what went wrong
    remedy: str = ""  # what to do about it
    paths: list[PathReport] = []  # best first


class Paired(WireMessage, frozen=True, tag="paired"):
    """Prefill: the answer to Pair."""

    report: PairReport


class PairsSeen(WireMessage, frozen=True, tag="pairs-seen"):
    """Decode: recent speed of its paths from each connected prefill worker. Sent on change."""

    reports: list[PairReport]


class KvPathLoad(msgspec.Struct):
    """What one path has carried since the worker's start, counted where it is read."""

    path: str
    num_bytes: int = 0  # of reads that ended well
    seconds: float = 0.0  # reading and verifying, summed over those
    exposed_s: float = 0.0  # of transfers that mostly used this path
    check_s: float = 0.0  # of `seconds`, spent on checksums but for those computed while copying
    retries: int = 0  # reads that failed here and continued over another path


class TierLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tier below a worker's pool: its content now, and counters since the worker's start."""

    tier: str  # "host", "disk", or the remote store's kind; "pool": see ResidentAudit
    num_blocks: int = 0
    num_bytes: int = 0  # as stored
    capacity_bytes: int = 0  # 0: not limited here
    loaded_blocks: int = 0  # towards the pool
    stored_blocks: int = 0  # from above
    load_s: float = 0.0
    store_s: float = 0.0
    rejected_blocks: int = 0  # not admitted, or no room
    evicted_blocks: int = 0
    corrupt_blocks: int = 0  # found wrong and discarded
    failures: int = 0


class LoadReport(WireMessage, frozen=True, tag="load"):
    """A worker's load now. Sent after a step when something changed, at most every 50 ms, and each heartbeat."""

    seq: int
    running: int = 0
    waiting: int = 0
    receiving: int = 0
    queued_tokens: int = 0  # prompt tokens not yet computed
    overdue: int = 0  # queued prompts past their TTFT target, which yield to prompts that can still meet theirs
    overdue_tokens: int = 0  # uncached tokens of the overdue prompts
    output_tokens: float = 0.0  # mean of the outputs that ended here last; 0: not known
    free_blocks: int = 0  # free, or cached and evictable (not pinned)
    cached_blocks: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    leased_blocks: int = 0
    quarantined_blocks: int = 0
    probe_blocks: int = 0  # used by a probe of the KV paths
    step_s: float = 0.0  # moving average of a step
    prefill_tokens_per_s: float = 0.0  # measured
    decode_step_s: float = 0.0
    preemptions: int = 0
    preempted: dict[str, int] = {}  # of those, by mode: swap, recompute, return-to-prefill
    swapped: int = 0  # sequences whose KV is in host memory now
    swapped_blocks: int = 0  # of theirs
    swapped_bytes: int = 0
    swap_out_s: float = 0.0  # copying out, since the start
    swap_in_s: float = 0.0
    swap_corrupt_blocks: int = 0  # found corrupt at swap-in
    recomputed_tokens: int = 0  # dropped with pre-empted sequences
    transport: str = ""
    kv_bytes: int = 0  # moved so far
    kv_seconds: float = 0.0
    kv_refusals: int = 0
    kv_refused: dict[str, int] = {}  # of those, by reason
    kv_check_s: float = 0.0  # as above, at this end
    kv_leases: int = 0  # transfers open now
    kv_expired_leases: int = 0
    kv_paths: list[KvPathLoad] = []
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    tier_hit_tokens: int = 0  # of the hits, brought up from below the pool
    fetching: int = 0  # queued sequences that wait for blocks from a store
    waiting_by_priority: dict[int, int] = {}
    waiting_tenants: int = 0  # tenants with queued sequences
    deadline_refusals: int = 0
    displaced: int = 0  # sequences that a full queue dropped for another tenant's
    tenant_tokens: dict[str, int] = {}  # computed so far, by tenant; of those without an entry: `other_tenant_tokens`
    other_tenant_tokens: int = 0
    tiers: list[TierLoad] = []
    reserving: int = 0  # of `waiting`, queued for a reservation
    held: int = 0  # prefilled; their blocks stay until the decode worker has read them
    pinned_blocks: int = 0  # of `cached` and `used`
    steps: int = 0  # computed since the start
    batch_sequences: int = 0  # in the last step
    batch_tokens: int = 0
    cascade_saved_tokens: int = 0  # read once for several decode rows that share them, in a layer; since the start
    drafted_tokens: int = 0  # verified after sequences' next tokens
    accepted_tokens: int = 0  # of those, accepted
    model_drafted_tokens: int = 0  # of the drafted tokens, by the draft model; the others by prompt lookup
    model_accepted_tokens: int = 0
    is_draining: bool = False  # accepts no new sequences


class KvEvents(WireMessage, frozen=True, tag="kv"):
    """Blocks stored and removed since `seq - 1`, in any tier. After a gap in `seq` the receiver asks for a snapshot."""

    seq: int
    stored: list[bytes] = []
    removed: list[bytes] = []
    lowered: list[bytes] = []  # from now on only below the worker's pool
    raised: list[bytes] = []  # in its pool again


class KvSnapshot(WireMessage, frozen=True, tag="kv-snapshot"):
    """Everything cached as of `seq`, or a part of it. Parts come in order, with other messages in between."""

    seq: int
    hashes: list[bytes]
    lowered: list[bytes] = []  # of those, the blocks that are only below the worker's pool
    part: int = 0  # 0 begins a snapshot, and discards one that is incomplete
    is_last: bool = True


class Audited(WireMessage, frozen=True, tag="audited"):
    """Tiers of the blocks of an Audit, as of the event `seq`, which was sent before this."""

    query_id: int
    seq: int
    tiers: list[int]  # for each: NOWHERE, BELOW_POOL, IN_POOL; CHANGING: an event about it follows


class AssignedByOthers(WireMessage, frozen=True, tag="assigned-by-others", kw_only=False):
    """The sum of what all other ingresses assigned here; see Assigned."""

    num_others: int  # connected; with none, no Assigned is needed
    is_complete: bool  # each of them has reported
    tokens: int = 0
    prompts: int = 0
    sequences: int = 0
    blocks: int = 0


class Status(WireMessage, frozen=True, tag="status"):
    """A worker's state, for `kvrelay status`."""

    query_id: int
    json: bytes
