"""Paged attention: every CPU path against the definition, over shapes, windows, caps and batch mixes."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from kvrelay import fp8
from tests.kernels.oracle.kernel_cases import KernelCase, make_step, only, run_attention, step_and_answer, written_out

BF16 = torch.bfloat16
CASES = {
    "one token": KernelCase(((1, 1),)),
    "decode at block borders": KernelCase(((1, 15), (1, 16), (1, 17), (1, 1), (1, 64), (1, 65))),
    "long decode over partitions": KernelCase(((1, 511), (1, 512), (1, 513), (1, 1100))),
    "whole prompt": KernelCase(((37, 37),)),
    "chunk after a cached prefix": KernelCase(((20, 150),)),
    "long chunk over partitions": KernelCase(((30, 1030),)),
    "mixed": KernelCase(((1, 33), (1, 700), (5, 5), (16, 48), (17, 49), (40, 40))),
    "window in decode and chunk": KernelCase(((1, 90), (1, 5), (30, 80)), window=20),
    "window of one": KernelCase(((1, 70), (5, 9)), window=1),
    "long window": KernelCase(((1, 1200), (9, 900)), window=600),
    "softcap": KernelCase(((1, 90), (30, 80)), softcap=5.0),
    "window and softcap": KernelCase(((1, 600), (30, 80)), window=33, softcap=20.0),
    "no GQA": KernelCase(((1, 40), (9, 20)), heads=4, kv_heads=4),
    "MQA": KernelCase(((1, 40), (9, 20)), heads=8, kv_heads=1),
    "wide group": KernelCase(((1, 40), (3, 20)), heads=60, kv_heads=1, head_dim=16),
    "head 80": KernelCase(((1, 40), (9, 20)), head_dim=80),
    "head 96": KernelCase(((1, 40), (9, 20)), head_dim=96),
    "head 128": KernelCase(((1, 40), (9, 20)), head_dim=128),
    "head 256": KernelCase(((1, 40), (9, 20)), heads=4, kv_heads=1, head_dim=256),
    "head 20": KernelCase(((1, 40), (9, 20)), head_dim=20),
    "block of 1": KernelCase(((1, 40), (9, 20)), block_size=1),
    "block of 32": KernelCase(((1, 31), (1, 32), (1, 33), (9, 70)), block_size=32),
    "block of 128": KernelCase(((1, 200), (9, 130)), block_size=128),
    "latent": KernelCase(((1, 40), (1, 600), (9, 20)), heads=4, kv_heads=1, head_dim=48, latent_dim=32),
    "latent, DeepSeek's sizes": KernelCase(((1, 33), (5, 20)), heads=16, kv_heads=1, head_dim=576, latent_dim=512),
    "latent, odd sizes, block of 1": KernelCase(
        ((1, 9), (4, 20)), heads=3, kv_heads=1, head_dim=29, latent_dim=21, block_size=1
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_attention_follows_its_definition(cpu, name, dtype):
    step, expected = step_and_answer(dataclasses.replace(CASES[name], dtype=dtype))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(run_attention(cpu, step).double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_the_reference_follows_the_definition_too(reference, name):
    step, expected = step_and_answer(CASES[name])
    torch.testing.assert_close(run_attention(reference, step).double(), expected, atol=1e-5, rtol=1e-5)


def test_the_reference_equals_torchs_causal_attention(reference):
    step = make_step(KernelCase(((48, 48),), heads=4, kv_heads=4))
    table = step.batch.block_tables[0].long()
    k, v = step.kv_layer[table].transpose(0, 1).flatten(1, 2)
    q, k, v = (t.transpose(0, 1) for t in (step.q, k, v))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.125).transpose(0, 1)
    torch.testing.assert_close(run_attention(reference, step), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("kind", [{}, {"window": 100}, {"kv_heads": 1, "latent_dim": 48}], ids=str)
def test_a_sequence_alone_equals_itself_in_a_batch_bit_for_bit(compiled, compiled_2_threads, dtype, kind):
    case = KernelCase(((1, 33), (1, 1300), (5, 5), (16, 48), (40, 600)), dtype=dtype, **kind)
    step = make_step(case)
    together = run_attention(compiled, step)
    assert torch.equal(together, run_attention(compiled_2_threads, step))
    for s in range(5):
        rows = slice(int(step.batch.query_starts[s]), int(step.batch.query_starts[s + 1]))
        for backend in (compiled, compiled_2_threads):
            assert torch.equal(run_attention(backend, only(step, s)), together[rows])


SHAPES = (
    {},
    {"window": 100},
    {"softcap": 5.0, "block_size": 1},
    {"heads": 4, "kv_heads": 4, "head_dim": 80},
    {"heads": 3, "kv_heads": 1, "head_dim": 29, "latent_dim": 21},
)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("kind", SHAPES, ids=str)
def test_a_prompt_cut_into_chunks_and_single_tokens_equals_the_whole_bit_for_bit(
    compiled, compiled_2_threads, dtype, kind
):
    step = make_step(KernelCase(((600, 600),), dtype=dtype, **kind))
    whole = run_attention(compiled, step)
    for cut in (slice(0, 7), slice(7, 200), slice(511, 514), slice(599, 600), slice(64, 65), slice(0, 1)):
        for backend in (compiled, compiled_2_threads):
            assert torch.equal(run_attention(backend, only(step, 0, cut)), whole[cut])


@pytest.mark.parametrize("kind", SHAPES, ids=str)
def test_each_token_decoded_alone_equals_its_row_of_the_prompt_bit_for_bit(compiled, kind):
    step = make_step(KernelCase(((70, 580),), dtype=BF16, **kind))  # over the borders of a tile and of a partition
    whole = run_attention(compiled, step)
    alone = [run_attention(compiled, only(step, 0, slice(row, row + 1))) for row in range(70)]
    assert torch.equal(torch.cat(alone), whole)
    assert not torch.equal(whole[1:], whole[:-1])


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_what_lies_behind_a_context_in_its_blocks_is_not_read(compiled, dtype):
    step = make_step(KernelCase(((1, 33), (9, 70), (1, 513)), dtype=dtype, block_size=32))
    found = run_attention(compiled, step)
    for s, context in enumerate((33, 70, 513)):
        last = int(step.batch.block_tables[s, context // 32])
        step.kv_layer[last, :, context % 32 :] = torch.nan
    assert torch.equal(run_attention(compiled, step), found)
    step.kv_layer[int(step.batch.block_tables[0, 1]), 1, 0] = torch.nan  # and what is of the context is
    assert run_attention(compiled, step)[0].isnan().all()


@pytest.mark.parametrize("factor", [1e3, 3e4])
def test_scores_that_lie_far_apart_leave_one_token_its_whole_weight(compiled, factor):
    step = make_step(KernelCase(((1, 300), (20, 90)), dtype=BF16))
    step = dataclasses.replace(step, q=step.q * factor)
    found, expected = run_attention(compiled, step), written_out(step, 0.125)
    torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("rise", [2.0, 5.0, 7.9, 8.1, 30.0, -6.0])
def test_scores_that_rise_or_fall_from_tile_to_tile(compiled, rise):
    """By so many powers of two for each tile of 64 tokens: the running best is raised at each, at some, or never."""
    step = make_step(KernelCase(((1, 700), (20, 300)), dtype=BF16))
    step = dataclasses.replace(step, q=torch.zeros_like(step.q))
    step.q[..., 0] = 8.0
    for s, context in enumerate((700, 300)):
        scores = torch.arange(context) * (rise / 64) / 1.4427 / (8.0 * 0.125)
        table, block_size = step.batch.block_tables[s].long(), step.kv_layer.shape[2]
        for t in range(context):
            step.kv_layer[table[t // block_size], 0, t % block_size, :, 0] = scores[t]
    found, expected = run_attention(compiled, step), written_out(step, 0.125)
    torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=2e-2)


def test_queries_may_be_a_view_into_the_fused_qkv(cpu):
    step = make_step(KernelCase(((1, 33), (9, 20))))
    fused = torch.cat((step.q.flatten(1), torch.zeros(10, 77)), dim=1)
    view = fused[:, : 6 * 64].unflatten(1, (6, 64))
    plan = cpu.plan(step.batch, step.case.shape)
    found = cpu.attention(view, step.kv_layer, plan, scale=0.125, window=None, softcap=None)
    assert torch.equal(found, run_attention(cpu, step))


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_attention_over_latents_of_fp8_is_that_over_their_numbers(cpu, dtype):
    case = KernelCase(((1, 40), (1, 600), (9, 20)), heads=4, kv_heads=1, head_dim=48, latent_dim=32, dtype=dtype)
    step = make_step(case)
    cache = torch.zeros((*step.kv_layer.shape[:-1], 52), dtype=torch.uint8)
    slots = torch.arange(step.kv_layer.shape[0] * case.block_size)
    cpu.store_latent(*step.kv_layer.nan_to_num(0).reshape(-1, 48).split((32, 16), -1), cache, slots)
    numbers = fp8.decoded(cache)
    assert torch.equal(cache, fp8.encoded(step.kv_layer.nan_to_num(0)))
    plan = cpu.plan(step.batch, dataclasses.replace(case.shape, kv_dtype=torch.float8_e4m3fn))
    found = cpu.latent_attention(*step.q.split((32, 16), -1), cache, plan, scale=0.125)
    expected = written_out(dataclasses.replace(step, kv_layer=numbers), 0.125)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_latent_entries_are_stored_at_their_slots_alone(cpu, dtype):
    cache = torch.full((5, 1, 4, 1, 12), 7.0, dtype=dtype)
    entries, slots = torch.randn(3, 12).to(dtype), torch.tensor([9, 2, 19])
    cpu.store_latent(entries[:, :8], entries[:, 8:], cache, slots)
    flat = cache.view(20, 12)
    assert torch.equal(flat[slots], entries)
    assert (flat[[at for at in range(20) if at not in slots.tolist()]] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_a_product_per_head_follows_its_definition_and_takes_views(cpu, dtype):
    weight, x = torch.randn(3, 20, 12).to(dtype) / 4, torch.randn(7, 3, 30).to(dtype)[..., 5:17]
    expected = torch.einsum("thi,hoi->tho", x.double(), weight.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(cpu.pack_heads(weight)(x).double(), expected, atol=tolerance, rtol=tolerance)


def test_a_row_of_a_product_per_head_does_not_depend_on_the_batch(compiled):
    packed, x = compiled.pack_heads(torch.randn(3, 20, 12)), torch.randn(9, 3, 12)
    assert torch.equal(packed(x)[4:5], packed(x[4:5]))
