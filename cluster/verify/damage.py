"""Damage to KV that negative controls do: to what the decode worker receives, and to what its lower tiers hold.

Functions with `@during` return a `During` of rows.py: a context in which the damage is done, and required to be.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

from kvrelay.cluster.verify.rows import Case, during
from kvrelay.decode import read_queue
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.service import WorkerService
from kvrelay.kvcache.tiers.controller import TierController
from kvrelay.kvtransfer.mover.verification import ArrivingRead
from kvrelay.types import KvLayout

if TYPE_CHECKING:
    import torch

TIERS_IDLE_S = 30.0
Change = Callable[["torch.Tensor", KvLayout], None]
"""(bytes of a region, layout of the pool) -> None: changes the bytes in place."""


# ---- in flight


@contextmanager
def tampering(change: Change, *, most: int | None = None) -> Iterator[Callable[[], int]]:
    """Change the regions that this process receives, `most` of them at most; yields a counter of those."""
    import torch

    count = 0

    class DamagedRead(ArrivingRead):
        """Its pieces are changed after they landed, before they are verified."""

        def receipt(self) -> None:
            return None  # so that it is called instead

        def __call__(self, num_bytes: int) -> None:
            nonlocal count
            assert isinstance(self.memory.owner, torch.Tensor)  # through the tensor: a GPU's pool has no host view
            pool, size = self.memory.owner.reshape(-1).view(torch.uint8), self.piece_bytes
            landed = self.pieces[self.num_landed // self.chunk_bytes : num_bytes // self.chunk_bytes].ravel().tolist()
            with torch.inference_mode():
                for offset in landed if most is None else landed[: most - count]:
                    change(pool[offset : offset + size], self.memory.layout)
                    count += 1
            super().__call__(num_bytes)

    with mock.patch.object(read_queue, "ArrivingRead", DamagedRead):
        yield lambda: count


@during
async def in_flight(case: Case, change: Change, *, most: int | None = None) -> AsyncIterator[None]:
    """Every region that arrives is changed, or the first `most`; at least one must arrive."""
    with tampering(change, most=most) as count:
        yield
    case.result.check("" if count() else "no KV was transferred", holds=count() > 0)


def flip_exponent_bit(region: "torch.Tensor", layout: KvLayout) -> None:
    """The top exponent bit of one float32: byte 3 of the first one in the second half, where values are."""
    region[len(region) // 2 + 3].bitwise_xor_(0x40)


def flip_lowest_bits(region: "torch.Tensor", layout: KvLayout) -> None:
    """The lowest bit of every number."""
    region[:: layout.itemsize].bitwise_xor_(1)


def scale_fp8_scales(region: "torch.Tensor", layout: KvLayout) -> None:
    """Every scale of fp8 KV times 8."""
    import torch

    scales = _fp8_scales(region, layout)
    scales.copy_((scales.clone().view(torch.float32) * 8).view(torch.uint8))


def flip_scale_exponent(region: "torch.Tensor", layout: KvLayout) -> None:
    """The top exponent bit of one scale of fp8 KV: of the first value's, which follows the keys'."""
    scales = _fp8_scales(region, layout)
    scales[len(scales) // 2, 3].bitwise_xor_(0x40)


def _fp8_scales(region: "torch.Tensor", layout: KvLayout) -> "torch.Tensor":
    """[vectors, 4] bytes, a view."""
    return region.view(-1, layout.row_bytes)[:, layout.head_dim * layout.itemsize :]


def negate_entries(start: int, end: int) -> Change:
    """The numbers start .. end - 1 of every token's latent KV, float32."""
    import torch

    def change(region: "torch.Tensor", layout: KvLayout) -> None:
        region.view(torch.float32).view(-1, layout.head_dim)[:, start:end].neg_()

    return change


# ---- in lower tiers


def tiers_of(engine: Engine) -> TierController:
    assert engine.tiers is not None
    return engine.tiers.controller


@during
async def corrupt_host_tier(case: Case, *, is_checked: bool) -> AsyncIterator[None]:
    """What the host tier holds is changed, and the pool forgotten. is_checked: the damage must be noticed."""
    worker = case.cluster.inside[0]

    def corrupt(engine: Engine) -> int:
        host = tiers_of(engine).host
        for row in map(host.row, host.index.hashes()):
            assert row is not None
            _corrupt(host.slab.row(row))
        engine.pool.reset_cache()
        return tiers_of(engine).stats.corrupt

    await tiers_idle(worker)
    before = await worker.thread.call(corrupt)
    yield
    await tiers_idle(worker)
    found = await worker.thread.call(lambda engine: tiers_of(engine).stats.corrupt) - before
    if is_checked:
        case.result.check(f"{found} blocks found corrupt, the prompt was recomputed", holds=found > 0)


async def tiers_idle(worker: WorkerService) -> None:
    """Wait until nothing moves between the worker's tiers. Raises TimeoutError."""
    async with asyncio.timeout(TIERS_IDLE_S):
        while not await worker.thread.call(lambda engine: tiers_of(engine).is_idle):
            await asyncio.sleep(0.02)


def corrupt_swapped(engine: Engine) -> None:
    """Change bytes of every swapped block."""
    area = engine.scheduler.preemption.area
    assert area is not None
    for seq in engine.scheduler.swapped:
        for row in seq.swapped.rows if seq.swapped is not None else ():
            _corrupt(area.slab.row(row))


def _corrupt(view: memoryview) -> None:
    """Change the first 4 KiB, exponents included."""
    view[:] = bytes(byte ^ 0x5A for byte in view[:4096]) + bytes(view[4096:])


def scale_block(engine: Engine, block: int) -> None:
    """Multiply every key and value of a block of the pool."""
    import torch

    with torch.inference_mode():
        engine.cache.storage.tensor[:, block].mul_(-4.0)
