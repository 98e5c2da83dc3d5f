"""The course of past days: bins, which days count, and what a file adds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.router.planning.season import BIN_S, DAYS, Season

pytestmark = pytest.mark.pure

PERIOD_S = 4 * BIN_S
WEEK_S = 86400.0


def days(*rates: float, period_s: float = PERIOD_S) -> Season:
    """Days of one rate each, from time 0."""
    season = Season()
    for day, rate in enumerate(rates):
        season.observe(day * period_s, (day + 1) * period_s, rate * period_s, period_s)
    return season


@given(st.lists(st.tuples(st.floats(1.0, 900.0), st.integers(0, 500)), min_size=1, max_size=20))
def test_no_request_is_lost_between_bins(spans):
    season, now_s = Season(), 120.0
    for seconds, requests in spans:
        season.observe(now_s, now_s + seconds, requests, 1e6)
        now_s += seconds
    assert sum(season.rates) * BIN_S == pytest.approx(sum(requests for _, requests in spans))
    assert (season.first, len(season.rates)) == (0, -(-now_s // BIN_S))


def test_a_span_that_was_not_observed_is_no_span_without_requests():
    season = Season()
    season.observe(0.0, 300.0, 300, PERIOD_S)
    season.observe(900.0, 1200.0, 600, PERIOD_S)
    assert season.rates == pytest.approx([1.0, math.nan, math.nan, 2.0], nan_ok=True)
    season.observe(1200.0, 2700.0, 0, PERIOD_S)
    assert season.usual(10.5 * BIN_S, PERIOD_S) == 0.0  # the day before alone
    assert days(4.0).after(Season(-8, [8.0] * 4, BIN_S)).usual(1.5 * PERIOD_S, PERIOD_S) == pytest.approx(6.0)


def test_one_odd_day_does_not_count():
    assert days(2.0, 2.0, 50.0, 2.0).usual(4.5 * PERIOD_S, PERIOD_S) == pytest.approx(2.0)
    assert days(50.0).usual(1.5 * PERIOD_S, PERIOD_S) == pytest.approx(50.0)  # the only one does


def test_the_same_weekday_counts_alone_once_it_was_there_twice():
    weeks = [1.0 if day % 7 == 5 else 9.0 for day in range(21)]
    at_s = 19.5 * PERIOD_S  # day 19 is such a day, too
    assert days(*weeks[:19]).usual(at_s, PERIOD_S) == pytest.approx(1.0)
    assert days(*weeks[6:19]).usual(13.5 * PERIOD_S, PERIOD_S) == pytest.approx(9.0)  # there was one only


def test_a_day_that_was_never_seen_has_no_course():
    season = days(1.0)
    assert season.usual(0.5 * PERIOD_S, PERIOD_S) is None
    assert season.course(0.5 * PERIOD_S, BIN_S, BIN_S, PERIOD_S) is None
    assert season.course(1.9 * PERIOD_S, BIN_S, BIN_S, PERIOD_S) is None  # reaches into a day without a past


def test_the_course_is_in_proportion_to_the_time_before():
    season = Season()
    for number in range(8):
        season.observe(number * BIN_S, (number + 1) * BIN_S, (3.0 if number % 4 == 3 else 1.0) * BIN_S, PERIOD_S)
    now_s = 10.5 * BIN_S  # the middle of the day's third bin
    found = season.course(now_s, BIN_S, 0.1, PERIOD_S)
    assert found == pytest.approx((1.0, 3.0))


def test_what_a_file_knows_is_put_before_what_was_observed():
    own = Season()
    own.observe(3 * BIN_S, 4 * BIN_S, 7 * BIN_S, PERIOD_S)
    merged = own.after(days(1.0, period_s=2 * BIN_S))
    assert merged.rates == pytest.approx([1.0, 1.0, math.nan, 7.0], nan_ok=True) and merged.first == 0
    again = merged.after(days(1.0, period_s=2 * BIN_S))
    assert again is merged
    assert Season().after(own) == own and own.after(Season()) == own


def test_only_so_many_days_are_remembered():
    season = days(*[1.0] * (DAYS + 5))
    assert len(season.rates) == DAYS * 4 and season.first == 5 * 4
    season.observe(1e9, 1e9 + 30.0, 3, PERIOD_S)  # years later
    assert len(season.rates) == 1
