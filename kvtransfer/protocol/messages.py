"""The messages between source (prefill) and target (decode): typed msgpack over kvrelay.plane.connection. Pure.

The source connects. `nonce` (of the ticket) names the transfer in every message. Nothing here comes from a client.
Durations only, never timestamps. A ticket is the decode worker's sealed, single-use permission to write KV into blocks
that it reserved. Both sides, the logs and the metrics use the same few reasons of refusals.

    source                          target
    Hello                      ->                 compares fingerprints, ranks the paths, connects the best
                               <-   HelloReply | Rejected
    Probe                      ->                 reads borrowed blocks over every path
                               <-   Probed
    Open, Announce...          ->                 reads regions as they are announced
                               <-   Progress      what has been read: the source announces no more than a window ahead
    Renew (every lease/3)      ->                 renews the leases
                               <-   Alive         renews the source's patience
    Commit                     ->                 waits for its reads, verifies
                               <-   ReadDone      where it has not verified every region
    Confirmed                  ->                 only if the source still holds those very blocks
                               <-   Committed
    Cancel                     ->   (any time)   <- Refusal
"""

import enum
import hashlib
import hmac
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Union

import msgspec

from kvrelay.errors import TransferError, TransferRefused
from kvrelay.kvtransfer.transports.topology import Topology
from kvrelay.plane.reports import KvPathLoad, PathReport
from kvrelay.types import Fingerprint, KvLayout

TRANSFER_PROTOCOL = 5
LEASE_S = 10.0  # blocks of a silent peer are freed after this time, on both sides
NONCE_BYTES = 16
_MAC_BYTES = hashlib.sha256().digest_size
_LABEL = b"kvrelay-ticket-v1\0"
_TRANSCRIPT_LABEL = b"kvrelay-transcript-v1\0"


class Reason(enum.StrEnum):
    """Why a transfer was refused. The first word of `TransferRefused.why`."""

    BAD_MAC = "bad_mac"  # not sealed by this cluster, or damaged
    UNKNOWN = "unknown"  # never granted here
    USED = "used"  # admitted one transfer already
    EXPIRED = "expired"  # the lease ended first
    STALE_EPOCH = "stale_epoch"  # another incarnation of the target granted it
    STALE_GENERATION = "stale_generation"  # a block has been re-used since
    FINGERPRINT = "fingerprint"  # another model, dtype or layout: the detail names the field
    OUT_OF_RANGE = "out_of_range"  # a block or layer that does not exist or was not granted
    INCOMPLETE = "incomplete"  # commit before every region had come
    CHECKSUM = "checksum"  # a region did not arrive as it left
    CANCELLED = "cancelled"  # one side gave up
    TRANSPORT = "transport"  # no way to move bytes that both sides have
    MALFORMED = "malformed"  # not a message of this protocol


REMEDIES: Mapping[Reason, str] = {
    Reason.BAD_MAC: "start every worker of the cluster with the same cluster.secret",
    Reason.FINGERPRINT: "start both workers with the same model, settings and versions of kvrelay",
    Reason.CHECKSUM: "set transfer.checks alike on both",
    Reason.TRANSPORT: "set transfer.transport to one that both have, or to auto",
    Reason.STALE_EPOCH: "the decode worker has restarted: nothing to do, the new one is paired anew",
    Reason.MALFORMED: "install the same version of kvrelay for both workers",
}


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """What the target granted. `target_blocks[i]` receives block `first_block + i` of the sequence.

    Blocks are the target's, of `layout.block_size` tokens; the source's may be of another size.
    """

    request_id: str
    target_worker: str
    target_epoch: str
    target_host: str
    target_port: int
    first_block: int  # index in the sequence of the first block that the target lacks
    num_blocks: int  # blocks of the prompt in all
    num_tokens: int  # tokens of the prompt
    layout: KvLayout  # of the target's pool
    target_blocks: list[int]
    generations: list[int]  # of target_blocks, at the time of the grant
    fingerprint: Fingerprint
    lease_s: float
    nonce: bytes


_to_ticket = msgspec.msgpack.Decoder(Ticket)
encode: Callable[[msgspec.Struct], bytes] = msgspec.msgpack.Encoder().encode


def refusal(request_id: str, reason: Reason, detail: str = "") -> TransferRefused:
    """A TransferRefused whose `why` starts with the reason."""
    return TransferRefused(request_id, f"{reason}: {detail}" if detail else str(reason))


def reason_of(error: TransferRefused) -> Reason | None:
    """The reason that `refusal` put in, or None."""
    word = error.why.partition(":")[0]
    return Reason(word) if word in Reason._value2member_map_ else None


def reason_word(error: TransferError) -> str:
    """The reason of a refusal, else the error's class: one word for metrics and spans."""
    reason = reason_of(error) if isinstance(error, TransferRefused) else None
    return str(reason or type(error).__name__)


def _mac(body: bytes, secret: bytes) -> bytes:
    return hmac.digest(secret, _LABEL + body, hashlib.sha256)


class Transcript:
    """What was said in one transfer, sealed at its end: both sides keep one and compare.

    TCP's own checksum is weak, and regions' checksums prove content, not where it was said to belong.
    """

    def __init__(self, secret: bytes, nonce: bytes) -> None:
        self._mac = hmac.new(secret, _TRANSCRIPT_LABEL + nonce, hashlib.sha256)

    def add(self, frame: bytes) -> None:
        """One announcement, as it goes over the wire."""
        self._mac.update(len(frame).to_bytes(4, "little") + frame)

    def seal(self, payload: bytes) -> bytes:
        """Over all announcements in order, and the payload of the commit."""
        mac = self._mac.copy()
        mac.update(payload)
        return mac.digest()


def seal(ticket: Ticket, secret: bytes) -> bytes:
    """The ticket as bytes that only holders of `secret` can make: MAC, then msgpack."""
    body = encode(ticket)
    return _mac(body, secret) + body


def incompatibility(ticket: Ticket) -> str | None:
    """What in it does not fit together, or None."""
    missing = ticket.num_blocks - ticket.first_block
    if not 0 <= ticket.first_block <= ticket.num_blocks:
        return "first_block is beyond num_blocks"
    if ticket.num_blocks != -(-ticket.num_tokens // ticket.layout.block_size):
        return f"{ticket.num_blocks} blocks are not {ticket.num_tokens} tokens"
    if len(ticket.target_blocks) != missing or len(ticket.generations) != missing:
        return f"{missing} blocks are missing but {len(ticket.target_blocks)} are granted"
    if len(set(ticket.target_blocks)) != missing:
        return "a block is granted twice"
    if min([ticket.first_block, *ticket.target_blocks]) < 0:
        return "a block index is negative"
    return None


def open_ticket(data: bytes, secret: bytes) -> Ticket:
    """The ticket inside `data`.

    Raises: TransferRefused: bad_mac (foreign, damaged or not a ticket), out_of_range (sealed
    by us but its numbers do not fit together).
    """
    mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
    if len(data) <= _MAC_BYTES or not hmac.compare_digest(mac, _mac(body, secret)):
        raise refusal("?", Reason.BAD_MAC, "the ticket was not sealed by this cluster")
    try:
        ticket = _to_ticket.decode(body)
    except msgspec.DecodeError as error:
        raise refusal("?", Reason.BAD_MAC, f"not a ticket of this version: {error}") from error
    if why := incompatibility(ticket):
        raise refusal(ticket.request_id, Reason.OUT_OF_RANGE, why)
    return ticket


# ---- messages


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all messages."""


class _OfTransfer(_Message, frozen=True):
    """`nonce`: the ticket's."""

    nonce: bytes


class Offer(msgspec.Struct, frozen=True):
    """One transport over which the source's pool can be read."""

    name: str
    descriptor: bytes


class Hello(_Message, frozen=True, tag="hello"):
    """First message of the source."""

    protocol: int
    worker_id: str
    epoch: str
    fingerprint: Fingerprint
    topology: Topology  # where the source is
    device: str
    layout: KvLayout  # of the source's pool
    checksums: str  # "xxh3" | "sum64" | "off": see checksums.py
    offers: list[Offer]


class Open(_OfTransfer, frozen=True, tag="open"):
    """Begin the transfer that this ticket admits."""

    request_id: str
    ticket: bytes


class Announce(_OfTransfer, frozen=True, tag="announce"):
    """These chunks are final in these layers. `checksums`: u64 little-endian, chunk by chunk, of each
    layer after layer, of those to be checked.
    """

    first_chunk: int  # counted from the sequence's first token
    chunks: list[int]  # where they lie in the source's pool: plans.End.numbers
    first_layer: int  # the model's number
    num_layers: int
    checksums: bytes = b""


class Probe(_Message, frozen=True, tag="probe"):
    """These probe blocks of the source may be read over every path. Answered by Probed."""

    probe_id: int
    block_ids: list[int]
    checksums: bytes  # as Announce's, of every layer; empty under checks "off"


class Commit(_OfTransfer, frozen=True, tag="commit"):
    """Everything has been announced; `payload` is for the decode worker. `seal`: Transcript's, of all of it."""

    payload: bytes
    seal: bytes


class Renew(_Message, frozen=True, tag="renew"):
    """The source still works on these."""

    nonces: list[bytes]


class Alive(_Message, frozen=True, tag="alive"):
    """Answer to Renew: the target lives."""


class Confirmed(_OfTransfer, frozen=True, tag="confirmed"):
    """The source held the announced blocks, unchanged, until after the last read."""


class Cancel(_OfTransfer, frozen=True, tag="cancel"):
    """The source gave up; its blocks may be re-used from now on."""

    reason: str


class HelloReply(_Message, frozen=True, tag="hello-reply"):
    """Accepted; the target reads over `transport`."""

    worker_id: str
    epoch: str
    transport: str
    why: str
    layout: KvLayout  # of the target's pool
    checks: str  # "full" | "sampled" | "off": which regions the source must hash


class Probed(_Message, frozen=True, tag="probed"):
    """What the paths measured, best first."""

    probe_id: int
    paths: list[PathReport]


class Progress(_OfTransfer, frozen=True, tag="progress"):
    """`num_bytes` more of this transfer have been read."""

    num_bytes: int


class Rejected(_Message, frozen=True, tag="rejected"):
    """Not accepted; the connection ends."""

    reason: str
    detail: str
    remedy: str = ""


class Refusal(_OfTransfer, frozen=True, tag="refusal"):
    """The transfer ended at the target, which will not commit it. `kind` names the error class."""

    kind: str
    why: str


class ReadDone(_OfTransfer, frozen=True, tag="read-done"):
    """Every region has been read, and what is checked is verified, which is not all."""


class Committed(_OfTransfer, frozen=True, tag="committed"):
    """The target's sequence owns the blocks."""

    transport: str  # the path that moved most of it
    num_bytes: int
    seconds: float


ToTarget = Union[Hello, Probe, Open, Announce, Commit, Renew, Confirmed, Cancel]
ToSource = Union[HelloReply, Probed, Alive, Progress, Rejected, Refusal, ReadDone, Committed]

# these raise msgspec.DecodeError (ValidationError included) on anything unexpected
decode_to_target: Callable[[bytes], ToTarget] = msgspec.msgpack.Decoder(ToTarget).decode
decode_to_source: Callable[[bytes], ToSource] = msgspec.msgpack.Decoder(ToSource).decode


# ---- counters


@dataclass(frozen=True, slots=True)
class TransferResult:
    """One committed transfer. On the source, `exposed_s` runs from commit() to its return."""

    transport: str  # the path that moved most of it
    num_blocks: int
    num_bytes: int
    seconds: float  # spent reading and verifying, summed over reads
    exposed_s: float  # commit received to committed: what the prefill's compute did not hide
    retries: int = 0  # reads that failed and went on over another path; counted by the target


def span_attributes(result: TransferResult) -> dict[str, str | int | float]:
    """A transfer that ended well, as attributes of its trace span."""
    return {
        "path": result.transport,
        "blocks": result.num_blocks,
        "bytes": result.num_bytes,
        "seconds": result.seconds,
        "exposed_s": result.exposed_s,
        "retries": result.retries,
    }


@dataclass(slots=True)
class TransferStats:
    """Counters since start, a record of 13 attributes. `transport` is the path used last."""

    transport: str = ""
    transfers: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    exposed_s: float = 0.0
    check_s: float = 0.0  # spent on checksums at this end, but for those computed while copying
    retries: int = 0
    refusals: int = 0
    refusals_by_reason: Counter[str] = field(default_factory=Counter)
    open_transfers: int = 0  # leases active
    expired_leases: int = 0
    quarantined_blocks: int = 0
    paths: dict[str, KvPathLoad] = field(default_factory=dict)

    def count(self, result: TransferResult) -> None:
        """Add one committed transfer."""
        self.transport = result.transport
        self.transfers += 1
        self.num_bytes += result.num_bytes
        self.seconds += result.seconds
        self.exposed_s += result.exposed_s

    def refuse(self, reason: str) -> None:
        """Add one transfer that was not committed."""
        self.refusals += 1
        self.refusals_by_reason[reason] += 1

    def path(self, name: str) -> KvPathLoad:
        """This path's counters, to add to."""
        return self.paths.setdefault(name, KvPathLoad(name))

    def plus(self, other: "TransferStats") -> "TransferStats":
        """Both, as one: a worker's two ends."""
        sums = {one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)[1:-1]}
        paths = {name: _joined(self.path(name), other.path(name)) for name in {**self.paths, **other.paths}}
        return TransferStats(other.transport or self.transport, **sums, paths=paths)

    def load_fields(self) -> dict[str, Any]:
        """LoadReport's fields about transfers."""
        return {
            "transport": self.transport,
            "kv_bytes": self.num_bytes,
            "kv_seconds": self.seconds,
            "kv_refusals": self.refusals,
            "kv_refused": dict(self.refusals_by_reason),
            "kv_check_s": self.check_s,
            "kv_leases": self.open_transfers,
            "kv_expired_leases": self.expired_leases,
            "kv_paths": list(self.paths.values()),
        }


def _joined(one: KvPathLoad, other: KvPathLoad) -> KvPathLoad:
    columns = zip(msgspec.structs.astuple(one)[1:], msgspec.structs.astuple(other)[1:], strict=True)
    return KvPathLoad(one.path, *map(sum, columns))
