"""The cache controller over real memory and threads: blocks go down and come up as they were, or not at all."""

import threading
import time

import numpy as np
import pytest
import torch
import xxhash

from kvrelay.hashing import block_hashes
from kvrelay.kvcache.eviction.policies import Lru
from kvrelay.kvcache.memory import host
from kvrelay.kvcache.memory.host import HostSlab
from kvrelay.kvcache.memory.jobs import IoJob, JobQueue, Urgency
from kvrelay.kvcache.memory.storage import KvStorage
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.stores.store import BlockStore, StoreStats
from kvrelay.kvcache.tiers.controller import TierController
from kvrelay.kvcache.tiers.host_tier import WAIT_LIMIT_S, HostTier, TierRules
from kvrelay.types import BlockMeta, IndexedBlock, KvLayout

LAYOUT = KvLayout(num_layers=3, num_blocks=16, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")


class MemoryStore(BlockStore):
    """A store in a dict; `gate` holds its loads back."""

    name = "memory"
    keeps_checksums = False

    def __init__(self):
        super().__init__(time.monotonic)
        self.blocks, self.gate, self.is_closed = {}, threading.Event(), False
        self.gate.set()
        self.num_loads, self.writing = 0, None

    def start(self):
        self.is_closed = False

    def contains(self, hashes):
        return [digest in self.blocks for digest in hashes]

    def load(self, hashes, into, metas=()):
        self.num_loads += 1
        self.gate.wait(10)
        for digest, view in zip(hashes, into, strict=True):
            if digest in self.blocks:
                view[:] = self.blocks[digest]
        return [digest in self.blocks for digest in hashes]

    def store(self, hashes, blocks, metas):
        if self.writing is not None:
            self.writing.append(tuple(hashes))
            self.gate.wait(10)
        self.blocks.update({digest: bytes(block) for digest, block in zip(hashes, blocks, strict=True)})
        return [True] * len(hashes)

    def delete(self, hashes):
        for digest in hashes:
            self.blocks.pop(digest, None)

    def stats(self):
        return StoreStats(num_blocks=len(self.blocks))

    def close(self):
        self.is_closed = True


class World:
    """A pool full of noise, a host tier of `slots`, and a store."""

    def __init__(self, slots=8, stores=(), clock=time.monotonic, **rules):
        self.storage = KvStorage(LAYOUT, torch.device("cpu"))
        self.storage.tensor.uniform_(-1, 1)
        self.pool = BlockPool(LAYOUT.num_blocks)
        self.slab = HostSlab(self.storage.memory, slots * LAYOUT.block_bytes)
        self.woken = threading.Semaphore(0)
        self.tiers = TierController(
            self.pool, HostTier(self.slab, Lru(), clock), list(stores), TierRules(**rules), wake=self.woken.release
        )
        self.tiers.start()

    def named(self, count, salt=""):
        """(entries, what is in them) of fresh blocks with a chain of their own."""
        hashes = block_hashes(list(range(4 * count)), 4, salt)
        blocks = self.pool.allocate(count)
        metas = [BlockMeta(hashes[i - 1] if i else None, 4 * (i + 1)) for i in range(count)]
        entries = [IndexedBlock(*entry) for entry in zip(hashes, blocks, metas, strict=True)]
        return entries, self.storage.tensor[list(blocks)].clone()

    def settle(self):
        """Until nothing is under way."""
        deadline = time.monotonic() + 10
        while not self.tiers.is_idle:
            self.woken.acquire(timeout=1)
            self.tiers.poll()
            assert time.monotonic() < deadline
        self.tiers.poll()

    def bring_up(self, entries):
        """(load, blocks) into fresh blocks of the pool."""
        blocks = self.pool.allocate(len(entries))
        return self.tiers.load([entry.digest for entry in entries], blocks), blocks


@pytest.fixture
def world(request):
    made = []

    def make(*args, **kwargs):
        made.append(World(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.tiers.close()
        one.tiers.check()


@pytest.mark.parametrize("native", [True, False])
def test_blocks_come_back_as_they_went(world, monkeypatch, native):
    if not native:
        monkeypatch.setattr(host, "native_copies", lambda: None)
    it = world()
    entries, expected = it.named(5)
    it.tiers.save(entries)
    it.settle()
    assert it.tiers.host.num_here([entry.digest for entry in entries], 0) == 5
    load, blocks = it.bring_up(entries)
    assert load.wait_verified()
    assert load.wait_layer(LAYOUT.num_layers - 1)
    load.wait_over()
    assert torch.equal(it.storage.tensor[list(blocks)], expected)


@pytest.mark.parametrize("head_dim", [1, 2, 10, 16, 64])  # layers of a block from 64 bytes to 4 KiB
@pytest.mark.parametrize("blocks", [1, 3, 400])  # the last past the caches, where a layer has 1 KiB
def test_blocks_are_hashed_on_their_way_as_where_they_lie(head_dim, blocks):
    layout = KvLayout(num_layers=5, num_blocks=blocks, block_size=4, num_kv_heads=2, head_dim=head_dim, dtype="float32")
    storage = KvStorage(layout, torch.device("cpu"))
    storage.tensor.uniform_(-1, 1)
    expected = storage.tensor.clone()
    slab = HostSlab(storage.memory, layout.num_bytes)
    order, slots = list(range(blocks)), list(reversed(range(blocks)))
    found = slab.save(order, slots)
    plain = [xxhash.xxh3_64_intdigest(expected[block].numpy().tobytes()) for block in order]
    assert found == plain == slab.checksums(slots) == [slab.checksum(slot) for slot in slots]
    storage.tensor.zero_()
    for layer in range(5):
        slab.load(slots, order, range(layer, layer + 1))
    assert torch.equal(storage.tensor, expected)


def test_blocks_are_held_while_they_are_saved_and_given_back(world):
    it = world()
    entries, _ = it.named(5)
    blocks = [entry.block for entry in entries]
    it.tiers.save(entries)
    it.pool.release(blocks)
    assert sorted(it.tiers.held_blocks()) == sorted(blocks)
    assert it.pool.counts().used == 5
    it.settle()
    assert it.tiers.held_blocks() == []
    assert it.pool.counts().used == 0


def test_a_block_that_rotted_in_the_host_tier_is_never_served(world):
    it = world()
    entries, _ = it.named(3)
    it.tiers.save(entries)
    it.settle()
    it.slab.row(it.tiers.host.row(entries[1].digest))[7] ^= 4
    load, _ = it.bring_up(entries)
    assert not load.wait_verified()
    assert load.corrupt == (entries[1].digest,)
    load.wait_over()
    it.settle()
    assert it.tiers.host.num_here([entry.digest for entry in entries], 0) == 1
    assert it.tiers.stats.corrupt == 1


def test_with_checks_off_the_same_rot_is_served(world):
    """The check above can fail."""
    it = world(is_checked=False)
    entries, expected = it.named(3)
    it.tiers.save(entries)
    it.settle()
    it.slab.row(it.tiers.host.row(entries[1].digest))[7] ^= 4
    load, blocks = it.bring_up(entries)
    assert load.wait_verified()
    load.wait_over()
    assert not torch.equal(it.storage.tensor[list(blocks)], expected)


class KeepingStore(MemoryStore):
    """One that can be asked to keep blocks."""

    supports_pins = True

    def __init__(self):
        super().__init__()
        self.pins = []

    def pin(self, hashes, ttl_s):
        assert all(digest in self.blocks for digest in hashes), "a pin came before its block"
        self.pins.append((set(hashes), ttl_s))


@pytest.mark.parametrize("write", ["write-through", "write-back"])
def test_a_pin_reaches_the_stores_that_can_keep_blocks_and_ends_there_too(world, write):
    keeping, plain = KeepingStore(), MemoryStore()
    plain.name = "plain"
    it = world(slots=16, stores=[keeping, plain], write=write)
    entries, _ = it.named(3)
    hashes = {entry.digest for entry in entries}
    it.tiers.pin(entries, it.tiers.host.now_s() + 60.0)
    it.settle()
    assert set(keeping.blocks) == hashes
    (kept, ttl_s) = keeping.pins[0]
    assert (kept, len(keeping.pins)) == (hashes, 1)
    assert 0.0 < ttl_s <= 60.0
    assert set(plain.blocks) == (hashes if write == "write-through" else set())
    shared = entries[0].digest
    it.tiers.unpin([entry.digest for entry in entries], {shared})
    it.settle()
    assert keeping.pins[1:] == [(hashes - {shared}, 0.0)]


def test_a_rotten_block_does_not_go_further_down(world):
    store = MemoryStore()
    it = world(stores=[store], write="write-back")
    entries, _ = it.named(3)
    it.tiers.save(entries)
    it.settle()
    it.slab.row(it.tiers.host.row(entries[0].digest))[0] ^= 1
    it.tiers._offload.put([entry.digest for entry in entries])
    it.settle()
    assert set(store.blocks) == {entry.digest for entry in entries[1:]}


def test_what_fell_out_of_the_host_tier_is_fetched_from_the_store_for_a_request_in_line(world):
    store = MemoryStore()
    it = world(slots=4, stores=[store])
    first, expected = it.named(4)
    it.tiers.save(first)
    it.settle()
    second, _ = it.named(4, salt="other")
    it.tiers.save(second)
    it.settle()
    hashes = [entry.digest for entry in first]
    assert it.tiers.host.num_here(hashes, 0) == 0
    store.gate.clear()
    it.tiers.fetches.fetch("r1", hashes, [entry.meta for entry in first], 0)
    assert it.tiers.fetches.is_waiting("r1")
    store.gate.set()
    it.settle()
    assert not it.tiers.fetches.is_waiting("r1")
    assert it.tiers.host.num_here(hashes, 0) == 4
    assert it.tiers.host.counts().held == 4  # nobody takes them away before the request has its turn
    load, blocks = it.bring_up(first)
    it.tiers.fetches.end("r1")
    load.wait_over()
    it.settle()
    assert torch.equal(it.storage.tensor[list(blocks)], expected)
    assert it.tiers.host.counts().held == 0


@pytest.mark.parametrize(("prefetch", "is_waiting"), [("wait", True), ("timeout", True), ("best-effort", False)])
def test_how_long_a_request_waits_for_a_store(world, prefetch, is_waiting):
    store = MemoryStore()
    it = world(slots=4, stores=[store], prefetch=prefetch)
    entries, _ = it.named(2)
    store.store([entry.digest for entry in entries], [bytes(LAYOUT.block_bytes)] * 2, [])
    store.gate.clear()
    it.tiers.fetches.fetch("r1", [entry.digest for entry in entries], [entry.meta for entry in entries], 0)
    assert it.tiers.fetches.is_waiting("r1") is is_waiting
    it.tiers.fetches.end("r1")
    store.gate.set()
    it.settle()
    assert it.tiers.host.counts().held == 0


def test_a_store_that_fails_costs_a_miss(world):
    class Broken(MemoryStore):
        def load(self, hashes, into, metas=()):
            raise OSError("the disk is gone")

    store = Broken()
    it = world(slots=4, stores=[store])
    entries, _ = it.named(2)
    store.store([entry.digest for entry in entries], [bytes(LAYOUT.block_bytes)] * 2, [])
    it.tiers.fetches.fetch("r1", [entry.digest for entry in entries], [entry.meta for entry in entries], 0)
    it.settle()
    assert not it.tiers.fetches.is_waiting("r1")
    assert it.tiers.host.num_here([entry.digest for entry in entries], 0) == 0
    assert it.tiers.host.counts().reserved == 0


def test_a_full_host_tier_whose_slots_are_all_held_saves_nothing_and_loses_nothing(world):
    it = world(slots=2)
    entries, _ = it.named(2)
    it.tiers.save(entries)
    it.settle()
    held = it.tiers.host.hold([entry.digest for entry in entries])
    more, _ = it.named(3, salt="other")
    it.tiers.save(more)
    it.settle()
    assert it.tiers.host.num_here([entry.digest for entry in more], 0) == 0
    assert it.tiers.held_blocks() == []
    it.tiers.host.unhold(held)


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def hung(world, **rules):
    """(world, its clock, entries in a store that never answers)."""
    store, clock = MemoryStore(), Clock()
    it = world(slots=8, stores=[store], clock=clock, **rules)
    entries, _ = it.named(4)
    store.store([entry.digest for entry in entries], [bytes(LAYOUT.block_bytes)] * 4, [])
    store.gate.clear()
    return it, clock, entries


def want(it, name, entries):
    it.tiers.fetches.fetch(name, [entry.digest for entry in entries], [entry.meta for entry in entries], 0)


def test_a_store_that_hangs_stops_a_request_that_waits_for_all_for_a_minute_and_the_next_not_at_all(world):
    it, clock, entries = hung(world, prefetch="wait")
    want(it, "r1", entries)
    assert it.tiers.fetches.is_waiting("r1")
    assert it.tiers.fetches.next_deadline_s() == clock.now_s + WAIT_LIMIT_S
    clock.now_s += WAIT_LIMIT_S
    it.tiers.poll()
    assert not it.tiers.fetches.is_waiting("r1")
    assert it.tiers.fetches.next_deadline_s() is None  # or an engine with nothing to do would step for ever
    want(it, "r2", entries)
    assert not it.tiers.fetches.is_waiting("r2")
    it.tiers._stores[0].gate.set()
    it.settle()
    want(it, "r3", [*entries[:3], it.named(1, salt="new")[0][0]])  # it answers again
    assert it.tiers.fetches.is_waiting("r3")


def test_what_is_fetched_for_a_request_that_is_gone_is_not_read(world, monkeypatch):
    monkeypatch.setattr("kvrelay.kvcache.memory.jobs._BATCH_BYTES", LAYOUT.block_bytes)
    it, _, entries = hung(world)
    want(it, "r1", entries)
    deadline = time.monotonic() + 10
    while not it.tiers.host.counts().reserved:
        it.woken.acquire(timeout=1)
        it.tiers.poll()
        assert time.monotonic() < deadline
    it.tiers.fetches.end("r1")
    it.tiers._stores[0].gate.set()
    it.settle()
    assert it.tiers._stores[0].num_loads <= 2  # those that two threads had begun
    assert it.tiers.host.counts().reserved == it.tiers.host.counts().held == 0


def test_what_the_host_tier_has_of_a_prompt_stays_while_the_rest_is_fetched(world):
    store = MemoryStore()
    it = world(slots=4, stores=[store], write="write-back")
    entries, _ = it.named(4)
    store.store([entry.digest for entry in entries], [bytes(LAYOUT.block_bytes)] * 4, [])
    it.tiers.save(entries[:2])
    it.settle()
    store.gate.clear()
    want(it, "r1", entries)
    others, _ = it.named(4, salt="other")
    it.tiers.save(others)
    store.gate.set()
    it.settle()
    assert it.tiers.host.num_here([entry.digest for entry in entries], 0) >= 2


def test_a_load_that_failed_is_not_tried_again(world, monkeypatch):
    it = world()
    entries, _ = it.named(3)
    it.tiers.save(entries)
    it.settle()

    def broken(slots):
        raise OSError("memory fault")

    monkeypatch.setattr(it.slab, "checksums", broken)
    load, _ = it.bring_up(entries)
    assert not load.wait_verified()
    it.tiers.discard_load(load)
    assert it.tiers.host.num_here([entry.digest for entry in entries], 0) == 0


def test_a_good_copy_that_came_after_a_corrupt_one_stays(world):
    it = world()
    entries, _ = it.named(2)
    it.tiers.save(entries)
    it.settle()
    it.slab.row(it.tiers.host.row(entries[1].digest))[7] ^= 4
    load, _ = it.bring_up(entries)
    assert not load.wait_verified()
    it.tiers.discard_load(load)
    it.tiers.save(entries)
    it.settle()
    assert it.tiers.host.num_here([entry.digest for entry in entries], 0) == 2


def test_a_block_on_its_way_to_a_store_is_not_sent_again_and_a_slow_store_holds_half_the_host_tier(world):
    store = MemoryStore()
    it = world(slots=8, stores=[store], write="write-through")
    store.writing = []
    store.gate.clear()
    entries, _ = it.named(8)
    hashes = [entry.digest for entry in entries]
    it.tiers.save(entries[:2])
    while not it.tiers.host.counts().held:  # on their way to the store
        it.woken.acquire(timeout=10)
        it.tiers.poll()
    it.tiers.used(hashes[:2])
    it.tiers.save(entries[2:])
    while len(it.tiers.host) < 8:
        it.woken.acquire(timeout=10)
        it.tiers.poll()
    assert it.tiers.host.counts().held == 4
    store.gate.set()
    it.settle()
    assert sorted(sum(store.writing, ())) == sorted(hashes[:4])


def test_sinks_leave_room_in_line_for_what_a_request_waits_for():
    queue = JobQueue(8)
    assert [queue.put(IoJob(Urgency.OFFLOAD, 1, list, print)) for _ in range(5)] == [True] * 4 + [False]
    assert [queue.put(IoJob(Urgency.FETCH, 1, list, print)) for _ in range(5)] == [True] * 4 + [False]
    assert queue.put(IoJob(Urgency.LOAD, 1, list, print))


def test_write_back_looks_for_work_a_small_part_of_the_time(world):
    clock = Clock()
    it = world(clock=clock, write="write-back")
    entries, _ = it.named(16)
    it.pool.release([entry.block for entry in entries[:2]])
    seen = []

    def slow(count):
        seen.append(count)
        clock.now_s += 0.5
        return []

    it.pool.allocate(2)
    for _ in range(100):
        it.tiers.end_step(slow, 0.0)
        clock.now_s += 0.1
    assert 1 <= len(seen) <= 2


def test_closing_with_a_request_in_line_lets_its_blocks_go(world):
    store = MemoryStore()
    it = world(slots=4, stores=[store], prefetch="wait")
    entries, _ = it.named(4)
    it.tiers.save(entries[:2])
    it.settle()
    store.gate.clear()
    want(it, "r1", entries)
    assert it.tiers.host.counts().held
    store.gate.set()
    it.tiers.close()
    assert it.tiers.host.counts().held == it.tiers.host.counts().reserved == 0


def test_closing_with_work_in_line_gives_everything_back():
    it = World(stores=[store := MemoryStore()])
    store.gate.clear()
    entries, _ = it.named(6)
    it.tiers.save(entries)
    store.gate.set()
    it.tiers.close()
    assert it.tiers.held_blocks() == []
    assert it.tiers.host.counts().reserved == it.tiers.host.counts().held == 0
    assert store.is_closed
    assert np.all([thread.name.startswith("kv-tier") is False for thread in threading.enumerate()])
