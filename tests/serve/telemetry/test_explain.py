"""The TTFT's parts are whole microseconds and sum to it exactly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.plane.messages import Timings, TokenOutput
from kvrelay.serve.telemetry.explain import Explain
from kvrelay.serve.telemetry.observer import Histogram

pytestmark = pytest.mark.pure


seconds = st.floats(0, 10)


def first_token(queue_s=0.0, compute_s=0.0):
    return TokenOutput(
        request_id="r",
        position=0,
        token_ids=[1],
        timings=Timings(queue_s=queue_s, compute_s=compute_s),
        cached_tokens=4,
    )


@given(seconds, seconds, seconds, seconds, seconds, seconds, seconds)
def test_the_parts_sum_to_the_ttft(received, submit, route, reserve, dispatch, queue, compute):
    explain = Explain(received_s=received, submitted_s=received + submit, route_s=route, reserve_s=reserve)
    explain.dispatched_s = received + submit + route + reserve + dispatch
    explain.on_first_token(first_token(queue, compute), explain.dispatched_s + queue + compute)
    assert sum(explain.parts_us().values()) == explain.ttft_us()


def test_time_outside_the_worker_is_the_networks():
    explain = Explain(received_s=0.0, submitted_s=0.010, dispatched_s=0.020)
    explain.on_first_token(first_token(0.001, 0.004), 0.027)
    parts = explain.parts_us()
    assert (parts["network"], parts["prefill_queue"], parts["prefill_compute"]) == (2000, 1000, 4000)
    assert (explain.ttft_us(), parts["ingress"]) == (27000, 10000)


def test_only_the_first_first_token_counts():
    explain = Explain(received_s=0.0)
    explain.on_first_token(first_token(), 0.5)
    explain.on_first_token(first_token(), 0.9)
    assert explain.ttft_us() == 500_000


def test_a_histogram_is_cumulative_and_counts_a_value_at_its_bound():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    histogram.observe(2.0, count=3)
    assert histogram.cumulative() == [(1.0, 2), (2.0, 6), (float("inf"), 7)]
    assert histogram.total == 18.0
