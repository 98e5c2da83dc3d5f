"""Plans between unequal layouts, against an oracle that walks over every token, part and head by itself."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.errors import LayoutMismatch
from kvrelay.kvtransfer.mover.copy_plan import Pairing, pair
from kvrelay.types import KvLayout
from tests.kvtransfer.copies import carry_out

pytestmark = pytest.mark.pure


MODEL = KvLayout(num_layers=2, num_blocks=8, block_size=4, num_kv_heads=4, head_dim=3, dtype="float16")


def row_of(layout, layer, block, token, part, head):
    """Byte offset of one head's vector, by numpy's own arithmetic."""
    shape = [layout.num_blocks, layout.num_layers, layout.num_parts, layout.block_size, layout.num_kv_heads]
    index = [block, layer, part, token, head]
    if layout.order == "HND":
        shape[3:], index[3:] = shape[:2:-1], index[:2:-1]
    return int(np.ravel_multi_index(index, shape)) * layout.head_dim * layout.itemsize


def rows_of(layout, blocks, first_token, tokens):
    """{(layer, token, part, head): offset} of a sequence's tokens in this pool; blocks[0] begins at `first_token`."""
    rows = {}
    for layer in range(layout.num_layers):
        for token in tokens:
            block, offset = divmod(token - first_token, layout.block_size)
            for part in range(layout.num_parts):
                for head in range(layout.num_kv_heads):
                    rows[layer, token, part, head] = row_of(layout, layer, blocks[block], offset, part, head)
    return rows


def random_pool(layout, seed):
    return np.random.default_rng(seed).integers(1, 256, layout.num_bytes, dtype=np.uint8)


@dataclasses.dataclass(frozen=True)
class Case:
    """A sequence that lies in a source's blocks, and from token `held` on is wanted in a target's."""

    source: KvLayout
    target: KvLayout
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
    num_layers, head_dim = draw(st.integers(1, 3)), draw(st.sampled_from([1, 3]))
    held = draw(st.integers(0, 2)) * sizes[1]
    end = held + draw(st.integers(1, 3 * max(sizes)))
    counts = [-(-end // sizes[0]), -(-(end - held) // sizes[1])]
    rooms = [count + draw(st.integers(0, 3)) for count in counts]
    layouts = []
    for side in range(2):
        order = draw(st.sampled_from(["NHD", "HND"]))
        layout = KvLayout(
            num_layers, rooms[side], sizes[side], heads, head_dim, "float16", order=order, is_latent=is_latent
        )
        layouts.append(layout)
    blocks = [draw(block_lists(count, room)) for count, room in zip(counts, rooms, strict=True)]
    return Case(*layouts, *blocks, held, end)


def plan_of(case):
    """The pairing, the chunks at both ends in the source's order, and the copies of all layers."""
    both = pair(case.source, case.target)
    count = both.num_chunks(case.end - case.held)
    first = case.held // both.chunk_tokens
    begins = both.source.chunks(case.source_blocks, first, count)
    lands = both.target.chunks(case.target_blocks, 0, count)
    order = np.argsort(begins, kind="stable")
    return both, begins[order], lands[order], both.copies(begins[order], lands[order], both.layers)


def carry(case, plan=plan_of):
    """(what the target pool holds afterwards, what it must hold)."""
    source, target = case.source, case.target
    pool, landed, wanted = (
        random_pool(source, 0),
        np.zeros(target.num_bytes, np.uint8),
        np.zeros(target.num_bytes, np.uint8),
    )
    both, _, _, copies = plan(case)
    copies.check_bounds(source.num_bytes, target.num_bytes)
    carry_out(pool, landed, copies)
    count = both.num_chunks(case.end - case.held) * both.chunk_tokens
    tokens = range(case.held, case.held + count)
    rows = rows_of(target, case.target_blocks, case.held, tokens)
    width = source.head_dim * source.itemsize
    for key, begin in rows_of(source, case.source_blocks, 0, tokens).items():
        wanted[rows[key] : rows[key] + width] = pool[begin : begin + width]
    return landed, wanted


@settings(deadline=None)
@given(cases())
def test_every_row_arrives_where_it_belongs_and_no_other_byte_is_written(case):
    got, expected = carry(case)
    assert np.array_equal(got, expected)


@settings(deadline=None)
@given(cases())
def test_a_plan_moves_each_byte_once_in_as_few_copies_as_can_be(case):
    both, _, lands, copies = plan_of(case)
    target = case.target
    per_token = target.num_parts * target.num_kv_heads * target.head_dim * target.itemsize
    assert copies.total_bytes == target.num_layers * len(lands) * both.chunk_tokens * per_token
    begins = set(zip(copies.source_offset.tolist(), copies.target_offset.tolist(), strict=True))
    ends = zip(
        (copies.source_offset + copies.num_bytes).tolist(),
        (copies.target_offset + copies.num_bytes).tolist(),
        strict=True,
    )
    could_be_one = len(begins.intersection(ends))
    assert could_be_one <= (0 if both.pieces_per_chunk <= 16 else 2 * len(lands) * target.num_layers)


@settings(deadline=None)
@given(cases())
def test_both_ends_read_an_chunks_bytes_in_the_same_order_and_they_land_in_it(case):
    both, begins, lands, copies = plan_of(case)
    pool, landed = random_pool(case.source, 5), np.zeros(case.target.num_bytes, np.uint8)
    carry_out(pool, landed, copies)
    span = np.arange(both.piece_bytes)
    sent = pool[np.add.outer(both.source.pieces_of(begins, both.layers), span)]
    arrived = landed[np.add.outer(both.target.pieces_of(lands, both.layers), span)]
    assert sent.shape == (len(lands), len(both.layers), both.pieces_per_chunk, both.piece_bytes)
    assert np.array_equal(sent, arrived)
    starts, _, sizes = copies.rows()
    in_order = np.concatenate([pool[start : start + size] for start, size in zip(starts, sizes, strict=True)])
    assert np.array_equal(in_order, sent.ravel())


def one_to_one(**target):
    """A sequence of 37 tokens in a source of MODEL's layout, wanted from token 4 on in a target's."""
    source = dataclasses.replace(MODEL, num_blocks=16)
    blocks = np.random.default_rng(1).permutation(20)[:17].tolist()
    return Case(source, dataclasses.replace(MODEL, num_blocks=24, **target), list(range(10)), blocks, 4, 37)


@pytest.mark.parametrize(
    ("target", "end", "wrong"),
    [
        ({"order": "HND"}, "source", {"pieces": lambda end: end.pieces[::-1]}),
        ({"order": "HND"}, "target", {"pieces": lambda end: np.sort(end.pieces)}),
        ({"block_size": 2}, "source", {"chunk_stride": lambda end: end.chunk_stride // 2}),
        ({"block_size": 2}, "target", {"region_bytes": lambda end: end.region_bytes // 2}),
        ({}, "target", {"block_bytes": lambda end: end.block_bytes // 2}),
    ],
)
def test_a_wrong_stride_at_one_end_is_seen_by_the_oracle(target, end, wrong):
    case = one_to_one(**target)
    right = pair(case.source, case.target)
    ends = {"source": right.source, "target": right.target}
    ends[end] = dataclasses.replace(ends[end], **{name: change(ends[end]) for name, change in wrong.items()})

    def plan_of_wrong(case):
        count = right.num_chunks(case.end - case.held)
        begins = ends["source"].chunks(case.source_blocks, case.held // right.chunk_tokens, count)
        lands = ends["target"].chunks(case.target_blocks, 0, count)
        broken = Pairing(ends["source"], ends["target"], right.chunk_tokens, right.piece_bytes)
        return right, begins, lands, broken.copies(begins, lands, right.layers)

    for plan, is_right in ((plan_of, True), (plan_of_wrong, False)):
        got, expected = carry(case, plan)
        assert np.array_equal(got, expected) is is_right


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
        ({"num_kv_heads": 1, "is_latent": True}, {"num_kv_heads": 1, "is_latent": True, "block_size": 2}, 1),
    ],
)
def test_pieces_are_as_long_as_both_ends_allow(source, target, pieces):
    both = pair(dataclasses.replace(MODEL, **source), dataclasses.replace(MODEL, **target))
    assert both.pieces_per_chunk == pieces
    layout = both.target.layout
    assert both.chunk_bytes == layout.num_parts * both.chunk_tokens * layout.num_kv_heads * 3 * 2


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"head_dim": 4}, "head_dim"),
        ({"num_kv_heads": 2}, "num_kv_heads"),
        ({"num_layers": 1}, "num_layers"),
        ({"block_size": 6}, "block_size"),
        ({"num_kv_heads": 1, "is_latent": True}, "is_latent"),
    ],
)
def test_layouts_that_cannot_be_paired_are_refused_by_the_field(change, field):
    with pytest.raises(LayoutMismatch) as caught:
        pair(MODEL, dataclasses.replace(MODEL, **change))
    assert caught.value.subject == field


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
        {"dtype": "int3"}, {"order": "DNH"}, {"block_size": 0}, {"num_kv_heads": 0}, {"is_latent": True},
    ],
)  # fmt: skip
def test_a_layout_that_cannot_be_is_refused_where_it_is_made(change):
    with pytest.raises(ValueError):
        dataclasses.replace(MODEL, **change)
