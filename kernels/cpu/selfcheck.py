"""Checks the compiled kernels against the reference on this processor, in milliseconds, before the first request.

The C code has paths for processors that it was not developed on; a wrong one is switched off.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvrelay.kernels.backend import AttentionBatch, AttentionShape, HeadInputs, SamplingBatch
from kvrelay.kernels.common.quant_scheme import ExpertChoice, Scheme
from kvrelay.kernels.oracle.reference import ReferenceBackend

_DTYPES = (torch.float32, torch.bfloat16)
Results = Iterator[Tensor]
_Check = Callable[[Any, "_Numbers"], Results]  # (backend, numbers) -> results, for both backends to agree on


class _Numbers:
    """Random tensors of one dtype, the same for every backend."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self._generator = dtype, torch.Generator().manual_seed(1)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(dtype or self.dtype)


def _linear(backend: Any, numbers: _Numbers) -> Results:
    native = backend.compiled_kernels  # never one of torch's linear kernels
    for inputs in (70, 96):  # AMX tiles take multiples of 32
        packed = (native or backend).pack_linear(numbers(150, inputs) / 8, numbers(150))
        yield from (packed(numbers(rows, inputs)) for rows in (1, 2, 3, 4, 5, 6, 13, 21, 70))


def _quantized(backend: Any, numbers: _Numbers) -> Results:
    """A product with the identity restores the weight approximately; other products differ from that weight's by 0."""
    weight, bias = (numbers(*shape, dtype=torch.float32) / 8 for shape in ((150, 70), (150,)))
    for scheme, largest in ((Scheme(4), 0.1), (Scheme(8, 64), 0.01)):
        restored = backend.pack_quantized(weight, None, scheme, torch.float32)(torch.eye(70))
        yield (restored.T - weight).norm() < largest * weight.norm()
        packed = backend.pack_quantized(weight, bias, scheme, numbers.dtype)
        inputs = [numbers(rows, 70) for rows in (1, 2, 3, 4, 5, 6, 13, 31)]
        yield from ((packed(x).float() - (x.float() @ restored + bias)).to(x.dtype) for x in inputs)


def _norm(backend: Any, numbers: _Numbers) -> Results:
    yield backend.rms_norm(numbers(3, 77), numbers(77, dtype=torch.float32).abs(), 1e-5)


def _rope(backend: Any, numbers: _Numbers) -> Results:
    table, positions = numbers(8, 40, dtype=torch.float32), torch.tensor([0, 5, 7])
    yield from backend.rope(numbers(3, 4, 48), numbers(3, 2, 48), table, positions)


def _norm_rope_store(backend: Any, numbers: _Numbers) -> Results:
    norms, at = (numbers(48).abs().float(), numbers(48).abs().float()), torch.tensor([0, 5, 7])
    layer, table = torch.zeros(2, 3, 2, 16, 2, 48, dtype=numbers.dtype)[:, 1], numbers(8, 40, dtype=torch.float32)
    q, k, v = numbers(3, 8, 48).split((4, 2, 2), 1)
    yield backend.norm_rope_store(q, k, v, HeadInputs(norms, 1e-5, table, at, layer, 4 * at))
    yield layer


def _activation(backend: Any, numbers: _Numbers) -> Results:
    gate_up = 4 * numbers(3, 2 * 37)
    yield from (backend.gated_activation(gate_up, kind) for kind in ("silu", "gelu_tanh"))


def _attention_batch() -> AttentionBatch:
    """A decode row and a chunk over 48 blocks of 16 tokens."""
    tables = torch.randperm(48, generator=torch.Generator().manual_seed(5)).to(torch.int32).view(2, 24)
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


def _attention(backend: Any, numbers: _Numbers) -> Results:
    kv, q = numbers(48, 2, 2, 16, 2, 40)[:, 1], numbers(21, 6, 40)  # one layer of two
    plan = backend.plan(_attention_batch(), AttentionShape(6, 2, 40, 16, numbers.dtype))
    for window, softcap in ((None, None), (30, 5.0)):
        yield backend.attention(q, kv, plan, scale=0.2, window=window, softcap=softcap)


def _fp8_cache(backend: Any, numbers: _Numbers) -> Results:
    """Stored without a rotation, then read; results relative to the largest."""
    sizes, layer = torch.logspace(-3, 3, 768).view(768, 1, 1), torch.zeros(48, 2, 16, 2, 44, dtype=torch.uint8)
    heads, still = numbers(768, 10, 40) * sizes.to(numbers.dtype), torch.tensor([[1.0, 0.0]])
    slots = torch.arange(768)
    q, k, v = heads.split((6, 2, 2), 1)
    backend.norm_rope_store(q, k, v, HeadInputs(None, 1e-5, still, torch.zeros_like(slots), layer, slots))
    yield layer
    shape = AttentionShape(6, 2, 40, 16, numbers.dtype, kv_dtype=torch.float8_e4m3fn)
    plan = backend.plan(_attention_batch(), shape)
    yield 1e-3 * backend.attention(numbers(21, 6, 40), layer, plan, scale=0.2, window=None, softcap=None)


def _latent_attention(backend: Any, numbers: _Numbers) -> Results:
    shape = AttentionShape(6, 1, 40, 16, numbers.dtype, latent_dim=30)
    plan, q, kv = backend.plan(_attention_batch(), shape), numbers(21, 6, 40), numbers(48, 1, 16, 1, 40)
    yield backend.latent_attention(*q.split((30, 10), -1), kv, plan, scale=0.2)


def _sampling(backend: Any, numbers: _Numbers) -> Results:
    batch = SamplingBatch(
        temperature=torch.tensor([0.0, 1.0, 0.7, 1.3]),
        top_k=torch.tensor([0, 0, 20, 0]),
        top_p=torch.tensor([1.0, 0.9, 1.0, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.05]),
        uniform=torch.tensor([0.3, 0.6, 0.1, 0.8], dtype=torch.float64),
    )
    logits = 4 * numbers(4, 333, dtype=torch.float32)
    yield backend.sample(logits, batch)
    masks = numbers(2, 11, dtype=torch.float32).view(torch.int32)  # about half of the bits
    masks[:, 2:7] = 0
    yield backend.sample(logits, replace(batch, masks=masks, mask_rows=torch.tensor([0, 1, 1, -1], dtype=torch.int32)))


def _widening(backend: Any, numbers: _Numbers) -> Results:
    yield backend.widened(8 * numbers(3, 16391, dtype=torch.bfloat16)).view(torch.int32)


def _experts(backend: Any, numbers: _Numbers) -> Results:
    logits, choice = numbers(19, 6, dtype=torch.float32), ExpertChoice(6, 2, normalise=True)
    weights, chosen = backend.choose_experts(logits, None, choice)
    pairs = [(numbers(74, 70) / 8, numbers(70, 37) / 6) for _ in range(6)]
    yield from (weights, chosen)
    packed = backend.pack_experts(pairs, "silu", numbers.dtype)
    yield packed(numbers(19, 70), weights, chosen, numbers(19, 70), logits[:, :1])


_CHECKS: dict[str, _Check] = {
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


def _agree(found: Tensor, expected: Tensor) -> bool:
    """Whole numbers and claims are equal, others near."""
    if not found.dtype.is_floating_point:
        return torch.equal(found, expected)
    tolerance = 1e-4 if found.dtype == torch.float32 else 4e-2
    return torch.allclose(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


def first_wrong_kernel(backend: Any) -> str | None:
    """The name of the first kernel of a backend (CpuBackend) that disagrees with the reference, or None."""
    reference = ReferenceBackend("cpu")
    for name, check in _CHECKS.items():
        for dtype in _DTYPES:
            found, expected = (check(one, _Numbers(dtype)) for one in (backend, reference))
            if not all(_agree(*pair) for pair in zip(found, expected, strict=True)):
                return name
    return None
