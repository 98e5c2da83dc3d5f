"""Cascade attention on CUDA: the groups (pure), and a step in two levels over the fake GPU equals the reference."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from kvrelay.kernels.backend import AttentionShape
from kvrelay.kernels.cuda import cascade as cuda_cascade
from kvrelay.kernels.cuda.cascade import FEWEST_TOKENS, WORTH, PrefixGroup, find_groups, make_levels, may_spare
from kvrelay.kernels.cuda.cuda_graphs import CudaGraphs
from tests.kernels.cpu.test_cascade import shared_step
from tests.kernels.cuda.test_backend import cuda, fake_gpu, on_host  # noqa: F401
from tests.kernels.oracle.kernel_cases import run_attention

SIZE = 16
FEWEST = FEWEST_TOKENS // SIZE


def tables_of(*rows):
    """Block tables of rows given as strings of runs: a letter is FEWEST blocks of its own name. (contexts, tables)."""
    width = FEWEST * max(map(len, rows)) + 1
    tables = np.zeros((len(rows), width), dtype=np.int32)
    for index, row in enumerate(rows):
        for at, letter in enumerate(row):
            first = 1000 * (ord(letter) - ord("a")) + 1
            tables[index, at * FEWEST : (at + 1) * FEWEST] = range(first, first + FEWEST)
        tables[index, len(row) * FEWEST] = 90000 + index
    return np.array([len(row) * FEWEST * SIZE + 1 for row in rows]), tables


def groups_of(*rows):
    return {(frozenset(group.rows), group.num_blocks // FEWEST) for group in find_groups(*tables_of(*rows), SIZE)}


def test_rows_with_one_prefix_are_a_group_and_others_are_none():
    eight = ["ab", "ac", "ad", "ae", "af", "ag", "ah", "ai"]
    assert groups_of(*eight, "zz", "yy") == {(frozenset(range(8)), 1)}
    assert groups_of(*eight[:7]) == set()  # as many tokens fewer as a row spares: not worth it
    assert groups_of("abcdefghi", "abcdefghj") == {(frozenset((0, 1)), 8)}
    assert groups_of("a") == groups_of(*"abcdefghij") == set()


def test_of_a_tree_the_level_is_taken_that_spares_more():
    deep = ["abcdefgh" + last for last in "ijkl"]
    wide = ["a" + last for last in "mnopqrstuvwx"]
    assert groups_of(*deep, "axyz", "axyw") == {(frozenset(range(4)), 8), (frozenset((4, 5)), 3)}
    assert groups_of("abz", "aby", *wide) == {(frozenset(range(14)), 1)}


def test_a_prefix_below_the_fewest_tokens_is_no_group():
    contexts, tables = tables_of(*["ab"] * 200)
    tables[:, FEWEST - 1] = range(200)
    assert find_groups(contexts, tables, SIZE) == ()


def test_a_row_keeps_a_token_of_its_own():
    """Even where all of its blocks are another's."""
    tables = np.tile(np.arange(1, FEWEST * 9 + 1, dtype=np.int32), (2, 1))
    (group,) = find_groups(np.array([FEWEST * 8 * SIZE, FEWEST * 8 * SIZE + 5]), tables, SIZE)
    assert group.num_blocks == FEWEST * 8 - 1


@pytest.mark.parametrize("seed", range(5))
def test_groups_are_disjoint_true_and_worth_it(seed):
    draw = np.random.default_rng(seed)
    contexts = draw.integers(1, 1500, 20)
    tables = draw.permutation(20 * 94).astype(np.int32).reshape(20, 94)
    for row in range(1, 20):
        common = int(draw.integers(0, 94))
        tables[row, :common] = tables[draw.integers(0, row), :common]
    groups = find_groups(contexts, tables, SIZE)
    rows = [row for group in groups for row in group.rows]
    assert len(set(rows)) == len(rows)
    for group in groups:
        assert len(group.rows) > 1 and group.num_blocks * SIZE >= FEWEST_TOKENS
        assert all(group.num_blocks * SIZE < contexts[row] for row in group.rows)
        assert len({tables[row, : group.num_blocks].tobytes() for row in group.rows}) == 1
    assert not groups or sum(group.spared_blocks for group in groups) * SIZE >= WORTH


def test_levels_hold_every_token_once():
    step = shared_step([700, 600, 650, 90, 610], ((1, 0, 590), (2, 0, 520), (4, 0, 600)), head_dim=2)
    lengths, tables = step.batch.context_lens, step.batch.block_tables
    levels = cuda_cascade.make_levels(lengths, tables, SIZE)
    assert levels is None  # 4 rows of 512 tokens spare 1536
    step = shared_step([1700, 1600, 1650, 90, 1610], ((1, 0, 1590), (2, 0, 1520), (4, 0, 1600)), head_dim=2)
    lengths, tables = step.batch.context_lens, step.batch.block_tables
    levels = make_levels(lengths, tables, SIZE)
    assert sorted(levels.rows.tolist()) == [0, 1, 2, 4] and levels.alone.tolist() == [3]
    (shared,) = [levels.shared.indices.tolist()]
    starts = levels.unique.indptr.tolist()
    for (begin, end), last, row in zip(
        itertools.pairwise(starts), levels.unique.last_page_len.tolist(), levels.rows.tolist(), strict=True
    ):
        blocks = shared + levels.unique.indices[begin:end].tolist()
        assert (len(blocks) - 1) * SIZE + last == int(lengths[row])
        assert blocks == tables[row, : len(blocks)].tolist()
    assert levels.shared.qo_indptr.tolist() == [0, 4] and levels.shared.last_page_len.tolist() == [SIZE]
    assert levels.spared_tokens == 3 * len(shared) * SIZE


STEP = {"contexts": [1700, 1600, 1650, 90, 1610], "shared": ((1, 0, 1590), (2, 0, 1520), (4, 0, 1600))}


@pytest.mark.parametrize("variant", [{}, {"softcap": 5.0}, {"window": 700}], ids=str)
def test_a_step_in_two_levels_equals_the_reference_on_a_fake_gpu(fake_gpu, reference, variant, monkeypatch):  # noqa: F811
    step = shared_step(**STEP, chunks=((5, 40), (30, 30)), dtype=torch.bfloat16, **variant)
    expected = run_attention(reference, step)
    found = run_attention(fake_gpu, dataclasses.replace(step, batch=on_host(step.batch)))
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    shares = "window" not in variant
    assert (fake_gpu.cascade_saved_tokens > 0) is shares
    assert fake_gpu.gpu.not_causal_plans == (3 if shares else 0)
    monkeypatch.setattr(cuda_cascade, "WORTH", 1 << 40)
    run_attention(fake_gpu, dataclasses.replace(step, batch=on_host(step.batch)))
    assert fake_gpu.gpu.not_causal_plans == (3 if shares else 0)


def test_levels_that_claim_what_is_not_so_give_other_results(fake_gpu, reference, monkeypatch):  # noqa: F811
    """The oracle can fail."""
    step = shared_step(STEP["contexts"], (), dtype=torch.bfloat16)
    monkeypatch.setattr(cuda_cascade, "find_groups", lambda *args: (PrefixGroup((0, 1), 100),))
    found, expected = run_attention(fake_gpu, step), run_attention(reference, step)
    torch.testing.assert_close(found[[0, 2, 3, 4]], expected[[0, 2, 3, 4]], atol=2e-2, rtol=2e-2)
    assert not torch.allclose(found[1], expected[1], atol=2e-2, rtol=2e-2)


def test_what_flashinfer_does_not_read_itself_is_not_shared(fake_gpu):  # noqa: F811
    plain = AttentionShape(6, 2, 64, SIZE, torch.bfloat16)
    assert fake_gpu.shares_prefixes(plain)
    for changes in ({"head_dim": 20}, {"dtype": torch.float32}, {"kv_dtype": torch.float8_e4m3fn}, {"latent_dim": 48}):
        assert not fake_gpu.shares_prefixes(dataclasses.replace(plain, **changes))


def test_a_graph_is_given_up_only_for_much(fake_gpu, monkeypatch):  # noqa: F811
    step = shared_step(**STEP, dtype=torch.bfloat16)
    spared = make_levels(step.batch.context_lens, step.batch.block_tables, SIZE).spared_tokens
    num_bytes = spared * 2 * 2 * 64 * 2 * 30  # keys and values, heads, head_dim, bfloat16, layers

    def fits(limit, **options):
        monkeypatch.setattr("kvrelay.kernels.cuda.cuda_graphs.EAGER_WORTH_BYTES", limit)
        return CudaGraphs(fake_gpu, step.case.shape, max_blocks=200, **options).fits(step.batch)

    assert fits(num_bytes + 1, num_layers=30) and not fits(num_bytes, num_layers=30)
    assert fits(1)  # nothing but windows


def test_prefixes_are_not_searched_where_a_graph_is_kept_anyway(fake_gpu, monkeypatch):  # noqa: F811
    step, searched = shared_step(**STEP, dtype=torch.bfloat16), []
    monkeypatch.setattr(cuda_cascade, "_best", lambda *args: searched.append(1) or ())
    graphs = CudaGraphs(fake_gpu, step.case.shape, max_blocks=200, num_layers=30)
    assert graphs.fits(step.batch) and not searched  # rows share 1,500 tokens, which 4 GiB are far beyond
    monkeypatch.setattr("kvrelay.kernels.cuda.cuda_graphs.EAGER_WORTH_BYTES", 1)
    assert graphs.fits(step.batch) and searched == [1]
    unlike = shared_step(STEP["contexts"], (), dtype=torch.bfloat16)
    assert graphs.fits(unlike.batch) and searched == [1]  # no two rows share a block


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_cannot_spare_so_much_are_told_without_the_search(seed):
    """Whatever groups spare, `may_spare` has allowed; never what would take longer contexts."""
    draw = np.random.default_rng(seed)
    rows = ["".join(draw.choice(list("ab"), draw.integers(1, 6))) for _ in range(draw.integers(2, 12))]
    contexts, tables = tables_of(*rows)
    spared = sum(group.spared_blocks for group in find_groups(contexts, tables, SIZE, worth=0)) * SIZE
    assert may_spare(contexts, tables, SIZE, spared) or spared == 0
    assert not may_spare(contexts, tables, SIZE, len(rows) * int(contexts.max()))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_step_in_two_levels_equals_the_reference(cuda, reference, head_dim, softcap):  # noqa: F811
    step = shared_step(**STEP, chunks=((5, 40),), head_dim=head_dim, softcap=softcap, dtype=torch.bfloat16)
    gpu = dataclasses.replace(step, kv_layer=step.kv_layer.nan_to_num(0)).to("cuda")
    found = run_attention(cuda, gpu).cpu()
    torch.testing.assert_close(found, run_attention(reference, step), atol=2e-2, rtol=2e-2)
    assert cuda.cascade_saved_tokens > 0
