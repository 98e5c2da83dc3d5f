"""Blocks come and go in the row of slots: nothing is lost, and freed slots are used again."""

import itertools
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvrelay import hashing
from kvrelay.router.index import hash_array as slots_module
from kvrelay.router.index.hash_array import both_bits
from kvrelay.router.index.holders import HolderIndex, HolderSets
from kvrelay.router.index.indexed_worker import Sweep
from kvrelay.router.index.prefix_index import PrefixIndex
from tests.router.index.index_cases import holders_of, kv_events, kv_snapshot, match, num_rows
from tests.scale import scaled

pytestmark = pytest.mark.pure


def chain(name, length, first=0):
    return [f"{name}{i}".encode().ljust(16) for i in range(first, first + length)]


@pytest.fixture(params=["native", "python"])
def either_table(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr("kvrelay.router.index.hash_array.new_hash_index", hashing.PythonHashIndex)


ROADS = [chain("r", 12) + chain(name, 28) for name in ("a", "b", "c")] + [chain("d", 40)]
WORKERS = [both_bits(row) for row in range(3)]


class RowMachine(RuleBasedStateMachine):
    """Three workers' pieces of a few chains come and go while the row is swept, step by step."""

    @initialize()
    def begin(self):
        self.holders, self.held = HolderIndex(chunk=4), [set() for _ in WORKERS]
        self.positions, self.sweep = self.holders.array, None

    @rule(worker=st.integers(0, 2), road=st.sampled_from(ROADS), start=st.integers(0, 39), length=st.integers(1, 40))
    def put(self, worker, road, start, length):
        some = road[start : start + length]
        self.holders.put(some, WORKERS[worker], WORKERS[worker])
        self.held[worker] |= set(some)

    @rule(worker=st.integers(0, 2), road=st.sampled_from(ROADS), start=st.integers(0, 39), length=st.integers(1, 40))
    def drop(self, worker, road, start, length):
        some = road[start : start + length]
        self.holders.drop(some, WORKERS[worker])
        self.held[worker] -= set(some)

    @rule(worker=st.integers(0, 2), road=st.sampled_from(ROADS[:3]), start=st.integers(1, 20), length=st.integers(1, 9))
    def put_with_others_in_between(self, worker, road, start, length):
        """Names lie where the chain's would."""
        some = [*road[:start], *ROADS[3][:length], *road[start + length :]]
        self.holders.put(some, WORKERS[worker], WORKERS[worker])
        self.held[worker] |= set(some)

    @rule(road=st.sampled_from(ROADS), start=st.integers(0, 20), stride=st.integers(1, 4))
    def drop_almost_all(self, road, start, stride):
        keep = {*road[start::stride], *ROADS[3][: start // 4]}
        for held, own_bits in zip(self.held, WORKERS, strict=True):
            self.holders.drop(sorted(held - keep), own_bits)
            held &= keep

    @precondition(lambda self: self.sweep is None)
    @rule()
    def begin_sweep(self):
        """Of nobody's bits, so that it changes nothing."""
        self.sweep = Sweep(self.holders, both_bits(7))

    @precondition(lambda self: self.sweep is not None)
    @rule()
    def step_sweep(self):
        assert self.sweep.step() == 0
        if self.sweep.is_done:
            self.sweep = None

    @rule(road=st.sampled_from(ROADS), cut=st.integers(0, 40))
    def look_up(self, road, cut):
        prompt = [*road[:cut], *chain("unknown", 5)]
        found = {}
        for depth, bits in self.holders.walk(prompt, sum(WORKERS)):
            found.update({worker: depth for worker, own_bits in enumerate(WORKERS) if bits & own_bits})
        expected = [next(i for i, one in enumerate(prompt) if one not in held) for held in self.held]
        assert found == {worker: depth for worker, depth in enumerate(expected) if depth}

    @invariant()
    def columns_agree(self):
        if not hasattr(self, "slots"):
            return
        positions, set_ids = self.positions, list(self.positions.set_ids)
        assert list(positions._used) == [1, *(int(set_id != 0) for set_id in set_ids[1:-1]), 1]
        assert list(positions._edges[:-1]) == [int(one != after) for one, after in itertools.pairwise(set_ids)]
        assert len(positions._names) == 16 * len(set_ids) and len(positions._chained) == len(set_ids)
        every = set().union(*self.held)
        assert len(positions) == len(every) == sum(set_id != 0 for set_id in set_ids)
        for one in every:
            assert positions.names([positions.position(one)]) == [one]
            assert self.holders.mask(one) == sum(
                own_bits for own_bits, held in zip(WORKERS, self.held, strict=True) if one in held
            )


@pytest.fixture(autouse=True)
def small_rows(monkeypatch):
    monkeypatch.setattr(slots_module, "MIN_GROWTH", 4)
    monkeypatch.setattr("kvrelay.router.index.holders.SHORT", 2)


SETTINGS = settings(max_examples=scaled(120), stateful_step_count=40, deadline=None)


def test_whatever_happens_in_a_row(either_table):
    run_state_machine_as_test(RowMachine, settings=SETTINGS)


def num_bytes(index):
    """Of the row's columns, the table of names and the kinds."""
    holders = holders_of(index)
    positions, set_ids = holders.array, holders.sets
    names = positions._table.num_bytes() or sys.getsizeof(positions._table._row_of)
    columns = (
        positions._names,
        positions.set_ids,
        positions._used,
        positions._chained,
        positions._edges,
        set_ids.masks,
        set_ids._counts,
    )
    return names + sum(map(sys.getsizeof, columns))


def test_churn_takes_no_more_memory_than_the_most_blocks_at_a_time(either_table, monkeypatch):
    """Many workers with blocks of their own and of others come and go, by events, by leaving, by snapshots."""
    monkeypatch.setattr(slots_module, "MIN_GROWTH", 256)  # rows as in production
    rng, index, kept, sizes = random.Random(2), PrefixIndex(), chain("kept", 3000), []
    index.add_worker("stays", max_blocks=10_000)
    index.apply_snapshot("stays", kv_snapshot(0, kept))
    for turn in range(3):
        for worker in range(60):
            index.add_worker(f"w{worker}", max_blocks=10_000)
            cached = chain(f"own{turn}-{worker}-", 2000) + kept[: rng.randrange(3000)]
            index.apply_snapshot(f"w{worker}", kv_snapshot(0, cached))
        index.apply_events("w0", kv_events(1, [], chain(f"own{turn}-0-", 2000)))
        index.apply_snapshot("w1", kv_snapshot(1, []))
        sizes.append(num_bytes(index))
        for worker in range(60):
            index.remove_worker(f"w{worker}")
        assert num_rows(index) == 1 and len(index) == 3000
        assert match(index, kept) == {"stays": 3000}
    assert max(sizes) < 1.2 * sizes[0]


def test_new_workers_get_the_lowest_rows_so_that_masks_stay_short():
    index = PrefixIndex()
    for worker in range(100):
        index.add_worker(f"w{worker}", max_blocks=10)
    for worker in range(1, 99):
        index.remove_worker(f"w{worker}")
    assert (num_rows(index), index.add_worker("new", max_blocks=10)) == (100, 1)
    index.remove_worker("w99")
    assert num_rows(index) == 2
    assert index.add_worker("w99", max_blocks=10) == 2


moves = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 3)), max_size=80)


@settings(max_examples=200, deadline=None)
@given(moves)
def test_kinds_are_numbered_and_no_more_than_there_were_at_once(happened):
    """Blocks move from one mask to another: (from, to, how many); 0: nobody's."""
    set_ids, counts = HolderSets(), {}
    for source, target, count in happened:
        count = min(count, counts.get(source, 0)) if source else count
        if not count or source == target:
            continue
        number = set_ids.moved(set_ids._numbers[source], target, count)
        assert (set_ids.masks[number] if number else 0) == target
        for mask, more in ((source, -count), (target, count)):
            if mask:
                counts[mask] = counts.get(mask, 0) + more
        counts = {mask: number for mask, number in counts.items() if number}
        assert {mask: set_ids._counts[number] for mask, number in set_ids._numbers.items() if mask} == counts
        assert sorted(mask for mask in set_ids.masks if mask) == sorted(counts)
        assert len(set_ids.masks) == 1 + len(counts) + len(set_ids._free)


def test_numbers_of_kinds_are_used_again():
    set_ids = HolderSets()
    for _ in range(3):
        numbers = [set_ids.moved(0, mask, 1) for mask in range(1, 1001)]
        assert sorted(numbers) == list(range(1, 1001))
        for mask in range(1, 1001):
            set_ids.moved(set_ids._numbers[mask], 0, 1)
    assert len(set_ids.masks) == len(set_ids._counts) == 1001 and not any(set_ids.masks)
