"""A mixture of experts on the CPU: the choice and the totals are the reference's, and no token sees another."""

from dataclasses import replace

import pytest
import torch

from kvrelay.kernels.common.quant_scheme import ExpertChoice, Scheme
from kvrelay.kernels.common.quantized import quantize
from kvrelay.kernels.cpu.native_kernels import NativeExperts

BF16, F16 = torch.bfloat16, torch.float16
TOKENS = (0, 1, 5, 61)
TOLERANCE = {torch.float32: 1e-5, BF16: 2e-2, F16: 4e-3}


@pytest.fixture(autouse=True)
def one_thread():
    """Idle torch threads that spin take more time than such small products need."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_weights(num_experts, hidden, ffn, dtype=torch.float32):
    """By expert, (gate and up, down)."""
    gate_ups = random(num_experts, 2 * ffn, hidden, dtype=dtype) / hidden**0.5
    return list(zip(gate_ups, random(num_experts, hidden, ffn, dtype=dtype, seed=1) / ffn**0.5, strict=True))


def choices(num_tokens, num_experts, num_chosen, seed=2):
    """(weights, chosen), every token's experts distinct."""
    chosen = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed)).argsort(dim=-1)
    weights = torch.rand(num_tokens, num_chosen, generator=torch.Generator().manual_seed(seed))
    return weights, chosen[:, :num_chosen].contiguous()


def expected(x, weights, chosen, experts, activation="silu"):
    """Every expert over every token in float64, of which each token then takes its own."""
    act = (
        torch.nn.functional.silu if activation == "silu" else lambda g: torch.nn.functional.gelu(g, approximate="tanh")
    )
    gate_up, down = (torch.stack(parts).double() for parts in zip(*experts, strict=True))
    gate, up = torch.einsum("th,efh->tef", x.double(), gate_up).chunk(2, dim=-1)
    made = torch.einsum("tef,ehf->teh", act(gate) * up, down)
    own = made.gather(1, chosen.unsqueeze(-1).expand(-1, -1, x.shape[1]))
    return (own * weights.double().unsqueeze(-1)).sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, F16], ids=str)
@pytest.mark.parametrize(("hidden", "ffn", "num_experts", "k"), [(64, 32, 8, 3), (33, 17, 4, 4), (70, 38, 16, 1)])
def test_experts_equal_the_weighted_sum(cpu, dtype, hidden, ffn, num_experts, k):
    weights = make_weights(num_experts, hidden, ffn, dtype)
    for activation in ("silu", "gelu_tanh"):
        experts = cpu.pack_experts(iter(weights), activation, dtype)
        for tokens in TOKENS:
            x, (shares, chosen) = random(tokens, hidden, dtype=dtype, seed=3), choices(tokens, num_experts, k)
            found = experts(x, shares, chosen)
            assert found.dtype == dtype and found.shape == x.shape
            near = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
            torch.testing.assert_close(found.double(), expected(x, shares, chosen, weights, activation), **near)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_quantised_experts_are_those_of_the_restored_weights(cpu, dtype, bits):
    weights, scheme = make_weights(6, 70, 34), Scheme(bits)
    experts = cpu.pack_experts(iter(weights), "silu", dtype, scheme)
    restored = [tuple(quantize(weight, scheme).restored() for weight in pair) for pair in weights]
    x, (shares, chosen) = random(23, 70, dtype=dtype, seed=3), choices(23, 6, 2)
    found = experts(x, shares, chosen).double()
    # activations between the products are of dtype
    torch.testing.assert_close(
        found, expected(x, shares, chosen, restored), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    assert experts.error.num_weights == 6 * 3 * 70 * 34 and 0 < experts.error.relative < (0.01 if bits == 8 else 0.1)
    assert (found - expected(x, shares, chosen, weights)).abs().max() > 1e-4  # the rounding is really there


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_a_base_is_added_with_and_without_its_own_share(cpu, reference, dtype):
    weights = make_weights(4, 32, 16, dtype)
    packed = [backend.pack_experts(iter(weights), "silu", dtype) for backend in (cpu, reference)]
    x, base, logits = random(9, 32, dtype=dtype), random(9, 32, dtype=dtype, seed=5), 3 * random(9, 1, seed=6)
    shares, chosen = choices(9, 4, 2)
    plain, near = packed[0](x, shares, chosen), {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    for share, of_logits in ((torch.ones(9, 1), None), (logits.sigmoid(), logits)):
        found, oracle = (experts(x, shares, chosen, base, of_logits) for experts in packed)
        torch.testing.assert_close(found, oracle, **near)
        torch.testing.assert_close(found.float(), plain.float() + share * base.float(), **near)


@pytest.mark.parametrize("where", ["all on one", "one on none", "last alone"])
def test_experts_may_be_crowded_or_empty(cpu, where):
    weights = make_weights(5, 32, 16)
    experts, x = cpu.pack_experts(iter(weights), "silu", torch.float32), random(40, 32)
    chosen = {
        "all on one": torch.full((40, 1), 3),
        "one on none": torch.tensor([0, 1, 3, 4]).repeat(10).unsqueeze(1),
        "last alone": torch.tensor([0] * 39 + [4]).unsqueeze(1),
    }[where]
    shares = torch.ones(40, 1)
    torch.testing.assert_close(
        experts(x, shares, chosen).double(), expected(x, shares, chosen, weights), atol=1e-5, rtol=1e-5
    )


def test_rows_may_be_strided(cpu):
    experts, x = cpu.pack_experts(iter(make_weights(4, 24, 16)), "silu", torch.float32), random(7, 48)
    shares, chosen = choices(7, 4, 2)
    assert torch.equal(experts(x[:, 24:], shares, chosen), experts(x[:, 24:].contiguous(), shares, chosen))


@pytest.mark.parametrize("scheme", [None, Scheme(8), Scheme(4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_a_token_alone_equals_itself_in_any_batch_bit_for_bit(compiled, compiled_2_threads, dtype, scheme):
    weights = make_weights(6, 96, 40, torch.float32 if scheme else dtype)
    x, base, logits = random(150, 96, dtype=dtype, seed=3), random(150, 96, dtype=dtype, seed=4), random(150, 1, seed=5)
    shares, chosen = choices(150, 6, 2)
    results = []
    for backend in (compiled, compiled_2_threads):
        experts = backend.pack_experts(iter(weights), "silu", dtype, scheme)
        rows = [slice(at, at + 1) for at in range(150)]
        alone = torch.cat([experts(x[r], shares[r], chosen[r], base[r], logits[r]) for r in rows])
        for tokens in (2, 7, 61, 150):
            some = slice(150 - tokens, 150)
            assert torch.equal(experts(x[some], shares[some], chosen[some], base[some], logits[some]), alone[some])
        results.append(alone)
    assert torch.equal(*results)


def test_more_tokens_than_fit_at_once_go_one_part_after_the_other(compiled):
    """64 MiB between the products: of 64 numbers, 6 experts and float32, 16 thousand tokens at once."""
    experts = compiled.pack_experts(iter(make_weights(6, 64, 8)), "silu", torch.float32)
    tokens = 40_000
    x, (shares, chosen) = random(tokens, 64), choices(tokens, 6, 6)
    found = experts(x, shares, chosen)
    for some in (slice(0, 50), slice(31_700, 31_900), slice(tokens - 50, tokens)):
        assert torch.equal(found[some], experts(x[some], shares[some], chosen[some]))


def test_a_wrong_weight_is_seen_by_the_comparisons(compiled):
    """Negative control: two experts exchanged."""
    weights = make_weights(4, 32, 16)
    swapped = [weights[1], weights[0], *weights[2:]]
    x, (shares, chosen) = random(9, 32), choices(9, 4, 2)
    found, right = (
        compiled.pack_experts(iter(w), "silu", torch.float32)(x, shares, chosen) for w in (swapped, weights)
    )
    assert (found - right).abs().max() > 0.1


def test_experts_refuse_other_types(compiled):
    experts = compiled.pack_experts(iter(make_weights(2, 8, 8)), "silu", torch.float32)
    assert isinstance(experts, NativeExperts)
    with pytest.raises(TypeError, match="bfloat16"):
        experts(random(1, 8, dtype=BF16), *choices(1, 2, 1))


# ---- the choice

PLAIN = ExpertChoice(16, 4)
RULES = {
    "softmax": PLAIN,
    "normalised and scaled": replace(PLAIN, normalise=True, scale=2.5),
    "all": ExpertChoice(16, 16),
    "groups by their best": replace(PLAIN, num_groups=4, num_chosen_groups=2),
    "sigmoid, groups by their two best": ExpertChoice(16, 4, "sigmoid", 4, 2, normalise=True, scale=2.5),
    "odd": ExpertChoice(13, 3, "sigmoid"),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_the_choice_is_the_references(cpu, reference, rule):
    for tokens in (0, 1, 33, 200):
        logits = 3 * random(tokens, rule.num_experts, seed=tokens)
        for correction in (None, random(rule.num_experts, seed=9)):
            weights, chosen = cpu.choose_experts(logits, correction, rule)
            want_weights, want_chosen = reference.choose_experts(logits, correction, rule)
            assert torch.equal(chosen, want_chosen)
            torch.testing.assert_close(weights, want_weights, atol=1e-6, rtol=1e-5)


LOGITS = torch.tensor([[0.0, 3.0, 2.0, 1.0]])


def test_the_best_experts_are_chosen_with_their_scores_as_weights(cpu):
    weights, chosen = cpu.choose_experts(LOGITS, None, ExpertChoice(4, 2, scale=2.0))
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, 2 * LOGITS.softmax(-1)[:, 1:3])


def test_experts_outside_of_the_best_groups_are_not_chosen(cpu):
    groups = ExpertChoice(4, 2, num_groups=2, num_chosen_groups=1)
    assert cpu.choose_experts(LOGITS, None, groups)[1].tolist() == [[1, 0]]  # by the best of a group: 3 > 2
    totals = replace(groups, scoring="sigmoid")
    assert sorted(cpu.choose_experts(LOGITS, torch.zeros(4), totals)[1][0].tolist()) == [
        2,
        3,
    ]  # by the sum of its two best


def test_a_correction_decides_the_choice_and_not_the_weights(cpu):
    rule = ExpertChoice(4, 1, "sigmoid", normalise=True)
    weights, chosen = cpu.choose_experts(LOGITS, torch.tensor([9.0, 0.0, 0.0, 0.0]), rule)
    assert chosen.tolist() == [[0]] and weights.tolist() == [[1.0]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.0])
def test_a_choice_from_numbers_that_are_none_is_still_of_experts_that_exist(compiled, value):
    for rule in (RULES["softmax"], RULES["sigmoid, groups by their two best"]):
        _, chosen = compiled.choose_experts(torch.full((3, 16), value), None, rule)
        assert all(len(set(row)) == 4 and set(row) <= set(range(16)) for row in chosen.tolist())
