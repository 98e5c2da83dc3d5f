"""What every store below host memory implements: disk, the cluster's store, Redis, object stores.

A store keeps whole blocks (all layers of `block_size` tokens, as one run of bytes) by prefix hash. Its methods block
and may be called from several threads at once; only the tier controller's I/O threads call them.
"""

import logging
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import xxhash

from kvrelay.kvcache.stores.codecs import Codec, CodecError, NoCodec
from kvrelay.types import BlockHash, BlockMeta


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Totals since start(), and what is stored now."""

    num_blocks: int = 0
    num_bytes: int = 0  # as stored, compressed or not
    capacity_bytes: int = 0  # 0: no limit of its own
    stored_blocks: int = 0
    loaded_blocks: int = 0
    store_s: float = 0.0
    load_s: float = 0.0
    rejected_blocks: int = 0  # not admitted, or no room
    evicted_blocks: int = 0
    corrupt_blocks: int = 0  # failed their checksum, or their seal, and were discarded
    failures: int = 0  # calls that failed as a whole


class BlockStore(ABC):
    """Blocks by prefix hash, and totals of what is loaded and stored. Thread-safe.

    Only start() raises StoreError; later failures are misses, logged and counted.
    """

    name: str
    keeps_checksums: bool  # every load is verified by the `BlockMeta.checksum` that was stored, if any
    supports_pins = False  # it evicts on its own, but not what is pinned

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._count_lock, self._stats = clock, threading.Lock(), StoreStats()

    @abstractmethod
    def start(self) -> None:
        """Open the store. Raises StoreError, with a remedy: not usable, or it holds another model's blocks."""

    @abstractmethod
    def close(self) -> None:
        """Finish writes under way and close. Blocks stay where the store outlives the process."""

    @abstractmethod
    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        """Which of these blocks can be loaded now."""

    @abstractmethod
    def delete(self, hashes: Sequence[BlockHash]) -> None:
        """Delete these blocks, if they are stored."""

    def load(
        self, hashes: Sequence[BlockHash], into: Sequence[memoryview], metas: Sequence[BlockMeta] = ()
    ) -> list[bool]:
        """Read blocks and verify their checksums or seals; returns which are in place.

        Args:
            into: one writable buffer of block_bytes for each hash; its content is undefined where the result is False.
            metas: as the caller knows them, with the root that opens a sealed block; may be left out where none is.
        """
        began_s = self._clock()
        loaded = self._load(hashes, into, metas or [_NO_META] * len(hashes))
        self.count(loaded_blocks=sum(loaded), load_s=self._clock() - began_s)
        return loaded

    def store(
        self, hashes: Sequence[BlockHash], blocks: Sequence[memoryview], metas: Sequence[BlockMeta]
    ) -> list[bool]:
        """Store copies; returns which are stored, those stored earlier included.

        The caller keeps `blocks` unchanged.
        """
        began_s = self._clock()
        kept = {digest for digest, is_here in zip(hashes, self._find(hashes), strict=True) if is_here}
        entries = zip(hashes, blocks, metas, strict=True)
        new = {digest: (block, meta) for digest, block, meta in entries if digest not in kept}
        stored = self._store(new) if new else set()
        self.count(stored_blocks=len(stored), rejected_blocks=len(new) - len(stored), store_s=self._clock() - began_s)
        return [digest in kept or digest in stored for digest in hashes]

    def pin(self, hashes: Sequence[BlockHash], ttl_s: float) -> object:  # noqa: B027 (only where `supports_pins`)
        """Pin the stored ones of these for `ttl_s` seconds, within the store's limit; 0 ends their pins."""

    def host_tier_changed(  # noqa: B027 (only a store that lets other workers read the host tier does anything)
        self, stored: Sequence[BlockHash], removed: Sequence[BlockHash]
    ) -> None:
        """The host tier has these blocks from now on, and no longer has those. Called on the engine's thread."""

    def count(self, **amounts: float) -> None:
        """Increment fields of StoreStats, by name."""
        with self._count_lock:
            now = {name: getattr(self._stats, name) + amount for name, amount in amounts.items()}
            self._stats = replace(self._stats, **now)

    def stats(self) -> StoreStats:
        return self._stats

    def _find(self, hashes: Sequence[BlockHash]) -> list[bool]:
        """Which of these blocks are stored, as `store` asks before it writes."""
        return self.contains(hashes)

    def _load(self, hashes: Sequence[BlockHash], into: Sequence[memoryview], metas: Sequence[BlockMeta]) -> list[bool]:
        """`load` without counting."""
        raise NotImplementedError

    def _store(self, new: Mapping[BlockHash, tuple[memoryview, BlockMeta]]) -> set[BlockHash]:
        """Store blocks that are not stored yet; returns which are now."""
        raise NotImplementedError


_NO_META = BlockMeta(None, 0)
FIRST_BACK_OFF_S, LAST_BACK_OFF_S = 1.0, 30.0


class BackOff:
    """Exponential back-off for one store or node. Times are the caller's clock, in seconds."""

    def __init__(self) -> None:
        self.num_failures = 0  # in a row
        self._until_s = 0.0

    def is_backing_off(self, now_s: float) -> bool:
        """Whether it should not be called yet."""
        return now_s < self._until_s

    def failed(self, now_s: float) -> float:
        """A call failed; returns the seconds to wait before the next one."""
        back_off_s: float = min(FIRST_BACK_OFF_S * 2**self.num_failures, LAST_BACK_OFF_S)
        self.num_failures = min(self.num_failures + 1, 16)
        self._until_s = now_s + back_off_s
        return back_off_s

    def succeeded(self) -> None:
        """A call succeeded: the next back-off is the shortest again."""
        self.num_failures = 0


logger = logging.getLogger(__name__)

# magic, version, 0, namespace, hash, length, XXH3-64 of all of these and of the bytes, unless they are sealed
_HEADER = struct.Struct("<4sHH16s16sQQ")
_MAGIC, _VERSION = b"kvrB", 1
HEADER_BYTES = _HEADER.size


class BadEnvelope(ValueError):
    """The value is not the requested block; the message says why."""


def wrap(namespace: bytes, digest: bytes, data: memoryview, *, is_sealed: bool) -> bytes:
    """The envelope of a block, in one copy."""
    bare = _HEADER.pack(_MAGIC, _VERSION, 0, namespace, digest, data.nbytes, 0)
    checksum = _checksum(bare, data[:0] if is_sealed else data)
    return b"".join((_HEADER.pack(_MAGIC, _VERSION, 0, namespace, digest, data.nbytes, checksum), data))


def _checksum(bare: bytes, data: memoryview) -> int:
    state = xxhash.xxh3_64(bare)
    state.update(data)
    return int(state.intdigest())


def unwrap(
    value: bytes | memoryview, namespace: bytes, digest: bytes, max_bytes: int, *, is_sealed: bool
) -> memoryview:
    """The block's bytes without a copy, verified where they are not sealed. Raises BadEnvelope."""
    view = memoryview(value)
    if view.nbytes < HEADER_BYTES:
        raise BadEnvelope(f"{view.nbytes} bytes are no block")
    magic, version, _, whose, which, size, checksum = _HEADER.unpack(view[:HEADER_BYTES])
    if (magic, version) != (_MAGIC, _VERSION):
        raise BadEnvelope("not written by this version of kvrelay")
    if (whose, which) != (namespace, digest):
        raise BadEnvelope("another block, or another model's")
    data = view[HEADER_BYTES:]
    if size != data.nbytes or size > max_bytes:
        raise BadEnvelope(f"{data.nbytes} bytes instead of {size}")
    bare = _HEADER.pack(magic, version, 0, whose, which, size, 0)
    if _checksum(bare, data[:0] if is_sealed else data) != checksum:
        raise BadEnvelope("its checksum does not match")
    return data


class EnvelopeStore(BlockStore):
    """A store that keeps each block in an envelope, and backs off after a failure. Thread-safe."""

    keeps_checksums = False  # its envelopes have checksums of their own

    def __init__(
        self, name: str, block_bytes: int, namespace: bytes, codec: Codec | None, clock: Callable[[], float]
    ) -> None:
        super().__init__(clock)
        self.name, self._block_bytes, self._namespace = name, block_bytes, namespace
        self._codec = codec or NoCodec()
        self._lock, self._back_off = threading.Lock(), BackOff()

    def _wrapped(self, digest: BlockHash, block: memoryview, meta: BlockMeta) -> bytes | None:
        """A block's envelope; None: the codec cannot encode it."""
        codec = self._codec
        try:
            encoded = codec.of(digest, meta).encode(block.cast("B"))
            return wrap(self._namespace, digest, encoded, is_sealed=codec.is_sealed)
        except CodecError as error:
            logger.warning("a block is not sent to %s: %s", self.name, error)
            return None

    def _opened(self, digest: BlockHash, view: memoryview, value: bytes, meta: BlockMeta) -> bool:
        """Decode an envelope into the caller's memory. False: it is corrupt, and deleted."""
        codec = self._codec
        try:
            most_bytes = codec.most_bytes(self._block_bytes)
            encoded = unwrap(value, self._namespace, digest, most_bytes, is_sealed=codec.is_sealed)
            codec.of(digest, meta).decode(encoded, view.cast("B"))
        except (BadEnvelope, CodecError) as error:
            logger.warning("a block in %s is discarded: %s", self.name, error)
            self.count(corrupt_blocks=1)
            self.delete([digest])
            return False
        return True

    def _is_backing_off(self) -> bool:
        return self._back_off.is_backing_off(self._clock())

    def _succeeded(self) -> None:
        with self._lock:
            self._back_off.succeeded()

    def _failed(self, error: Exception) -> None:
        with self._lock:
            back_off_s = self._back_off.failed(self._clock())
        self.count(failures=1)
        logger.warning("backing off from %s for %.0f s: %s", self.name, back_off_s, error)
