"""The last 15 minutes at an ingress: rates, percentiles within their bucket, gaps, KV flows, and fixed memory."""

import random

import numpy as np
import pytest

from kvrelay.serve.telemetry.history import FLOW_PERIODS, NUM_POINTS, PERIOD_S, WINDOW, History, quantile
from kvrelay.serve.telemetry.observer import ServeStats

pytestmark = pytest.mark.pure


def recorded(*, periods=0, each=lambda stats: None, period_s=PERIOD_S):
    """A history of so many periods after its first sample, what `each` does within one; with its stats."""
    history, stats = History(), ServeStats()
    history.record(stats, 100.0)
    for number in range(periods):
        each(stats)
        history.record(stats, 100.0 + period_s * (number + 1))
    return history, stats


def points(history):
    return history.view(0.0)["points"]


@pytest.mark.parametrize("share", [0.5, 0.99])
@pytest.mark.parametrize("seed", range(8))
def test_a_percentile_lies_in_the_bucket_of_numpys(share, seed):
    rng, stats = random.Random(seed), ServeStats()
    values = [rng.lognormvariate(-1.5, 1.0) for _ in range(rng.choice([1, 7, 900]))]
    for value in values:
        stats.ttft_s.observe(value)
    bounds = (0.0, *stats.ttft_s.bounds)
    exact = float(np.quantile(values, share, method="inverted_cdf"))
    low = max(bound for bound in bounds if bound < exact)
    high = min((bound for bound in bounds if bound >= exact), default=bounds[-1])
    assert low <= quantile(stats.ttft_s.bounds, stats.ttft_s.counts, share) <= high


def test_a_percentile_of_nothing_is_none_and_one_past_the_last_bound_is_that_bound():
    assert quantile((1.0, 2.0), (0, 0, 0), 0.5) is None
    assert quantile((1.0, 2.0), (0, 0, 4), 0.5) == 2.0
    assert quantile((1.0, 2.0), (0, 4, 0), 0.5) == 1.5


def test_rates_are_of_what_was_counted_since_the_sample_before():
    history, stats = History(), ServeStats()
    stats.output_tokens = 5000  # before the first sample: of a time that is unknown
    history.record(stats, 0.0)
    stats.outcomes.update(stop=8, length=1, client=1, error=3, slo=2)
    stats.prompt_tokens, stats.output_tokens = 500, 5100
    stats.looked_up_tokens, stats.cached_prefix_tokens = 400, 100
    stats.kv_flows["p", "d", "shm"] = 50_000
    stats.ttft_s.observe(0.2, 10)
    history.record(stats, PERIOD_S)
    (point,) = zip(*points(history).values(), strict=True)
    shown = dict(zip(points(history), point, strict=True))
    assert shown.pop("ttft_p50_s") == pytest.approx(0.175) and shown.pop("ttft_p99_s") == pytest.approx(0.1995)
    assert shown == {
        "requests_per_s": 3.0,
        "failed_per_s": 1.0,
        "prompt_tokens_per_s": 100.0,
        "output_tokens_per_s": 20.0,
        "itl_p50_s": None,
        "itl_p99_s": None,
        "hit_share": 0.25,
        "kv_bytes_per_s": 10_000.0,
    }


def test_a_point_is_over_the_last_periods_and_forgets_older_ones():
    history, stats = recorded()
    stats.output_tokens = 300
    for number in range(WINDOW + 1):
        history.record(stats, 100.0 + PERIOD_S * (number + 1))
    assert points(history)["output_tokens_per_s"] == [60.0, 30.0, 20.0, 0.0]


def test_an_idle_ingress_serves_nothing_and_has_no_latency():
    history, _ = recorded(periods=4)
    assert points(history)["requests_per_s"] == [0.0] * 4
    assert points(history)["ttft_p99_s"] == points(history)["hit_share"] == [None] * 4


def test_a_late_sample_leaves_a_gap_and_its_rate_is_over_its_whole_time():
    history, stats = recorded(periods=2, each=lambda stats: setattr(stats, "output_tokens", stats.output_tokens + 50))
    stats.output_tokens += 400
    history.record(stats, 110.0 + 4 * PERIOD_S)
    assert points(history)["output_tokens_per_s"] == [10.0, 10.0, None, None, None, 20.0]


def test_hours_of_silence_leave_one_window_of_gaps():
    history, stats = recorded(periods=1)
    history.record(stats, 1e9)
    values = points(history)["requests_per_s"]
    assert values == [None] * (NUM_POINTS - 1) + [0.0]


def test_memory_is_fixed_and_the_newest_fifteen_minutes_are_kept():
    count = NUM_POINTS + 50
    totals = iter(range(count))
    history, stats = recorded(periods=count, each=lambda stats: setattr(stats, "output_tokens", next(totals) ** 2))
    values = points(history)["output_tokens_per_s"]
    assert len(values) == NUM_POINTS and values[-1] == pytest.approx((2 * count - 5) / PERIOD_S + 0.2, rel=0.01)
    assert PERIOD_S * NUM_POINTS == 15 * 60
    assert len(history._recent) == WINDOW and len(history._flows) == FLOW_PERIODS and not stats.kv_flows


def test_kv_flows_are_means_by_pair_and_transport_most_first():
    def move(stats):
        stats.kv_flows.update({("p0", "d0", "shm"): 5000, ("p0", "d1", "tcp"): 500, ("d0", "d1", "tcp"): 50_000})

    history, stats = recorded(periods=FLOW_PERIODS, each=move)
    flows = [tuple(flow.values()) for flow in history.view(0.0)["flows"]]
    assert flows == [("d0", "d1", "tcp", 10_000.0), ("p0", "d0", "shm", 1000.0), ("p0", "d1", "tcp", 100.0)]
    for number in range(FLOW_PERIODS):
        history.record(stats, 100.0 + PERIOD_S * (FLOW_PERIODS + number + 1))
    assert history.view(0.0)["flows"] == []


def test_the_age_of_the_newest_point_is_told():
    history, _ = recorded(periods=1)
    assert history.view(107.5)["age_s"] == 2.5
