"""Plans: every region once, nothing else, in as few copies as neighbours allow."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import LayoutMismatch, TransportError
from kvrelay.kvtransfer.mover.copy_plan import cut
from kvrelay.types import KvLayout
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
    expected = np.zeros_like(target).reshape(3, 20, -1)
    expected[layers.start : layers.stop, target_blocks] = source.reshape(3, 12, -1)[
        layers.start : layers.stop, source_blocks
    ]
    assert np.array_equal(target.reshape(3, 20, -1), expected)
    assert copies.total_bytes == len(source_blocks) * len(layers) * SOURCE.region_bytes


@given(block_pairs(), LAYERS)
def test_an_expanded_plan_is_the_same_plan(pairs, layers):
    copies = plan_copies(SOURCE, TARGET, *pairs, layers)
    sources, targets, sizes = copies.expanded()
    assert len(sources) == len(targets) == len(sizes) == copies.num_copies
    assert int(sizes.sum()) == copies.total_bytes
    one, other = pools()
    carry_out(one, other, copies)
    again = np.zeros_like(other)
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        again[target : target + size] = one[source : source + size]
    assert np.array_equal(other, again)


def test_neighbours_on_both_sides_become_one_copy():
    copies = plan_copies(SOURCE, TARGET, [4, 5, 6, 9], [10, 11, 12, 13], range(3))
    assert copies.num_bytes.tolist() == [3 * SOURCE.region_bytes, SOURCE.region_bytes]
    assert copies.num_copies == 6


def test_neighbours_on_one_side_only_stay_apart():
    assert len(plan_copies(SOURCE, TARGET, [4, 5], [10, 12], range(1)).num_bytes) == 2


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


@given(block_pairs(), LAYERS)
def test_region_offsets_are_the_layouts(pairs, layers):
    blocks = pairs[0]
    expected = [layer * SOURCE.layer_bytes + block * SOURCE.region_bytes for layer in layers for block in blocks]
    assert region_offsets(SOURCE, blocks, layers).tolist() == expected
