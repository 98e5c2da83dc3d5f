"""The disk tier: blocks in a folder with a byte limit, found again after a restart.

Owns the store's life: claiming a folder, losing it, and replacing a volume whose records have become too small. Where
blocks are is volume.py's, what their bytes look like format.py's.
"""

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from kvrelay.errors import StoreError
from kvrelay.kvcache.eviction.policies import EvictionPolicy, Lru
from kvrelay.kvcache.index.tier_index import OfferedBefore, Quota, TierIndex, in_rows
from kvrelay.kvcache.stores.codecs import Codec, NoCodec
from kvrelay.kvcache.stores.disk.folder import WorkerFolder, claim, unused_folders
from kvrelay.kvcache.stores.disk.format import FORMAT_VERSION, PAGE_BYTES, Geometry, fit_geometry, pages, smallest_limit
from kvrelay.kvcache.stores.disk.records import RecordIo, Segments
from kvrelay.kvcache.stores.disk.volume import Outcome, Volume, is_disk_full
from kvrelay.kvcache.stores.namespace import Namespace
from kvrelay.kvcache.stores.store import BlockStore, StoreStats
from kvrelay.types import BlockHash, BlockMeta

logger = logging.getLogger(__name__)

_REPEAT_S = 60.0  # between two log lines of one kind
_RECLAIM_S = 60.0  # between two attempts to claim a folder
_FULL = (errno.ENOSPC, errno.EDQUOT)
_SEGMENT_BYTES = 128 << 20
_MAX_SEGMENTS = 8192  # on a disk that was almost full at the start: each takes a file descriptor
_SAMPLE_BLOCKS = 16  # whose encoded size determines the size of records
_SAMPLE_MARGIN = 1.04
_UNFIT_LIMIT = 64  # blocks that do not fit before records are resized, unless eight times as many did


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """The options of a disk store."""

    policy: Callable[[int], EvictionPolicy] = lambda num_rows: Lru()  # from the number of rows
    is_admission_on: bool = True  # write a block at its second offer, or if it is pinned or has a priority
    quota: Quota | None = None  # bytes of each tenant (not of blocks without one); None: unlimited
    io_depth: int = 8  # requests under way at once
    is_direct: bool | None = None  # None: direct I/O where the file system has it
    segment_bytes: int | None = None  # of one file at most; None: an eighth of the limit, 128 MiB at most


class DiskStore(BlockStore):
    """A BlockStore on a local disk.

    More than 12 attributes: eight parameters, and the state that one lock protects while the volume is replaced.
    """

    name, supports_pins = "disk", True

    def __init__(
        self,
        path: str | Path,
        limit_bytes: int,
        block_bytes: int,
        namespace: Namespace,
        *,
        codec: Codec | None = None,
        options: DiskOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limit_bytes`: of all files in this worker's subfolder of `path`; `block_bytes`: before compression."""
        super().__init__(clock)
        self.path, self.limit_bytes, self.block_bytes = Path(path), limit_bytes, block_bytes
        self._codec: Codec = codec or NoCodec()
        self.keeps_checksums = self._codec.name == "none"
        self._options = options or DiskOptions()
        self._namespace = namespace.with_fields(block_bytes=block_bytes, codec=self._codec.name, format=FORMAT_VERSION)
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)  # no call is using the volume
        self._executor: ThreadPoolExecutor | None = None
        self._folder: WorkerFolder | None = None
        self._volume: Volume | None = None  # None: no folder, or the size of records is not known yet
        self._inside = 0
        self._is_changing = False  # a thread waits to replace the volume
        self._is_closed = False
        self._retry_at_s = 0.0
        self._logged_s: dict[str, float] = {}  # when an error of each kind was last logged
        self._num_unfit = self._num_fit = 0

    # ---- life

    def start(self) -> None:
        """Claim a subfolder and find its blocks. On a full disk it does so once there is room, and stores nothing until
        then.

        Raises:
            StoreError: not writable, too small for a block, or (with foreign="refuse") of another namespace.
        """
        least = smallest_limit(self._codec.most_bytes(self.block_bytes) if self._codec.is_fixed else self.block_bytes)
        if self.limit_bytes < least:
            raise StoreError(
                str(self.path),
                f"{self.limit_bytes} bytes do not hold a single block; set cache.disk_size to {least} or more",
            )
        self._executor = ThreadPoolExecutor(self._options.io_depth, thread_name_prefix="kvrelay-disk")
        try:
            with self._lock:
                self._open_unless_full()
        except BaseException:
            self.close()
            raise

    def _open_unless_full(self) -> None:
        """Raises StoreError: another reason."""
        try:
            self._open()
        except StoreError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in _FULL:
                raise
            self._retry_at_s = self._clock() + _RECLAIM_S
            self._complain("open", error)

    def _open(self) -> None:
        """Raises StoreError."""
        self._folder = folder = claim(self.path, self._namespace)
        try:
            manifest = folder.manifest
            if manifest is None:
                folder.wipe()
                folder.write_manifest(self._namespace, None)
            elif manifest.record_bytes:
                has_segments = any(folder.path.glob("segment-*.kv"))  # without, free space may ask for smaller ones
                self._open_volume(
                    manifest.record_bytes - PAGE_BYTES, manifest.rows_per_segment if has_segments else None
                )
                return
            if self._codec.is_fixed:
                self._open_volume(self._codec.most_bytes(self.block_bytes), None)
        except OSError as error:
            self._close_folder()
            raise StoreError(str(folder.path), f"{error.strerror}: {self._remedy(error)}") from error

    def _open_volume(self, payload_bytes: int, rows_per_segment: int | None) -> None:
        """Raises OSError."""
        assert self._folder is not None and self._executor is not None
        disk, most = os.statvfs(self._folder.path), self._options.segment_bytes
        room = max(disk.f_bavail * disk.f_frsize // 8, self.limit_bytes // _MAX_SEGMENTS)
        geometry = fit_geometry(
            self.limit_bytes,
            payload_bytes,
            rows_per_segment=rows_per_segment,
            segment_bytes=min(most or _SEGMENT_BYTES, room, most or self.limit_bytes // 8),
        )
        self._folder.write_manifest(self._namespace, geometry)
        segments = Segments(self._folder.path, geometry, is_direct=self._options.is_direct)
        rows = RecordIo(segments, geometry, self._namespace.digest, self._codec, self._executor, self._options.io_depth)
        volume = Volume(segments, rows, geometry, self._index(geometry), self._clock)
        try:
            volume.open()
        except BaseException:
            segments.close()
            raise
        self._volume = volume
        logger.info("disk tier in %s: %d of %d blocks found", self._folder.path, volume.usage()[0], geometry.num_rows)

    def _index(self, geometry: Geometry) -> TierIndex:
        options = self._options
        return TierIndex(
            geometry.num_rows,
            options.policy(geometry.num_rows),
            quota=None if options.quota is None else in_rows(options.quota, geometry.record_bytes),
            admission=OfferedBefore(geometry.num_rows) if options.is_admission_on else None,
            keep_changes=True,
        )

    def close(self) -> None:
        """Finish writes under way and release the folder. Blocks stay."""
        with self._lock:
            self._is_closed = True
            self._quiet.wait_for(lambda: self._inside == 0)
            self._close_folder()
        if self._executor is not None:
            self._executor.shutdown()

    def _close_folder(self) -> None:
        volume, self._volume = self._volume, None
        folder, self._folder = self._folder, None
        try:
            if volume is not None:
                volume.close()
        except OSError as error:
            self._complain("close", error)
        finally:
            if folder is not None:
                folder.close()

    # ---- BlockStore

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        with self._visit() as volume:
            return [False] * len(hashes) if volume is None else volume.contains(hashes)

    def tenants(self, hashes: Sequence[BlockHash]) -> list[str | None]:
        """Whose each of these blocks is; None: it is not stored."""
        with self._visit() as volume:
            return [None] * len(hashes) if volume is None else volume.tenants(hashes)

    def _load(self, hashes: Sequence[BlockHash], into: Sequence[memoryview], metas: Sequence[BlockMeta]) -> list[bool]:
        with self._visit() as volume:
            outcome = Outcome() if volume is None else volume.load(hashes, into, metas)
            self._note(outcome)
            return [digest in outcome.done for digest in hashes]

    def _store(self, new: Mapping[BlockHash, tuple[memoryview, BlockMeta]]) -> set[BlockHash]:
        """Without the blocks that the admission filter refuses."""
        self._fit_records(new)
        with self._visit() as volume:
            outcome = Outcome() if volume is None else volume.store(new)
            self._note(outcome)
            with self._lock:
                self._num_unfit += outcome.num_unfit
                self._num_fit += outcome.num_written
        self.count(stored_blocks=outcome.num_written - len(outcome.done))
        return outcome.done

    def _note(self, outcome: Outcome) -> None:
        """Count and log what went wrong."""
        if outcome.num_corrupt:
            self.count(corrupt_blocks=outcome.num_corrupt)
            what = f"discarded {outcome.num_corrupt} blocks in {self.path}, which failed their checksums or seals"
            self._complain("corrupt", what)
        if outcome.errors:
            self.count(failures=1)
            self._complain(outcome.errors[0].strerror or "failed", outcome.errors[0])

    def _complain(self, kind: str, what: object) -> None:
        """Log an error, unless one of this kind was logged within the last minute."""
        now_s = self._clock()
        if now_s >= self._logged_s.get(kind, -_REPEAT_S) + _REPEAT_S:
            self._logged_s[kind] = now_s
            logger.error("disk tier: %s%s", what, f"; {self._remedy(what)}" if isinstance(what, OSError) else "")

    def delete(self, hashes: Sequence[BlockHash]) -> None:
        with self._visit() as volume:
            if volume is not None:
                self._note(volume.delete(hashes))

    def pin(self, hashes: Sequence[BlockHash], ttl_s: float) -> int:
        """Pin the stored ones of these until `ttl_s`, or the process, ends; half the store at most.

        Returns how many.
        """
        with self._visit() as volume:
            return 0 if volume is None else volume.pin(hashes, ttl_s)

    def trim(self) -> None:
        """Evict what tenants have beyond their quotas, which have changed."""
        with self._visit() as volume:
            if volume is not None:
                volume.trim()

    def stats(self) -> StoreStats:
        with self._visit() as volume:
            num_blocks, num_evicted, num_bytes = (0, 0, 0) if volume is None else volume.usage()
            capacity = 0 if volume is None else volume.geometry.num_rows * volume.geometry.record_bytes
        stats = super().stats()
        return replace(
            stats,
            num_blocks=num_blocks,
            num_bytes=num_bytes,
            capacity_bytes=capacity,
            evicted_blocks=stats.evicted_blocks + num_evicted,
        )

    # ---- the volume in use, and its replacement

    @contextlib.contextmanager
    def _visit(self) -> Iterator[Volume | None]:
        """The volume, open until the end of the block; None when there is none."""
        with self._lock:
            self._check_folder()
            volume = None if self._is_changing or self._is_closed else self._volume
            self._inside += 1
        try:
            yield volume
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._quiet.notify_all()

    def _check_folder(self) -> None:
        """Close a folder that was removed, so that its space is freed, and try to claim a new one now and then."""
        if self._is_changing or self._is_closed or self._executor is None:
            return
        if self._folder is not None and self._folder.is_gone():
            self.count(failures=1)
            self._complain("lost", f"{self._folder.path} was removed or replaced while in use; its blocks are lost")
            self._drop()
        now_s = self._clock()
        if self._folder is None and not self._is_closed and now_s >= self._retry_at_s:
            self._retry_at_s = now_s + _RECLAIM_S
            try:
                self._open()
            except StoreError as error:
                self._complain("open", error)

    def _drop(self) -> None:
        """Close volume and folder when no call uses them. Called with the lock, which is released while waiting."""
        self._is_changing = True
        self._quiet.wait_for(lambda: self._inside == 0)
        if self._volume is not None:
            self.count(evicted_blocks=self._volume.usage()[1])
        self._close_folder()
        self._is_changing = False

    def _fit_records(self, new: Mapping[BlockHash, tuple[memoryview, BlockMeta]]) -> None:
        """Where encoded sizes vary, choose the size of records from a sample; again when too many blocks do not fit."""
        if self._codec.is_fixed or not new:
            return
        with self._lock:
            is_outgrown = self._num_unfit >= max(_UNFIT_LIMIT, self._num_fit // 8)
            if self._is_changing or self._is_closed or self._folder is None:
                return
            if self._volume is not None and not is_outgrown:
                return
            chosen = islice(new.items(), _SAMPLE_BLOCKS)
            sample = max(self._codec.of(digest, meta).encode(block).nbytes for digest, (block, meta) in chosen)
            try:
                self._resize(pages(min(int(sample * _SAMPLE_MARGIN), self._codec.most_bytes(self.block_bytes))))
            except (OSError, StoreError) as error:
                self._complain("resize", error)

    def _resize(self, payload_bytes: int) -> None:
        """Start over with records of this size. Raises OSError or StoreError."""
        if self._volume is not None:
            logger.warning(
                "blocks no longer fit the disk tier's records of %d bytes: starting over with %d bytes each",
                self._volume.geometry.payload_bytes,
                payload_bytes,
            )
            self._drop()
            if self._is_closed:
                return
            self._folder = claim(self.path, self._namespace)
        self._num_unfit = self._num_fit = 0
        assert self._folder is not None
        self._folder.wipe()
        self._open_volume(payload_bytes, None)

    def _remedy(self, error: OSError) -> str:
        if not is_disk_full(error):
            return "continuing without it; check that the disk is healthy and mounted for writing"
        unused: list[tuple[Path, int]] = []
        with contextlib.suppress(OSError):
            unused = unused_folders(self.path)
        hint = f"; {sum(size for _, size in unused)} bytes are in unused subfolders: " if unused else ""
        names = ", ".join(str(path) for path, _ in unused)
        return f"only blocks that fit are stored; free some space or lower cache.disk_size{hint}{names}"
