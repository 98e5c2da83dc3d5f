"""Paths and samples: the pure rules of the KV plane."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kvtransfer.mover.verification import SAMPLED_SHARE, chosen_regions
from kvrelay.kvtransfer.paths.selection import CLEARLY_FASTER, MAX_BACKOFF_S, MIN_BACKOFF_S, PathTable, untried

pytestmark = pytest.mark.pure


def table(*names):
    return PathTable([(name, f"why {name}") for name in names or ("shm", "nixl", "tcp")])


def test_the_best_ranked_path_is_taken():
    assert table().best(0.0).name == "shm"


def test_a_failed_path_rests_twice_as_long_each_time_up_to_a_limit():
    paths, now, rests = table("shm", "tcp"), 0.0, []
    for _ in range(9):
        paths.failed("shm", "no", now)
        rests.append(paths["shm"].backs_off_until_s - now)
        assert paths.best(now).name == "tcp"
        now = paths["shm"].backs_off_until_s
        assert paths.best(now).name == "shm"
    assert rests[:3] == [MIN_BACKOFF_S, 2 * MIN_BACKOFF_S, 4 * MIN_BACKOFF_S]
    assert rests[-1] == MAX_BACKOFF_S


def test_reads_that_fail_together_count_once():
    paths = table("shm", "tcp")
    for _ in range(4):
        paths.failed("shm", "no", 0.0)
    assert (paths["shm"].failures, paths["shm"].backs_off_until_s) == (1, MIN_BACKOFF_S)


def test_a_read_that_ends_well_makes_up_for_all_failures():
    paths = table()
    paths.failed("shm", "no", 0.0)
    paths.moved("shm", 1 << 20, 0.001)
    assert (paths.best(0.0).name, paths["shm"].failures, paths["shm"].problem) == ("shm", 0, "")


def test_where_all_rest_the_one_that_rests_least_is_taken():
    paths = table("shm", "tcp")
    paths.failed("tcp", "no", 0.0)
    paths.failed("shm", "no", 0.5)
    assert paths.best(0.6).name == "tcp"


def test_every_path_is_tried_twice_and_no_more():
    paths = table("shm", "tcp")
    seen = []
    for name in untried(paths, lambda: 0.0):
        seen.append(name)
        paths.failed(name, "no", 0.0)
    assert sorted(seen) == ["shm", "shm", "tcp", "tcp"]
    assert seen[:2] == ["shm", "tcp"]


def test_only_a_clearly_faster_path_overtakes_a_better_ranked_one():
    paths = table("shm", "tcp")
    paths.probed("shm", 4e9, 1e-5)
    paths.probed("tcp", 4e9 * CLEARLY_FASTER * 0.99, 1e-5)
    paths.reorder()
    assert paths.names == ["shm", "tcp"]
    paths.probed("tcp", 4e9 * CLEARLY_FASTER * 1.01, 1e-5)
    paths.reorder()
    assert paths.names == ["tcp", "shm"]


def test_a_path_that_was_not_measured_stays_behind_those_that_were():
    paths = table("nixl", "tcp")
    paths.probed("tcp", 2e9, 1e-4)
    paths.reorder()
    assert paths.names == ["tcp", "nixl"]


def test_small_reads_do_not_count_as_bandwidth():
    paths = table()
    paths.moved("shm", 4096, 0.001)
    assert paths["shm"].bytes_per_s == 0.0
    paths.moved("shm", 1 << 20, 0.001)
    assert paths["shm"].bytes_per_s == (1 << 20) / 0.001


# ---- samples


@given(st.binary(min_size=16, max_size=16), st.integers(1, 8), st.integers(0, 40))
def test_both_ends_draw_the_same_sample_and_no_block_goes_unchecked(nonce, layers, blocks):
    chosen = chosen_regions(nonce, blocks, layers)
    assert chosen.shape == (blocks, layers)
    assert np.array_equal(chosen, chosen_regions(nonce, blocks, layers))
    assert chosen.any(axis=1).all()


def test_a_sample_has_about_its_share():
    assert chosen_regions(b"n" * 16, 400, 100).mean() == pytest.approx(SAMPLED_SHARE, abs=0.02)


def test_another_ticket_draws_another_sample():
    assert not np.array_equal(chosen_regions(b"a" * 16, 20, 20), chosen_regions(b"b" * 16, 20, 20))
