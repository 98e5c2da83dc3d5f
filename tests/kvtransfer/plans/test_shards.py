"""Shards: every head and layer that a target holds comes from exactly one source, and replicas share the work."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import LayoutMismatch
from kvrelay.kvtransfer.plans.copy_plan import overlap
from kvrelay.kvtransfer.plans.shards import shard, sources_of
from kvrelay.types import KvLayout

pytestmark = pytest.mark.pure


MODEL = KvLayout(num_layers=6, num_blocks=2, block_size=16, num_kv_heads=4, head_dim=8, dtype="bfloat16")
LATENT = dataclasses.replace(MODEL, num_kv_heads=1, is_latent=True)


def shards(model, tensor_parallel, stages=1):
    return [
        shard(model, tensor_parallel=tensor_parallel, rank=rank, pipeline_stages=stages, stage=stage)
        for stage in range(stages)
        for rank in range(tensor_parallel)
    ]


def asked(model, source_ranks, target_ranks):
    """For each target rank, the source ranks that it reads."""
    sources = shards(model, source_ranks)
    return [sources_of(target, sources, turn) for turn, target in enumerate(shards(model, target_ranks))]


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 6), st.integers(1, 6))
def test_each_head_and_layer_of_a_target_has_one_source(source_ranks, target_ranks, source_stages, target_stages):
    sources = shards(MODEL, source_ranks, source_stages)
    for turn, target in enumerate(shards(MODEL, target_ranks, target_stages)):
        cells = Counter(
            (layer, head)
            for index in sources_of(target, sources, turn)
            for layer in overlap(sources[index], target).layers
            for head in overlap(sources[index], target).heads
        )
        assert cells == Counter((layer, head) for layer in target.layers for head in target.kv_heads)


def test_heads_are_split_and_gathered():
    assert asked(MODEL, 1, 4) == [[0], [0], [0], [0]]
    assert asked(MODEL, 4, 1) == [[0, 1, 2, 3]]
    assert asked(MODEL, 4, 2) == [[0, 1], [2, 3]]


def test_who_holds_the_same_heads_takes_turns():
    assert asked(MODEL, 8, 4) == [[0], [3], [4], [7]]
    assert asked(MODEL, 8, 8) == [[0], [1], [2], [3], [4], [5], [6], [7]]


def test_latent_kv_is_whole_everywhere_and_every_rank_serves_one():
    assert [layout.num_kv_heads for layout in shards(LATENT, 4)] == [1, 1, 1, 1]
    assert asked(LATENT, 4, 4) == [[0], [1], [2], [3]]
    assert asked(LATENT, 2, 4) == [[0], [1], [0], [1]]


def test_pipeline_stages_share_layers_as_evenly_as_can_be():
    model = dataclasses.replace(MODEL, num_layers=7)
    assert [layout.layers for layout in shards(model, 1, 3)] == [range(3), range(3, 5), range(5, 7)]


def test_what_no_source_holds_is_named():
    whole, first_stage = MODEL, shard(MODEL, pipeline_stages=2, stage=0)
    with pytest.raises(LayoutMismatch, match="0 shares of the source hold head 0 of layer 3"):
        sources_of(whole, [first_stage])


def test_shares_that_overlap_in_part_are_refused():
    halves = [shard(MODEL, tensor_parallel=2, rank=rank) for rank in range(2)]
    with pytest.raises(LayoutMismatch, match="2 shares of the source hold head 0 of layer 0"):
        sources_of(MODEL, [*halves, MODEL])


@pytest.mark.parametrize("ranks", [3, 6])
def test_heads_that_cannot_be_shared_evenly_are_refused(ranks):
    with pytest.raises(LayoutMismatch, match=f"4 heads cannot be shared evenly by {ranks} workers"):
        shard(MODEL, tensor_parallel=ranks)
