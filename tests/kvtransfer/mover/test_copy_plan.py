"""Plans: every region once, nothing else, in as few copies as neighbours allow."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import LayoutMismatch, TransportError
from kvrelay.kvtransfer.mover.copy_plan import TURN_BYTES, cut, pair
from kvrelay.kvtransfer.mover.verification import ReceivePlan
from kvrelay.kvtransfer.transports.cuda_ipc import CUDA_IPC
from kvrelay.kvtransfer.transports.memory import SHM
from kvrelay.kvtransfer.transports.nixl.reader import NIXL
from kvrelay.types import KvLayout, KvMemory
from tests.kvtransfer.copies import carry_out, plan_copies, region_offsets

pytestmark = pytest.mark.pure


SOURCE = KvLayout(num_layers=3, num_blocks=12, block_size=2, num_kv_heads=1, head_dim=2, dtype="float32")
TARGET = dataclasses.replace(SOURCE, num_blocks=20)
LAYERS = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda ends: range(min(ends), max(ends)))


@st.composite
def block_pairs(draw):
    """Equally many distinct blocks on both sides, often with runs."""
    count = draw(st.integers(0, 12))
    if draw(st.booleans()):
        first, second = draw(st.integers(0, 12 - count)), draw(st.integers(0, 20 - count))
        return list(range(first, first + count)), list(range(second, second + count))
    return draw(st.permutations(range(12)))[:count], draw(st.permutations(range(20)))[:count]


def pools():
    source = np.random.default_rng(0).integers(1, 255, SOURCE.num_bytes, dtype=np.uint8)
    return source, np.zeros(TARGET.num_bytes, dtype=np.uint8)


@given(block_pairs(), LAYERS)
def test_carrying_out_a_plan_moves_those_regions_and_no_other_byte(pairs, layers):
    source_blocks, target_blocks = pairs
    source, target = pools()
    copies = plan_copies(SOURCE, TARGET, source_blocks, target_blocks, layers)
    copies.check_bounds(len(source), len(target))
    carry_out(source, target, copies)
    expected, some = np.zeros_like(target).reshape(20, 3, -1), slice(layers.start, layers.stop)
    expected[target_blocks, some] = source.reshape(12, 3, -1)[source_blocks, some]
    assert np.array_equal(target.reshape(20, 3, -1), expected)
    assert copies.total_bytes == len(source_blocks) * len(layers) * SOURCE.region_bytes


def test_neighbours_on_both_sides_become_one_copy():
    copies = plan_copies(SOURCE, TARGET, [4, 5, 6, 9], [10, 11, 12, 13], range(3))
    assert copies.num_bytes.tolist() == [3 * SOURCE.block_bytes, SOURCE.block_bytes]


def test_some_layers_of_a_block_are_one_copy():
    copies = plan_copies(SOURCE, TARGET, [4, 5], [10, 11], range(1, 3))
    assert copies.num_bytes.tolist() == [2 * SOURCE.region_bytes] * 2


def test_neighbours_on_one_side_only_stay_apart():
    assert len(plan_copies(SOURCE, TARGET, [4, 5], [10, 12], range(3)).num_bytes) == 2


@pytest.mark.parametrize(("is_scattered", "groups", "expected"), [(False, 1, 64), (True, 1, 256), (True, 4, 1024)])
def test_a_4k_prompt_of_a_llama_8b_needs_a_descriptor_for_each_block_and_announcement(is_scattered, groups, expected):
    """Contiguous blocks: one for each 8 MiB, which is what a transfer reads at a time. Once they were 8,192."""
    layout = KvLayout(32, 300, 16, 8, 128, "bfloat16")
    lists = [np.random.default_rng(seed).permutation(300)[:256] if is_scattered else np.arange(256) for seed in (1, 2)]
    both, step, num_copies = pair(layout, layout), 32 // groups, 0
    sources, targets = (end.chunks(blocks) for end, blocks in zip((both.source, both.target), lists, strict=True))
    for first in range(0, 32, step):
        for some, layers in cut(256, range(first, first + step), both.chunk_bytes, TURN_BYTES):
            copies = both.copies(sources[some], targets[some], layers)
            num_copies += len(copies.num_bytes)
    assert num_copies == expected


def test_unequal_regions_or_lists_are_refused():
    with pytest.raises(LayoutMismatch, match="head_dim"):
        plan_copies(SOURCE, dataclasses.replace(TARGET, head_dim=4), [1], [1], range(1))
    with pytest.raises(ValueError, match="2 chunks cannot go to 1"):
        plan_copies(SOURCE, TARGET, [1, 2], [1], range(1))


@pytest.mark.parametrize(("source_block", "target_block", "layer"), [(12, 0, 2), (0, 20, 2), (-1, 0, 0), (0, -1, 0)])
def test_a_copy_outside_a_pool_is_refused(source_block, target_block, layer):
    copies = plan_copies(SOURCE, TARGET, [source_block], [target_block], range(layer, layer + 1))
    with pytest.raises(TransportError):
        copies.check_bounds(SOURCE.num_bytes, TARGET.num_bytes)


@given(st.integers(1, 40), LAYERS, st.integers(1, 2_000))
def test_cutting_covers_everything_once_within_the_limit(num_blocks, layers, limit):
    seen = np.zeros((3, num_blocks), dtype=int)
    for blocks, some in cut(num_blocks, layers, SOURCE.region_bytes, limit):
        seen[some.start : some.stop, blocks] += 1
        size = (blocks.stop - blocks.start) * len(some) * SOURCE.region_bytes
        assert size <= max(limit, SOURCE.region_bytes)
    expected = np.zeros_like(seen)
    expected[layers.start : layers.stop] = 1
    assert np.array_equal(seen, expected)


@pytest.mark.parametrize(("transport", "turns"), [(SHM, 64), (CUDA_IPC, 8), (NIXL, 8)])
def test_where_a_turn_costs_much_it_brings_more(transport, turns):
    layout = KvLayout(32, 320, 16, 8, 128, "bfloat16")  # a 4k prompt of a Llama-8B: 512 MiB
    plan = ReceivePlan(layout, KvMemory(layout, 0, "cpu", None, memoryview(b""), None))
    plan.turn_bytes = transport.turn_bytes
    assert len(list(plan.units(256, range(32)))) == turns


@given(block_pairs(), LAYERS)
def test_region_offsets_are_the_layouts(pairs, layers):
    blocks = pairs[0]
    expected = [block * SOURCE.block_bytes + layer * SOURCE.region_bytes for block in blocks for layer in layers]
    assert region_offsets(SOURCE, blocks, layers).tolist() == expected
