"""The load generator's figures: percentiles, gaps, goodput, counts."""

import random

import numpy as np
import pytest

from kvrelay.cluster.loadgen.stats import (
    LATE_S,
    OK,
    UNFINISHED,
    Distribution,
    LoadRecord,
    Slo,
    Summary,
    distribution,
    token_gaps,
)

pytestmark = pytest.mark.pure


def record(outcome=OK, *, start=0.0, late=0.0, ttft=0.1, e2e=1.1, tokens=11, wanted=0, cached=0, prompt=8):
    return LoadRecord(
        index=0,
        scheduled_s=start - late,
        started_s=start,
        outcome=outcome,
        ttft_s=ttft,
        e2e_s=e2e,
        num_prompt_tokens=prompt,
        num_output_tokens=tokens,
        num_cached_tokens=cached,
        num_chunks=tokens,
        wanted_tokens=wanted,
    )


@pytest.mark.parametrize("size", [1, 2, 3, 10, 101])
def test_percentiles_are_numpys(size):
    values = [random.Random(size).expovariate(1) for _ in range(size)]
    found = distribution(values)
    assert (found.p50, found.p90, found.p95, found.p99) == pytest.approx(np.percentile(values, (50, 90, 95, 99)))


def test_no_values_have_a_percentile_of_zero():
    assert distribution([]) == Distribution()


def test_a_distribution_needs_no_order():
    found = distribution([3.0, 1.0, 2.0])
    assert (found.count, found.mean, found.p50, found.max) == (3, 2.0, 2.0, 3.0)


def test_a_chunk_of_k_tokens_counts_as_k_gaps():
    gaps = token_gaps([0.030, 0.010], num_tokens=7)  # three chunks, seven tokens: six gaps
    assert sorted(gaps) == [0.0, 0.0, 0.0, 0.0, 0.010, 0.030]


def test_more_chunks_than_tokens_add_no_gaps():
    assert token_gaps([0.01, 0.01, 0.01], num_tokens=2) == [0.01, 0.01, 0.01]


def test_tpot_is_the_time_after_the_first_token_over_the_other_tokens():
    assert record(ttft=0.1, e2e=1.1, tokens=11).tpot_s == pytest.approx(0.1)
    assert record(tokens=1).tpot_s is None


@pytest.mark.parametrize(
    ("slo", "good"),
    [(Slo(), 3), (Slo(ttft_s=0.2), 2), (Slo(tpot_s=0.05), 1), (Slo(ttft_s=0.2, tpot_s=0.05), 0), (Slo(ttft_s=0.01), 0)],
)
def test_goodput_counts_requests_inside_every_limit(slo, good):
    records = [
        record(ttft=0.1, e2e=1.1),  # tpot 0.1
        record(ttft=0.15, e2e=1.15),  # tpot 0.1
        record(ttft=0.3, e2e=0.5),  # tpot 0.02
        record("http 500", ttft=None, e2e=0.01, tokens=0),
        record(UNFINISHED, ttft=0.1, e2e=0.2),
    ]
    assert [slo.is_met(one) for one in records].count(True) == good


def test_a_one_token_answer_cannot_miss_the_tpot_limit():
    assert Slo(tpot_s=0.001).is_met(record(tokens=1))


def test_concurrency_does_not_count_a_request_that_ends_as_another_starts():
    records = [record(start=0, e2e=1.0), record(start=1.0, e2e=1.0), record(start=1.5, e2e=1.0)]
    assert Summary(records, [], Slo()).max_concurrency == 2


def test_a_summary_keeps_rejected_failed_and_unfinished_apart():
    records = [
        record(start=1.0, e2e=1.0, tokens=10, cached=4, wanted=10),
        record(start=1.0, e2e=3.0, tokens=20, wanted=21),
        record("http 429", start=2.0, ttft=None, e2e=0.1, tokens=0),
        record("http 429", start=2.0, ttft=None, e2e=0.1, tokens=0),
        record("timeout", start=2.0, ttft=None, e2e=0.1, tokens=0),
        record(UNFINISHED, start=2.0, ttft=None, e2e=0.1, tokens=0),
    ]
    found = Summary(records, [], Slo(ttft_s=1.0))
    assert (found.num_requests, found.num_ok, found.num_rejected) == (6, 2, 2)
    assert (found.num_failed, found.num_unfinished) == (1, 1)
    assert found.errors == {"http 429": 2, "timeout": 1}
    assert found.duration_s == pytest.approx(3.0)
    assert found.output_tokens_per_s == pytest.approx(10.0)
    assert found.goodput_per_s == pytest.approx(2 / 3)
    assert found.slo_attainment == pytest.approx(2 / 5)
    assert found.cached_tokens == 4
    assert found.num_wrong_length == 1


def test_a_run_without_requests_has_a_summary():
    found = Summary([], [], Slo())
    assert (found.num_requests, found.requests_per_s, found.ttft_s.count) == (0, 0.0, 0)


@pytest.mark.parametrize(("late_s", "is_late"), [(0.0, False), (LATE_S / 2, False), (2 * LATE_S, True)])
def test_a_generator_is_late_when_its_requests_left_late_however_busy_it_was(late_s, is_late):
    records = [record(start=float(index), late=late_s) for index in range(100)]
    for cpu_share in (0.02, 0.99):
        assert Summary(records, [], Slo(), cpu_share).is_late is is_late
