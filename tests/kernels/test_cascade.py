"""Decode rows that share blocks read them together: the very same numbers, and only where blocks are the same."""

import dataclasses

import pytest
import torch

from kvrelay.kernels.backend import AttentionShape
from kvrelay.kernels.cascade import PART_TOKENS, TILE_TOKENS, WORTH, Schedule
from tests.kernels.kernel_cases import Case, make_step, run_attention

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
TREE = ((1, 0, 1100), (2, 0, 700), (3, 2, 1000), (4, 0, 130))  # (row, of row, so many tokens in common)
CONTEXTS = (1300, 1201, 1150, 1111, 200)
KINDS = {
    "GQA": {},
    "MHA": {"heads": 2, "kv_heads": 2, "head_dim": 20},
    "MQA": {"heads": 8, "kv_heads": 1, "head_dim": 32},
    "wide group": {"heads": 50, "kv_heads": 1, "head_dim": 16},
    "window": {"window": 300},
    "short window": {"window": 40},
    "softcap": {"softcap": 5.0},
    "window and softcap": {"window": 900, "softcap": 20.0},
    "latent": {"heads": 4, "kv_heads": 1, "head_dim": 48, "latent_dim": 32},
    "block of 1": {"block_size": 1, "head_dim": 16},
    "block of 48": {"block_size": 48, "head_dim": 16},
    "block of 128": {"block_size": 128, "head_dim": 16},
}


def shared_step(case, shared=TREE):
    """A step in which row a has row b's blocks for the whole blocks of so many first tokens."""
    step = make_step(case)
    for row, of, tokens in shared:
        blocks = tokens // case.block_size
        step.batch.block_tables[row, :blocks] = step.batch.block_tables[of, :blocks]
    return step


def case_of(contexts=CONTEXTS, chunks=(), **kind):
    return Case((*((1, context) for context in contexts), *chunks), **kind)


def run(backend, step, *, shares, worth=None, monkeypatch=None):
    """(attention, tokens spared) of a step with or without sharing."""
    native, before = backend.native, backend.native.spared_tokens
    native.shares_prefixes = shares
    try:
        return run_attention(backend, step), native.spared_tokens - before
    finally:
        native.shares_prefixes = True


def assert_same(backend, step):
    (together, spared), (alone, none) = (run(backend, step, shares=shares) for shares in (True, False))
    assert torch.equal(together, alone) and not alone.isnan().any()
    assert spared > 0 and none == 0
    return spared


@pytest.fixture(params=["compiled", "compiled_2_threads"])
def backend(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_share_blocks_get_what_they_get_alone_bit_for_bit(backend, kind, dtype):
    assert_same(backend, shared_step(case_of(dtype=dtype, **KINDS[kind])))
