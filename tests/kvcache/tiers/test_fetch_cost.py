"""Fetch what another place holds only where that is sooner than computing it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kvcache.tiers.fetch_cost import StoreSpeed, fetch_seconds, worth_fetching

pytestmark = pytest.mark.pure


MIB = 1 << 20


def worth(num_blocks=10, *, bandwidth=1e9, latency_s=0.001, prefill=1000.0, **more):
    return worth_fetching(num_blocks, MIB, 16, bandwidth, latency_s, prefill, **more)


def test_a_fast_path_is_taken_and_a_slow_one_is_not():
    assert worth() == 10  # 11 ms against 160 ms
    assert worth(bandwidth=1e6) == 0  # 10 s


def test_a_queue_at_the_store_or_at_this_worker_tips_the_scale():
    assert worth(queued_s=1.0) == 0
    assert worth(queued_s=1.0, compute_queued_s=2.0) == 10


def test_latency_makes_few_blocks_not_worth_it():
    assert worth(1, latency_s=0.05) == 0
    assert worth(10, latency_s=0.05) == 10


def test_what_was_not_measured_is_tried():
    assert worth(bandwidth=0.0) == worth(prefill=0.0) == 10
    assert fetch_seconds(MIB, 0.0, 0.0) == math.inf


def test_nothing_is_nothing():
    assert worth(0) == worth(-1) == 0


@given(
    st.integers(1, 10_000), st.floats(1e6, 1e11), st.floats(0, 1), st.floats(1, 1e6), st.floats(0, 10), st.floats(0, 10)
)
def test_it_is_all_where_fetching_is_sooner_and_none_where_not(num_blocks, bandwidth, latency_s, prefill, queued, own):
    found = worth_fetching(num_blocks, MIB, 16, bandwidth, latency_s, prefill, queued, own)
    is_sooner = queued + latency_s + num_blocks * MIB / bandwidth < own + num_blocks * 16 / prefill
    assert found == (num_blocks if is_sooner else 0)


def test_a_store_that_was_slow_once_is_measured_again_after_a_while():
    speed = StoreSpeed()
    assert speed.bytes_per_s(0.0) == 0.0
    speed.observe(100, 1.0, now_s=10.0)
    assert speed.bytes_per_s(10.0) == 100.0
    speed.observe(0, 1.0, now_s=11.0)  # brought nothing: says nothing
    speed.observe(200, 1.0, now_s=12.0)
    assert speed.bytes_per_s(13.0) == 130.0
    assert speed.bytes_per_s(60.0) == 0.0
