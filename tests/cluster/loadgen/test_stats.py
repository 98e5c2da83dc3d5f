"""The load generator's figures: percentiles, gaps, goodput, counts."""

import random

import numpy as np
import pytest

from kvrelay.cluster.loadgen.stats import (
    OK,
    UNFINISHED,
    GapHistogram,
    LoadRecord,
    Slo,
    add_gaps,
    count_good,
    distribution,
    gap_distribution,
    max_concurrency,
    percentile,
    summarize,
)

pytestmark = pytest.mark.pure


def record(outcome=OK, *, start=0.0, ttft=0.1, e2e=1.1, tokens=11, wanted=0, cached=0, prompt=8):
    return LoadRecord(
        index=0,
        scheduled_s=start,
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
@pytest.mark.parametrize("q", [0, 50, 90, 95, 99, 100])
def test_percentiles_are_numpys(size, q):
    values = sorted(random.Random(size).expovariate(1) for _ in range(size))
    assert percentile(values, q) == pytest.approx(np.percentile(values, q))


def test_no_values_have_a_percentile_of_zero():
    assert percentile([], 50) == 0
    assert distribution([]).count == 0


def test_a_distribution_needs_no_order():
    found = distribution([3.0, 1.0, 2.0])
    assert (found.count, found.mean, found.p50, found.max) == (3, 2.0, 2.0, 3.0)


def test_the_gap_histogram_is_within_half_a_percent_of_the_exact_percentiles():
    draw, gaps = random.Random(1), GapHistogram()
    values = sorted(draw.lognormvariate(-4, 1) for _ in range(20_000))
    for value in values:
        gaps.add(value)
    found = gap_distribution(gaps)
    for q, value in ((50, found.p50), (90, found.p90), (95, found.p95), (99, found.p99)):
        exact = values[int(len(values) * q / 100) - 1]
        assert value == pytest.approx(exact, rel=0.006)
    assert found.mean == pytest.approx(sum(values) / len(values))
    assert found.max == values[-1]


def test_the_cumulative_gaps_end_at_one():
    gaps = GapHistogram()
    gaps.add(0.0, 3)
    gaps.add(0.01)
    assert [share for _, share in gaps.cumulative()] == [0.75, 1.0]


def test_a_chunk_of_k_tokens_counts_as_k_gaps():
    gaps = GapHistogram()
    add_gaps(gaps, [0.030, 0.010], num_tokens=7)  # three chunks, seven tokens: six gaps
    assert gaps.count == 6
    assert gaps.sum_s == pytest.approx(0.040)
    assert gaps.percentile(50) == 0.0
    assert gaps.percentile(99) == pytest.approx(0.030, rel=0.01)


def test_more_chunks_than_tokens_add_no_gaps():
    gaps = GapHistogram()
    add_gaps(gaps, [0.01, 0.01, 0.01], num_tokens=2)
    assert gaps.count == 3


def test_tpot_is_the_time_after_the_first_token_over_the_other_tokens():
    assert record(ttft=0.1, e2e=1.1, tokens=11).tpot_s == pytest.approx(0.1)
    assert record(tokens=1).tpot_s is None


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(), 3),
        (Slo(ttft_s=0.2), 2),
        (Slo(tpot_s=0.05), 1),
        (Slo(ttft_s=0.2, tpot_s=0.05), 0),
        (Slo(ttft_s=0.01), 0),
    ],
)
def test_goodput_counts_requests_inside_every_limit(slo, good):
    records = [
        record(ttft=0.1, e2e=1.1),  # tpot 0.1
        record(ttft=0.15, e2e=1.15),  # tpot 0.1
        record(ttft=0.3, e2e=0.5),  # tpot 0.02
        record("http 500", ttft=None, e2e=0.01, tokens=0),
        record(UNFINISHED, ttft=0.1, e2e=0.2),
    ]
    assert count_good(records, slo) == good


def test_a_one_token_answer_cannot_miss_the_tpot_limit():
    assert Slo(tpot_s=0.001).is_met(record(tokens=1))


def test_concurrency_does_not_count_a_request_that_ends_as_another_starts():
    assert max_concurrency([record(start=0, e2e=1.0), record(start=1.0, e2e=1.0), record(start=1.5, e2e=1.0)]) == 2


def test_a_summary_keeps_rejected_failed_and_unfinished_apart():
    records = [
        record(start=1.0, e2e=1.0, tokens=10, cached=4, wanted=10),
        record(start=1.0, e2e=3.0, tokens=20, wanted=21),
        record("http 429", start=2.0, ttft=None, e2e=0.1, tokens=0),
        record("http 429", start=2.0, ttft=None, e2e=0.1, tokens=0),
        record("timeout", start=2.0, ttft=None, e2e=0.1, tokens=0),
        record(UNFINISHED, start=2.0, ttft=None, e2e=0.1, tokens=0),
    ]
    found = summarize(records, GapHistogram(), Slo(ttft_s=1.0))
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
    found = summarize([], GapHistogram(), Slo())
    assert (found.num_requests, found.requests_per_s, found.ttft_s.count) == (0, 0.0, 0)
