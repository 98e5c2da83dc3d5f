"""Every kernel of a backend against its definition in float64, over a grid of dtypes, shapes, blocks and lengths.

A family is one kernel. The tests on CPUs, bench/gpu on GPUs, and `kvrelay verify` (before it trusts a backend with a
16-bit model) share these cases. Deterministic; measures no times.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvrelay import fp8
from kvrelay.kernels.backend import Activation, Backend, HeadInputs, SamplingBatch
from kvrelay.kernels.common.quant_scheme import Scheme
from kvrelay.kernels.oracle import exact
from kvrelay.kernels.oracle.exact import Exact
from kvrelay.kernels.oracle.grid_steps import (
    BLOCK_SIZES,
    FP8,
    HEADS,
    KernelCase,
    KernelStep,
    attention_cases,
    laid_out,
    long_cases,
    make_step,
)
from kvrelay.kernels.oracle.reference import ReferenceBackend, TorchBackend
from kvrelay.kernels.oracle.stored_examples import EXAMPLES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (0, 1, 2, 3, 5, 6, 7, 13, 33, 70)
_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")


@dataclass(frozen=True, slots=True)
class Compared:
    """Largest error of a case relative to its bound (correct if at most 1), or of the worst of several cases."""

    case: str
    ratio: float
    num_cases: int = 1

    @property
    def ok(self) -> bool:
        return self.num_cases > 0 and self.ratio <= 1.0


Family = Callable[[Backend, torch.dtype], Iterator[Compared]]


@dataclass(slots=True)
class _Numbers:
    """Random tensors on a backend's device: the same numbers on every device."""

    backend: Backend
    dtype: torch.dtype
    seed: int = 0

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        self.seed += 1
        numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(self.seed))
        return numbers.to(dtype or self.dtype).to(self.backend.device)


def linear(backend: Backend, dtype: torch.dtype) -> Iterator[Compared]:
    numbers = _Numbers(backend, dtype)
    for n, k in ((1, 1), (16, 8), (17, 33), (150, 70), (96, 300), (40, 2048)):
        weight, bias = numbers(n, k) / k**0.5, numbers(n)
        for b in (None, bias):
            packed = backend.pack_linear(weight, b)
            for rows in ROWS:
                x = numbers(rows, k)
                yield _compare(f"{rows} x {k} x {n}", packed(x), exact.linear(x, weight, b))


def head_linears(backend: Backend, dtype: torch.dtype) -> Iterator[Compared]:
    numbers = _Numbers(backend, dtype)
    for heads, n, k in ((1, 1, 1), (3, 20, 12), (4, 64, 48)):
        weight = numbers(heads, n, k) / k**0.5
        packed = backend.pack_heads(weight)
        for rows in ROWS:
            x = numbers(rows, heads, k + 9)[..., 5 : 5 + k]  # a view, like the fused projection's
            each = [exact.linear(x[:, head], weight[head], None) for head in range(heads)]
            both = (torch.stack([getattr(one, name) for one in each], 1) for name in ("value", "bound"))
            yield _compare(f"{rows} x {heads} heads x {k} x {n}", packed(x), Exact(*both))


def quantized_linear(backend: Backend, dtype: torch.dtype) -> Iterator[Compared]:
    """Quantised products against the weight that the backend restores for a unit matrix."""
    numbers = _Numbers(backend, dtype)
    schemes = (Scheme(4), Scheme(8), Scheme(4, 128), Scheme(8, 64))
    for scheme, (n, k) in product(schemes, ((1, 1), (17, 33), (150, 70), (40, 300))):
        weight, bias = numbers(n, k, dtype=torch.float32) / k**0.5, numbers(n, dtype=torch.float32)
        unit = torch.eye(k, device=backend.device)
        restored = backend.pack_quantized(weight, None, scheme, torch.float32)(unit).T
        most = 3 * weight.abs().amax(1, keepdim=True).expand(-1, k)  # at most: scale * integer and offset
        for b in (None, bias):
            packed = backend.pack_quantized(weight, b, scheme, dtype)
            for rows in ROWS:
                x = numbers(rows, k)
                yield _compare(f"{scheme}, {rows} x {k} x {n}", packed(x), exact.linear(x, restored, b, held=most))


def stored_linear(backend: Backend, dtype: torch.dtype) -> Iterator[Compared]:
    """Products with checkpoints' quantised weights against the restored ones. Products that turn their inputs into fp8
    have `input_group`, the inputs that share a scale, and may be off by what that loses.
    """
    numbers = _Numbers(backend, dtype)
    for (kind, make), with_bias in product(EXAMPLES.items(), (False, True)):
        weight = make(0)
        restored, bias = weight.restored().to(backend.device), numbers(weight.out_features) if with_bias else None
        packed, _ = backend.pack_stored(weight, bias, dtype)
        held = 3 * restored.abs().amax(1, keepdim=True).expand_as(restored)
        for rows in ROWS:
            x, group = numbers(rows, weight.in_features), getattr(packed, "input_group", None)
            lost = None if group is None else exact.lost_as_fp8(x, group)
            right = exact.linear(x, restored, bias, held=held, lost=lost)
            yield _compare(f"{kind}, {rows} rows", packed(x), right)


def embedding(backend: Backend, dtype: torch.dtype) -> Iterator[Compared]:
    table = _Numbers(backend, dtype)(50, 37)
    for rows, scale in product(ROWS, (1.0, 6.0827)):
        ids = torch.arange(rows) * 7 % 50
        due = table[ids.to(table.device)].double() * scale
        right = exact.unrounded(due) if scale == 1.0 else exact.rounded(due, exact.V * due.abs(), dtype)
        yield _compare(f"{rows} rows times {scale}", backend.embed(ids, table, scale), right)


def norms(backend: Backend, dtype: torch.dtype) -> Iterator[Compared]:
    """rms_norm and add_rms_norm; weights of either dtype; heads inside a fused projection."""
    numbers = _Numbers(backend, dtype)
    for rows, width in product(ROWS, (2, 20, 64, 576, 2048)):
        weights = (numbers(width, dtype=torch.float32), numbers(width))
        for weight in weights:
            x, residual = 3 * numbers(rows, width), numbers(rows, width)
            yield _compare(f"{rows} x {width}", backend.rms_norm(x, weight, 1e-5), exact.rms_norm(x, weight, 1e-5))
            total = exact.rounded(x.double() + residual.double(), 0.0, dtype)
            normed = exact.rms_norm((x.double() + residual.double()).to(dtype), weight, 1e-5, x_roundings=1)
            found, kept = backend.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
            yield _compare(f"sum of {rows} x {width}", kept, total)
            yield _compare(f"norm of a sum of {rows} x {width}", found, normed)
    for rows, (heads, dim) in product(ROWS, ((3, 64), (9, 20))):
        x, weight = numbers(rows, (2 * heads) * dim)[:, heads * dim :].unflatten(1, (heads, dim)), numbers(dim)
        yield _compare(f"{rows} x {heads} heads", backend.rms_norm(x, weight, 1e-6), exact.rms_norm(x, weight, 1e-6))


def _rotations(rotary: int) -> Tensor:
    """Cosines, then sines, of 500 positions."""
    angles = torch.outer(torch.arange(500.0), 1e4 ** -(torch.arange(rotary // 2) / (rotary // 2)))
    return torch.cat((angles.cos(), angles.sin()), 1)


def rope(backend: Backend, dtype: torch.dtype) -> Iterator[Compared]:
    numbers = _Numbers(backend, dtype)
    for rows, (dim, rotary) in product(ROWS, ((64, 64), (64, 20), (20, 20), (128, 64))):
        table = _rotations(rotary).to(backend.device)
        positions = torch.arange(rows) * 131 % 500
        fused = numbers(rows, 7 * dim)
        q, k = fused[:, : 4 * dim].unflatten(1, (4, dim)), fused[:, 4 * dim : 6 * dim].unflatten(1, (2, dim))
        due = [exact.rope(x, table, positions.to(table.device)) for x in (q, k)]
        for name, found, right in zip("qk", backend.rope(q, k, table, positions), due, strict=True):
            yield _compare(f"{name}, {rows} rows, {rotary} of {dim}", found, right)


def activations(backend: Backend, dtype: torch.dtype) -> Iterator[Compared]:
    numbers = _Numbers(backend, dtype)
    for rows, width, kind in product(ROWS, (1, 37, 512, 1536), _ACTIVATIONS):
        x = 4 * numbers(rows, 2 * width)
        yield _compare(f"{kind}, {rows} x {width}", backend.gated_activation(x, kind), exact.gated_activation(x, kind))


def cache_writes(backend: Backend, dtype: torch.dtype) -> Iterator[Compared]:
    """store_kv and store_latent: the exact bytes, at their slots only."""
    numbers = _Numbers(backend, dtype)
    sizes = (1, 8, 16, 32, 64, 128)
    for size, rows, kind, layout in product(sizes, (0, 1, 7, 70), (dtype, torch.uint8), backend.kv_layouts):
        num_blocks, heads, dim = 128 // size, 3, 20
        fused = numbers(rows, 9 * dim)  # strided, like the model's
        k, v = fused[:, : 3 * dim].unflatten(1, (heads, dim)), fused[:, 4 * dim : 7 * dim].unflatten(1, (heads, dim))
        slots = torch.randperm(128, generator=torch.Generator().manual_seed(rows))[:rows]
        at, where = slots.to(backend.device), f"{rows} rows, blocks of {size}, {kind}, {layout}"
        row = dim + fp8.SCALE_BYTES * (kind == torch.uint8)
        cache = torch.full((num_blocks, 2, size, heads, row), 7, dtype=kind, device=backend.device)
        due = cache.clone()
        due[at // size, 0, at % size], due[at // size, 1, at % size] = fp8.stored(k, kind), fp8.stored(v, kind)
        cache = laid_out(cache, layout)
        backend.store_kv(k, v, cache, slots)
        yield _compare(where, cache, exact.unrounded(due))
        latents = torch.full((num_blocks, 1, size, 1, row), 7, dtype=kind, device=backend.device)
        due = latents.clone()
        due[at // size, 0, at % size, 0] = fp8.stored(fused[:, :dim], kind)
        backend.store_latent(fused[:, : dim - 5], fused[:, dim - 5 : dim], latents, slots)
        yield _compare(f"latents, {where}", latents, exact.unrounded(due))


def placements(backend: Backend, dtype: torch.dtype) -> Iterator[Compared]:
    """norm_rope_store: the bits of rms_norm, rope and store_kv in sequence, and no other bytes of the cache."""
    numbers = _Numbers(backend, dtype)
    kinds, widths = (dtype, torch.float32, torch.uint8), ((64, 64), (20, 12), (128, 64))
    for rows, kind, layout, (dim, rotary) in product((0, 1, 7, 70), kinds, backend.kv_layouts, widths):
        table = _rotations(rotary).to(backend.device)
        slots = torch.randperm(128, generator=torch.Generator().manual_seed(rows))[:rows]
        row = dim + fp8.SCALE_BYTES * (kind == torch.uint8)
        empty = torch.full((8, 2, 16, 2, row), 7, dtype=kind, device=backend.device)
        fused = numbers(rows, 10 * dim)
        wide, own = (tuple(numbers(dim, dtype=of) for _ in range(2)) for of in (torch.float32, dtype))
        for norms in (None, wide, own):
            found, due = (
                _placed(backend, fused, norms, table, slots, laid_out(empty, layout), whole) for whole in (1, 0)
            )
            where = f"{rows} rows, {rotary} of {dim}, {kind}, {layout}, norms {norms and norms[0].dtype}"
            for name, a, b in zip(("queries", "cache"), found, due, strict=True):
                yield _compare(f"{name}, {where}", a, exact.unrounded(b))


def _placed(
    backend: Backend, fused: Tensor, norms: Any, table: Tensor, slots: Tensor, cache: Tensor, in_one: int
) -> tuple[Tensor, Tensor]:
    """(queries, cache) of six query heads, two key and two value heads side by side, by one kernel or several."""
    heads, cache = fused.clone().unflatten(1, (10, -1)), cache.clone()
    inputs = HeadInputs(norms, 1e-5, table, slots * 131 % 500, cache, slots)
    q, k, v = heads.split((6, 2, 2), dim=1)
    of = backend.norm_rope_store if in_one else functools.partial(TorchBackend.norm_rope_store, backend)
    return of(q, k, v, inputs), cache


def widening(backend: Backend, dtype: torch.dtype) -> Iterator[Compared]:
    for rows in ROWS:
        x = _Numbers(backend, dtype, rows)(rows, 331)
        yield _compare(f"{rows} rows", backend.widened(x), exact.unrounded(x))


def sampling(backend: Backend, dtype: torch.dtype) -> Iterator[Compared]:
    """The reference's tokens exactly, for logits that were rounded to this dtype."""
    reference, filters = ReferenceBackend("cpu"), ((0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (200, 0.95, 0.02))
    for rows, (top_k, top_p, min_p) in product((0, 1, 13, 70), filters):
        logits = 4 * _Numbers(backend, dtype, rows)(rows, 3001).float()
        batch = SamplingBatch(
            (torch.arange(rows) % 3).float() * 0.6,
            torch.full((rows,), top_k),
            torch.full((rows,), top_p),
            torch.full((rows,), min_p),
            torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(rows)),
        )
        for kind, masked in {"": batch, ", masked": _masked(batch, logits.shape[1])}.items():
            due = exact.unrounded(reference.sample(logits.cpu(), masked))
            yield _compare(f"{rows} rows, top_k {top_k}, top_p {top_p}{kind}", backend.sample(logits, masked), due)


def _masked(batch: SamplingBatch, vocab: int) -> SamplingBatch:
    """A few masks for all rows but each fifth: half of the bits, one bit in seven words, one bit, all bits."""
    rows, generator = batch.uniform.shape[0], torch.Generator().manual_seed(vocab)
    masks = torch.randint(-(1 << 31), 1 << 31, (4, -(-vocab // 32)), generator=generator).to(torch.int32)
    masks[1], masks[2], masks[3] = torch.where(torch.arange(masks.shape[1]) % 7 == 0, 1 << 20, 0), 0, -1
    masks[2, 40] = -(1 << 31)  # the highest bit
    return replace(batch, masks=masks, mask_rows=(torch.arange(rows) % 5 - 1).to(torch.int32))


def attend(backend: Backend, step: KernelStep, scale: float) -> Tensor:
    """A step's attention by a backend."""
    case = step.case
    plan = backend.plan(step.batch, case.shape)
    if case.latent_dim is not None:
        q, rotary = step.q.tensor_split((case.latent_dim,), dim=-1)
        return backend.latent_attention(q, rotary, step.kv_layer, plan, scale=scale)
    return backend.attention(step.q, step.kv_layer, plan, scale=scale, window=case.window, softcap=case.softcap)


@functools.lru_cache(maxsize=32)
def _right(case: KernelCase, scale: float, device: torch.device) -> Exact:
    """Cached: it is the same for all block sizes and all backends."""
    return exact.attention(make_step(case).to(device), scale)


def attention_case(backend: Backend, case: KernelCase, scale: float) -> Compared:
    """One step of attention against its definition."""
    right = _right(replace(case, block_size=BLOCK_SIZES[0], kv_layout="NHD"), scale, backend.device)
    return _compare(f"{case}, scale {scale}", attend(backend, make_step(case).to(backend.device), scale), right)


def _attention(heads: str, backend: Backend, dtype: torch.dtype, *, is_long: bool = False) -> Iterator[Compared]:
    for case in long_cases(heads, dtype) if is_long else attention_cases(heads, dtype, backend.kv_layouts):
        yield attention_case(backend, case, _scale_of(case))


def _compare(case: str, found: Tensor, right: Exact) -> Compared:
    return Compared(case, right.ratio(found))


def _scale_of(case: KernelCase) -> float:
    """Softmax over a long context: all tokens count about equally, or (plain caches) a few dominate."""
    return 0.125 if case.kv_dtype is FP8 or case.softcap is not None else 1.0


FAMILIES: dict[str, Family] = {
    "linear": linear,
    "linear per head": head_linears,
    "quantised linear": quantized_linear,
    "stored linear": stored_linear,
    "embedding": embedding,
    "norms": norms,
    "rope": rope,
    "gated activations": activations,
    "cache writes": cache_writes,
    "inputs": placements,
    "widening": widening,
    "sampling": sampling,
    **{f"attention, {heads}": functools.partial(_attention, heads) for heads in HEADS},
    **{f"attention to 32k, {heads}": functools.partial(_attention, heads, is_long=True) for heads in HEADS},
}


def judge(family: str, backend: Backend, dtype: torch.dtype) -> Compared:
    """All cases of a family: how many, and the one nearest to its bound or past it."""
    with torch.inference_mode():
        compared = list(FAMILIES[family](backend, dtype))
    worst = max(compared, key=lambda one: one.ratio, default=Compared("no case", 0.0))
    return replace(worst, num_cases=len(compared))
