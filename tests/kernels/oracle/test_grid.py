"""Every kernel, on every CPU backend and in every dtype, within bounds that follow from rounding; and the bounds can be
missed.

The grid is kernels/oracle/grid.py's, the one that a GPU is held against, too (bench/gpu/gpu.py). What it is held
against is held against torch and Hugging Face here.
"""

import dataclasses
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from kvrelay.kernels.cpu.backend import CpuBackend
from kvrelay.kernels.cpu.native_kernels import NativeLinear
from kvrelay.kernels.oracle import exact
from kvrelay.kernels.oracle.grid import DTYPES, FAMILIES, attend, attention_case, judge
from kvrelay.kernels.oracle.grid_steps import BLOCK_SIZES, FP8, HEADS, KernelCase, make_step
from tests.kernels.oracle.kernel_cases import only, run_attention, written_out

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def backends(torch_only, reference):
    """All that can run here; the compiled ones where there is a compiler."""
    compiled = {
        f"compiled, {n} threads": backend for n in (1, 2) if (backend := CpuBackend(n)).compiled_kernels is not None
    }
    torch.set_num_threads(1)  # float64 over small shapes
    return {"torch": torch_only, "reference": reference, **compiled}


@pytest.fixture(scope="module")
def best(backends):
    """What controls are run with."""
    return list(backends.values())[-1]


def is_torchs_own(name, family, dtype):
    """Whether the compiled backend hands this on to torch's kernels, which are asked themselves."""
    return name.startswith("compiled") and family.startswith("attention") and dtype == torch.float16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_kernel_is_within_its_bounds_over_the_whole_grid(backends, family, dtype):
    asked = {name: backend for name, backend in backends.items() if not is_torchs_own(name, family, dtype)}
    verdicts = {name: judge(family, backend, dtype) for name, backend in asked.items()}
    assert {name: str(verdict) for name, verdict in verdicts.items() if not verdict.ok} == {}


class Spoiled:
    """A backend of which one thing is a little wrong."""

    def __init__(self, right, **wrong):
        self._right, self._wrong = right, wrong

    def __getattr__(self, name):
        right = getattr(self._right, name)
        return (lambda *args, **kw: self._wrong[name](right, *args, **kw)) if name in self._wrong else right


def one_weight(pack, weight, *rest):
    """Its largest number 2 % off."""
    changed = weight.clone()
    changed.view(-1)[int(weight.float().abs().argmax())] *= 1.02
    return pack(changed, *rest)


def next_position(rope, q, k, table, positions):
    return rope(q, k, table, positions + 1)


def next_slot(place, q, k, v, inputs):
    return place(q, k, v, dataclasses.replace(inputs, slot_mapping=(inputs.slot_mapping + 1) % 128))


def wrong_block(plan, batch, shape):
    """The last sequence reads its second block where its first is."""
    tables = batch.block_tables.clone()
    if batch.max_context_len >= 2 * shape.block_size:
        tables[-1, 0] = tables[-1, 1]
    return plan(dataclasses.replace(batch, block_tables=tables), shape)


def one_token_less(plan, batch, shape):
    """The longest sequence does not see the token before its last."""
    context = batch.context_lens.clone()
    if context.numel():
        context[-1] -= 1
    return plan(dataclasses.replace(batch, context_lens=context), shape)


WRONG = {
    "linear": {"pack_linear": one_weight},
    "linear per head": {"pack_heads": one_weight},
    "quantised linear": {
        "pack_quantized": lambda pack, *args: lambda x: pack(*args)(x) * (1.0 if x.shape[0] < 31 else 1.02)
    },
    "stored linear": {
        "pack_stored": lambda pack, *args: (
            lambda x: pack(*args)[0](x) * (1.0 if x.shape[0] < 31 else 1.04),
            pack(*args)[1],
        )
    },
    "embedding": {"embed": lambda embed, ids, *rest: embed((ids + 1) % 50, *rest)},
    "norms": {"rms_norm": lambda norm, x, weight, eps: norm(x, weight, 100 * eps + 0.02)},
    "rope": {"rope": next_position},
    "gated activations": {
        "gated_activation": lambda act, x, kind: act(x, "silu" if kind == "gelu_tanh" else "gelu_tanh")
    },
    "cache writes": {"store_kv": lambda store, k, v, cache, slots: store(k, v, cache, (slots + 1) % 128)},
    "inputs": {"norm_rope_store": next_slot},
    "widening": {"widened": lambda widened, x: widened(x) * (1 + 2.0**-20)},
    "sampling": {"sample": lambda sample, logits, batch: sample(logits.roll(1, -1), batch)},
    **{name: {"plan": wrong_block} for name in FAMILIES if name.startswith("attention")},
}


def test_every_family_has_a_control():
    assert WRONG.keys() == FAMILIES.keys()


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("family", WRONG)
def test_what_is_a_little_wrong_is_out_of_bounds(best, family, dtype):
    spoiled = Spoiled(best, **WRONG[family])
    with torch.inference_mode():
        assert any(not compared.ok for compared in FAMILIES[family](spoiled, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_one_token_too_few_or_a_window_one_too_wide_is_out_of_bounds(best, dtype):
    """Of 300 tokens, in a batch."""
    case = KernelCase(((1, 33), (9, 300)), dtype=dtype, heads=4, kv_heads=2, head_dim=32)
    assert attention_case(best, case, 1.0).ok
    assert not attention_case(Spoiled(best, plan=one_token_less), case, 1.0).ok
    wider = Spoiled(best, attention=lambda right, *args, window, **kw: right(*args, window=window + 1, **kw))
    case = dataclasses.replace(case, window=20)
    assert attention_case(best, case, 1.0).ok and not attention_case(wider, case, 1.0).ok


def test_a_result_that_is_no_number_or_of_another_shape_is_not_right():
    right = exact.unrounded(torch.ones(2, 3))
    assert right.ratio(torch.ones(2, 3)) == 0.0
    assert right.ratio(torch.full((2, 3), math.nan)) == math.inf
    assert right.ratio(torch.full((2, 3), 1.5)) == math.inf
    with pytest.raises(ValueError, match="shape"):
        right.ratio(torch.ones(3))


# ---- what the grid is held against, against others' and a formula written out


@pytest.mark.parametrize("heads", HEADS)
def test_the_definition_of_attention_is_the_formula_written_out(heads):
    for variant in (
        ({}, {"kv_dtype": FP8}) if heads == "MLA" else ({}, {"window": 7, "softcap": 5.0}, {"kv_dtype": FP8})
    ):
        step = make_step(KernelCase(((1, 5), (1, 33), (9, 40)), block_size=8, **HEADS[heads], **variant))
        found = exact.attention(step, 0.3).value
        torch.testing.assert_close(found, written_out(step, 0.3), atol=1e-12, rtol=1e-12)


def contiguous(step):
    """q, k, v [1, heads, tokens, dim] float64 of a step with one whole prompt, read in the order of its tokens."""
    k, v = step.kv_layer[step.batch.block_tables[0].long()].transpose(0, 1).flatten(1, 2).double()
    return (x.transpose(0, 1).unsqueeze(0) for x in (step.q.double(), k, v))


@pytest.mark.parametrize("heads", ["MHA", "GQA", "MQA"])
def test_the_definition_and_the_reference_are_torchs_and_hugging_faces_attention_in_float64(reference, heads):
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    step = make_step(KernelCase(((64, 64),), block_size=8, **HEADS[heads]))
    q, k, v = contiguous(step)
    group = q.shape[1] // k.shape[1]
    mask = torch.ones(64, 64, dtype=torch.bool).tril()
    right = exact.attention(step, 0.3)
    torchs = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(right.value, torchs, atol=1e-12, rtol=1e-12)
    assert right.ratio(run_attention(reference, step, 0.3)) <= 1.0

    window = mask & ~torch.ones(64, 64, dtype=torch.bool).tril(-20)
    layer = torch.nn.Module()
    layer.num_key_value_groups = group
    added = torch.zeros(64, 64).double().masked_fill(~window, -math.inf)[None, None]
    theirs, _ = eager_attention_forward(layer, q, k, v, added, scaling=0.3, softcap=5.0)
    case = dataclasses.replace(step.case, window=20, softcap=5.0)
    limited = dataclasses.replace(step, case=case)
    right = exact.attention(limited, 0.3)
    torch.testing.assert_close(right.value, theirs[0].double(), atol=1e-6, rtol=1e-6)  # its softmax is in float32
    assert right.ratio(run_attention(reference, limited, 0.3)) <= 1.0


def test_the_definitions_of_norms_and_rotations_are_hugging_faces_in_float64():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x, weight = torch.randn(7, 48).double(), torch.randn(48).double()
    theirs = F.rms_norm(x, (48,), weight, 1e-5)
    torch.testing.assert_close((x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight), theirs)
    q, positions = torch.randn(9, 3, 48), torch.arange(9) * 5
    angles = torch.outer(torch.arange(50.0), 1e4 ** -(torch.arange(24) / 24))
    table = torch.cat((angles.cos(), angles.sin()), 1)
    cos, sin = (torch.cat((part, part), -1)[positions].double()[None] for part in table.chunk(2, 1))
    theirs, _ = apply_rotary_pos_emb(q.double().transpose(0, 1)[None], q.double().transpose(0, 1)[None], cos, sin)
    torch.testing.assert_close(exact.rope(q, table, positions).value, theirs[0].transpose(0, 1))


# ---- properties of random steps


@st.composite
def cases(draw):
    """Any step that the engine could plan, small."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    latent = draw(st.booleans())
    decodes = draw(st.lists(st.integers(1, 700), max_size=5))
    chunks = draw(st.lists(st.tuples(st.integers(2, 60), st.integers(0, 600)), max_size=3))
    return KernelCase(
        (*((1, context) for context in decodes), *((new, new + before) for new, before in chunks)),
        heads=group if latent else kv_heads * group,
        kv_heads=1 if latent else kv_heads,
        head_dim=draw(st.sampled_from([8, 20, 33])),
        block_size=draw(st.sampled_from(BLOCK_SIZES)),
        dtype=draw(st.sampled_from([torch.float32, BF16])),
        window=None if latent else draw(st.none() | st.integers(1, 700)),
        softcap=None if latent else draw(st.none() | st.floats(1, 50)),
        latent_dim=draw(st.integers(1, 8)) if latent else None,
        kv_dtype=draw(st.sampled_from([None, FP8])),
        shared_tokens=draw(st.sampled_from([0, 128, 512])),
    )


ANY = settings(
    max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@ANY
@given(case=cases(), scale=st.sampled_from([0.1, 0.4, 1.0]), seed=st.integers(0, 2**32))
def test_any_step_is_within_bounds_and_each_sequence_as_if_it_were_alone(
    compiled, compiled_2_threads, case, scale, seed
):
    step = make_step(case, seed)
    together = attend(compiled, step, scale)
    assert exact.attention(step, scale).ratio(together) <= 1.0
    assert torch.equal(together, attend(compiled_2_threads, step, scale))
    for row in range(len(case.sequences)):
        own = slice(int(step.batch.query_starts[row]), int(step.batch.query_starts[row + 1]))
        assert torch.equal(attend(compiled_2_threads, only(step, row), scale), together[own])


@ANY
@given(case=cases(), seed=st.integers(0, 2**32))
def test_any_step_is_within_bounds_without_a_compiler(torch_only, case, seed):
    step = make_step(case, seed)
    assert exact.attention(step, 0.4).ratio(attend(torch_only, step, 0.4)) <= 1.0


@ANY
@given(case=cases(), sizes=st.tuples(st.sampled_from(BLOCK_SIZES), st.sampled_from(BLOCK_SIZES)))
def test_the_size_of_blocks_and_where_they_lie_change_no_bit(compiled, case, sizes):
    found = [attend(compiled, make_step(dataclasses.replace(case, block_size=size)), 0.3) for size in sizes]
    assert torch.equal(*found)


@ANY
@given(
    rows=st.integers(0, 40),
    n=st.integers(1, 70),
    k=st.integers(1, 200),
    dtype=st.sampled_from([torch.float32, BF16]),
    seed=st.integers(0, 2**32),
)
def test_any_product_is_within_bounds_and_each_row_as_if_it_were_alone(compiled, rows, n, k, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(size, generator=generator).to(dtype) for size in ((rows, k), (n, k)))
    linear = NativeLinear(compiled.compiled_kernels, weight, None, compiled.compiled_kernels.linear_kind(dtype, k))
    found = linear(x)
    assert exact.linear(x, weight, None).ratio(found) <= 1.0
    assert all(torch.equal(linear(x[row : row + 1]), found[row : row + 1]) for row in range(rows))
