"""Snapshots in parts, and their going in slice by slice: what is claimed meanwhile, and what ends it."""

import itertools

import pytest

from kvrelay.router.index.indexed_worker import RETRY_EVERY, SLICE, DeferredWork
from kvrelay.router.types import IndexState
from tests.router.index.index_cases import ScheduledIndex, depths, holders_of, kv_events, kv_snapshot, match

pytestmark = pytest.mark.pure


def chain(name, length):
    return [f"{name}{i}".encode().ljust(16) for i in range(length)]


LONG = chain("x", 3 * SLICE + 10)
STALE, EXACT, DEGRADED = IndexState.STALE, IndexState.EXACT, IndexState.DEGRADED


def deferred(*names, max_blocks=10_000):
    index = ScheduledIndex()
    for name in names:
        index.add_worker(name, max_blocks=max_blocks)
    return index


def finish(index):
    """How many slices were left."""
    count = 0
    while index.work():
        count += 1
    return count


def known(index, name="w"):
    return index.state(name), match(index, LONG).get(name, 0)


def test_a_snapshot_goes_in_by_slices_and_there_is_no_hit_before_all_is_in():
    index = deferred("w")
    assert index.apply_snapshot("w", kv_snapshot(5, LONG)) is True
    seen = []
    while index.work():
        seen.append((index.num_blocks("w"), *known(index)))
    assert [count for count, *_ in seen] == [SLICE, 2 * SLICE, 3 * SLICE, len(LONG)]
    assert {(state, depth) for _, state, depth in seen} == {(STALE, 0)}
    assert (known(index), index.num_scheduled) == ((EXACT, len(LONG)), 1)


def test_parts_may_come_before_or_after_others_have_gone_in():
    index = deferred("w")
    index.apply_snapshot("w", kv_snapshot(5, LONG[:100], is_last=False))
    assert index.work() is True and index.work() is False and known(index) == (STALE, 0)
    index.apply_snapshot("w", kv_snapshot(5, LONG[100:200], part=1, is_last=False))
    index.apply_snapshot("w", kv_snapshot(5, LONG[200:300], LONG[250:300], part=2))
    finish(index)
    assert (known(index), index.num_scheduled) == ((EXACT, 300), 2)
    assert depths(index, LONG)["w"][0] == 250


def test_events_count_at_once_whatever_of_the_snapshot_is_in():
    index = deferred("w")
    index.apply_snapshot("w", kv_snapshot(5, LONG[:10], LONG[4:10], is_last=False))
    finish(index)
    assert index.apply_events("w", kv_events(6, [], [LONG[3], LONG[13]])) is True  # one is in, the other is to come
    assert index.apply_events("w", kv_events(7, LONG[30:40], [], raised=LONG[4:5], lowered=LONG[15:16])) is True
    index.apply_snapshot("w", kv_snapshot(5, LONG[10:30], part=1))
    finish(index)
    assert (index.state("w"), index.num_blocks("w")) == (EXACT, 38)
    index.apply_events("w", kv_events(8, [LONG[3], LONG[13]], []))
    assert depths(index, LONG) == {"w": (5, 40)}
    assert index.apply_events("w", kv_events(9, [], [], raised=LONG[5:10])) is True
    assert depths(index, LONG)["w"][0] == 15


def test_what_the_snapshot_does_not_name_goes_in_the_end():
    index = deferred("w", "other")
    for name in ("w", "other"):
        index.apply_snapshot(name, kv_snapshot(5, LONG))
    finish(index)
    assert index.apply_events("w", kv_events(9, [], [])) is False
    index.apply_snapshot("w", kv_snapshot(9, LONG[:50]))
    finish(index)
    assert (known(index), known(index, "other")) == ((EXACT, 50), (EXACT, len(LONG)))
    assert index.num_blocks("w") == 50


def test_one_that_is_degraded_is_asked_for_hits_meanwhile():
    index = deferred("w")
    index.apply_snapshot("w", kv_snapshot(5, LONG))
    finish(index)
    assert index.apply_events("w", kv_events(6, [], [b"unknown".ljust(16)])) is False
    index.apply_snapshot("w", kv_snapshot(6, LONG[:700], is_last=False))
    for _slices in range(3):
        assert known(index) == (DEGRADED, len(LONG))
    assert index.apply_events("w", kv_events(7, [], LONG[900:])) is True
    assert known(index) == (DEGRADED, 900)
    index.apply_snapshot("w", kv_snapshot(6, LONG[700:], part=1))
    finish(index)
    assert known(index) == (EXACT, 900)


def test_a_missing_part_is_asked_for_and_the_rest_of_that_snapshot_is_of_no_use():
    index = deferred("w")
    index.apply_snapshot("w", kv_snapshot(5, LONG[:10], is_last=False))
    assert index.apply_snapshot("w", kv_snapshot(5, LONG[20:30], part=2, is_last=False)) is False
    assert index.apply_snapshot("w", kv_snapshot(5, LONG[30:40], part=3)) is True  # asked already
    finish(index)
    assert known(index) == (STALE, 0)
    index.apply_snapshot("w", kv_snapshot(6, LONG[:20]))
    finish(index)
    assert known(index) == (EXACT, 20)


def test_another_snapshot_ends_one_that_is_not_in():
    index = deferred("w")
    index.apply_snapshot("w", kv_snapshot(5, LONG, is_last=False))
    index.work()
    index.apply_snapshot("w", kv_snapshot(7, LONG[:3], is_last=False))
    assert index.apply_snapshot("w", kv_snapshot(5, LONG, part=1)) is False  # two that are mixed are none
    index.apply_snapshot("w", kv_snapshot(8, LONG[:3]))
    finish(index)
    assert (known(index), len(index)) == ((EXACT, 3), 3)


def test_a_gap_in_the_events_meanwhile_asks_for_another():
    index = deferred("w")
    index.apply_snapshot("w", kv_snapshot(5, LONG))
    assert index.apply_events("w", kv_events(7, [], [])) is False
    finish(index)
    assert known(index) == (STALE, 0)
    index.apply_snapshot("w", kv_snapshot(7, LONG[:9]))
    finish(index)
    assert known(index) == (EXACT, 9)


def test_parts_that_do_not_come_are_asked_for_after_many_events():
    index = deferred("w")
    index.apply_snapshot("w", kv_snapshot(5, LONG[:10], is_last=False))
    asked = [seq for seq in range(6, 6 + 2 * RETRY_EVERY) if not index.apply_events("w", kv_events(seq, [], []))]
    assert asked == [5 + RETRY_EVERY, 5 + 2 * RETRY_EVERY]


def test_an_audit_waits_for_a_snapshot_but_not_for_ever():
    index = deferred("w")
    index.apply_snapshot("w", kv_snapshot(5, LONG, is_last=False))
    assert index.audit_sample("w", 0, 8) == []
    assert index.apply_audit("w", 99, [], []) is True
    index.apply_snapshot("w", kv_snapshot(5, LONG, part=1, is_last=False))
    assert [index.apply_audit("w", 99, [], []) for _ in range(2)] == [True, False]
    index.apply_snapshot("w", kv_snapshot(99, LONG))
    assert [index.apply_audit("w", 99, [], []) for _ in range(3)] == [True] * 3  # all of it is here
    finish(index)
    assert known(index) == (EXACT, len(LONG))


def test_who_leaves_or_restarts_meanwhile_leaves_nothing():
    index = deferred("w", "other")
    index.apply_snapshot("other", kv_snapshot(0, LONG[:5]))
    index.apply_snapshot("w", kv_snapshot(5, LONG))
    for _ in range(3):
        index.work()
    old = index.row("w")
    index.add_worker("w", max_blocks=10_000)
    assert index.row("w") != old  # nobody's until the last of it is gone
    index.apply_snapshot("w", kv_snapshot(1, LONG[:2]))
    finish(index)
    assert (known(index), known(index, "other"), len(index)) == ((EXACT, 2), (EXACT, 5), 5)
    assert index.add_worker("new", max_blocks=9) == old
    index.remove_worker("w")
    index.remove_worker("other")
    assert match(index, LONG) == {}
    finish(index)
    assert len(index) == 0


def test_one_slice_takes_off_no_more_than_it_puts_in():
    index = deferred("w")
    index.apply_snapshot("w", kv_snapshot(0, LONG))
    finish(index)
    index.remove_worker("w")
    left = [len(LONG)]
    while index.work():
        left.append(len(index))
    assert all(before - after <= SLICE for before, after in itertools.pairwise(left)) and len(left) >= 4


def test_blocks_stay_where_they_are_while_somebody_is_taken_off():
    hashes = LONG[:640][::-1]
    index = deferred("w", "other")
    index.apply_snapshot("w", kv_snapshot(0, hashes))
    index.apply_snapshot("other", kv_snapshot(0, LONG))
    finish(index)
    positions = holders_of(index).array
    index.remove_worker("other")
    before = {one: positions.position(one) for one in LONG}
    index.work()
    match(index, LONG)
    assert all(positions.position(one) in (before[one], 0) for one in before)
    finish(index)
    match(index, LONG)
    assert any(positions.position(one) != before[one] for one in hashes)


@pytest.mark.parametrize("is_deferred", [False, True])
def test_more_than_fits_is_cut_off_and_degrades(is_deferred):
    index = ScheduledIndex(is_deferred=is_deferred)
    index.add_worker("w", max_blocks=SLICE + 7)
    for seq in (1, 2):
        index.apply_snapshot("w", kv_snapshot(seq, LONG))
        finish(index)
        assert known(index)[0] is DEGRADED
    index.apply_snapshot("w", kv_snapshot(3, LONG[: SLICE + 7]))
    finish(index)
    assert known(index) == (EXACT, SLICE + 7)


def test_chores_are_done_in_turns_and_one_that_fails_holds_up_no_other():
    done = []
    at_once, chores = DeferredWork(), DeferredWork(lambda work: done.append("scheduled"))

    def chore(name, times):
        def step():
            done.append(name)
            return done.count(name) < times

        return step

    def broken():
        raise ValueError

    at_once.add(chore("at once", 2))
    chores.add(chore("a", 2))
    chores.add(broken)
    chores.add(chore("b", 1))
    assert chores.work() is True
    with pytest.raises(ValueError):
        chores.work()
    assert [chores.work(), chores.work(), chores.work()] == [True, False, False]
    assert done == ["at once", "at once", "scheduled", "a", "b", "a"]
