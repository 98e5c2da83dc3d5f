"""A CUDA-IPC read as one Triton kernel, one program per tile of a copy. Import it where triton is installed."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvrelay.kvtransfer.mover.copy_plan import CopyList

TILE_BYTES = 64 << 10
_BLOCK = 4096  # words of one pass: 16 KiB, 64 bytes of each of 256 threads
_NUM_WARPS = 8


@triton.jit
def _copy(table, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr):
    tile, num_tiles = tl.program_id(0), tl.num_programs(0)
    source, target = tl.load(table + tile), tl.load(table + num_tiles + tile)
    num_bytes = tl.load(table + 2 * num_tiles + tile).to(tl.int32)
    if ALIGNMENT == 1:
        source_words, target_words = source.to(tl.pointer_type(tl.uint8)), target.to(tl.pointer_type(tl.uint8))
        num_words = num_bytes
    else:
        source_words, target_words = source.to(tl.pointer_type(tl.int32)), target.to(tl.pointer_type(tl.int32))
        num_words = num_bytes // 4
    if ALIGNMENT == 16:  # the compiler cannot know: four words are one access then
        source_words, target_words = tl.multiple_of(source_words, 16), tl.multiple_of(target_words, 16)
        num_words = tl.multiple_of(num_words, 4)
    for first in range(0, num_words, BLOCK):
        word = first + tl.arange(0, BLOCK)
        inside = word < num_words
        tl.store(target_words + word, tl.load(source_words + word, mask=inside), mask=inside)


@lru_cache(maxsize=64)
def _stream(device: torch.device) -> Any:
    """One for all sources: torch has few, and gives them out again."""
    return torch.cuda.Stream(device)


def launch(copies: CopyList, source: int, target: int, device: torch.device) -> Any:
    """Copy between memory at these addresses, on a stream of its own. Waits for nothing.

    Returns the event behind the kernel, None where there is nothing to copy (or no GPU: in the interpreter).
    """
    begins, lands, sizes = copies.tiles(TILE_BYTES)
    if not len(sizes):
        return None
    table = np.concatenate((begins + source, lands + target, sizes))
    bits = int(np.bitwise_or.reduce(table))
    alignment = next(width for width in (16, 4, 1) if bits % width == 0)
    staged, constants = torch.from_numpy(table), {"ALIGNMENT": alignment, "BLOCK": _BLOCK, "num_warps": _NUM_WARPS}
    if device.type == "cpu":
        _copy[(len(sizes),)](staged, **constants)
        return None
    event = torch.cuda.Event(blocking=True)  # its waiter sleeps: the engine's kernels may keep the device
    with torch.cuda.device(device), torch.cuda.stream(_stream(device)):
        _copy[(len(sizes),)](staged.pin_memory().to(device, non_blocking=True), **constants)
        event.record()
    return event


@lru_cache(maxsize=64)
def problem(device: torch.device) -> str | None:
    """Why the kernel cannot be used on this device; None: it builds and copies what it should."""
    if device.type == "cpu":
        return _problem(device)
    with torch.cuda.stream(_stream(device)):
        return _problem(device)


def _problem(device: torch.device) -> str | None:
    rows = np.arange(120_000, dtype=np.int64).astype(np.uint8)
    try:
        source, wrong = torch.from_numpy(rows).to(device), []
        for step in (16, 4, 1):  # the alignments that the kernel knows
            begins, lands, sizes = (np.array(row) for row in ([16 + step, 512, 0], [80_000, 64, 0], [step, 70_000, 0]))
            found, expected = torch.zeros(200_000, dtype=torch.uint8).to(device), np.zeros(200_000, dtype=np.uint8)
            if (
                event := launch(CopyList(begins, lands, sizes), source.data_ptr(), found.data_ptr(), device)
            ) is not None:
                event.synchronize()
            for begin, at, size in zip(begins, lands, sizes, strict=True):
                expected[at : at + size] = rows[begin : begin + size]
            if not np.array_equal(found.cpu().numpy(), expected):
                wrong.append(step)
    except Exception as error:  # an error of its compiler or the driver
        return f"triton's copy kernel does not work here: {error}"
    return f"triton's copy kernel copies wrong bytes (in words of {wrong} bytes)" if wrong else None
