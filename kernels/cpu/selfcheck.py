"""Checks the compiled kernels against the reference on this processor, in milliseconds, before the first request.

The C code has paths for processors that it was not developed on; a wrong one is switched off.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvrelay.kernels.backend import AttentionBatch, AttentionShape, HeadInputs, SamplingBatch
from kvrelay.kernels.common.expert_choice import ExpertChoice
from kvrelay.kernels.common.quant_scheme import Scheme
from kvrelay.kernels.cpu.native_kernels import NativeKernels
from kvrelay.kernels.cpu.native_weights import NativeExperts, NativeQuantLinear, choose_experts
from kvrelay.kernels.oracle.reference import ReferenceBackend

_DTYPES = (torch.float32, torch.bfloat16)


def _near(found: Tensor, expected: Tensor) -> bool:
    tolerance = 1e-4 if found.dtype == torch.float32 else 4e-2
    return torch.allclose(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


def _random(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def _linear(native: NativeKernels, reference: ReferenceBackend, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(1)
    weight, bias = _random(generator, dtype, 150, 70) / 8, _random(generator, dtype, 150)
    packed = native.pack_linear(weight, bias)
    inputs = [_random(generator, dtype, rows, 70) for rows in (1, 2, 3, 4, 5, 6, 13)]
    wide = [reference.pack_linear(weight.float(), bias.float())(x.float()) for x in inputs]
    return all(_near(packed(x), expected) for x, expected in zip(inputs, wide, strict=True))


def _quantized(native: NativeKernels, reference: ReferenceBackend, dtype: torch.dtype) -> bool:
    """A product with the identity restores the weight approximately; other products equal that weight's."""
    generator = torch.Generator().manual_seed(9)
    weight, bias = _random(generator, torch.float32, 150, 70) / 8, _random(generator, torch.float32, 150)
    inputs = [_random(generator, dtype, rows, 70) for rows in (1, 2, 3, 4, 5, 6, 13, 31)]
    for scheme, largest in ((Scheme(4), 0.1), (Scheme(8, 64), 0.01)):
        plain = NativeQuantLinear(native, weight, None, scheme, torch.float32)
        restored = plain(torch.eye(70)).T
        if not float((restored - weight).norm()) < largest * float(weight.norm()):
            return False
        packed, exact = NativeQuantLinear(native, weight, bias, scheme, dtype), reference.pack_linear(restored, bias)
        if not all(_near(packed(x), exact(x.float())) for x in inputs):
            return False
    return True


def _norm(native: NativeKernels, reference: ReferenceBackend, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(2)
    x, weight = _random(generator, dtype, 3, 77), torch.rand(77, generator=generator)
    return _near(native.rms_norm(x, None, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


def _rope(native: NativeKernels, reference: ReferenceBackend, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(3)
    q, k = _random(generator, dtype, 3, 4, 48), _random(generator, dtype, 3, 2, 48)
    table, positions = torch.rand(8, 40, generator=generator), torch.tensor([0, 5, 7])
    expected = reference.rope(q, k, table, positions)
    found = native.rope(q.clone(), k.clone(), table, positions)
    return all(_near(a, b) for a, b in zip(found, expected, strict=True))


def _norm_rope_store(native: NativeKernels, reference: ReferenceBackend, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(11)
    heads, table = _random(generator, dtype, 3, 8, 48), torch.rand(8, 40, generator=generator)
    norms, at = (torch.rand(48, generator=generator), torch.rand(48, generator=generator)), torch.tensor([0, 5, 7])
    layers = [torch.zeros(2, 2, 16, 2, 48, dtype=dtype) for _ in range(2)]

    def place(kernels: NativeKernels | ReferenceBackend, layer: Tensor) -> Tensor:
        q, k, v = heads.clone().split((4, 2, 2), 1)
        return kernels.norm_rope_store(q, k, v, HeadInputs(norms, 1e-5, table, at, layer, 4 * at))

    found, expected = place(native, layers[0]), place(reference, layers[1])
    return _near(found, expected) and _near(*layers)


def _activation(native: NativeKernels, reference: ReferenceBackend, dtype: torch.dtype) -> bool:
    gate_up = 4 * _random(torch.Generator().manual_seed(4), dtype, 3, 2 * 37)
    return all(
        _near(native.gated_activation(gate_up, kind), reference.gated_activation(gate_up, kind))
        for kind in ("silu", "gelu_tanh")
    )


def _attention_batch(generator: torch.Generator) -> AttentionBatch:
    """A decode row and a chunk over 48 blocks of 16 tokens."""
    tables = torch.randperm(48, generator=generator).to(torch.int32).view(2, 24)
    return AttentionBatch(
        query_starts=torch.tensor([0, 1, 21], dtype=torch.int32),
        context_lens=torch.tensor([150, 70], dtype=torch.int32),
        block_tables=tables.contiguous(),
        slot_mapping=torch.arange(21),
        positions=torch.arange(21),
        num_decode=1,
        max_query_len=20,
        max_context_len=150,
    )


def _attention(native: NativeKernels, reference: ReferenceBackend, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(5)
    kv = _random(generator, dtype, 48, 2, 16, 2, 40)
    shape = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=40, block_size=16, dtype=dtype)
    batch, q = _attention_batch(generator), _random(generator, dtype, 21, 6, 40)

    def run(kernels: NativeKernels | ReferenceBackend, window: int | None, softcap: float | None) -> Tensor:
        plan = kernels.plan(batch, shape)
        return kernels.attention(q, kv, plan, scale=0.2, window=window, softcap=softcap)  # type: ignore[arg-type]

    return all(_near(run(native, w, c), run(reference, w, c)) for w, c in ((None, None), (30, 5.0)))


def _fp8_cache(native: NativeKernels, reference: ReferenceBackend, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(8)
    sizes = torch.logspace(-3, 3, 768).view(768, 1, 1)
    k, v = (_random(generator, dtype, 768, 2, 40) * sizes.to(dtype) for _ in range(2))
    layers = [torch.zeros(48, 2, 16, 2, 44, dtype=torch.uint8) for _ in range(2)]
    for kernels, layer in zip((native, reference), layers, strict=True):
        kernels.store_kv(k, v, layer, torch.arange(768))  # type: ignore[attr-defined]
    shape = AttentionShape(6, 2, 40, 16, dtype, kv_dtype=torch.float8_e4m3fn)
    batch, q = _attention_batch(generator), _random(generator, dtype, 21, 6, 40)
    found = native.attention(q, layers[0], native.plan(batch, shape), scale=0.2, window=None, softcap=None)
    plan = reference.plan(batch, shape)
    expected = reference.attention(q, layers[1], plan, scale=0.2, window=None, softcap=None)
    size = float(expected.abs().max())
    return torch.equal(*layers) and _near(found / size, expected / size)


def _latent_attention(native: NativeKernels, reference: ReferenceBackend, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(7)
    kv, latent_dim = _random(generator, dtype, 48, 1, 16, 1, 40), 30
    shape = AttentionShape(6, 1, 40, 16, dtype, latent_dim=latent_dim)
    batch, q = _attention_batch(generator), _random(generator, dtype, 21, 6, 40)
    found = native.attention(q, kv, native.plan(batch, shape), scale=0.2, window=None, softcap=None)
    expected = reference.latent_attention(q, kv, reference.plan(batch, shape), scale=0.2, latent_dim=latent_dim)
    return _near(found[..., :latent_dim], expected)


def _sampling(native: NativeKernels, reference: ReferenceBackend, dtype: torch.dtype) -> bool:
    logits = 4 * torch.randn(4, 333, generator=torch.Generator().manual_seed(6))
    batch = SamplingBatch(
        temperature=torch.tensor([0.0, 1.0, 0.7, 1.3]),
        top_k=torch.tensor([0, 0, 20, 0]),
        top_p=torch.tensor([1.0, 0.9, 1.0, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.05]),
        uniform=torch.tensor([0.3, 0.6, 0.1, 0.8], dtype=torch.float64),
    )
    return torch.equal(native.sample(logits, batch), reference.sample(logits, batch))


def _widening(native: NativeKernels, reference: ReferenceBackend, dtype: torch.dtype) -> bool:
    x = 8 * _random(torch.Generator().manual_seed(9), torch.bfloat16, 3, 16391)
    return torch.equal(native.widened(x), reference.widened(x))


def _experts(native: NativeKernels, reference: ReferenceBackend, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(10)
    logits, choice = _random(generator, torch.float32, 19, 6), ExpertChoice(6, 2, normalise=True)
    weights, chosen = choose_experts(native, logits, None, choice)
    want_weights, want_chosen = reference.choose_experts(logits, None, choice)
    pairs = [(_random(generator, dtype, 74, 70) / 8, _random(generator, dtype, 70, 37) / 6) for _ in range(6)]
    x, base = _random(generator, dtype, 19, 70), _random(generator, dtype, 19, 70)
    found = NativeExperts(native, pairs, "silu", None, dtype)(x, weights, chosen, base, logits[:, :1])
    expected = reference.pack_experts(pairs, "silu", dtype)(x, want_weights, want_chosen, base, logits[:, :1])
    return torch.equal(chosen, want_chosen) and _near(weights, want_weights) and _near(found, expected)


_CHECKS: dict[str, Callable[[NativeKernels, ReferenceBackend, torch.dtype], bool]] = {
    "linear": _linear,
    "quantised linear": _quantized,
    "norm": _norm,
    "rope": _rope,
    "norm, rope and store": _norm_rope_store,
    "activation": _activation,
    "attention": _attention,
    "fp8 cache": _fp8_cache,
    "latent attention": _latent_attention,
    "experts": _experts,
    "sampling": _sampling,
    "widening": _widening,
}


def first_wrong_kernel(native: NativeKernels) -> str | None:
    """The name of the first kernel that disagrees with the reference, or None."""
    reference = ReferenceBackend("cpu")
    for name, check in _CHECKS.items():
        if not all(check(native, reference, dtype) for dtype in _DTYPES):
            return name
    return None
