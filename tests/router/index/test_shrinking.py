"""The row of slots gets shorter when most of its blocks have gone: nothing is lost, whatever happens meanwhile."""

import itertools
import random
import sys

import pytest
from hypothesis import Phase, given, settings
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
from kvrelay.router.index.hash_array import HashArray, both_bits
from kvrelay.router.index.holders import HolderIndex, HolderSets
from kvrelay.router.index.indexed_worker import Sweep
from kvrelay.router.index.prefix_index import PrefixIndex
from tests.router.index.index_cases import holders_of, match, num_rows
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
    """Three workers' pieces of a few chains come and go while the row closes up, step by step, or is swept."""

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

    @rule(
        road=st.sampled_from(ROADS),
        start=st.integers(0, 20),
        stride=st.integers(1, 4),
        most=st.integers(1, 5),
        times=st.integers(0, 9),
    )
    def drop_almost_all_and_begin(self, road, start, stride, most, times):
        keep = {*road[start::stride], *ROADS[3][: start // 4]}
        for held, own_bits in zip(self.held, WORKERS, strict=True):
            self.holders.drop(sorted(held - keep), own_bits)
            held &= keep
        if self.holders.begin_compaction():
            self.compact(most, times)

    @precondition(lambda self: self.positions.is_compacting)
    @rule(most=st.integers(1, 9), times=st.integers(1, 30))
    def compact(self, most, times):
        while times and self.holders.compact(most):
            times -= 1

    @precondition(lambda self: self.positions.is_compacting)
    @rule()
    def close_up_to_the_end(self):
        """And once more where more has gone meanwhile."""
        for _ in range(2):
            while self.holders.compact(5):
                pass
            self.holders.begin_compaction()
        assert not self.positions.is_sparse and not self.positions.is_compacting

    @precondition(lambda self: self.sweep is None)
    @rule()
    def begin_sweep(self):
        """It may end a closing; nobody's bits, so that it changes nothing."""
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
    monkeypatch.setattr(slots_module, "_STRETCH", 7)
    monkeypatch.setattr("kvrelay.router.index.holders.SHORT", 2)


SETTINGS = settings(max_examples=scaled(120), stateful_step_count=40, deadline=None)


def test_whatever_happens_while_a_row_closes_up(either_table):
    run_state_machine_as_test(RowMachine, settings=SETTINGS)


def test_the_machine_finds_new_blocks_that_come_to_lie_anywhere(monkeypatch):
    """A control."""
    room = HashArray._free_run

    def anywhere(self, count):
        ahead, self._ahead = self._ahead, 0
        found = room(self, count)
        self._ahead = ahead
        return found

    monkeypatch.setattr(HashArray, "_free_run", anywhere)
    with pytest.raises((AssertionError, IndexError)):
        run_state_machine_as_test(
            RowMachine, settings=settings(SETTINGS, max_examples=600, database=None, phases=[Phase.generate])
        )


def closed_up():
    """The depth of a chain in a row that has closed up, whose sixth block's place another block has; what is noted of
    it.
    """
    holders, road = HolderIndex(), ROADS[0]
    holders.put(chain("gone", 200), WORKERS[0], WORKERS[0])
    holders.put(road, WORKERS[0], WORKERS[0])
    holders.walk(road, WORKERS[0])  # it is noted that they are a chain
    holders.drop([*chain("gone", 200), road[5]], WORKERS[0])
    holders.array._cursor = holders.array.position(road[4]) + 1
    holders.put([b"other".ljust(16)], WORKERS[0], WORKERS[0])
    assert holders.array.position(b"other".ljust(16)) == holders.array.position(road[4]) + 1
    assert holders.begin_compaction()
    while holders.compact(3):
        pass
    assert holders.array.position(road[0]) == 1
    first, after = holders.array._chained[1:5], holders.array._chained[7:40]
    return holders.walk(road, WORKERS[0]), sum(first), sum(after)


def test_what_is_noted_of_a_chain_moves_with_it_and_nothing_else_is():
    ends, first, after = closed_up()
    assert ends == [(5, WORKERS[0])]
    assert first >= 2 and after >= 20


def test_the_check_finds_notes_of_what_does_not_follow(monkeypatch):
    """A control: what lies next to each other in the end is taken for a chain."""
    close = HashArray._compact_stretch

    def noted(self, most, stop):
        before = self._packed
        stop = close(self, most, stop)
        self._chained[before - 1 : self._packed] = b"\1" * (self._packed - before + 1)
        return stop

    monkeypatch.setattr(HashArray, "_compact_stretch", noted)
    assert closed_up()[0] != [(5, WORKERS[0])]


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


def test_memory_after_churn_is_that_of_what_is_left(either_table, monkeypatch):
    """Many workers with blocks of their own and of others come and go, by events, by leaving, by snapshots."""
    monkeypatch.setattr(slots_module, "MIN_GROWTH", 256)  # rows as in production
    monkeypatch.setattr(slots_module, "_STRETCH", 1 << 13)
    rng, index = random.Random(2), PrefixIndex()
    small = PrefixIndex()
    kept = chain("kept", 3000)
    for one in (small, index):
        one.add_worker("stays", max_blocks=10_000)
        one.apply_snapshot("stays", 0, kept)
    for worker in range(60):
        index.add_worker(f"w{worker}", max_blocks=10_000)
        index.apply_snapshot(f"w{worker}", 0, chain(f"own{worker}-", 2000) + kept[: rng.randrange(3000)])
    assert num_bytes(index) > 10 * num_bytes(small)
    index.apply_events("w0", 1, [], chain("own0-", 2000))
    index.apply_snapshot("w1", 1, [])
    for worker in range(60):
        index.remove_worker(f"w{worker}")
    assert num_bytes(index) < 4 * num_bytes(small)
    assert num_rows(index) == 1 and len(index) == 3000
    assert match(index, kept) == {"stays": 3000}
    index.apply_events("stays", 1, [], kept)
    assert num_bytes(index) < 100_000


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
def test_kinds_are_numbered_and_no_more_than_there_were_at_once_of_the_higher_ones(happened):
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
        assert len(set_ids.masks) == 1 + max(set_ids._numbers.values())


def test_the_lists_of_kinds_shrink_with_them():
    set_ids = HolderSets()
    for mask in range(1, 1001):
        set_ids.moved(0, mask, 1)
    for mask in range(1000, 2, -1):
        set_ids.moved(mask, 0, 1)
    assert set_ids.masks == [0, 1, 2] and len(set_ids._counts) == 3
    assert len(set_ids._free) < 100 and set_ids.moved(0, 9999, 1) == 3
