"""Fetch or compute: measured speeds decide."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvrelay.kvcache.tiers.fetches import StoreSpeed, is_worth_fetching

pytestmark = pytest.mark.pure

MIB = 1 << 20


def worth(*, bandwidth: float = 1e9, prefill: float = 1000.0) -> bool:
    return is_worth_fetching(MIB, 16, bandwidth, prefill)


def test_a_fast_path_is_taken_and_a_slow_one_is_not():
    assert worth()  # 11 ms against 160 ms
    assert not worth(bandwidth=1e6)  # 10 s


def test_what_was_not_measured_is_tried():
    assert worth(bandwidth=0.0) and worth(prefill=0.0)


@given(st.floats(1e6, 1e11), st.floats(1, 1e6))
def test_it_is_where_fetching_is_sooner(bandwidth, prefill):
    assert worth(bandwidth=bandwidth, prefill=prefill) == (MIB / bandwidth < 16 / prefill)


def test_a_store_that_was_slow_once_is_measured_again_after_a_while():
    speed = StoreSpeed()
    assert speed.bytes_per_s(0.0) == 0.0
    speed.observe(100, 1.0, now_s=10.0)
    assert speed.bytes_per_s(10.0) == 100.0
    speed.observe(0, 1.0, now_s=11.0)  # brought nothing: says nothing
    speed.observe(200, 1.0, now_s=12.0)
    assert speed.bytes_per_s(13.0) == 130.0
    assert speed.bytes_per_s(60.0) == 0.0
