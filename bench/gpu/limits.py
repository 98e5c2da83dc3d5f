"""What the device can do at most: reading its memory, copying in it and to the host, dense bf16 products."""

import platform
import sys
from collections.abc import Callable

import torch

from bench.gpu.engines import seconds_of
from bench.gpu.section import Context

SHAPES = ((8192, 8192, 8192), (8192, 4096, 14336), (16384, 4096, 6144))  # rows, inner, columns
TINY_SHAPES = ((128, 64, 128),)


def run(context: Context) -> None:
    """Rows of name and value; the driver hands them to the other sections as `Context.limits`."""
    context.add(name="device", text=device_name(context), what=versions())
    size = (16 << 20) if context.tiny else context.room(4 << 30)
    memory(context, size)
    host(context, size // 2)
    rates = [product(context, *shape) for shape in (TINY_SHAPES if context.tiny else SHAPES)]
    context.add(name="gemm_gflop_s", value=max(rates), what="dense bf16 product, the best of a prefill's shapes")


def rate(context: Context, action: Callable[[], object], amount: float) -> float:
    """10^9 of `amount` per second, the best of some runs."""
    action()
    return amount / min(seconds_of(context, action, 3 if context.tiny else 10)) / 1e9


def memory(context: Context, size: int) -> None:
    source = torch.ones(size // 4, dtype=torch.float32, device=context.device)
    target = torch.empty_like(source)
    read = max(rate(context, source.sum, size), rate(context, source.view(torch.int32).max, size))
    context.add(name="read_gb_s", value=read, what="memory read once, the best of two reductions")
    copy = rate(context, lambda: target.copy_(source), size)
    context.add(name="copy_gb_s", value=copy, what="copy within the device, its bytes counted once")


def host(context: Context, size: int) -> None:
    there = torch.empty(size // 4, dtype=torch.float32, device=context.device)
    here = torch.empty(size // 4, dtype=torch.float32, pin_memory=context.is_cuda)
    down = rate(context, lambda: here.copy_(there), size)
    context.add(name="to_host_gb_s", value=down, what="device to pinned host memory")
    up = rate(context, lambda: there.copy_(here), size)
    context.add(name="from_host_gb_s", value=up, what="pinned host memory to device")


def product(context: Context, rows: int, inner: int, columns: int) -> float:
    """GFLOP/s."""
    x = torch.randn(rows, inner, dtype=torch.bfloat16, device=context.device)
    weight = torch.randn(columns, inner, dtype=torch.bfloat16, device=context.device)
    return rate(context, lambda: torch.nn.functional.linear(x, weight), 2.0 * rows * inner * columns)


def device_name(context: Context) -> str:
    return torch.cuda.get_device_name() if context.is_cuda else f"cpu {platform.machine()}"


def versions() -> str:
    """Of what computes here."""
    found = [f"python {sys.version.split()[0]}", f"torch {torch.__version__}"]
    for name in ("flashinfer", "transformers"):
        try:
            found.append(f"{name} {__import__(name).__version__}")
        except (ImportError, OSError, AttributeError) as error:
            found.append(f"no {name} ({type(error).__name__})")
    return ", ".join(found)
