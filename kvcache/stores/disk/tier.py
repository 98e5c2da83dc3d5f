"""The disk tier: blocks in a folder with a byte limit, found again after a restart.

Owns the store's life: claiming a folder, losing it, counting and telling what goes wrong. Where blocks lie is
disk_volume.py's, how their bytes look disk_format.py's.
"""

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvrelay.errors import StoreError
from kvrelay.kvcache.eviction.registry import EvictionPolicy, Lru
from kvrelay.kvcache.eviction.sketch import FrequencySketch
from kvrelay.kvcache.index.tier_index import TierIndex
from kvrelay.kvcache.stores.codecs import Codec, NoCodec
from kvrelay.kvcache.stores.disk.folder import Foreign, WorkerFolder, claim, survey
from kvrelay.kvcache.stores.disk.format import (
    FORMAT_VERSION,
    PAGE_BYTES,
    Geometry,
    fit_geometry,
    pages,
    smallest_limit,
)
from kvrelay.kvcache.stores.disk.io import Segments
from kvrelay.kvcache.stores.disk.records import RecordIo
from kvrelay.kvcache.stores.disk.volume import Outcome, Volume, is_disk_full
from kvrelay.kvcache.stores.namespace import Namespace
from kvrelay.kvcache.stores.store import BlockMeta, StoreStats
from kvrelay.types import BlockHash

logger = logging.getLogger(__name__)

_AGAIN_S = 60.0  # between two log lines of one kind, and between attempts to get a lost folder back
_SEGMENT_BYTES = 128 << 20
_SAMPLE_BLOCKS = 16  # whose encoded size decides on the rows' size
_SAMPLE_MARGIN = 1.04
_UNFIT_LIMIT = 64  # blocks that do not fit until rows are made anew, unless eight times as many did


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """What may be chosen of a disk store."""

    policy: Callable[[int], EvictionPolicy] = lambda num_rows: Lru()  # called with how many rows there are
    is_admission_on: bool = (
        True  # a block is written when it is offered for the second time, is pinned or has a priority
    )
    quota_bytes: int | None = None  # of each tenant (not of blocks without one); None: as much as there is
    foreign: Foreign = "keep"  # what to do about unused subfolders of other namespaces: see disk_folder.claim
    io_depth: int = 8  # requests under way at once
    is_direct: bool | None = None  # None: direct I/O where the file system has it
    segment_bytes: int | None = None  # of one file; None: an eighth of the limit, 128 MiB at most


class DiskStore:
    """A BlockStore on a local disk."""

    name = "disk"

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
        """`limit_bytes`: of everything in this worker's subfolder of `path`. `namespace`: whose blocks these are."""
        self.path, self.limit_bytes, self.block_bytes = Path(path), limit_bytes, block_bytes
        self._codec: Codec = codec or NoCodec()
        self.keeps_checksums = self._codec.name == "none"
        self._options = options or DiskOptions()
        self._namespace = namespace.with_fields(block_bytes=block_bytes, codec=self._codec.name, format=FORMAT_VERSION)
        self._clock = clock
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)  # nobody is inside the volume
        self._executor: ThreadPoolExecutor | None = None
        self._folder: WorkerFolder | None = None
        self._volume: Volume | None = None  # None: no folder, or its rows have no size yet
        self._inside = 0
        self._is_changing = False  # somebody waits to replace the volume
        self._is_closed = False
        self._retry_at_s = 0.0
        self._told: dict[str, float] = {}
        self._sums: Counter[str] = Counter()
        self._seconds = {"store": 0.0, "load": 0.0}
        self._num_unfit = self._num_fit = 0

    # ---- life

    def start(self) -> None:
        """Claim a subfolder and find its blocks.

        Raises:
            StoreError: not writable, too small for a block, or (with foreign="refuse") somebody else's.
        """
        least = smallest_limit(self._codec.encoded_bytes(self.block_bytes) or self.block_bytes)
        if self.limit_bytes < least:
            raise StoreError(
                str(self.path),
                f"{self.limit_bytes} bytes do not hold one block; set cache.disk_size to {least} or more",
            )
        self._executor = ThreadPoolExecutor(self._options.io_depth, thread_name_prefix="kvrelay-disk")
        try:
            with self._lock:
                self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        """Raises StoreError."""
        self._folder = folder = claim(self.path, self._namespace, self._options.foreign)
        try:
            manifest = folder.manifest
            if manifest is None:
                folder.wipe()
                folder.write_manifest(self._namespace, None)
            elif manifest.record_bytes:
                self._open_volume(manifest.record_bytes - PAGE_BYTES, manifest.rows_per_segment)
                return
            size = self._codec.encoded_bytes(self.block_bytes)
            if size is not None:
                self._open_volume(size, None)
        except OSError as error:
            self._close_folder()
            raise StoreError(str(folder.path), f"{error.strerror}: {self._remedy(error)}") from error

    def _open_volume(self, payload_bytes: int, rows_per_segment: int | None) -> None:
        """Raises OSError."""
        assert self._folder is not None and self._executor is not None
        geometry = fit_geometry(
            self.limit_bytes, payload_bytes,
            rows_per_segment=rows_per_segment, segment_bytes=self._options.segment_bytes or min(_SEGMENT_BYTES, self.limit_bytes // 8),
        )  # fmt: skip
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
        quota = None if options.quota_bytes is None else options.quota_bytes // geometry.record_bytes
        return TierIndex(
            geometry.num_rows,
            options.policy(geometry.num_rows),
            quotas={"": None},
            default_quota=quota,
            admission=FrequencySketch(geometry.num_rows) if options.is_admission_on else None,
            keep_changes=True,
        )

    def close(self) -> None:
        """Finish what is being written and let go. Blocks stay."""
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

    # ---- what callers do

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        with self._visit() as volume:
            return [False] * len(hashes) if volume is None else volume.contains(hashes)

    def load(self, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> list[bool]:
        """Bring blocks, each verified; see BlockStore."""
        with self._visit() as volume, self._timed("load"):
            outcome = Outcome() if volume is None else volume.load(hashes, into)
            self._count(outcome, loaded=len(outcome.done))
            return [index in outcome.done for index in range(len(hashes))]

    def store(
        self, hashes: Sequence[BlockHash], blocks: Sequence[memoryview], metas: Sequence[BlockMeta]
    ) -> list[bool]:
        """Keep copies of blocks; see BlockStore. False also for those that the admission filter does not want yet."""
        self._fit_records(blocks)
        with self._visit() as volume, self._timed("store"):
            outcome = Outcome(num_rejected=len(hashes)) if volume is None else volume.store(hashes, blocks, metas)
            self._count(outcome)
            return [index in outcome.done for index in range(len(hashes))]

    def delete(self, hashes: Sequence[BlockHash]) -> None:
        with self._visit() as volume:
            if volume is not None:
                self._count(volume.delete(hashes))

    def pin(self, hashes: Sequence[BlockHash], ttl_s: float) -> int:
        """Keep those that are here for so long, half the store at most; how many are pinned. Ends with the process, or with 0."""
        with self._visit() as volume:
            return 0 if volume is None else volume.pin(hashes, ttl_s)

    def stats(self) -> StoreStats:
        with self._visit() as volume:
            num_blocks, num_evicted, num_bytes = (0, 0, 0) if volume is None else volume.usage()
            capacity = 0 if volume is None else volume.geometry.num_rows * volume.geometry.record_bytes
        with self._lock:
            sums = self._sums
            return StoreStats(
                num_blocks=num_blocks,
                num_bytes=num_bytes,
                capacity_bytes=capacity,
                stored_blocks=sums["stored"],
                stored_bytes=sums["stored"] * self.block_bytes,
                loaded_blocks=sums["loaded"],
                loaded_bytes=sums["loaded"] * self.block_bytes,
                store_s=self._seconds["store"],
                load_s=self._seconds["load"],
                rejected_blocks=sums["rejected"],
                evicted_blocks=sums["evicted"] + num_evicted,
                corrupt_blocks=sums["corrupt"],
                failures=sums["failures"],
            )

    def check(self) -> None:
        """Raise AssertionError unless every row is in exactly one state."""
        with self._visit() as volume:
            if volume is not None:
                volume.check()

    # ---- coming and going

    @contextlib.contextmanager
    def _visit(self) -> Iterator[Volume | None]:
        """The volume, which stays open meanwhile; None when there is none."""
        with self._lock:
            self._look_after_folder()
            volume = None if self._is_changing or self._is_closed else self._volume
            self._inside += 1
        try:
            yield volume
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._quiet.notify_all()

    def _look_after_folder(self) -> None:
        """A folder that was removed is let go, so that its space comes back, and a new one is claimed now and then."""
        if self._is_changing or self._is_closed or self._executor is None:
            return
        if self._folder is not None and self._folder.is_gone():
            self._complain("lost", f"{self._folder.path} was removed or replaced while in use; its blocks are lost")
            self._sums["failures"] += 1
            self._drop()
        now_s = self._clock()
        if self._folder is None and not self._is_closed and now_s >= self._retry_at_s:
            self._retry_at_s = now_s + _AGAIN_S
            try:
                self._open()
            except StoreError as error:
                self._complain("open", error)

    def _drop(self) -> None:
        """Close volume and folder once all are out. Called with the lock, which waiting lets go of."""
        self._is_changing = True
        self._quiet.wait_for(lambda: self._inside == 0)
        if self._volume is not None:
            self._sums["evicted"] += self._volume.usage()[1]
        self._close_folder()
        self._is_changing = False

    def _fit_records(self, blocks: Sequence[memoryview]) -> None:
        """Decide on the rows' size from a sample, where it depends on the blocks; again when it no longer fits."""
        if self._codec.encoded_bytes(self.block_bytes) is not None or not blocks:
            return
        with self._lock:
            is_outgrown = self._num_unfit >= max(_UNFIT_LIMIT, self._num_fit // 8)
            if (
                self._is_changing
                or self._is_closed
                or self._folder is None
                or (self._volume is not None and not is_outgrown)
            ):
                return
            sample = max(self._codec.encode(block).nbytes for block in blocks[:_SAMPLE_BLOCKS])
            try:
                self._resize(pages(min(int(sample * _SAMPLE_MARGIN), self._codec.most_bytes(self.block_bytes))))
            except (OSError, StoreError) as error:
                self._complain("resize", error)

    def _resize(self, payload_bytes: int) -> None:
        """Slots of this size, none of them in use. Raises OSError or StoreError."""
        if self._volume is not None:
            logger.warning("blocks no longer fit the disk tier's rows of %d bytes: making it anew with %d bytes each",
                           self._volume.geometry.payload_bytes, payload_bytes)  # fmt: skip
            self._drop()
            if self._is_closed:
                return
            self._folder = claim(self.path, self._namespace, "keep")
        self._num_unfit = self._num_fit = 0
        assert self._folder is not None
        self._folder.wipe()
        self._open_volume(payload_bytes, None)

    # ---- accounts

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._seconds[what] += time.perf_counter() - began

    def _count(self, outcome: Outcome, loaded: int = 0) -> None:
        with self._lock:
            self._sums["loaded"] += loaded
            self._sums["stored"] += outcome.num_written
            self._sums["rejected"] += outcome.num_rejected
            self._sums["corrupt"] += outcome.num_corrupt
            self._num_unfit += outcome.num_unfit
            self._num_fit += outcome.num_written
            if outcome.num_corrupt:
                self._complain(
                    "corrupt", f"{outcome.num_corrupt} blocks in {self.path} failed their checksums: discarded"
                )
            if outcome.errors:
                self._sums["failures"] += 1
                self._complain(outcome.errors[0].strerror or "failed", outcome.errors[0])

    def _complain(self, kind: str, what: object) -> None:
        """Log it, unless that kind was logged within the last minute."""
        now_s = self._clock()
        if now_s < self._told.get(kind, -_AGAIN_S) + _AGAIN_S:
            return
        self._told[kind] = now_s
        remedy = f"; {self._remedy(what)}" if isinstance(what, OSError) else ""
        logger.error("disk tier: %s%s", what, remedy)

    def _remedy(self, error: OSError) -> str:
        if not is_disk_full(error):
            return "goes on without; see whether the disk is healthy and mounted for writing"
        unused = []
        with contextlib.suppress(OSError):
            unused = [report for report in survey(self.path) if not report.is_in_use]
        told = f"; {sum(report.num_bytes for report in unused)} bytes are in unused subfolders: " if unused else ""
        names = ", ".join(str(report.path) for report in unused)
        return f"keeps the blocks it has room for; free some space or lower cache.disk_size{told}{names}"
