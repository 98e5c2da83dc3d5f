"""Fingerprints: what must be equal between two workers, what need only fit together, and what to do about the rest."""

import dataclasses

import pytest

from kvrelay.types import Fingerprint

pytestmark = pytest.mark.pure


OURS = Fingerprint(2, "digest", "bfloat16", 16, 30, 3, 64, "seed", versions="kvrelay 0.1, torch 2.13")


def misfit(*, convert_dtype=False, **changes):
    return OURS.incompatibility(dataclasses.replace(OURS, **changes), convert_dtype=convert_dtype)


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("protocol", 3, "versions"),
        ("versions", "kvrelay 0.2, torch 2.13", "versions"),
        ("hash_seed", "other", "versions"),
        ("model", "other", "model.source"),
        ("num_layers", 31, "model.source"),
        ("num_kv_heads", 4, "model.source"),
        ("head_dim", 128, "model.source"),
        ("num_parts", 1, "model.source"),
        ("quantization", "int4 in groups of 32", "model.quantization"),
        ("dtype", "float32", "transfer.convert_dtype"),
        ("dtype", "fp8_e4m3", "kv_dtype"),
        ("compute_dtype", "float32", "transfer.convert_dtype"),
        ("block_size", 24, "multiple"),
    ],
)
def test_what_must_be_equal_is_named_with_both_values_and_the_remedy(field, value, remedy):
    difference = misfit(**{field: value})
    assert difference is not None
    assert (difference.field, difference.ours, difference.theirs) == (field, getattr(OURS, field), value)
    assert remedy in difference.remedy
    assert str(difference) == f"{field}: {getattr(OURS, field)!r} != {value!r}"


@pytest.mark.parametrize("changes", [{}, {"block_size": 32}, {"block_size": 4}, {"order": "HND"}])
def test_what_need_only_fit_may_differ(changes):
    assert misfit(**changes) is None


def test_unequal_dtypes_fit_where_they_are_converted():
    assert misfit(dtype="float32", compute_dtype="float32", convert_dtype=True) is None
    assert misfit(dtype="float32", model="other", convert_dtype=True).field == "model"


def test_every_field_is_either_compared_or_fits():
    told = {
        "protocol",
        "versions",
        "hash_seed",
        "model",
        "num_layers",
        "num_kv_heads",
        "head_dim",
        "num_parts",
        "quantization",
        "dtype",
        "compute_dtype",
        "block_size",
    }
    assert set(Fingerprint.__slots__) - told == {"order"}
