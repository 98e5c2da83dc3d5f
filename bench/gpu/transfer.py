"""CUDA IPC and NIXL between two processes: a device's pool read into another's, NIXL also from and to host memory.

Every byte is compared. Last, since it may cost the process its device: what a read does whose source was killed.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import torch

from bench.gpu.section import Context, LeftOut
from kvrelay.errors import TransportError
from kvrelay.kvcache.memory.storage import KvStorage
from kvrelay.kvtransfer.mover.copy_plan import LARGE_TURN_BYTES, CopyList, pair
from kvrelay.kvtransfer.transports.base import Reader, Transport
from kvrelay.kvtransfer.transports.cuda_ipc import CUDA_IPC
from kvrelay.kvtransfer.transports.nixl.reader import NIXL
from kvrelay.types import KvLayout

TARGET_SHARE = 0.80  # of the device's copy rate
HOST, SECRET = "127.0.0.1", b"gpu"
TRANSPORTS = {"cuda_ipc": CUDA_IPC, "nixl": NIXL}
_REPEATS = 6
_CHILD_S = 60.0
_LAST_S = 20.0  # left for the last way


def layout_of(context: Context) -> KvLayout:
    """A 4k prompt of a Llama-8B is 256 of these blocks: 512 MiB."""
    if context.tiny:
        return KvLayout(2, 64, 16, 2, 32, "bfloat16")
    return KvLayout(32, 320, 16, 8, 128, "bfloat16")


def pool(layout: KvLayout, device: str, *, seed: int | None) -> KvStorage:
    """Bytes that a seed gives on the CPU, so that both processes know them; None: zeros."""
    storage = KvStorage(layout, torch.device(device, 0) if device == "cuda" else torch.device(device))
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        one = torch.rand(storage.layers[0].shape, generator=generator)
        for number, layer in enumerate(storage.layers):
            layer.copy_((one + number).to(layer.dtype))
    if device == "cuda":
        torch.cuda.synchronize()
    return storage


def copies(layout: KvLayout, count: int, seed: int) -> tuple[CopyList, np.ndarray, np.ndarray]:
    """Scattered blocks into scattered blocks, all layers; and which ones."""
    draw = np.random.default_rng(seed)
    sources, targets = draw.permutation(layout.num_blocks)[:count], draw.permutation(layout.num_blocks)[:count]
    both = pair(layout, layout)
    return both.copies(both.source.offsets(sources), both.target.offsets(targets), both.layers), sources, targets


def source_process(pipe: Connection, layout: KvLayout, device: str, transport: str) -> None:
    """Exports a pool until it receives the end message."""

    async def serve() -> None:
        storage = pool(layout, device, seed=1)
        exporter = TRANSPORTS[transport].make_exporter(storage.memory, SECRET, HOST)
        await exporter.start()
        exporter.set_busy(1)
        pipe.send(exporter.describe())
        await asyncio.to_thread(pipe.recv)
        exporter.set_busy(0)
        await exporter.aclose()

    try:
        asyncio.run(serve())
    except Exception as error:  # a process edge: the other side says what happened
        pipe.send(f"{type(error).__name__}: {error}")


def run(context: Context) -> None:
    layout = layout_of(context)
    if context.is_cuda:
        one_way(context, layout, "cuda", "cuda", CUDA_IPC)
    ways = [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")] if context.is_cuda else [("cpu", "cpu")]
    why = NIXL.why_not(pool(replace(layout, num_layers=1), "cpu", seed=None).memory)
    for source, target in ways if why is None else ():
        one_way(context, layout, source, target, NIXL)
    if context.is_cuda and context.left_s > _LAST_S:
        one_way(context, layout, "cuda", "cuda", CUDA_IPC, must_outlive=True)
    if why is not None:
        raise LeftOut(f"NIXL: {why}")


def one_way(
    context: Context, layout: KvLayout, source: str, target: str, transport: Transport, *, must_outlive: bool = False
) -> None:
    """One source process, read by this one. must_outlive: it is killed first."""
    way = {"way": f"{source} -> {target}", "over": transport.name}
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=source_process, args=(theirs, layout, source, transport.name), daemon=True)
    child.start()
    try:
        answer = ours.recv() if ours.poll(_CHILD_S) else "the source did not come up"
        if isinstance(answer, str):
            context.add(**way, ok=False, note=answer)
            return
        asyncio.run(measured(context, layout, way, transport, answer, child.kill if must_outlive else None))
        if child.is_alive():
            ours.send("end")
    finally:
        child.join(10)
        if child.is_alive():
            child.kill()


async def measured(
    context: Context,
    layout: KvLayout,
    way: dict[str, str],
    transport: Transport,
    descriptor: bytes,
    kill_source: Callable[[], None] | None,
) -> None:
    storage = pool(layout, way["way"].rpartition(" ")[2], seed=None)
    reader = transport.make_reader(storage.memory, SECRET, HOST)
    try:
        await reader.connect(descriptor)
        if kill_source is None:
            await read(context, layout, way, reader, storage)
        else:
            kill_source()
            await outlive(context, way, storage, reader, copies(layout, 1, 0)[0])
    except TransportError as error:
        context.add(**way, ok=False, note=str(error))
    finally:
        await reader.aclose()


async def read(context: Context, layout: KvLayout, way: dict[str, str], reader: Reader, storage: KvStorage) -> None:
    expected = pool(layout, storage.tensor.device.type, seed=1)
    for count in (1, 16) if context.tiny else (1, 16, 256):
        seconds = []
        for repeat in range(_REPEATS):
            storage.tensor.zero_()
            context.synchronize()
            plan, sources, targets = copies(layout, count, repeat)
            began = time.perf_counter()
            await reader.read(plan)
            seconds.append(time.perf_counter() - began)
            whole = torch.equal(storage.tensor[targets.tolist()], expected.tensor[sources.tolist()])
            if not whole or int(storage.tensor.count_nonzero()) > plan.total_bytes:
                context.add(**way, blocks=count, ok=False, note="not the source's bytes")
                return
        add_row(context, layout, way, count, min(seconds))
    seconds = [await in_units(reader, plan) for _ in range(_REPEATS)]
    add_row(context, layout, way, count, min(seconds), "as a transfer reads it, unverified")
    moved = torch.equal(storage.tensor[targets.tolist()], expected.tensor[np.roll(sources, 1).tolist()])
    context.add(**way, note="control: other blocks differ", ok=not moved)


async def in_units(reader: Reader, plan: CopyList) -> float:
    """The read in a transfer's units, as many at once as the reader likes. Seconds."""
    rows = np.stack(plan.tiles(LARGE_TURN_BYTES))
    unit_of = (np.cumsum(rows[2]) - 1) // LARGE_TURN_BYTES
    units = [CopyList(*rows[:, unit_of == unit]) for unit in np.unique(unit_of)]
    turns = asyncio.Semaphore(reader.max_in_flight)

    async def one(unit: CopyList) -> None:
        async with turns:
            await reader.read(unit)

    began = time.perf_counter()
    await asyncio.gather(*(one(unit) for unit in units))
    return time.perf_counter() - began


async def outlive(context: Context, way: dict[str, str], storage: KvStorage, reader: Reader, plan: CopyList) -> None:
    """The source was killed: a read of its pool must end, and write nothing but its blocks; the device must work on."""
    await asyncio.sleep(1)  # for the driver to take the process apart
    whole = storage.tensor.view(torch.uint8).view(-1)
    before = whole.clone()
    reading = reader.read(plan)
    await asyncio.wait({reading}, timeout=5)
    for _, begin, num_bytes in zip(*plan.tiles(1 << 30), strict=True):
        whole[begin : begin + num_bytes] = before[begin : begin + num_bytes] = 0
    outcome = "it hangs" if not reading.done() else str(reading.exception() or "it ends well")
    is_whole = reading.done() and torch.equal(whole, before)
    context.add(**way, note=f"a read after the source was killed: {outcome}", ok=is_whole)


def add_row(
    context: Context, layout: KvLayout, way: dict[str, str], count: int, seconds: float, note: str = ""
) -> None:
    rate = count * layout.block_bytes / seconds / 1e9
    name = {"cuda -> cpu": "to_host_gb_s", "cpu -> cuda": "from_host_gb_s"}.get(way["way"], "copy_gb_s")
    share = context.share_of(name, rate)
    is_whole = way["way"] == "cuda -> cuda" and count == 256 and not note
    context.add(
        **way,
        blocks=count,
        mib=count * layout.block_bytes / (1 << 20),
        ms=1e3 * seconds,
        gb_s=rate,
        of=name,
        share=share,
        meets=share >= TARGET_SHARE if is_whole and share is not None else None,
        ok=True,
        **({"note": note} if note else {}),
    )
