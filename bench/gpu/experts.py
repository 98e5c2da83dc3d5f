"""A layer of experts in Qwen3-30B-A3B's sizes, bf16: equal to the loop over experts, captured, and against the
limits. And a Llama-8B's largest product over quantised weights, beside bf16.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu.engines import seconds_of
from bench.gpu.section import Context
from kvrelay.kernels.backend import Backend, Experts
from kvrelay.kernels.common.quant_scheme import ExpertChoice
from kvrelay.kernels.common.stored_weights import Fp8Weight, Mxfp4Weight, QuantizedWeight, StoredWeight
from kvrelay.kernels.oracle.reference import ReferenceBackend
from kvrelay.kernels.select import select_backend

TOLERANCE = 2e-2  # of the largest number
_HIDDEN, _FFN, _CHOICE = 2048, 768, ExpertChoice(128, 8, normalise=True)
_TINY = (64, 32, ExpertChoice(8, 2, normalise=True))


def run(context: Context) -> None:
    backend = select_backend("cuda" if context.is_cuda else "cpu", context.device)
    hidden, ffn, choice = _TINY if context.tiny else (_HIDDEN, _FFN, _CHOICE)
    generator = torch.Generator(backend.device).manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype, device=backend.device)

    weights = [
        (random(2 * ffn, hidden) * hidden**-0.5, random(hidden, ffn) * ffn**-0.5) for _ in range(choice.num_experts)
    ]
    experts = backend.pack_experts(iter(weights), "silu", torch.bfloat16)
    loop = ReferenceBackend(backend.device).pack_experts(iter(weights), "silu", torch.bfloat16)
    for tokens in (1, 3, 40) if context.tiny else (1, 4, 16, 64, 256, 2048, 8192):
        x, logits = random(tokens, hidden), 3 * random(tokens, choice.num_experts, dtype=torch.float32)
        measure(context, backend, experts, loop, choice, x, logits, ffn)


def measure(
    context: Context,
    backend: Backend,
    experts: Experts,
    loop: Experts,
    choice: ExpertChoice,
    x: Tensor,
    logits: Tensor,
    ffn: int,
) -> None:
    def layer() -> Tensor:
        return experts(x, *backend.choose_experts(logits, None, choice))

    tokens, hidden = x.shape
    shares, chosen = backend.choose_experts(logits, None, choice)
    found, expected = layer(), loop(x, shares, chosen)
    off = error(found, expected)
    control = error(loop(x, shares, (chosen + 1) % choice.num_experts), expected)  # each token's experts' neighbours
    replay = captured(layer) if context.is_cuda and getattr(experts, "is_grouped", False) else None
    seconds = min(seconds_of(context, replay or layer, 3 if context.tiny else 20))
    if replay is not None:
        off = max(off, error(replay(), expected))
    read = 2 * 3 * hidden * ffn * int(torch.unique(chosen).numel())
    flops = 2.0 * 3 * hidden * ffn * tokens * choice.num_chosen
    context.add(
        tokens=tokens,
        ms=1e3 * seconds,
        captured=replay is not None,
        relative_error=off,
        control=control,
        loop_ms=1e3 * min(seconds_of(context, lambda: loop(x, shares, chosen), 3)),
        share_of_memory_limit=context.share_of("read_gb_s", read / seconds / 1e9),
        share_of_gemm_peak=context.share_of("gemm_gflop_s", flops / seconds / 1e9),
        ok=off <= TOLERANCE < control,
    )


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


def captured(layer: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The layer as a graph; its result is overwritten by the next call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


QUANTISED_TOLERANCE = 5e-2  # inputs become fp8, too, where both factors are


def stored_weights(rows: int, inner: int, device: str) -> dict[str, StoredWeight]:
    """[rows, inner], random, of each kind that checkpoints have."""
    generator = torch.Generator(device).manual_seed(0)

    def integers(end: int, *shape: int) -> Tensor:
        return torch.randint(0, end, shape, generator=generator, device=device)

    def scales(*shape: int) -> Tensor:
        return (torch.rand(*shape, generator=generator, device=device) + 0.5) / 256

    e4m3 = torch.randn(rows, inner, generator=generator, device=device).to(torch.float8_e4m3fn)
    of_groups = scales(rows, inner // 128).to(torch.bfloat16).float()  # as published: ours holds them as half floats
    return {
        "fp8 per output": Fp8Weight(e4m3, scales(rows, 1), (1, inner)),
        "fp8 in blocks": Fp8Weight(e4m3, scales(rows // 128, inner // 128), (128, 128)),
        "int4": QuantizedWeight(
            integers(16, rows, inner // 128, 128).to(torch.int8), of_groups, -8 * of_groups, inner, 4
        ),
        "mxfp4": Mxfp4Weight(integers(256, rows, inner // 2).byte(), (118 + integers(4, rows, inner // 32)).byte()),
    }


def torch_int4(weight: QuantizedWeight) -> Callable[[Tensor], Tensor]:
    """torch's own int4 product, bfloat16 times groups of 32, 64, 128 or 256: number = scale * (integer - 8) + middle.

    Raises RuntimeError: it does not work on the weight's device.
    """
    integers, group = weight.integers.flatten(1).int(), weight.group
    pairs = torch.stack((weight.scales, weight.offsets + 8 * weight.scales), -1)
    factors = pairs.transpose(0, 1).to(torch.bfloat16).contiguous()  # [K / group, N, 2]
    if integers.is_cuda:
        pack, product = torch.ops.aten._convert_weight_to_int4pack, torch.ops.aten._weight_int4pack_mm
        packed = pack((integers[:, 0::2] << 4 | integers[:, 1::2]).byte(), 8)
    else:
        pack, product = torch.ops.aten._convert_weight_to_int4pack_for_cpu, torch.ops.aten._weight_int4pack_mm_for_cpu
        packed = pack(integers, 1)
    product(torch.zeros(1, weight.in_features, dtype=torch.bfloat16, device=packed.device), packed, group, factors)
    return lambda x: product(x, packed, group, factors)


def run_quantised(context: Context) -> None:
    """gate and up stacked; "product" names what computes: a plain one where the weight had to be restored. int4 beside
    torch's own product.
    """
    backend = select_backend("cuda" if context.is_cuda else "cpu", context.device)
    rows, inner = (256, 128) if context.tiny else (512, 512) if context.rehearse else (28672, 4096)
    generator = torch.Generator(backend.device).manual_seed(1)
    for kind, weight in stored_weights(rows, inner, context.device).items():
        restored = weight.restored().to(torch.bfloat16)
        plain, (packed, _) = backend.pack_linear(restored), backend.pack_stored(weight, None, torch.bfloat16)
        linears: dict[str, Callable[[Tensor], Tensor]] = {"plain": plain, "packed": packed}
        beside: dict[str, Any] = {}
        if isinstance(weight, QuantizedWeight):
            try:
                linears["torch"] = torch_int4(weight)
            except RuntimeError as failure:
                beside = {"torch_failure": str(failure)}
        for tokens in (1, 3) if context.tiny else (1, 16, 64, 2048):
            x = torch.randn(tokens, inner, generator=generator, device=backend.device).to(torch.bfloat16)
            ways = {name: partial(linear, x) for name, linear in linears.items()}
            runs = {name: captured(way) if context.is_cuda else way for name, way in ways.items()}
            expected, found, *others = (run().clone() for run in runs.values())
            seconds = {name: min(seconds_of(context, run, 3 if context.tiny else 20)) for name, run in runs.items()}
            if others:
                beside = {"torch_us": 1e6 * seconds["torch"], "torch_relative_error": error(others[0], expected)}
            context.add(
                weight=kind,
                product=type(packed).__name__,
                tokens=tokens,
                us=1e6 * seconds["packed"],
                bf16_us=1e6 * seconds["plain"],
                times_faster=seconds["plain"] / seconds["packed"],
                share_of_memory_limit=context.share_of("read_gb_s", weight.num_bytes / seconds["packed"] / 1e9),
                share_of_gemm_peak=context.share_of("gemm_gflop_s", 2e-9 * rows * inner * tokens / seconds["packed"]),
                relative_error=(off := error(found, expected)),
                control=(control := error(found.roll(1, 1), expected)),
                ok=off <= QUANTISED_TOLERANCE < control,
                **beside,
            )
