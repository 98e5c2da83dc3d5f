"""Messages of the slab protocol: reading and writing blocks by key between two processes. Typed msgpack.

A *slab* is memory that holds many blocks. Block data never travels in these messages: the process that owns the
memory to be written reads it from the other's slab over a transport. A get is an AcquireLease (the server holds the
blocks for a lease and returns their offsets), a read by the client, and a ReleaseLease. A put is a PutBlocks: the
client keeps its blocks unchanged until the answer, while the server reads them. Every request has a number, which its
answer repeats. Times are durations.

    client                       server
    SlabHello              ->                          names the transports over which the client's slab can be read
                           <-    SlabWelcome | SlabRejected
    AcquireLease           ->    LeaseGranted          the client reads and verifies
    ReleaseLease           ->    (no answer)
    PutBlocks              ->    (the server reads and verifies)   Stored
    AnnounceBlocks         ->    (no answer)
    Exists, Forget, Pin, FindHolders, Describe -> Stored | Done | HolderAddresses | Description

Keys are opaque: clients derive them from a block's hash and everything its bytes depend on (model, dtype, codec).
"""

from collections.abc import Callable
from typing import Union

import msgspec

from kvrelay.kvtransfer.protocol.messages import Offer
from kvrelay.kvtransfer.transports.topology import Topology

SLAB_PROTOCOL = 1
MISSING = -1  # as an offset: the server does not have the block


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all messages."""


class _Numbered(_Message, frozen=True):
    """A request, or the answer that repeats its number."""

    number: int


class SlabOffer(msgspec.Struct, frozen=True):
    """A slab, and the transports over which it can be read."""

    num_bytes: int
    offers: list[Offer]


class SlabHello(_Message, frozen=True, tag="slab-hello"):
    """First message of a client."""

    protocol: int
    peer_id: str
    block_bytes: int  # the largest block that it will request or offer
    topology: Topology
    slab: SlabOffer | None  # that the server may be asked to read


class SlabWelcome(_Message, frozen=True, tag="slab-welcome"):
    """The client is accepted."""

    node_id: str
    epoch: str
    topology: Topology
    slab: SlabOffer


class SlabRejected(_Message, frozen=True, tag="slab-rejected"):
    """The client is refused; the connection ends."""

    why: str


class AcquireLease(_Numbered, frozen=True, tag="acquire-lease"):
    """Hold these blocks, those that are there, until ReleaseLease or the end of the lease."""

    keys: list[bytes]


class LeaseGranted(_Numbered, frozen=True, tag="lease-granted"):
    """One entry for each key of AcquireLease, in order."""

    offsets: list[int]  # bytes from the slab's beginning, or MISSING
    sizes: list[int]
    checksums: list[int]  # XXH3-64 of the block's bytes


class ReleaseLease(_Numbered, frozen=True, tag="release-lease"):
    """The blocks leased under this number have been read. Not answered."""


class BlockOffer(msgspec.Struct, frozen=True, array_like=True):
    """A block for the server to store, with what kvcache's BlockMeta says of it."""

    key: bytes
    offset: int  # in the client's slab
    num_bytes: int
    checksum: int
    parent: bytes = b""
    end_tokens: int = 0
    priority: int = 0
    tenant: str = ""


class PutBlocks(_Numbered, frozen=True, tag="put-blocks"):
    """Store copies of these blocks, which stay in the client's slab until the answer or for `hold_s` seconds."""

    hold_s: float
    blocks: list[BlockOffer]


class Exists(_Numbered, frozen=True, tag="exists"):
    """Which of these blocks are there? Answered by Stored."""

    keys: list[bytes]


class Stored(_Numbered, frozen=True, tag="stored"):
    """Which blocks are stored, in the order of Exists or PutBlocks; those stored earlier count."""

    found: list[bool]


class Forget(_Numbered, frozen=True, tag="forget"):
    """Delete these blocks, in memory and on disk. Answered by Done."""

    keys: list[bytes]


class Pin(_Numbered, frozen=True, tag="pin"):
    """Pin these blocks for `ttl_s` seconds; 0 ends their pins. Answered by Done."""

    keys: list[bytes]
    ttl_s: float


class AnnounceBlocks(_Message, frozen=True, tag="announce-blocks"):
    """The client's own slab has the `added` blocks from now on, readable at host:port, and no longer the `removed`
    ones.

    Not answered. Forgotten when the connection ends.
    """

    host: str
    port: int
    added: list[bytes]
    removed: list[bytes] = []


class FindHolders(_Numbered, frozen=True, tag="find-holders"):
    """Which workers announced these blocks? Answered by HolderAddresses."""

    keys: list[bytes]


class HolderAddresses(_Numbered, frozen=True, tag="holder-addresses"):
    """For each key the "host:port" of a worker that announced it, or ""."""

    addresses: list[str]


class Describe(_Numbered, frozen=True, tag="describe"):
    """Answered by Description."""


class Description(_Numbered, frozen=True, tag="description"):
    """The server's state as JSON, for people and metrics."""

    text: bytes


class Done(_Numbered, frozen=True, tag="done"):
    """The request was carried out."""


class SlabRequestFailed(_Numbered, frozen=True, tag="failed"):
    """The request was not carried out."""

    why: str


Request = Union[AcquireLease, PutBlocks, Exists, Forget, Pin, FindHolders, Describe]
Answer = Union[LeaseGranted, Stored, Done, HolderAddresses, Description, SlabRequestFailed]
ToServer = Union[SlabHello, ReleaseLease, AnnounceBlocks, Request]
ToClient = Union[SlabWelcome, SlabRejected, Answer]

encode: Callable[[ToServer | ToClient], bytes] = msgspec.msgpack.Encoder().encode
decode_to_server: Callable[[bytes], ToServer] = msgspec.msgpack.Decoder(ToServer).decode
decode_to_client: Callable[[bytes], ToClient] = msgspec.msgpack.Decoder(ToClient).decode
"""Decoders raise msgspec.DecodeError (ValidationError included) on anything unexpected."""
