"""Tickets: the decode worker's sealed, single-use permission to land KV in blocks that it reserved.

Pure: no clock, no sockets, no random source. Owns the reasons of every refusal, so that both
sides, the logs and the metrics use the same few words.
"""

import enum
import hashlib
import hmac
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from kvrelay.errors import TransferError, TransferRefused
from kvrelay.types import Fingerprint, KvLayout

TRANSFER_PROTOCOL = 2
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


REMEDIES: Mapping[Reason, str] = MappingProxyType(
    {
        Reason.BAD_MAC: "start every worker of the cluster with the same cluster.secret",
        Reason.FINGERPRINT: "start both workers with the same model, settings and versions of kvrelay",
        Reason.CHECKSUM: "set transfer.checks alike on both",
        Reason.TRANSPORT: "set transfer.transport to one that both have, or to auto",
        Reason.STALE_EPOCH: "the decode worker has restarted: nothing to do, the new one is paired anew",
        Reason.MALFORMED: "install the same version of kvrelay for both workers",
    }
)


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


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ticket)


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
    body = _encoder.encode(ticket)
    return _mac(body, secret) + body


def _incompatibility(ticket: Ticket) -> str | None:
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
        ticket = _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise refusal("?", Reason.BAD_MAC, f"not a ticket of this version: {error}") from error
    if why := _incompatibility(ticket):
        raise refusal(ticket.request_id, Reason.OUT_OF_RANGE, why)
    return ticket
