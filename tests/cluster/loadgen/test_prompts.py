"""Prompts of the load generator."""

import pytest

from kvrelay.cluster.loadgen.prompts import PromptSpec, as_text, synthetic_prompt, trace_prompt
from kvrelay.cluster.workloads.trace import TraceEntry

pytestmark = pytest.mark.pure


SPEC = PromptSpec(input_tokens=100, shared_tokens=40, low=50, high=60, seed=3)


def entry(**fields):
    return TraceEntry(**{"arrival_s": 0.0, "input_tokens": 20, "output_tokens": 5, **fields})


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
