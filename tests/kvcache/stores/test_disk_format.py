"""The disk tier's format: sizes, headers, runs of neighbours; and what a namespace tells apart."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kvcache.stores.disk.format import (
    HEADER_BYTES,
    PAGE_BYTES,
    Geometry,
    RecordHeader,
    fit_geometry,
    runs,
    smallest_limit,
    unpack_header,
)
from kvrelay.kvcache.stores.namespace import Namespace, namespace_of
from kvrelay.types import BlockHash, BlockMeta, Fingerprint, KvLayout

pytestmark = pytest.mark.pure


SPACE = bytes(range(16))
HEADER = RecordHeader(
    SPACE, 7, 1 << 40, BlockHash(b"h" * 16), BlockMeta(BlockHash(b"p" * 16), 640, -3, "tenant"), 368_640, 1 << 63
)


def test_a_header_says_what_was_packed_and_fits_one_sector():
    assert unpack_header(HEADER.pack(), SPACE, 7) == HEADER
    first = dataclasses.replace(HEADER, meta=BlockMeta(None, 16))
    assert unpack_header(first.pack() + bytes(100), SPACE, 7) == first
    assert HEADER_BYTES == len(HEADER.pack()) <= 512


def test_a_header_of_another_namespace_or_place_or_with_any_bit_flipped_is_none():
    packed = HEADER.pack()
    assert unpack_header(packed, bytes(16), 7) is None
    assert unpack_header(packed, SPACE, 8) is None
    assert unpack_header(bytes(HEADER_BYTES), SPACE, 0) is None
    for bit in range(8 * HEADER_BYTES):
        wrong = bytearray(packed)
        wrong[bit // 8] ^= 1 << bit % 8
        assert unpack_header(bytes(wrong), SPACE, 7) is None


@pytest.mark.parametrize("change", [{"digest": BlockHash(b"x" * 33)}, {"meta": BlockMeta(None, 16, tenant="t" * 65)}])
def test_what_does_not_fit_a_header_is_refused(change):
    with pytest.raises(ValueError, match="at most"):
        dataclasses.replace(HEADER, **change).pack()


@given(limit=st.integers(0, 1 << 24), payload=st.integers(1, 1 << 20), segment=st.integers(1, 1 << 23))
def test_all_segments_fit_the_limit_and_no_slot_is_wasted(limit, payload, segment):
    geometry = fit_geometry(limit, payload, segment_bytes=segment)
    assert geometry.record_bytes % PAGE_BYTES == 0 and 0 <= geometry.payload_bytes - payload < PAGE_BYTES
    total = sum(geometry.segment_bytes(index) for index in range(geometry.num_segments))
    assert total == geometry.num_rows * geometry.record_bytes <= max(0, limit - smallest_limit(0))
    assert (geometry.num_rows > 0) == (limit >= smallest_limit(payload))
    if geometry.num_rows:
        last, offset = geometry.place(geometry.num_rows - 1)
        assert offset + geometry.record_bytes == geometry.segment_bytes(last)


@given(rows=st.sets(st.integers(0, 60)), per_segment=st.integers(1, 20), most=st.integers(1, 9))
def test_runs_are_neighbours_in_one_segment_and_leave_nothing_out(rows, per_segment, most):
    ordered = sorted(rows)
    found = runs(ordered, Geometry(2 * PAGE_BYTES, per_segment, 61), max_rows=most)
    assert [index for run in found for index in run] == list(range(len(ordered)))
    for run in found:
        here = ordered[run.start : run.stop]
        assert 1 <= len(here) <= most
        assert here == list(range(here[0], here[0] + len(here)))
        assert len({row // per_segment for row in here}) == 1


# ---- namespaces

FINGERPRINT = Fingerprint(2, "digest", "bfloat16", 16, 30, 3, 64, "seed", versions="kvrelay 0.1, torch 2.13")
LAYOUT = KvLayout(30, 100, 16, 3, 64, "bfloat16")


def test_a_namespace_does_not_depend_on_how_many_blocks_a_pool_has():
    more = dataclasses.replace(LAYOUT, num_blocks=500)
    assert namespace_of(FINGERPRINT, LAYOUT) == namespace_of(FINGERPRINT, more)
    assert len(namespace_of(FINGERPRINT, LAYOUT).digest) == 16


@pytest.mark.parametrize(
    ("layout", "fingerprint", "field"),
    [
        ({}, {"model": "other"}, "model"),
        ({}, {"hash_seed": "other"}, "hash_seed"),
        ({}, {"versions": "kvrelay 0.2"}, "versions"),
        ({}, {"compute_dtype": "float32"}, "compute_dtype"),
        ({}, {"quantization": "int8 in groups of 32"}, "quantization"),
        ({"dtype": "float16"}, {}, "dtype"),
        ({"block_size": 32}, {}, "block_size"),
        ({"order": "HND"}, {}, "order"),
        ({"head_dim": 32}, {}, "head_dim"),
        ({"num_kv_heads": 1}, {}, "heads"),
        ({"num_layers": 15}, {}, "layers"),
        ({"num_kv_heads": 1, "is_latent": True}, {}, "heads"),
    ],
)
def test_whatever_changes_a_blocks_bytes_or_its_hash_changes_the_namespace(layout, fingerprint, field):
    ours = namespace_of(FINGERPRINT, LAYOUT)
    theirs = namespace_of(dataclasses.replace(FINGERPRINT, **fingerprint), dataclasses.replace(LAYOUT, **layout))
    assert ours.digest != theirs.digest
    assert (ours.difference(dict(theirs.fields)) or "").startswith(f"{field} is ")


def test_a_field_that_only_one_has_is_a_difference():
    ours = Namespace.of({"model": "m"})
    assert ours.difference({"model": "m", "new": "x"}) == "new is 'x' there, 'absent' here"
    assert ours.difference({}) == "model is 'absent' there, 'm' here"
    assert ours.difference({"model": "m"}) is None
    assert ours.with_fields(codec="none").digest == Namespace.of({"codec": "none", "model": "m"}).digest
