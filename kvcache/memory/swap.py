"""Host memory for the KV of pre-empted sequences: copied out of the pool at once, and back while a step already
computes.

An area of its own beside the host tier, which may evict its entries and has no hashes for blocks that are not full. KV
stays here until its sequence is resumed or has ended. Lives on the engine's thread; an I/O thread makes large loads.
Imports no torch.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvrelay.kvcache.memory.jobs import (
    MAX_JOBS,
    BlockSlab,
    CopyStats,
    IoJob,
    IoThreads,
    JobQueue,
    Load,
    MakeThreads,
    Urgency,
    run,
)
from kvrelay.types import BlockHash, BlockId

logger = logging.getLogger(__name__)

_BLEND = 0.3  # weight of the newest copy in the speeds
_PROBE_BLOCKS = 16
_INLINE_S = 0.004
"""Loads shorter than this run on the engine's thread: a thread, and a step that waits for layers, cost 8 ms."""
_NO_HASH = BlockHash(b"")


@dataclass(frozen=True, slots=True)
class SwappedBlocks:
    """A swapped-out sequence's blocks, from `first_block` of its block table on."""

    first_block: int
    rows: tuple[int, ...]
    checksums: tuple[int, ...]

    @property
    def end_block(self) -> int:
        return self.first_block + len(self.rows)


class SwapLoad(Load):
    """The load of a swapped-out sequence."""


class SwapArea:
    """Rows of a slab, their owners, and the copies. All methods run on the engine's thread; jobs on an I/O thread."""

    def __init__(
        self,
        slab: BlockSlab,
        *,
        is_checked: bool,
        wake: Callable[[], None],
        clock: Callable[[], float],
        make_threads: MakeThreads = IoThreads,
    ) -> None:
        self.slab, self.is_checked, self._clock = slab, is_checked, clock
        self.stats = CopyStats()
        self.save_bytes_per_s = self.load_bytes_per_s = 0.0  # measured; 0: not yet
        self.latency_s = 0.0  # of a swap out and back of one block
        self._free = list(range(slab.num_rows - 1, -1, -1))
        self.held: set[int] = set()  # rows of swapped-out sequences
        self.loading: set[int] = set()  # rows of loads that `poll` has not collected
        self._io = make_threads("kv-swap", 1, JobQueue(MAX_JOBS), wake)

    def start(self) -> None:
        self._io.start()

    def close(self) -> None:
        """Blocking: waits for the job under way."""
        self._io.close()
        self.poll()

    def poll(self) -> None:
        """Collect what the thread has finished: rows become free."""
        for job, result in self._io.finished():
            job.then(result)

    def probe(self, blocks: Sequence[int]) -> None:
        """Measure both directions with unused blocks, whose content stays."""
        chosen = list(blocks)[: min(_PROBE_BLOCKS, self.slab.num_rows)]
        self._round_trip(chosen)  # the first touches the pages
        (save_one, load_one), (save_all, load_all) = self._round_trip(chosen[:1]), self._round_trip(chosen)
        self.latency_s = min(save_one + load_one, save_all + load_all)  # one block's copies take next to nothing
        num_bytes = len(chosen) * self.slab.block_bytes
        self.save_bytes_per_s, self.load_bytes_per_s = num_bytes / max(save_all, 1e-9), num_bytes / max(load_all, 1e-9)

    def _round_trip(self, blocks: Sequence[int]) -> tuple[float, float]:
        """Seconds out and back, layer by layer, as in a load."""
        rows, began_s = list(range(len(blocks))), self._clock()
        self.slab.save(blocks, rows)
        saved_s = self._clock()
        for layer in range(self.slab.num_layers):
            self.slab.load(rows, blocks, range(layer, layer + 1))
        return saved_s - began_s, self._clock() - saved_s

    def _blend(self, old: float, num_blocks: int, seconds: float) -> float:
        if seconds <= 0 or num_blocks < _PROBE_BLOCKS:  # with fewer, most of the time is latency
            return old
        new = num_blocks * self.slab.block_bytes / seconds
        return old + _BLEND * (new - old) if old else new

    @property
    def num_free(self) -> int:
        return len(self._free)

    def save(self, first_block: int, blocks: Sequence[int]) -> SwappedBlocks | None:
        """Copy these blocks of a block table; done on return. None: no room, and nothing changed."""
        if len(blocks) > len(self._free):
            return None
        rows = [self._free.pop() for _ in blocks]
        began_s = self._clock()
        try:
            checksums = self.slab.save(blocks, rows) if rows else []
        except BaseException:
            self._free += rows
            raise
        seconds = self._clock() - began_s
        self.held.update(rows)
        self.stats.saved += len(rows)
        self.stats.save_s += seconds
        self.save_bytes_per_s = self._blend(self.save_bytes_per_s, len(rows), seconds)
        return SwappedBlocks(first_block, tuple(rows), tuple(checksums))

    def drop(self, swapped: SwappedBlocks) -> None:
        """The sequence ended, or is recomputed: free its rows."""
        self.held.difference_update(swapped.rows)
        self._free += swapped.rows

    def load(self, swapped: SwappedBlocks, first_block: int, blocks: Sequence[BlockId]) -> SwapLoad:
        """Load the blocks from `first_block` of the block table on into `blocks`, which the caller holds until it is
        over.

        All of the sequence's rows become free then.
        """
        skip = first_block - swapped.first_block
        rows, saved = swapped.rows[skip:], swapped.checksums[skip:]
        load = SwapLoad([_NO_HASH] * len(rows), rows, blocks)
        self.held.difference_update(swapped.rows)
        self.loading.update(swapped.rows)
        work = partial(load.run, self.slab, saved, is_checked=self.is_checked, clock=self._clock)
        num_bytes = len(rows) * self.slab.block_bytes
        job = IoJob(Urgency.LOAD, num_bytes, work, lambda result: self._loaded(load, swapped, result))
        if num_bytes <= _INLINE_S * self.load_bytes_per_s:
            job.then(run(job))
        elif not self._io.put(job):  # the worker is shutting down
            self._loaded(load, swapped, None)
        return load

    def _loaded(self, load: SwapLoad, swapped: SwappedBlocks, result: object) -> None:
        load.over()
        self.loading.difference_update(swapped.rows)
        self._free += swapped.rows
        if load.corrupt:
            logger.error("%d swapped-out blocks failed their checksums; they are recomputed", len(load.corrupt))
            self.stats.corrupt += len(load.corrupt)
        elif isinstance(result, float):
            self.stats.loaded += len(load.blocks)
            self.stats.load_s += result
            self.load_bytes_per_s = self._blend(self.load_bytes_per_s, len(load.blocks), result)

    @property
    def is_idle(self) -> bool:
        return self._io.is_idle

    def check(self, held: Sequence[SwappedBlocks]) -> None:
        """Raise AssertionError unless each row is free, being loaded, or one of these sequences'."""
        rows = [row for swapped in held for row in swapped.rows]
        assert sorted(rows) == sorted(self.held), "a held row has no sequence, or two"
        everything = sorted([*self._free, *self.held, *self.loading])
        assert everything == list(range(self.slab.num_rows)), "a row is lost, or counted twice"
