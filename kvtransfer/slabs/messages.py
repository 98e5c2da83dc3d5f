"""Messages of the slab protocol: blocks by name between one process's memory and another's. Typed msgpack over kvrelay.plane.connection.

A *slab* is memory that holds many blocks. Bytes never travel in these messages: whoever owns the memory that is to be
written reads it from the other's slab over a transport. So a Get is a Lend (the owner holds the blocks for a lease and
tells where they lie), a read by the client, and a Release; a Put is a Take, for which the client holds its blocks until
it is answered, while the owner reads them. Every request carries a number that its answer repeats. Durations only.

    client                       owner of the blocks
    SlabHello              ->                          says over which transports its own slabs can be read
                           <-    SlabWelcome | SlabRejected
    Lend                   ->    Lent                  the client reads, verifies
    Release                ->    (no answer)
    Take                   ->    (the owner reads, verifies)   Taken
    Exists, Forget, Pin, Replicate, Whereabouts, Describe -> Exist | Done | Places | Description

Keys are opaque: clients make them of a block's hash and of all that its bytes depend on (model, dtype, block size, codec).
"""

from typing import Union

import msgspec

from kvrelay.kvtransfer.paths.topology import Topology
from kvrelay.kvtransfer.protocol.messages import Offer

SLAB_PROTOCOL = 1
MISSING = -1  # an offset: not there


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all messages."""


class SlabOffer(msgspec.Struct, frozen=True):
    """One slab and the transports over which it can be read."""

    num_bytes: int
    offers: list[Offer]


class SlabHello(_Message, frozen=True, tag="slab-hello"):
    """First message of a client."""

    protocol: int
    peer_id: str
    block_bytes: int  # the largest block that it will ask for or offer
    topology: Topology
    slabs: list[SlabOffer]  # that the owner may be asked to read


class SlabWelcome(_Message, frozen=True, tag="slab-welcome"):
    """Accepted."""

    node_id: str
    epoch: str
    topology: Topology
    slab: SlabOffer


class SlabRejected(_Message, frozen=True, tag="slab-rejected"):
    """Not accepted; the connection ends."""

    why: str


class Lend(_Message, frozen=True, tag="lend"):
    """Which of these blocks are there, and where? They stay until Release, or until the lease ends."""

    number: int
    keys: list[bytes]


class Lent(_Message, frozen=True, tag="lent"):
    """One entry for each key of Lend, in its order. Checksums are xxh3-64 of the block's bytes."""

    number: int
    lease_s: float
    offsets: list[int]  # in the slab, bytes; MISSING: not lent
    sizes: list[int]
    checksums: list[int]
    generations: list[int]  # of the place: another one is another block


class Release(_Message, frozen=True, tag="release"):
    """The blocks lent under this number have been read. Not answered."""

    number: int


class Offered(msgspec.Struct, frozen=True, array_like=True):
    """A block to take. Tells all that a store wants to know of it: see kvcache's BlockMeta."""

    key: bytes
    offset: int  # in the client's slab
    num_bytes: int
    checksum: int
    parent: bytes = b""
    end_tokens: int = 0
    priority: int = 0
    tenant: str = ""


class Take(_Message, frozen=True, tag="take"):
    """Please keep copies of these; they lie in the client's slab number `slab` until this is answered or `hold_s` is over."""

    number: int
    slab: int
    hold_s: float
    blocks: list[Offered]


class Taken(_Message, frozen=True, tag="taken"):
    """Which of them are kept, in Take's order; a block that was there already is."""

    number: int
    kept: list[bool]


class Exists(_Message, frozen=True, tag="exists"):
    """Which of these are there?"""

    number: int
    keys: list[bytes]


class Exist(_Message, frozen=True, tag="exist"):
    """In the order of Exists."""

    number: int
    found: list[bool]


class Forget(_Message, frozen=True, tag="forget"):
    """Delete these, wherever this node has them. Answered by Done."""

    number: int
    keys: list[bytes]


class Pin(_Message, frozen=True, tag="pin"):
    """Keep these for so long whatever comes; 0: no longer. Answered by Done with how many are there."""

    number: int
    keys: list[bytes]
    ttl_s: float


class Replicate(_Message, frozen=True, tag="replicate"):
    """See to it that these have as many copies as placement wants, now. Answered by Done with how many were copied."""

    number: int
    keys: list[bytes]


class Holding(_Message, frozen=True, tag="holding"):
    """This client's own slab holds these blocks from now on, and no longer holds those; it lends them at host:port.

    Not answered. Forgotten with the connection.
    """

    host: str
    port: int
    added: list[bytes]
    removed: list[bytes] = []


class Whereabouts(_Message, frozen=True, tag="whereabouts"):
    """Who else holds these? Answered by Places."""

    number: int
    keys: list[bytes]


class Places(_Message, frozen=True, tag="places"):
    """For each key the "host:port" of a worker that said that it holds it; "": nobody known."""

    number: int
    addresses: list[str]


class Describe(_Message, frozen=True, tag="describe"):
    """Answered by Description."""

    number: int


class Description(_Message, frozen=True, tag="description"):
    """For people and metrics: JSON."""

    number: int
    text: bytes


class Done(_Message, frozen=True, tag="done"):
    """The request was carried out."""

    number: int
    count: int = 0


class Failed(_Message, frozen=True, tag="failed"):
    """The request was not carried out."""

    number: int
    why: str


ToOwner = Union[
    SlabHello, Lend, Release, Take, Exists, Forget, Pin, Replicate, Holding, Whereabouts, Describe
]  # fmt: skip
Request = Union[Lend, Take, Exists, Forget, Pin, Replicate, Whereabouts, Describe]
Answer = Union[Lent, Taken, Exist, Done, Places, Description, Failed]
ToClient = Union[SlabWelcome, SlabRejected, Lent, Taken, Exist, Done, Places, Description, Failed]

_encoder = msgspec.msgpack.Encoder()
_to_owner = msgspec.msgpack.Decoder(ToOwner)
_to_client = msgspec.msgpack.Decoder(ToClient)


def encode(message: ToOwner | ToClient) -> bytes:
    """One message as msgpack."""
    return _encoder.encode(message)


def decode_to_owner(frame: bytes) -> ToOwner:
    """Raises msgspec.DecodeError (ValidationError included) on anything unexpected."""
    message: ToOwner = _to_owner.decode(frame)
    return message


def decode_to_client(frame: bytes) -> ToClient:
    """Raises msgspec.DecodeError (ValidationError included) on anything unexpected."""
    message: ToClient = _to_client.decode(frame)
    return message
