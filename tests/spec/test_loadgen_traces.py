"""Arrivals, trace files and prompts of the load generator."""

from itertools import islice, pairwise, takewhile

import pytest

from kvrelay.cluster.loadgen_traces import (
    PromptSpec,
    TraceEntry,
    as_text,
    parse_azure,
    parse_mooncake,
    parse_trace,
    poisson_arrivals,
    scale_entries,
    spread_buckets,
    synthetic_prompt,
    trace_prompt,
)
from kvrelay.errors import ConfigError

MOONCAKE = [
    '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n',
    "\n",
    '{"timestamp": 3000, "input_length": 700, "output_length": 9, "hash_ids": [0, 7]}\n',
]
AZURE = [
    "TIMESTAMP,ContextTokens,GeneratedTokens\n",
    "2023-11-16 18:17:03.9799600,4808,10\n",
    "2023-11-16 18:17:05.4799600,110,27\n",
]
SPEC = PromptSpec(input_tokens=100, shared_tokens=40, low=50, high=60, seed=3)


def entry(**fields):
    return TraceEntry(**{"arrival_s": 0.0, "input_tokens": 20, "output_tokens": 5, **fields})


def test_poisson_arrivals_repeat_with_their_seed():
    def first(seed):
        return list(islice(poisson_arrivals(5.0, seed=seed), 50))

    assert first(1) == first(1) != first(2)


def test_poisson_arrivals_come_at_their_rate_with_exponential_gaps():
    arrivals = list(takewhile(lambda at: at < 1000, poisson_arrivals(20.0, seed=7)))
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert arrivals == sorted(arrivals)
    assert len(arrivals) == pytest.approx(20_000, rel=0.03)
    assert variance == pytest.approx(mean**2, rel=0.1)  # exponential: deviation = mean


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_a_rate_must_be_positive(rate):
    with pytest.raises(ConfigError):
        next(poisson_arrivals(rate, seed=0))


def test_a_mooncake_line_becomes_an_entry():
    found = list(parse_mooncake(MOONCAKE))
    assert found[0] == TraceEntry(0.0, 6758, 500, (0, 1), 512)
    assert found[1].arrival_s == 3.0


@pytest.mark.parametrize("line", ["{", "[]", '{"timestamp": 0}', '{"timestamp": 0, "input_length": "x"}'])
def test_a_broken_mooncake_line_is_named(line):
    with pytest.raises(ConfigError, match="line 4"):
        list(parse_mooncake([*MOONCAKE, line]))


def test_azure_times_start_at_zero_and_keep_microseconds():
    found = list(parse_azure(AZURE))
    assert [(one.arrival_s, one.input_tokens, one.output_tokens) for one in found] == [(0.0, 4808, 10), (1.5, 110, 27)]


def test_an_azure_file_with_other_columns_is_refused():
    with pytest.raises(ConfigError, match="ContextTokens"):
        list(parse_azure(["a,b\n", "1,2\n"]))


def test_a_broken_azure_row_is_named():
    with pytest.raises(ConfigError, match="line 4"):
        list(parse_azure([*AZURE, "yesterday,1,2\n"]))


def test_no_more_of_a_trace_is_read_than_asked_for():
    assert len(parse_trace([*MOONCAKE, "broken"], is_csv=False, limit=2)) == 2


def test_spreading_stays_inside_the_bucket_and_in_order():
    entries = [entry(arrival_s=at, input_tokens=n) for n, at in enumerate([0.0] * 40 + [3.0] * 40 + [9.0])]
    spread = spread_buckets(entries, bucket_s=3.0, seed=1)
    times = [one.arrival_s for one in spread]
    assert times == sorted(times)
    assert [one.input_tokens for one in spread] == [one.input_tokens for one in entries]
    assert all(old.arrival_s <= new.arrival_s < old.arrival_s + 3 for old, new in zip(entries, spread, strict=True))
    assert sum(times[:40]) / 40 == pytest.approx(1.5, abs=0.5)
    assert len(set(times)) == len(times)


def test_spreading_repeats_with_its_seed():
    entries = [entry()] * 5
    assert spread_buckets(entries, bucket_s=3, seed=1) == spread_buckets(entries, bucket_s=3, seed=1)
    assert spread_buckets(entries, bucket_s=3, seed=1) != spread_buckets(entries, bucket_s=3, seed=2)


def test_scaling_shrinks_lengths_blocks_and_times_alike():
    (found,) = scale_entries(
        [entry(arrival_s=8.0, input_tokens=1024, output_tokens=64)], time_scale=0.5, length_scale=0.25
    )
    assert (found.arrival_s, found.input_tokens, found.output_tokens, found.block_tokens) == (4.0, 256, 16, 128)


def test_scaling_cuts_to_the_limits_and_never_to_nothing():
    (found,) = scale_entries([entry(input_tokens=900, output_tokens=900)], max_input=100, max_output=7)
    assert (found.input_tokens, found.output_tokens) == (100, 7)
    (found,) = scale_entries([entry(input_tokens=3, output_tokens=1)], length_scale=0.01)
    assert (found.input_tokens, found.output_tokens) == (1, 1)


def test_synthetic_prompts_have_the_length_the_range_and_the_shared_prefix():
    first, second = synthetic_prompt(SPEC, 0), synthetic_prompt(SPEC, 1)
    assert len(first) == len(second) == 100
    assert first[:40] == second[:40]
    assert first[40:] != second[40:]
    assert set(first) <= set(range(50, 60))


def test_a_prompt_depends_on_seed_and_index_alone():
    assert synthetic_prompt(SPEC, 5) == synthetic_prompt(SPEC, 5)
    other = PromptSpec(input_tokens=100, shared_tokens=40, low=50, high=60, seed=4)
    assert synthetic_prompt(SPEC, 5) != synthetic_prompt(other, 5)


def test_a_shared_prefix_longer_than_the_prompt_is_the_prompt():
    spec = PromptSpec(input_tokens=10, shared_tokens=40)
    assert synthetic_prompt(spec, 0) == synthetic_prompt(spec, 1)
    assert len(synthetic_prompt(spec, 0)) == 10


def test_equal_hash_ids_become_equal_blocks_and_others_differ():
    first = trace_prompt(SPEC, entry(input_tokens=30, hash_ids=(4, 5, 6), block_tokens=10), 0)
    second = trace_prompt(SPEC, entry(input_tokens=30, hash_ids=(4, 5, 9), block_tokens=10), 1)
    assert first[:20] == second[:20]
    assert first[20:] != second[20:]
    assert first[:10] != first[10:20]


def test_a_partial_last_block_is_the_whole_blocks_beginning():
    whole = trace_prompt(SPEC, entry(input_tokens=20, hash_ids=(4, 5), block_tokens=10), 0)
    part = trace_prompt(SPEC, entry(input_tokens=13, hash_ids=(4, 5), block_tokens=10), 1)
    assert part == whole[:13]


def test_what_no_hash_id_covers_is_the_requests_own():
    first = trace_prompt(SPEC, entry(input_tokens=30, hash_ids=(4,), block_tokens=10), 0)
    second = trace_prompt(SPEC, entry(input_tokens=30, hash_ids=(4,), block_tokens=10), 1)
    assert len(first) == 30
    assert first[:10] == second[:10]
    assert first[10:] != second[10:]


def test_text_prompts_keep_equal_prefixes_and_have_a_word_per_id():
    first, second = as_text([1, 2, 3]), as_text([1, 2, 4])
    assert first.split()[:2] == second.split()[:2]
    assert first != second
    assert len(first.split()) == 3
