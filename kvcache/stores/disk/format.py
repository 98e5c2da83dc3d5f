"""How the disk tier's files look, byte by byte. Pure: no files here.

A folder of one worker holds `lock`, `manifest.json` and segments of equal slots, preallocated. A slot is one page with a
header, then one block as its codec made it, filled up with zeros to whole pages. Slot `n` lies in segment
`n // slots_per_segment`.

A slot vouches for itself: the header's checksum covers the header, the payload's stands in the header, and so does the
slot's own number. A write that was torn, of header, payload or both, over whatever the slot held before, leaves one of:
the old block, the new one, or a slot whose checksums do not hold. No order of writes and no flush is needed for that.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvrelay.kvcache.stores.store import BlockMeta
from kvrelay.types import BlockHash

FORMAT_VERSION = 1
PAGE_BYTES = 4096  # what direct I/O aligns to on every common device
MOST_IOVECS = 1024  # IOV_MAX
MOST_TENANT_BYTES = 64
MOST_HASH_BYTES = 32

_MAGIC = b"KVRSLOT1"
# magic, namespace, slot, sequence, payload bytes, payload checksum, end_tokens, priority, hash, parent, tenant
_BODY = struct.Struct(f"<8s16sQQQQQiBBBx{MOST_HASH_BYTES}s{MOST_HASH_BYTES}s{MOST_TENANT_BYTES}s")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _BODY.size + _CHECK.size


def pages(num_bytes: int) -> int:
    """Rounded up to whole pages, in bytes."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def payload_checksum(data: bytes | bytearray | memoryview) -> int:
    """XXH3-64: against faults, not against forgery."""
    return xxhash.xxh3_64_intdigest(data)


def header_checksum(body: bytes) -> int:
    """As payload_checksum, of a header's fields."""
    return xxhash.xxh3_64_intdigest(body)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of one folder's files, in slots and bytes."""

    slot_bytes: int
    slots_per_segment: int
    num_slots: int

    @property
    def payload_bytes(self) -> int:
        """Most that a slot's payload can have."""
        return self.slot_bytes - PAGE_BYTES

    @property
    def num_segments(self) -> int:
        return -(-self.num_slots // self.slots_per_segment)

    def segment_bytes(self, segment: int) -> int:
        """The last segment has only the slots that are left."""
        slots = min(self.slots_per_segment, self.num_slots - segment * self.slots_per_segment)
        return slots * self.slot_bytes

    def place(self, slot: int) -> tuple[int, int]:
        """Segment and byte offset in it."""
        segment, index = divmod(slot, self.slots_per_segment)
        return segment, index * self.slot_bytes


def fit_geometry(
    limit_bytes: int, payload_bytes: int, *, segment_bytes: int, slots_per_segment: int | None = None
) -> Geometry:
    """What fits into the limit, the folder's small files included. `num_slots` may come out as 0: the limit is too small.

    `slots_per_segment`: as an existing folder has it, whatever `segment_bytes` says.
    """
    slot_bytes = PAGE_BYTES + pages(payload_bytes)
    per_segment = slots_per_segment or max(1, segment_bytes // slot_bytes)
    return Geometry(slot_bytes, per_segment, max(0, limit_bytes - smallest_limit(0)) // slot_bytes)


def smallest_limit(payload_bytes: int) -> int:
    """Bytes that a folder with a single slot takes: manifest, lock and the folder itself are three pages."""
    return 3 * PAGE_BYTES + (PAGE_BYTES + pages(payload_bytes) if payload_bytes else 0)


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What a slot says of itself."""

    namespace: bytes
    slot: int
    sequence: int  # of two slots that claim one hash the higher holds: the other was evicted earlier
    digest: BlockHash
    meta: BlockMeta
    num_bytes: int  # of the payload, as encoded
    checksum: int  # of the payload, as encoded

    def pack(self) -> bytes:
        """HEADER_BYTES long. Raises ValueError: a hash or tenant that is too long for it."""
        parent, tenant = self.meta.parent or b"", self.meta.tenant.encode()
        if max(len(self.digest), len(parent)) > MOST_HASH_BYTES or len(tenant) > MOST_TENANT_BYTES:
            raise ValueError(f"hashes have at most {MOST_HASH_BYTES} bytes, tenants {MOST_TENANT_BYTES}")
        body = _BODY.pack(
            _MAGIC, self.namespace, self.slot, self.sequence, self.num_bytes, self.checksum,
            self.meta.end_tokens, self.meta.priority,
            len(self.digest), len(parent), len(tenant), self.digest, parent, tenant,
        )  # fmt: skip
        return body + _CHECK.pack(header_checksum(body))


def unpack_header(data: bytes | memoryview, namespace: bytes, slot: int) -> SlotHeader | None:
    """The header at the beginning of `data` when it is whole, of this namespace and of this slot; else None."""
    body = bytes(data[: _BODY.size])
    if body[:8] != _MAGIC or _CHECK.unpack_from(data, _BODY.size)[0] != header_checksum(body):
        return None
    _, space, place, sequence, size, checksum, end_tokens, priority, *rest = _BODY.unpack(body)
    digest_len, parent_len, tenant_len, digest, parent, tenant = rest
    if space != namespace or place != slot:
        return None
    meta = BlockMeta(
        BlockHash(parent[:parent_len]) if parent_len else None, end_tokens, priority, tenant[:tenant_len].decode()
    )
    return SlotHeader(space, place, sequence, BlockHash(digest[:digest_len]), meta, size, checksum)


def runs(slots: Sequence[int], geometry: Geometry, *, most_slots: int) -> list[range]:
    """Cut ascending `slots` into runs that lie side by side in one segment: ranges of indices into `slots`."""
    found: list[range] = []
    start = 0
    for index in range(1, len(slots) + 1):
        ends = (
            index == len(slots)
            or slots[index] != slots[index - 1] + 1
            or slots[index] % geometry.slots_per_segment == 0
            or index - start == most_slots
        )
        if ends:
            found.append(range(start, index))
            start = index
    return found
