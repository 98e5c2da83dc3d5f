"""Messages between source (prefill) and target (decode): typed msgpack over kvrelay.plane.connection.

The source connects. `nonce` (of the ticket) names the transfer in every message. Nothing here
comes from a client. Durations only, never timestamps.

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
                               <-   ReadDone
    Confirmed                  ->                 only if the source still holds those very blocks
                               <-   Committed
    Cancel                     ->   (any time)
                               <-   Refusal       (any time)
"""

from typing import Union

import msgspec

from kvrelay.kvtransfer.paths.topology import Topology
from kvrelay.kvtransfer.protocol.tickets import PathReport
from kvrelay.types import Fingerprint, KvLayout


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all messages."""


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


class Open(_Message, frozen=True, tag="open"):
    """Begin the transfer that this ticket admits."""

    nonce: bytes
    request_id: str
    ticket: bytes


class Announce(_Message, frozen=True, tag="announce"):
    """These chunks are final in these layers. `checksums`: u64 little-endian, layer-major, of those to be checked."""

    nonce: bytes
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


class Commit(_Message, frozen=True, tag="commit"):
    """Everything has been announced; `payload` is for the decode worker. `seal`: Transcript's, of all of it."""

    nonce: bytes
    payload: bytes
    seal: bytes


class Renew(_Message, frozen=True, tag="renew"):
    """The source still works on these."""

    nonces: list[bytes]


class Alive(_Message, frozen=True, tag="alive"):
    """Answer to Renew: the target lives."""


class Confirmed(_Message, frozen=True, tag="confirmed"):
    """The source held the announced blocks, unchanged, until after the last read."""

    nonce: bytes


class Cancel(_Message, frozen=True, tag="cancel"):
    """The source gave up; its blocks may be re-used from now on."""

    nonce: bytes
    reason: str


class HelloReply(_Message, frozen=True, tag="hello-reply"):
    """Accepted; the target reads over `transport`."""

    worker_id: str
    epoch: str
    transport: str
    why: str
    layout: KvLayout  # of the target's pool
    checks: str  # "full" | "sampled" | "off": which regions the source must hash
    sampled_share: float = 1.0


class Probed(_Message, frozen=True, tag="probed"):
    """What the paths measured, best first."""

    probe_id: int
    paths: list[PathReport]


class Progress(_Message, frozen=True, tag="progress"):
    """`num_bytes` more of this transfer have been read."""

    nonce: bytes
    num_bytes: int


class Rejected(_Message, frozen=True, tag="rejected"):
    """Not accepted; the connection ends."""

    reason: str
    detail: str
    remedy: str = ""


class Refusal(_Message, frozen=True, tag="refusal"):
    """The transfer ended at the target, which will not commit it. `kind` names the error class."""

    nonce: bytes
    kind: str
    why: str


class ReadDone(_Message, frozen=True, tag="read-done"):
    """Every region has been read and verified."""

    nonce: bytes


class Committed(_Message, frozen=True, tag="committed"):
    """The target's sequence owns the blocks."""

    nonce: bytes
    transport: str  # the path that moved most of it
    num_bytes: int
    seconds: float


ToTarget = Union[Hello, Probe, Open, Announce, Commit, Renew, Confirmed, Cancel]
ToSource = Union[HelloReply, Probed, Alive, Progress, Rejected, Refusal, ReadDone, Committed]

_encoder = msgspec.msgpack.Encoder()
_to_target = msgspec.msgpack.Decoder(ToTarget)
_to_source = msgspec.msgpack.Decoder(ToSource)


def encode(message: ToTarget | ToSource) -> bytes:
    """One message as msgpack."""
    return _encoder.encode(message)


def decode_to_target(frame: bytes) -> ToTarget:
    """Raises msgspec.DecodeError (ValidationError included) on anything unexpected."""
    message: ToTarget = _to_target.decode(frame)
    return message


def decode_to_source(frame: bytes) -> ToSource:
    """Raises msgspec.DecodeError (ValidationError included) on anything unexpected."""
    message: ToSource = _to_source.decode(frame)
    return message
