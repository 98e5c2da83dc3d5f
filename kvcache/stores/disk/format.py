"""The format of the disk tier's files. Pure: no files here.

A worker's folder holds `lock`, `manifest.json` and preallocated segments of equal records. A record is one page with a
header, then one block as its codec encoded it, zero-padded to whole pages. Row `n` is in segment `n //
rows_per_segment`.

Each record verifies itself: the header's checksum covers the header, which contains the payload's checksum (0 where the
payload is sealed, which verifies it) and the row's number. A torn write, of header, payload or both, over any earlier
content, leaves the old block, the new one, or a record that fails. That needs no order of writes and no flush.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvrelay.types import BlockHash, BlockMeta

FORMAT_VERSION = 1
PAGE_BYTES = 4096  # the alignment of direct I/O on every common device
MAX_IOVECS = 1024  # IOV_MAX
MAX_TENANT_BYTES = 64
MAX_HASH_BYTES = 32

_MAGIC = b"KVRBLOCK"
# magic, namespace, row, sequence, payload bytes, payload checksum, end_tokens, priority, hash, parent, tenant
_BODY = struct.Struct(f"<8s16sQQQQQiBBBx{MAX_HASH_BYTES}s{MAX_HASH_BYTES}s{MAX_TENANT_BYTES}s")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _BODY.size + _CHECK.size


def pages(num_bytes: int) -> int:
    """Rounded up to whole pages, in bytes."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def payload_checksum(data: bytes | bytearray | memoryview) -> int:
    """XXH3-64: against faults, not against forgery."""
    return xxhash.xxh3_64_intdigest(data)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of one folder's files, in rows and bytes."""

    record_bytes: int
    rows_per_segment: int
    num_rows: int

    @property
    def payload_bytes(self) -> int:
        """The largest payload of a record."""
        return self.record_bytes - PAGE_BYTES

    @property
    def num_segments(self) -> int:
        return -(-self.num_rows // self.rows_per_segment)

    def segment_bytes(self, segment: int) -> int:
        """The size of this segment; the last one has only the remaining rows."""
        rows = min(self.rows_per_segment, self.num_rows - segment * self.rows_per_segment)
        return rows * self.record_bytes

    def place(self, row: int) -> tuple[int, int]:
        """(segment, byte offset in it) of a row."""
        segment, index = divmod(row, self.rows_per_segment)
        return segment, index * self.record_bytes


def fit_geometry(
    limit_bytes: int, payload_bytes: int, *, segment_bytes: int, rows_per_segment: int | None = None
) -> Geometry:
    """The largest geometry within the limit, the folder's small files included. No rows: the limit is too small.

    `rows_per_segment`: of an existing folder; overrides `segment_bytes`.
    """
    record_bytes = PAGE_BYTES + pages(payload_bytes)
    per_segment = rows_per_segment or max(1, segment_bytes // record_bytes)
    return Geometry(record_bytes, per_segment, max(0, limit_bytes - smallest_limit(0)) // record_bytes)


def smallest_limit(payload_bytes: int) -> int:
    """Bytes of a folder with a single row; manifest, lock and the folder itself take three pages."""
    return 3 * PAGE_BYTES + (PAGE_BYTES + pages(payload_bytes) if payload_bytes else 0)


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The header of a record."""

    namespace: bytes
    row: int
    sequence: int  # of two records with one hash the higher is valid: the other was evicted earlier
    digest: BlockHash
    meta: BlockMeta
    num_bytes: int  # of the payload, as encoded
    checksum: int  # of the payload, as encoded

    def pack(self) -> bytes:
        """[HEADER_BYTES] bytes. Raises ValueError: the hash or tenant is too long."""
        parent, tenant = self.meta.parent or b"", self.meta.tenant.encode()
        if max(len(self.digest), len(parent)) > MAX_HASH_BYTES or len(tenant) > MAX_TENANT_BYTES:
            raise ValueError(f"hashes have at most {MAX_HASH_BYTES} bytes, tenants {MAX_TENANT_BYTES}")
        numbers = (self.row, self.sequence, self.num_bytes, self.checksum, self.meta.end_tokens, self.meta.priority)
        sizes = (len(self.digest), len(parent), len(tenant))
        body = _BODY.pack(_MAGIC, self.namespace, *numbers, *sizes, self.digest, parent, tenant)
        return body + _CHECK.pack(payload_checksum(body))


def unpack_header(data: bytes | memoryview, namespace: bytes, row: int) -> RecordHeader | None:
    """The header at the start of `data`; None unless it is intact and of this namespace and row."""
    body = bytes(data[: _BODY.size])
    if body[:8] != _MAGIC or _CHECK.unpack_from(data, _BODY.size)[0] != payload_checksum(body):
        return None
    _, space, place, sequence, size, checksum, end_tokens, priority, *rest = _BODY.unpack(body)
    digest_len, parent_len, tenant_len, digest, parent, tenant = rest
    if space != namespace or place != row:
        return None
    meta = BlockMeta(
        BlockHash(parent[:parent_len]) if parent_len else None, end_tokens, priority, tenant[:tenant_len].decode()
    )
    return RecordHeader(space, place, sequence, BlockHash(digest[:digest_len]), meta, size, checksum)


def runs(rows: Sequence[int], geometry: Geometry, *, max_rows: int) -> list[range]:
    """Split ascending `rows` into runs that are adjacent in one segment: ranges of indices into `rows`."""
    found: list[range] = []
    start = 0
    for index in range(1, len(rows) + 1):
        ends = (
            index == len(rows)
            or rows[index] != rows[index - 1] + 1
            or rows[index] % geometry.rows_per_segment == 0
            or index - start == max_rows
        )
        if ends:
            found.append(range(start, index))
            start = index
    return found
