"""Blocks asked for ahead of their request, and pins below the pool, over real threads: found when wanted, held by
nobody.
"""

import time

import pytest

from kvrelay.kvcache.tiers.fetches import MAX_PREFETCHES
from tests.kvcache.tiers.test_controller import MemoryStore, world  # noqa: F401

SOON_S = 1000.0  # a pin that no test outlives


def chain(it, count, salt=""):
    """(hashes, metas) of a chain that the store has and nobody else."""
    entries, _ = it.named(count, salt)
    it.tiers.save(entries)
    it.settle()
    it.tiers.reset()
    it.pool.release([entry.block for entry in entries])
    it.tiers.poll()
    return [entry.digest for entry in entries], [entry.meta for entry in entries]


@pytest.fixture
def stored(world):  # noqa: F811
    """A world with a store in which a chain of four blocks lies: (world, store, hashes, metas)."""
    store = MemoryStore()
    it = world(slots=8, stores=[store], prefetch="wait")
    return it, store, *chain(it, 4)


def ahead(it, hashes, metas, *, ttl_s=SOON_S, name="p"):
    """Prefetch; the list gets what it is told."""
    told = []
    assert it.tiers.fetches.prefetch(name, hashes, metas, time.monotonic() + ttl_s, told.append)
    return told


def fill(it, count, salt):
    """Other blocks want in; how many got in."""
    before = it.tiers.stats.saved
    entries, _ = it.named(count, salt)
    it.tiers.save(entries)
    it.settle()
    it.pool.release([entry.block for entry in entries])
    return it.tiers.stats.saved - before


def test_what_was_prefetched_outlives_pressure_and_holds_nothing(stored):
    it, _, hashes, metas = stored
    told = ahead(it, hashes, metas)
    it.settle()
    assert told == [4]
    fill(it, 8, "other")
    assert it.tiers.host.num_here(hashes, 0) == 4
    counts = it.tiers.host.counts()
    assert (counts.held, counts.reserved, len(it.tiers.fetches)) == (0, 0, 0)
    assert it.pool.counts().used == 0


def test_a_prefetch_whose_request_never_comes_ends_by_itself(stored):
    it, _, hashes, metas = stored
    ahead(it, hashes, metas, ttl_s=0.0)
    it.settle()
    fill(it, 8, "other")
    assert it.tiers.host.num_here(hashes, 0) == 0
    assert it.tiers.host.counts().pinned == 0
    assert len(it.tiers.fetches._prefetches) == 0


def test_a_request_waits_for_a_prefetch_under_way_and_asks_for_the_rest(stored):
    it, store, hashes, metas = stored
    asked = []
    load = store.load
    store.load = lambda digests, into, metas: asked.extend(digests) or load(digests, into, metas)
    store.gate.clear()
    ahead(it, hashes[:3], metas[:3])
    it.tiers.fetches.fetch("r", hashes, metas, 0)
    assert it.tiers.fetches.is_waiting("r")
    store.gate.set()
    it.settle()
    assert not it.tiers.fetches.is_waiting("r")
    assert sorted(asked) == sorted(hashes)  # each once
    assert it.tiers.host.counts().held == 4
    it.tiers.fetches.end("r")
    assert it.tiers.host.counts().held == 0


def test_a_request_that_goes_while_it_waits_for_a_prefetch_leaves_nothing(stored):
    it, store, hashes, metas = stored
    store.gate.clear()
    ahead(it, hashes[:2], metas[:2])
    it.tiers.fetches.fetch("r", hashes, metas, 0)
    it.tiers.fetches.end("r")
    store.gate.set()
    it.settle()
    assert it.tiers.host.counts().held == 0
    assert it.tiers.host.num_here(hashes, 0) == 2


def test_what_no_store_has_is_not_on_its_way(stored):
    it, store, hashes, metas = stored
    store.delete(hashes[2:])
    told = ahead(it, hashes, metas)
    it.settle()
    assert told == [2]


def test_a_store_that_fails_is_told_as_nothing(stored):
    it, store, hashes, metas = stored

    def broken(hashes):
        raise OSError("gone")

    store.contains = broken
    told = ahead(it, hashes, metas)
    it.settle()
    assert told == [0]
    assert len(it.tiers.fetches._prefetches) == 0


def test_their_number_is_bounded(stored):
    it, store, hashes, metas = stored
    store.gate.clear()
    for index in range(MAX_PREFETCHES):
        ahead(it, hashes, metas, name=str(index))
    told = []
    assert not it.tiers.fetches.prefetch("one more", hashes, metas, SOON_S, told.append)
    store.gate.set()
    it.settle()
    assert told == []
    ahead(it, hashes, metas, name="now there is room")


def test_closing_tells_those_that_wait(stored):
    it, _, hashes, metas = stored
    told = [ahead(it, hashes, metas, name=str(index)) for index in range(8)]
    it.tiers.close()
    assert all(len(one) == 1 for one in told)


def test_with_prefetch_off_nothing_is_brought(world):  # noqa: F811
    store = MemoryStore()
    it = world(stores=[store], prefetch="off")
    hashes, metas = chain(it, 4)
    assert ahead(it, hashes, metas) == [0]
    it.settle()
    assert it.tiers.host.num_here(hashes, 0) == 0


# ---- pins


@pytest.mark.parametrize("write", ["write-through", "selective", "write-back"])
@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_pinned_chain_stays_in_the_host_tier_under_pressure(world, write, is_pinned):  # noqa: F811
    it = world(slots=8, write=write)
    entries, _ = it.named(3)
    if is_pinned:
        it.tiers.pin(entries, time.monotonic() + SOON_S)
    else:
        it.tiers.save(entries)
    it.settle()
    for salt in "abc":
        fill(it, 4, salt)
    assert (it.tiers.host.num_here([entry.digest for entry in entries], 0) == 3) == is_pinned


def test_a_pin_ends_early_even_before_its_block_has_arrived(world):  # noqa: F811
    it = world(slots=8)
    entries, _ = it.named(3)
    it.tiers.pin(entries, time.monotonic() + SOON_S)
    it.tiers.unpin([entry.digest for entry in entries])
    it.settle()
    assert it.tiers.host.counts().pinned == 0
    assert not it.tiers._pin_when_saved


def test_pins_beyond_the_limit_are_saved_and_not_pinned(world):  # noqa: F811
    it = world(slots=8)
    entries, _ = it.named(7)
    it.tiers.pin(entries, time.monotonic() + SOON_S)
    it.settle()
    assert it.tiers.host.counts().pinned == 4
    assert it.tiers.host.num_here([entry.digest for entry in entries], 0) == 7
    assert not it.tiers._pin_when_saved
