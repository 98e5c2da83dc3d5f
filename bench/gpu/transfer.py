"""NIXL between two processes: a device's pool read into another's, and into host memory; every byte compared."""

import asyncio
import multiprocessing
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from bench.gpu.section import Context, LeftOut
from kvrelay.kvcache.memory.storage import KvStorage
from kvrelay.kvtransfer.mover.copy_plan import CopyList, pair
from kvrelay.kvtransfer.transports.nixl.reader import NIXL
from kvrelay.types import KvLayout

TARGET_SHARE = 0.80  # of the device's copy rate
HOST, SECRET = "127.0.0.1", b"gpu"
_REPEATS = 6
_CHILD_S = 60.0


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


def source_process(pipe: Connection, layout: dict[str, Any], device: str) -> None:
    """Exports a pool until it receives the end message."""

    async def serve() -> None:
        storage = pool(KvLayout(**layout), device, seed=1)
        exporter = NIXL.make_exporter(storage.memory, SECRET, HOST)
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
    if why := NIXL.why_not(pool(replace(layout, num_layers=1), "cpu", seed=None).memory):
        raise LeftOut(f"NIXL: {why}")
    ways = [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")] if context.is_cuda else [("cpu", "cpu")]
    if context.rehearse:  # UCX asks the driver whose memory it is, and takes the fake device's for the host's
        ways = [("cpu", "cpu")]
    for source, target in ways:
        one_way(context, layout, source, target)


def one_way(context: Context, layout: KvLayout, source: str, target: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    fields = {
        name: getattr(layout, name)
        for name in ("num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim", "dtype")
    }
    child = spawn.Process(target=source_process, args=(theirs, fields, source), daemon=True)
    child.start()
    try:
        answer = ours.recv() if ours.poll(_CHILD_S) else "the source did not come up"
        if isinstance(answer, str):
            context.add(way=f"{source} -> {target}", ok=False, note=answer)
            return
        asyncio.run(read(context, layout, source, target, answer))
        ours.send("end")
    finally:
        child.join(10)
        if child.is_alive():
            child.kill()


async def read(context: Context, layout: KvLayout, source: str, target: str, descriptor: bytes) -> None:
    expected, storage = pool(layout, target, seed=1), pool(layout, target, seed=None)
    reader = NIXL.make_reader(storage.memory, SECRET, HOST)
    await reader.connect(descriptor)
    try:
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
                    context.add(way=f"{source} -> {target}", blocks=count, ok=False, note="not the source's bytes")
                    return
            add_row(context, layout, (source, target), count, min(seconds))
        moved = torch.equal(storage.tensor[targets.tolist()], expected.tensor[np.roll(sources, 1).tolist()])
        context.add(way=f"{source} -> {target}", note="control: other blocks differ", ok=not moved)
    finally:
        await reader.aclose()


def add_row(context: Context, layout: KvLayout, way: tuple[str, str], count: int, seconds: float) -> None:
    rate = count * layout.block_bytes / seconds / 1e9
    name = {("cuda", "cpu"): "to_host_gb_s", ("cpu", "cuda"): "from_host_gb_s"}.get(way, "copy_gb_s")
    share = context.share_of(name, rate)
    is_whole = way == ("cuda", "cuda") and count == 256
    context.add(
        way=" -> ".join(way),
        blocks=count,
        mib=count * layout.block_bytes / (1 << 20),
        ms=1e3 * seconds,
        gb_s=rate,
        of=name,
        share=share,
        meets=share >= TARGET_SHARE if is_whole and share is not None else None,
        ok=True,
    )
