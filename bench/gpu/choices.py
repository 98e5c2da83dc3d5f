"""Choices between kernels, measured side by side: prefill attention, drawing tokens, torch.compile of what lies between
two attention calls. What is chosen by measuring at start (prefill attention) and what is not switched on
(torch.compile) is printed.
"""

import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor

from bench.gpu.engines import seconds_of
from bench.gpu.section import Context
from kvrelay.kernels.backend import AttentionShape, Backend, SamplingBatch
from kvrelay.kernels.common import sampling_search
from kvrelay.kernels.common.token_masks import token_masks_of
from kvrelay.kernels.cuda.backend import Draw, draw_by_torch
from kvrelay.kernels.oracle import reference
from kvrelay.kernels.select import select_backend

_REPEATS = 20
_NEAR = 5e-2  # two ways in bf16, relative to the largest number


def run(context: Context) -> None:
    backend = select_backend("cuda" if context.is_cuda else "cpu", context.device)
    with torch.inference_mode():
        prefill_attention(context, backend)
        drawing(context)
        compiled_segments(context, backend)


def faster(seconds: dict[str, float]) -> str:
    return min(seconds, key=lambda name: seconds[name])


def microseconds(seconds: dict[str, float]) -> dict[str, float]:
    return {f"{name} µs": 1e6 * taken for name, taken in seconds.items()}


def prefill_attention(context: Context, backend: Backend) -> None:
    """FlashInfer's fa2 and fa3 over a prompt of 2,048 tokens, as the product compares them at start."""
    shape, kernels = AttentionShape(32, 8, 128, 16, torch.bfloat16), cast("Any", backend)
    found: dict[str, float] = kernels.paged.prefill_kernels.try_out(shape, (0.1, None, None)) if context.is_cuda else {}
    if not found:
        context.add(choice="prefill attention", left_out="needs Hopper, and fa3 compiled")
        return
    context.add(
        choice="prefill attention, 2,048 tokens", faster=faster(found), ok=len(found) == 2, **microseconds(found)
    )


def drawing(context: Context) -> None:
    """With sorts (the reference), by search in torch, and by Triton where it is installed; the same tokens from all."""
    device = torch.device(context.device)
    ways: dict[str, Callable[[Tensor, SamplingBatch], Tensor]] = {"sort": reference.draw}
    ways["search"] = _searched(device, draw_by_torch)
    if context.is_cuda:
        from kvrelay.kernels.cuda import sampling_triton

        ways["triton"] = _searched(device, sampling_triton.draw)
    vocab = 320 if context.tiny else 128256
    for rows in (3,) if context.tiny else (1, 64, 256):
        generator = torch.Generator().manual_seed(rows)
        logits = (4 * torch.randn(rows, vocab, generator=generator)).to(device)
        uniform = torch.rand(rows, generator=generator, dtype=torch.float64)
        cases = ((0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (200, 0.95, 0.02))
        for (top_k, top_p, min_p), masks in product(cases, (None, random_masks(rows, vocab, generator))):
            batch = SamplingBatch(
                torch.full((rows,), 0.8),
                torch.full((rows,), top_k),
                torch.full((rows,), top_p),
                torch.full((rows,), min_p),
                uniform,
                masks,
                None if masks is None else torch.arange(rows, dtype=torch.int32),
            )
            kind = "" if masks is None else ", masked"
            tokens = {name: draw(logits, batch).tolist() for name, draw in ways.items()}
            seconds = {name: min(seconds_of(context, partial(draw, logits, batch), 3)) for name, draw in ways.items()}
            context.add(
                choice=f"draw of {rows}: top_k {top_k}, top_p {top_p}, min_p {min_p}{kind}",
                faster=faster(seconds),
                ok=all(found == tokens["sort"] for found in tokens.values()),
                **microseconds(seconds),
            )


def random_masks(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    """A mask for each row, as in SamplingBatch, of about half of the tokens."""
    return torch.randint(-(1 << 31), 1 << 31, (rows, -(-vocab // 32)), generator=generator).to(torch.int32)


def _searched(device: torch.device, draw: Draw) -> Callable[[Tensor, SamplingBatch], Tensor]:
    settings = sampling_search.SettingsCache(device)

    def drawn(logits: Tensor, batch: SamplingBatch) -> Tensor:
        uniform, masks = sampling_search.to_device(batch.uniform, device), token_masks_of(batch, logits)
        return draw(logits, settings.of(batch), uniform, masks)

    return drawn


class Segment:
    """What lies between two attention calls of a Llama-8B: output projection, norms, MLP, the next layer's qkv.

    `ours` is what the product calls; `plain` the same in torch, for the compiler.
    """

    def __init__(self, context: Context, backend: Backend) -> None:
        hidden, ffn, heads = (64, 128, 96) if context.tiny else (4096, 14336, 6144)
        self.attended = 64 if context.tiny else 4096
        self.hidden = hidden
        generator = torch.Generator(context.device).manual_seed(0)
        sizes = {
            "o": (hidden, self.attended),
            "gate_up": (2 * ffn, hidden),
            "down": (hidden, ffn),
            "qkv": (heads, hidden),
        }
        self.weights = {
            name: (torch.randn(*size, generator=generator, device=context.device) * size[1] ** -0.5).to(torch.bfloat16)
            for name, size in sizes.items()
        }
        self.norm = torch.ones(hidden, dtype=torch.bfloat16, device=context.device)
        self._backend = backend
        self._packed = {name: backend.pack_linear(weight) for name, weight in self.weights.items()}

    def ours(self, attended: Tensor, residual: Tensor) -> Tensor:
        backend, packed = self._backend, self._packed
        x, residual = backend.add_rms_norm(packed["o"](attended), residual.clone(), self.norm, 1e-5)
        x = packed["down"](backend.gated_activation(packed["gate_up"](x), "silu"))
        x, residual = backend.add_rms_norm(x, residual, self.norm, 1e-5)
        return packed["qkv"](x)

    def plain(self, attended: Tensor, residual: Tensor) -> Tensor:
        linear, weights = torch.nn.functional.linear, self.weights
        residual = residual + linear(attended, weights["o"])
        gate, up = linear(self._normed(residual), weights["gate_up"]).chunk(2, dim=-1)
        residual = residual + linear(torch.nn.functional.silu(gate.float()).to(gate.dtype) * up, weights["down"])
        return linear(self._normed(residual), weights["qkv"])

    def _normed(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.norm


def compiled_segments(context: Context, backend: Backend) -> None:
    """On a GPU both are replayed as graphs, as the product runs them. With --tiny nothing is compiled."""
    segment = Segment(context, backend)
    generator = torch.Generator(context.device).manual_seed(1)
    for tokens in (3,) if context.tiny else (1, 16, 64, 256, 1024):
        if context.left_s < 20:
            context.add(choice=f"torch.compile, {tokens} tokens", left_out="no time left")
            continue
        inputs = [
            torch.randn(tokens, width, generator=generator, device=context.device).to(torch.bfloat16)
            for width in (segment.attended, segment.hidden)
        ]
        compiled = segment.plain if context.tiny else torch.compile(segment.plain, dynamic=False)
        found, expected = compiled(*inputs).float(), segment.ours(*inputs).float()
        error = float((found - expected).abs().max() / expected.abs().max())
        seconds = {
            name: statistics.median(seconds_of(context, replayed(context, way, inputs), _REPEATS))
            for name, way in (("eager", segment.ours), ("compiled", compiled))
        }
        context.add(
            choice=f"torch.compile of a layer's segment, {tokens} tokens",
            faster=faster(seconds),
            compiled_over_eager=seconds["compiled"] / seconds["eager"],
            worst_relative_error=error,
            ok=error < _NEAR,
            **microseconds(seconds),
        )


def replayed(context: Context, way: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], object]:
    """What runs it: on a GPU a captured graph."""
    if not context.is_cuda:
        return lambda: way(*inputs)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        way(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        way(*inputs)
    return graph.replay
