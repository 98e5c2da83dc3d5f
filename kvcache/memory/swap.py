"""Host memory for the KV of pre-empted sequences: out of the pool at once, back into it while a step already computes.

An area of its own beside the host tier: what is in that tier may be evicted, and a block that is not full has no name there.
What is here stays until its sequence is back or has ended. Lives on the engine's thread; many blocks an I/O thread brings back.
Imports no torch.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrelay.kvcache.memory.jobs import IoJob, IoThreads, JobQueue, Threads, Urgency, run
from kvrelay.kvcache.memory.loads import Load
from kvrelay.types import BlockHash, BlockId

logger = logging.getLogger(__name__)

_BLEND = 0.3  # weight of the newest copy in the speeds
_MAX_JOBS = 1024
_PROBE_BLOCKS = 16
_AT_ONCE_S = 0.004
"""A load this short is done at once: handing it to a thread, and a step that waits for layers, cost 8 ms."""
_NAMELESS = BlockHash(b"")


class Slab(Protocol):
    """The area's memory (host.py). Its methods block."""

    num_layers: int
    num_slots: int
    block_bytes: int

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> list[int]: ...

    def checksums(self, slots: Sequence[int]) -> list[int]: ...

    def load(self, slots: Sequence[int], blocks: Sequence[int], layers: range) -> None: ...

    def slot(self, slot: int) -> memoryview: ...


@dataclass(frozen=True, slots=True)
class Swapped:
    """One sequence's blocks from `first_block` of its table on, as they were saved."""

    first_block: int
    slots: tuple[int, ...]
    checksums: tuple[int, ...]

    @property
    def end_block(self) -> int:
        return self.first_block + len(self.slots)


class SwapLoad(Load):
    """A swapped sequence's blocks on their way back."""


@dataclass(slots=True)
class SwapStats:
    """Since the start. Counts are blocks."""

    saved: int = 0
    loaded: int = 0
    corrupt: int = 0
    save_s: float = 0.0
    load_s: float = 0.0


class SwapArea:
    """Slots, who has them, and the copies. Every method is the engine thread's, but for the jobs' insides."""

    def __init__(
        self,
        slab: Slab,
        *,
        is_checked: bool,
        wake: Callable[[], None],
        clock: Callable[[], float],
        make_threads: Callable[[str, int, JobQueue, Callable[[], None]], Threads] = IoThreads,
    ) -> None:
        self.slab, self.is_checked, self._clock = slab, is_checked, clock
        self.sums = SwapStats()
        self.save_bytes_per_s = self.load_bytes_per_s = 0.0  # measured; 0: not yet
        self.latency_s = 0.0  # of a swap out and back, however small
        self._free = list(range(slab.num_slots - 1, -1, -1))
        self._held: set[int] = set()  # slots of sequences that are swapped out
        self._loading: set[int] = set()
        self._io = make_threads("kv-swap", 1, JobQueue(max_jobs=_MAX_JOBS, max_bytes=1 << 62), wake)

    def start(self) -> None:
        self._io.start()

    def close(self) -> None:
        """Blocking: what is under way ends first."""
        self._io.close()
        self.poll()

    def poll(self) -> None:
        """Take note of what the thread has done: slots become free."""
        for job, result in self._io.finished():
            job.then(result)

    def probe(self, blocks: Sequence[int]) -> None:
        """Measure both directions with blocks that hold nothing of value; what is in them stays."""
        chosen = list(blocks)[: min(_PROBE_BLOCKS, self.slab.num_slots)]
        self._round_trip(chosen)  # the first touches the pages
        (save_one, load_one), (save_all, load_all) = self._round_trip(chosen[:1]), self._round_trip(chosen)
        self.latency_s = min(save_one + load_one, save_all + load_all)  # one block's copies take next to nothing
        num_bytes = len(chosen) * self.slab.block_bytes
        self.save_bytes_per_s, self.load_bytes_per_s = num_bytes / max(save_all, 1e-9), num_bytes / max(load_all, 1e-9)

    def _round_trip(self, blocks: Sequence[int]) -> tuple[float, float]:
        """Seconds out and back, layer by layer as a load does it."""
        slots, began_s = list(range(len(blocks))), self._clock()
        self.slab.save(blocks, slots)
        saved_s = self._clock()
        for layer in range(self.slab.num_layers):
            self.slab.load(slots, blocks, range(layer, layer + 1))
        return saved_s - began_s, self._clock() - saved_s

    def _blend(self, old: float, num_blocks: int, seconds: float) -> float:
        if seconds <= 0 or num_blocks < _PROBE_BLOCKS:  # of fewer, the time is mostly latency
            return old
        new = num_blocks * self.slab.block_bytes / seconds
        return old + _BLEND * (new - old) if old else new

    # ---- out

    @property
    def num_free(self) -> int:
        return len(self._free)

    def save(self, first_block: int, blocks: Sequence[int]) -> Swapped | None:
        """Copy these blocks of a table; done on return. None: no room, and nothing changed."""
        if len(blocks) > len(self._free):
            return None
        slots = [self._free.pop() for _ in blocks]
        began_s = self._clock()
        try:
            checksums = self.slab.save(blocks, slots) if slots else []
        except BaseException:
            self._free += slots
            raise
        seconds = self._clock() - began_s
        self._held.update(slots)
        self.sums.saved += len(slots)
        self.sums.save_s += seconds
        self.save_bytes_per_s = self._blend(self.save_bytes_per_s, len(slots), seconds)
        return Swapped(first_block, tuple(slots), tuple(checksums))

    def drop(self, swapped: Swapped) -> None:
        """Its sequence ended, or is computed again: the slots are free."""
        self._held.difference_update(swapped.slots)
        self._free += swapped.slots

    # ---- back

    def load(self, swapped: Swapped, first_block: int, blocks: Sequence[BlockId]) -> SwapLoad:
        """Bring the blocks from `first_block` of the table on into `blocks`, which the caller holds until it is over.

        The slots are this area's again from now on: all become free when it is over.
        """
        skip = first_block - swapped.first_block
        slots, sums = swapped.slots[skip:], swapped.checksums[skip:]
        load = SwapLoad([], slots, blocks)
        self._held.difference_update(swapped.slots)
        self._loading.update(swapped.slots)
        slab, clock, is_checked = self.slab, self._clock, self.is_checked

        def work() -> float:
            began_s = clock()
            try:
                found = slab.checksums(slots) if is_checked and slots else sums
                num_bad = sum(now != then for now, then in zip(found, sums, strict=True))
                load.verified([_NAMELESS] * num_bad)
                for layer in range(0 if num_bad else slab.num_layers):
                    if slots:
                        slab.load(slots, blocks, range(layer, layer + 1))
                    load.arrived(layer + 1)
            finally:
                load.over()
            return clock() - began_s

        num_bytes = len(slots) * slab.block_bytes
        job = IoJob(Urgency.LOAD, num_bytes, work, lambda result: self._loaded(load, swapped, result))
        if num_bytes <= _AT_ONCE_S * self.load_bytes_per_s:
            job.then(run(job))
        elif not self._io.put(job):  # the worker is shutting down
            self._loaded(load, swapped, None)
        return load

    def _loaded(self, load: SwapLoad, swapped: Swapped, result: object) -> None:
        load.over()
        self._loading.difference_update(swapped.slots)
        self._free += swapped.slots
        if load.corrupt:
            logger.error("%d swapped blocks were not what was saved; they are computed anew", len(load.corrupt))
            self.sums.corrupt += len(load.corrupt)
        elif isinstance(result, float):
            self.sums.loaded += len(load.blocks)
            self.sums.load_s += result
            self.load_bytes_per_s = self._blend(self.load_bytes_per_s, len(load.blocks), result)

    # ---- what others may know

    @property
    def num_held(self) -> int:
        """Slots with KV of sequences that are swapped out."""
        return len(self._held)

    @property
    def is_idle(self) -> bool:
        return self._io.is_idle

    def check(self, held: Sequence[Swapped]) -> None:
        """Raise AssertionError unless each slot is free, on its way back, or one of these sequences'."""
        slots = [slot for swapped in held for slot in swapped.slots]
        assert sorted(slots) == sorted(self._held), "a swapped slot has no sequence, or two"
        everything = sorted([*self._free, *self._held, *self._loading])
        assert everything == list(range(self.slab.num_slots)), "a swap slot is lost, or there twice"
