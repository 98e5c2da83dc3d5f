"""A small world for the state machine of the tiers: a pool, a host tier, two stores, and threads that run when told.

A block's content is its own name, so that whatever is served can be held against what it should be.
"""

import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrelay.hashing import HASH_BYTES, HashChain, tenant_name
from kvrelay.kvcache.eviction.policies import Lru
from kvrelay.kvcache.memory.jobs import IoJob, JobQueue, Load, Urgency
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.stores.store import BlockStore, StoreStats
from kvrelay.kvcache.tiers.controller import TierController
from kvrelay.kvcache.tiers.host_tier import HostTier, TierRules
from kvrelay.types import BlockId, BlockMeta, IndexedBlock

SIZE = 4  # tokens of a block
BLOCKS, SLOTS = 14, 9
MAX_JOBS, BATCH = 6, 2
BLOCK_BYTES = (8 << 20) // BATCH  # as the batches see it
LAYERS, PART = 2, HASH_BYTES // 2
EMPTY = b"?" * HASH_BYTES
PATHS = ["a", "ab", "abc", "abcd", "abe", "bc", "bcde", "xyzuvw"]
SALTS = ["", "salted"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chain of full blocks; prompts with the same beginning and salt share it."""

    chain: HashChain
    hashes: list
    metas: list
    tenant: str


def prompt_of(path: str, salt: str) -> Prompt:
    chain = HashChain.of([ord(letter) for letter in path for _ in range(SIZE)], SIZE, salt)
    hashes, tenant = chain.hashes(), tenant_name(chain.root)
    metas = [BlockMeta(hashes[i - 1] if i else None, SIZE * (i + 1), 0, tenant) for i in range(len(hashes))]
    return Prompt(chain, hashes, metas, tenant)


PROMPTS = [prompt_of(path, salt) for path in PATHS for salt in SALTS]
CHECKSUMS = {digest: zlib.crc32(digest) for prompt in PROMPTS for digest in prompt.hashes}


class Trouble(OSError):
    """What a store or a copy may run into."""


@dataclass
class Faults:
    """How often each still goes wrong from now on."""

    save: int = 0
    load: int = 0
    checksum: int = 0

    def hit(self, name: str) -> bool:
        left = getattr(self, name)
        setattr(self, name, max(0, left - 1))
        return left > 0


class CountedTier(HostTier):
    """Counts how often each row was handed out: a reference with an older number is stale."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.generation = [0] * self.num_rows

    def reserve(self, *args, **options):
        rows = super().reserve(*args, **options)
        for row in rows or ():
            self.generation[row] += 1
        return rows


class FakeSlab:
    """Slots of a few bytes, and the pool's blocks beside them."""

    num_layers, num_rows, block_bytes = LAYERS, SLOTS, BLOCK_BYTES

    def __init__(self, pool: BlockPool) -> None:
        self.pool, self.faults = pool, Faults()
        self.memory = bytearray(SLOTS * HASH_BYTES)
        self.content = [EMPTY] * BLOCKS  # of the pool

    def row(self, slot: int) -> memoryview:
        return memoryview(self.memory)[slot * HASH_BYTES : (slot + 1) * HASH_BYTES]

    def bytes_of(self, slot: int) -> bytes:
        return bytes(self.memory[slot * HASH_BYTES : (slot + 1) * HASH_BYTES])

    def checksum(self, slot: int) -> int:
        if self.faults.hit("checksum"):
            raise Trouble("checksum")
        return zlib.crc32(self.bytes_of(slot))

    def checksums(self, slots: Sequence[int]) -> list[int]:
        return [self.checksum(slot) for slot in slots]

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> list[int]:
        for block, slot in zip(blocks, slots, strict=True):
            assert self.pool.num_holders(block), "a block that nobody holds is saved"
            assert slot in self.index.rows.reserved, "a slot is written that is not reserved"
            self.row(slot)[:] = self.content[block]
            if self.faults.hit("save"):
                raise Trouble("save")
        return [zlib.crc32(self.bytes_of(slot)) for slot in slots]

    def load(self, slots: Sequence[int], blocks: Sequence[int], layers: range) -> None:
        for slot, block in zip(slots, blocks, strict=True):
            assert slot in self.index.rows.holds, "a slot is read that nobody holds"
            assert self.pool.num_holders(block) == 1, "a block is written that is free or shared"
            old, new = self.content[block], self.bytes_of(slot)
            begin, end = layers.start * PART, layers.stop * PART
            self.content[block] = old[:begin] + new[begin:end] + old[end:]
        if self.faults.hit("load"):
            raise Trouble("load")


class FakeStore(BlockStore):
    """Keeps blocks, loses them, spoils them (and says so), or fails."""

    def __init__(self, name: str, capacity: int) -> None:
        super().__init__(lambda: 0.0)
        self.name, self.capacity, self.blocks = name, capacity, {}
        self.is_open, self.mode, self.wishes, self.keeps_checksums = False, "well", 0, False

    def start(self) -> None:
        self.is_open = True

    def close(self) -> None:
        self.is_open = False

    def stats(self) -> StoreStats:
        return StoreStats(num_blocks=len(self.blocks))

    def _enter(self) -> None:
        assert self.is_open, "a store is asked that is not open"
        if self.mode == "fails":
            raise Trouble(self.name)

    def contains(self, hashes):
        self._enter()
        return [digest in self.blocks for digest in hashes]

    def load(self, hashes, into, metas=()):
        self._enter()
        came = [digest in self.blocks and self.mode != "spoils" for digest in hashes]
        for digest, view, is_good in zip(hashes, into, came, strict=True):
            view[:] = self.blocks[digest] if is_good else EMPTY
        return came

    def store(self, hashes, blocks, metas):
        self._enter()
        assert len(set(hashes)) == len(hashes)
        for digest, block in zip(hashes, blocks, strict=True):
            assert bytes(block) == digest, "a spoilt block goes down, to be right for ever"
        if self.mode == "spoils":
            return [False] * len(hashes)
        for digest in hashes:
            while len(self.blocks) >= self.capacity:
                del self.blocks[next(iter(self.blocks))]
            self.blocks[digest] = bytes(digest)
        return [True] * len(hashes)

    def delete(self, hashes) -> None:
        for digest in hashes:
            self.blocks.pop(digest, None)


class InlineThreads:
    """Jobs in the queue's order, as many under way as there would be threads; which ends next is chosen from
    outside.
    """

    def __init__(self, name: str, num_threads: int, queue: JobQueue, wake: Callable[[], None]) -> None:
        self.queue = JobQueue(MAX_JOBS)
        self.num_threads, self.under_way, self.ended = num_threads, [], []
        self.is_stopping = False

    def start(self) -> None:
        assert not self.is_stopping

    def put(self, job: IoJob) -> bool:
        return not self.is_stopping and self.queue.put(job)

    def finished(self):
        ended, self.ended = self.ended, []
        return ended

    @property
    def is_idle(self) -> bool:
        return not (len(self.queue) or self.under_way or self.ended)

    def take(self) -> None:
        while len(self.under_way) < self.num_threads and (job := self.queue.take()) is not None:
            self.under_way.append(job)

    def step(self, pick: int) -> bool:
        """End one job; False: there is none."""
        self.take()
        if not self.under_way:
            return False
        job = self.under_way.pop(pick % len(self.under_way))
        try:
            result = job.work()
        except Trouble as error:
            result = error
        self.ended.append((job, result))
        return True

    def close(self) -> None:
        self.is_stopping = True
        self.ended += [(job, RuntimeError("closing")) for job in self.queue.drop_all()]
        while self.under_way:
            self.step(0)

    def num_rows(self, urgency: Urgency) -> int:
        """Slots of jobs of this kind that have not been reported."""
        jobs = [job for _, _, job in self.queue._heap] + self.under_way + [job for job, _ in self.ended]
        return sum(job.num_bytes for job in jobs if job.urgency is urgency) // BLOCK_BYTES


@dataclass(eq=False, slots=True)
class Seq:
    """What the scheduler would know of a sequence."""

    name: str
    prompt: Prompt
    priority: int
    arrived_s: float
    blocks: list = field(default_factory=list)
    generations: list = field(default_factory=list)
    num_in_pool: int = 0
    num_named: int = 0
    load: Load | None = None
    load_generations: list = field(default_factory=list)
    is_computed: bool = False


class Life:
    """Every action is one that the engine, its threads, its stores or bad luck could take next."""

    def __init__(self, write: str, prefetch: str, quota: int | None, *, is_checked: bool = True) -> None:
        self.now_s, self.count, self.arrivals = 0.0, 0, 0
        self.pool = BlockPool(BLOCKS, block_size=SIZE, pin_share=0.3)
        self.slab = FakeSlab(self.pool)
        self.index = self.slab.index = CountedTier(self.slab, Lru(), lambda: self.now_s, quota=quota, pin_limit=3)
        self.stores = [FakeStore("near", 6), FakeStore("far", 40)]
        self.rules = TierRules(write, prefetch, 2.0, is_checked, SIZE)
        self.tiers = TierController(
            self.pool, self.index, self.stores, self.rules, wake=lambda: None, make_threads=InlineThreads
        )
        self.tiers.start()
        self.copies, self.io = self.tiers._copies, self.tiers._io
        self.waiting: list[Seq] = []
        self.running: list[Seq] = []
        self.mirror: set = set()
        self.rotten: dict[int, int] = {}  # slot -> its generation when it was spoilt
        self.generations = [0] * BLOCKS
        self.served = 0
        self.unanswered: set[str] = set()  # prefetches
        engine = [self.arrive] * 2 + [self.admit] * 3 + [self.compute] * 2 + [self.finish] * 3 + [self.press]
        threads = [self.copy, self.copy, self.transfer, self.transfer, self.transfer, self.poll, self.poll]
        rest = [
            self.tick,
            self.rot,
            self.lose,
            self.pin,
            self.pin_saved,
            self.prefetch,
            self.prefetch,
            self.write_back,
            self.write_back,
            self.publish,
        ]
        self.actions = (engine + threads) * 3 + rest + [self.fault, self.reset]

    def step(self, number: int, argument: int) -> None:
        self.actions[number % len(self.actions)](argument)
        self.count += 1
        self.check_cheaply()
        if self.count % 8 == 0:
            self.check()

    # ---- the engine

    def arrive(self, argument: int) -> None:
        if len(self.waiting) >= 4:
            return
        self.arrivals += 1
        prompt = PROMPTS[argument % len(PROMPTS)]
        seq = Seq(str(self.arrivals), prompt, argument // 128, self.now_s)
        self.waiting.append(seq)
        self.tiers.fetches.fetch(seq.name, prompt.hashes, prompt.metas, len(self.pool.match(prompt.chain)))

    def admit(self, argument: int) -> None:
        if not self.waiting:
            return
        seq = self.waiting[argument % len(self.waiting)]
        if self.tiers.fetches.is_waiting(seq.name):
            return
        hashes, match = seq.prompt.hashes, self.pool.match(seq.prompt.chain)
        for digest, block in zip(hashes, match.blocks, strict=False):
            assert self.slab.content[block] == digest, "the pool serves another block"
        below = self.tiers.host.num_here(hashes, len(match))
        self.pool.acquire(match.blocks)
        fresh = self.fresh(len(hashes) - len(match))
        if fresh is None:
            self.pool.release(match.blocks)
            return
        self.waiting.remove(seq)
        self.running.append(seq)
        self.pool.use(match, seq.priority)
        seq.blocks, seq.num_in_pool = [*match.blocks, *fresh], len(match)
        seq.num_named = seq.num_in_pool
        seq.generations = [self.pool.generation(block) for block in seq.blocks]
        if below:
            chosen = range(len(match), len(match) + below)
            seq.load = self.tiers.load([hashes[i] for i in chosen], [BlockId(seq.blocks[i]) for i in chosen])
            seq.load_generations = [self.index.generation[slot] for slot in seq.load.rows]
        self.tiers.fetches.end(seq.name)
        self.tiers.used(hashes[: len(match) + below], seq.priority)
        if self.rules.write == "selective":
            self.tiers.save([self.entry(seq, i) for i in range(len(match))])

    def entry(self, seq: Seq, at: int) -> IndexedBlock:
        return IndexedBlock(seq.prompt.hashes[at], BlockId(seq.blocks[at]), seq.prompt.metas[at])

    def fresh(self, count: int):
        held = {block for seq in self.running for block in seq.blocks} | set(self.pool.pinned)
        held |= set(self.tiers.held_blocks())
        blocks = self.pool.allocate(count)
        for block in blocks or ():
            assert block not in held, "a held or pinned block was handed out"
            self.generations[block] += 1
            assert self.pool.generation(block) == self.generations[block], "a generation was skipped"
            self.slab.content[block] = EMPTY
        return blocks

    def compute(self, argument: int) -> None:
        """A step: what comes from below is awaited, the rest computed, all of it named."""
        todo = [seq for seq in self.running if not seq.is_computed]
        if not todo:
            return
        seq = todo[argument % len(todo)]
        assert seq.generations == [self.pool.generation(block) for block in seq.blocks], "an older generation is used"
        first, hashes = seq.num_in_pool, seq.prompt.hashes
        if seq.load is not None:
            load = self.settle(seq)
            if not load.wait_layer(LAYERS - 1):
                self.drop_blocks(seq)
                self.running.remove(seq)
                self.waiting.append(seq)
                self.tiers.discard_load(load)
                missed = set(load.corrupt or load.hashes)
                for digest, slot in zip(load.hashes, load.rows, strict=True):
                    assert digest not in missed or self.index.row(digest) != slot, "what failed is tried again"
                return
            first += len(load.blocks)
            self.served += len(load.blocks)
        for at in range(first):
            assert self.slab.content[seq.blocks[at]] == hashes[at], "another block's content is served"
        for at in range(first, len(hashes)):
            assert self.pool.num_holders(seq.blocks[at]) == 1, "a shared block is written"
            self.slab.content[seq.blocks[at]] = bytes(hashes[at])
        seq.is_computed = True
        self.pool.insert(seq.prompt.chain, array("i", seq.blocks), seq.num_in_pool, len(hashes), priority=seq.priority)
        seq.num_named = len(hashes)
        if argument % 8 and self.rules.write == "write-through":  # else: "do not keep" below
            self.tiers.save([self.entry(seq, at) for at in range(seq.num_in_pool, len(hashes))])

    def settle(self, seq: Seq) -> Load:
        """As the engine does: nothing else happens on its thread until the load is over."""
        load, seq.load = seq.load, None
        assert load is not None
        while not load.is_over:
            assert load.rows and self.copies.step(0), "a load that nobody works on is awaited"
        now = [self.index.generation[slot] for slot in load.rows]
        assert now == seq.load_generations or load not in self.tiers._loads, "a slot was handed out while it was read"
        return load

    def drop_blocks(self, seq: Seq) -> None:
        self.pool.release(seq.blocks)
        seq.blocks, seq.generations = [], []

    def finish(self, argument: int) -> None:
        """The end, or an abort, in any state; mostly of one that is computed."""
        computed = [seq for seq in self.running if seq.is_computed]
        everyone = self.running + self.waiting if argument % 8 == 0 else computed
        if not everyone:
            return
        seq = everyone[argument % len(everyone)]
        if seq.load is not None:
            self.settle(seq)
        self.tiers.fetches.end(seq.name)
        if seq in self.running:
            self.running.remove(seq)
            self.drop_blocks(seq)
        else:
            self.waiting.remove(seq)

    def press(self, argument: int) -> None:
        """Others need room."""
        blocks = self.fresh(min(argument % (BLOCKS + 1), self.pool.num_available))
        if blocks is not None:
            self.pool.release(blocks)

    def pin(self, argument: int) -> None:
        prompt = PROMPTS[argument % len(PROMPTS)]
        self.pool.pin(prompt.chain, len(prompt.hashes), 5.0)
        self.index.pin(prompt.hashes, self.now_s + 5.0)

    def pin_saved(self, argument: int) -> None:
        """A session keeps a prompt below, too, or ends."""
        for seq in [seq for seq in self.running if seq.is_computed][:1]:
            if argument % 3:
                self.tiers.pin([self.entry(seq, at) for at in range(len(seq.blocks))], self.now_s + 5.0)
            else:
                self.tiers.unpin(seq.prompt.hashes)

    def prefetch(self, argument: int) -> None:
        """A hint that a request will come."""
        prompt = PROMPTS[argument % len(PROMPTS)]
        here = len(self.pool.match(prompt.chain))
        here += self.tiers.host.num_here(prompt.hashes, here)
        self.arrivals += 1
        name = f"ahead-{self.arrivals}"
        self.unanswered.add(name)

        def told(num_coming: int) -> None:
            self.unanswered.remove(name)  # once

        if not self.tiers.fetches.prefetch(name, prompt.hashes[here:], prompt.metas[here:], self.now_s + 5.0, told):
            self.unanswered.remove(name)

    def write_back(self, argument: int) -> None:
        self.tiers.end_step(self.pool.eviction_candidates, 0.0)

    def reset(self, argument: int) -> None:
        if argument % 4 == 0:
            self.tiers.reset()
            self.pool.reset_cache()
            assert not len(self.index)

    # ---- threads and time

    def copy(self, argument: int) -> None:
        self.copies.step(argument)

    def transfer(self, argument: int) -> None:
        self.io.step(argument)

    def poll(self, argument: int) -> None:
        self.tiers.poll()
        assert not self.copies.ended and not self.io.ended
        deadline_s = self.tiers.fetches.next_deadline_s()
        assert deadline_s is None or deadline_s > self.now_s, "an engine with nothing to do would step for ever"
        for seq in self.waiting:
            waited_s = self.now_s - seq.arrived_s
            is_waiting = self.tiers.fetches.is_waiting(seq.name)
            assert not is_waiting or waited_s < 60.0, "a request waits for ever"

    def tick(self, argument: int) -> None:
        self.now_s += (0.1, 1.0, 3.0, 70.0)[argument % 4]
        self.pool.tick(self.now_s)

    # ---- bad luck

    def rot(self, argument: int) -> None:
        entries = list(self.index._entries.values())
        if entries and argument < 64:
            slot = entries[argument % len(entries)].row
            self.slab.row(slot)[argument % HASH_BYTES] ^= 4
            self.rotten[slot] = self.index.generation[slot]

    def fault(self, argument: int) -> None:
        what, times = argument % 5, argument // 64
        if what < 3:
            setattr(self.slab.faults, ("save", "load", "checksum")[what], times)
        else:
            self.stores[what - 3].mode = ("well", "fails", "spoils", "well")[times]

    def lose(self, argument: int) -> None:
        store = self.stores[argument % 2]
        store.delete(list(store.blocks)[:: 1 + argument % 3])

    # ---- what must be so

    def publish(self, argument: int) -> None:
        for change in self.tiers.drain_changes():
            assert not set(change.stored) & set(change.removed)
            assert set(change.removed) <= self.mirror and not set(change.stored) & self.mirror
            self.mirror = (self.mirror - set(change.removed)) | set(change.stored)
        assert self.mirror == set(self.index.hashes())

    def check_cheaply(self) -> None:
        pool, index = self.pool.counts(), self.index.counts()
        assert pool.free + pool.used + pool.cached == BLOCKS, "a block is lost"
        assert index.free + index.reserved + index.cached + index.leaving == SLOTS, "a slot is lost"
        held = sum(len(load.rows) for load in self.tiers._loads) + self.tiers._offload._num_held
        held += sum(len(fetch.held) for fetch in self.tiers.fetches._fetches.values())
        assert sum(self.index.rows.holds.values()) == held, "a hold is lost or nobody's"
        assert index.reserved == len(self.tiers._saving) + self.io.num_rows(Urgency.FETCH), (
            "a reserved slot is nobody's"
        )
        assert self.io.num_rows(Urgency.OFFLOAD) == self.tiers._offload._num_held
        for threads in (self.copies, self.io):
            loads = sum(job.urgency is Urgency.LOAD for _, _, job in threads.queue._heap)
            assert len(threads.queue) <= MAX_JOBS + loads <= MAX_JOBS + len(self.running) + 1, "a line grows"
        for digest, entry in self.index._entries.items():
            if self.rotten.get(entry.row) != self.index.generation[entry.row]:
                assert self.slab.bytes_of(entry.row) == digest, "a slot holds another block than it says"
                assert self.tiers.host._checksums[entry.row] == CHECKSUMS[digest], "a slot has another's checksum"

    def check(self) -> None:
        self.pool.check()
        self.index.check()
        self.tiers.check()
        holders: dict[int, int] = dict.fromkeys(self.pool.pinned, 1)
        for block in [block for seq in self.running for block in seq.blocks] + list(self.tiers.held_blocks()):
            holders[block] = holders.get(block, 0) + 1
        assert holders == {b: n for b in range(BLOCKS) if (n := self.pool.num_holders(b))}, "a reference is nobody's"
        assert len(self.tiers.fetches) <= len(self.waiting), "a fetch is nobody's"
        assert len(self.unanswered) <= len(self.tiers.fetches._prefetches) <= MAX_JOBS * 2 + 2
        assert all(len(known) <= 4 * SLOTS for known in self.tiers._offload._known.values())

    def end(self, argument: int) -> None:
        """Everything is drained, or closed in the middle; either way nothing is left behind."""
        while argument % 2 and self.running + self.waiting:
            self.finish(0)
        while argument % 2 and (self.copies.step(0) or self.io.step(0) or not self.tiers.is_idle):
            self.tiers.poll()
        self.tiers.close()
        while self.running + self.waiting:
            self.finish(0)
        self.now_s += 1000.0
        self.pool.tick(self.now_s)
        self.pool.reset_cache()
        self.tiers.reset()
        self.check_cheaply()
        self.check()
        self.publish(0)
        assert not self.unanswered, "a prefetch was never answered"
        assert not self.tiers._pin_when_saved and not self.tiers.fetches._prefetches
        assert self.pool.counts().free == BLOCKS, "a block was never given back"
        assert self.index.counts().free == SLOTS, "a slot was never given back"
        assert not any(store.is_open for store in self.stores)
