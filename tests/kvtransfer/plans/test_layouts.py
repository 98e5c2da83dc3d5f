"""Plans between unequal layouts, against an oracle that walks over every token, part and head by itself."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.errors import LayoutMismatch
from kvrelay.kvtransfer.plans.copy_plan import Pairing, pair
from kvrelay.kvtransfer.plans.shards import shard, sources_of
from kvrelay.types import KvLayout
from tests.kvtransfer.copies import carry_out

pytestmark = pytest.mark.pure


MODEL = KvLayout(num_layers=2, num_blocks=8, block_size=4, num_kv_heads=4, head_dim=3, dtype="float16")


def row_of(layout, layer, block, token, part, head):
    """Byte offset of one head's vector, by numpy's own arithmetic; `layer` and `head` are the model's."""
    shape = [layout.num_layers, layout.num_blocks, layout.num_parts, layout.block_size, layout.num_kv_heads]
    index = [layer - layout.first_layer, block, part, token, head - layout.first_kv_head]
    if layout.order == "HND":
        shape[3:], index[3:] = shape[:2:-1], index[:2:-1]
    return int(np.ravel_multi_index(index, shape)) * layout.head_dim * layout.itemsize


def rows_of(layout, blocks, first_token, tokens):
    """{(layer, token, part, head): offset} of a sequence's tokens in this pool; blocks[0] begins at `first_token`."""
    rows = {}
    for layer in layout.layers:
        for token in tokens:
            block, offset = divmod(token - first_token, layout.block_size)
            for part in range(layout.num_parts):
                for head in layout.kv_heads:
                    rows[layer, token, part, head] = row_of(layout, layer, blocks[block], offset, part, head)
    return rows


def random_pool(layout, seed):
    return np.random.default_rng(seed).integers(1, 256, layout.num_bytes, dtype=np.uint8)


@dataclasses.dataclass(frozen=True)
class Case:
    """A sequence that lies in the blocks of several sources, and from token `held` on is wanted in targets' blocks."""

    sources: list[KvLayout]
    targets: list[KvLayout]
    source_blocks: list[int]
    target_blocks: list[int]
    held: int  # tokens that the target has: whole blocks of its own
    end: int  # the sequence's tokens


@st.composite
def block_lists(draw, count, room):
    """`count` distinct blocks of `room`: in a run, in a run backwards, or anywhere."""
    first = draw(st.integers(0, room - count))
    run = list(range(first, first + count))
    return draw(st.sampled_from([run, run[::-1], draw(st.permutations(range(room)))[:count]]))


@st.composite
def cases(draw):
    small, factor = draw(st.sampled_from([1, 2, 3, 4, 8, 16])), draw(st.sampled_from([1, 1, 2, 4]))
    sizes = draw(st.permutations([small, small * factor]))
    is_latent = draw(st.booleans()) and draw(st.booleans())
    heads = 1 if is_latent else draw(st.sampled_from([1, 2, 4]))
    parallel = [draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4, 8]))]
    stages = [draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3]))]
    held = draw(st.integers(0, 2)) * sizes[1]
    end = held + draw(st.integers(1, 3 * max(sizes)))
    counts = [-(-end // sizes[0]), -(-(end - held) // sizes[1])]
    rooms = [count + draw(st.integers(0, 3)) for count in counts]
    layouts = []
    for side in range(2):
        model = KvLayout(
            draw(st.just(3)),
            rooms[side],
            sizes[side],
            heads,
            draw(st.sampled_from([1, 3])),
            "float16",
            order=draw(st.sampled_from(["NHD", "HND"])),
            is_latent=is_latent,
        )
        model = dataclasses.replace(model, head_dim=layouts[0][0].head_dim) if layouts else model
        layouts.append(
            [
                shard(model, tensor_parallel=parallel[side], rank=rank, pipeline_stages=stages[side], stage=stage)
                for stage in range(stages[side])
                for rank in range(parallel[side])
            ]
        )
    blocks = [draw(block_lists(count, room)) for count, room in zip(counts, rooms, strict=True)]
    return Case(*layouts, *blocks, held, end)


def plan_of(case, source, target):
    """The pairing, the chunks at both ends in the source's order, and the copies of all common layers."""
    both = pair(source, target)
    count = both.num_chunks(case.end - case.held)
    first = case.held // both.overlap.chunk_tokens
    begins = both.source.chunks(case.source_blocks, first, count)
    lands = both.target.chunks(case.target_blocks, 0, count)
    order = np.argsort(begins, kind="stable")
    return both, begins[order], lands[order], both.copies(begins[order], lands[order], both.overlap.layers)


def carry(case, plan=plan_of):
    """(what every target pool holds afterwards, what it must hold)."""
    pools = [random_pool(layout, index) for index, layout in enumerate(case.sources)]
    replicas = {}
    for layout, pool in zip(case.sources, pools, strict=True):
        pool[:] = replicas.setdefault((layout.kv_heads, layout.layers), pool)  # equal shares are equal
    got, expected = [], []
    for turn, target in enumerate(case.targets):
        landed, wanted = np.zeros(target.num_bytes, np.uint8), np.zeros(target.num_bytes, np.uint8)
        rows = None
        for index in sources_of(target, case.sources, turn):
            source, (both, _, _, copies) = case.sources[index], plan(case, case.sources[index], target)
            copies.check_bounds(source.num_bytes, target.num_bytes)
            carry_out(pools[index], landed, copies)
            count = both.num_chunks(case.end - case.held) * both.overlap.chunk_tokens
            tokens = range(case.held, case.held + count)
            rows = rows or rows_of(target, case.target_blocks, case.held, tokens)
            width = source.head_dim * source.itemsize
            for key, begin in rows_of(source, case.source_blocks, 0, tokens).items():
                if key in rows:
                    wanted[rows[key] : rows[key] + width] = pools[index][begin : begin + width]
        got.append(landed)
        expected.append(wanted)
    return got, expected


@settings(deadline=None)
@given(cases())
def test_every_row_arrives_where_it_belongs_and_no_other_byte_is_written(case):
    got, expected = carry(case)
    for landed, wanted in zip(got, expected, strict=True):
        assert np.array_equal(landed, wanted)


@settings(deadline=None)
@given(cases())
def test_a_plan_moves_each_byte_once_in_as_few_copies_as_can_be(case):
    for turn, target in enumerate(case.targets):
        for index in sources_of(target, case.sources, turn):
            both, _, lands, copies = plan_of(case, case.sources[index], target)
            share = target.num_parts * len(both.overlap.heads) * target.head_dim * target.itemsize
            tokens = len(lands) * both.overlap.chunk_tokens
            assert copies.total_bytes == len(both.overlap.layers) * tokens * share
            begins = set(zip(copies.source_offset.tolist(), copies.target_offset.tolist(), strict=True))
            ends = zip(
                (copies.source_offset + copies.num_bytes).tolist(),
                (copies.target_offset + copies.num_bytes).tolist(),
                strict=True,
            )
            could_be_one = len(begins.intersection(ends))
            assert could_be_one <= (0 if both.pieces_per_chunk <= 16 else 2 * len(lands))


@settings(deadline=None)
@given(cases())
def test_both_ends_read_an_chunks_bytes_in_the_same_order_and_they_land_in_it(case):
    target = case.targets[0]
    index = sources_of(target, case.sources)[0]
    both, begins, lands, copies = plan_of(case, case.sources[index], target)
    pool, landed = random_pool(case.sources[index], 5), np.zeros(target.num_bytes, np.uint8)
    carry_out(pool, landed, copies)
    span = np.arange(both.piece_bytes)
    sent = pool[np.add.outer(both.source.pieces_of(begins, both.overlap.layers), span)]
    arrived = landed[np.add.outer(both.target.pieces_of(lands, both.overlap.layers), span)]
    assert sent.shape == (len(both.overlap.layers), len(lands), both.pieces_per_chunk, both.piece_bytes)
    assert np.array_equal(sent, arrived)
    starts, _, sizes = copies.expanded()
    in_order = np.concatenate([pool[start : start + size] for start, size in zip(starts, sizes, strict=True)])
    assert np.array_equal(in_order, sent.ravel())


def one_to_one(**target):
    """A sequence of 37 tokens in a source of MODEL's layout, wanted from token 4 on in a target's."""
    source = dataclasses.replace(MODEL, num_blocks=16)
    blocks = np.random.default_rng(1).permutation(20)[:17].tolist()
    return Case([source], [dataclasses.replace(MODEL, num_blocks=24, **target)], list(range(10)), blocks, 4, 37)


@pytest.mark.parametrize(
    ("target", "end", "wrong"),
    [
        ({"order": "HND"}, "source", {"pieces": lambda end: end.pieces[::-1]}),
        ({"order": "HND"}, "target", {"pieces": lambda end: np.sort(end.pieces)}),
        ({"block_size": 2}, "source", {"chunk_stride": lambda end: end.chunk_stride // 2}),
        ({"block_size": 2}, "target", {"first": lambda end: end.first + 6}),
    ],
)
def test_a_wrong_stride_at_one_end_is_seen_by_the_oracle(target, end, wrong):
    case = one_to_one(**target)
    right = pair(case.sources[0], case.targets[0])
    ends = {"source": right.source, "target": right.target}
    ends[end] = dataclasses.replace(ends[end], **{name: change(ends[end]) for name, change in wrong.items()})

    def plan_of_wrong(case, source, target):
        count = right.num_chunks(case.end - case.held)
        begins = ends["source"].chunks(case.source_blocks, case.held // right.overlap.chunk_tokens, count)
        lands = ends["target"].chunks(case.target_blocks, 0, count)
        broken = Pairing(ends["source"], ends["target"], right.overlap, right.piece_bytes)
        return right, begins, lands, broken.copies(begins, lands, right.overlap.layers)

    for plan, is_right in ((plan_of, True), (plan_of_wrong, False)):
        got, expected = carry(case, plan)
        assert np.array_equal(got[0], expected[0]) is is_right


def test_equal_layouts_pair_as_whole_regions_whatever_their_order():
    for order in ("NHD", "HND"):
        layout = dataclasses.replace(MODEL, order=order)
        both = pair(layout, dataclasses.replace(layout, num_blocks=5))
        assert (both.pieces_per_chunk, both.piece_bytes) == (1, layout.region_bytes)


@pytest.mark.parametrize(
    ("source", "target", "pieces"),
    [
        ({}, {"block_size": 2}, 2),  # K and V
        ({"order": "HND"}, {"order": "HND", "block_size": 2}, 2 * 4),  # of each head
        ({}, {"order": "HND"}, 2 * 4 * 4),  # of each token and head
        ({"num_kv_heads": 1}, {"num_kv_heads": 1, "order": "HND"}, 1),  # with one head both orders are the same
        ({"block_size": 1}, {"block_size": 1, "order": "HND"}, 1),  # with one token, too
        ({}, {"num_kv_heads": 2, "total_kv_heads": 4}, 2 * 4),  # half the heads of each token
        ({"order": "HND"}, {"order": "HND", "num_kv_heads": 2, "total_kv_heads": 4}, 2),  # half of K, half of V
        ({"num_kv_heads": 1, "is_latent": True}, {"num_kv_heads": 1, "is_latent": True, "block_size": 2}, 1),
    ],
)
def test_pieces_are_as_long_as_both_ends_allow(source, target, pieces):
    both = pair(dataclasses.replace(MODEL, **source), dataclasses.replace(MODEL, **target))
    assert both.pieces_per_chunk == pieces
    share = both.target.layout.num_parts * both.overlap.chunk_tokens * len(both.overlap.heads) * 3 * 2
    assert both.chunk_bytes == share


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"head_dim": 4}, "head_dim"),
        ({"num_kv_heads": 2}, "model_kv_heads"),
        ({"num_layers": 1}, "model_layers"),
        ({"block_size": 6}, "block_size"),
        ({"dtype": "float32"}, "dtype"),
        ({"num_kv_heads": 1, "is_latent": True}, "is_latent"),
    ],
)
def test_layouts_that_cannot_be_paired_are_refused_by_the_field(change, field):
    with pytest.raises(LayoutMismatch) as caught:
        pair(MODEL, dataclasses.replace(MODEL, **change))
    assert caught.value.subject == field


def test_shares_without_a_head_or_layer_in_common_are_refused():
    first, second = (shard(MODEL, tensor_parallel=2, rank=rank) for rank in range(2))
    with pytest.raises(LayoutMismatch, match=r"kv_heads: .* none in common"):
        pair(first, second)
    first, second = (shard(MODEL, pipeline_stages=2, stage=stage) for stage in range(2))
    with pytest.raises(LayoutMismatch, match=r"layers: .* none in common"):
        pair(first, second)


def test_chunks_and_layers_that_are_not_there_are_refused():
    both = pair(MODEL, dataclasses.replace(MODEL, block_size=2))
    for first, count in ((-1, 1), (3, 2), (5, 0)):
        with pytest.raises(ValueError, match="chunks"):
            both.source.chunks([0, 1], first, count)
    chunks = both.source.chunks([0]), both.target.chunks([0, 1])
    for layers in (range(2, 3), range(3), range(-1, 1)):
        with pytest.raises(ValueError, match="layers"):
            both.copies(*chunks, layers)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "int3"}, {"order": "DNH"}, {"block_size": 0}, {"num_kv_heads": 2, "total_kv_heads": 1},
        {"first_layer": 1, "total_layers": 2}, {"first_kv_head": -1, "total_kv_heads": 8}, {"is_latent": True},
    ],
)  # fmt: skip
def test_a_layout_that_cannot_be_is_refused_where_it_is_made(change):
    with pytest.raises(ValueError):
        dataclasses.replace(MODEL, **change)
