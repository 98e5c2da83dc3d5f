"""KV transfers between two processes of this host, against memcpy measured in the same run.

    python bench/transfer.py [--blocks 2048] [--rounds 7] [--transports shm,nixl,tcp] [--json out.json]

Per transport, with checksums on and off: bandwidth of many scattered 32 KiB blocks (the target's
first read to its last region verified, and the whole protocol from open to committed), and the
latency of one block. The source is this process, the target a child; handshakes are not counted.
"""

import argparse
import asyncio
import ctypes
import json
import mmap
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout works uninstalled

from kvrelay.config import TransferSettings
from kvrelay.kvtransfer.source import KvSource
from kvrelay.kvtransfer.target import KvTarget
from kvrelay.types import Fingerprint, KvLayout, KvMemory

SECRET = b"bench"
FINGERPRINT = Fingerprint(1, "bench", "bfloat16", 16, 1, 8, 64, "bench")


def layout_for(num_blocks):
    """One layer of 32 KiB regions, twice as many as will be moved, so that they can be scattered."""
    return KvLayout(1, 2 * num_blocks, 16, 8, 64, "bfloat16")


def allocate(layout):
    fd = os.memfd_create("kvrelay-bench", os.MFD_CLOEXEC)
    os.ftruncate(fd, layout.num_bytes)
    mapping = mmap.mmap(fd, layout.num_bytes)
    array = np.frombuffer(mapping, dtype=np.uint8)
    array[:] = np.arange(len(array), dtype=np.uint8)  # every page is there before the clock runs
    return KvMemory(layout, array.ctypes.data, "cpu", fd, memoryview(mapping), array)


def scattered(layout, count, seed):
    return np.random.default_rng(seed).permutation(layout.num_blocks)[:count].tolist()


def memcpy_seconds(layout, count, rounds):
    """Best time of copying the same scattered blocks inside one process."""
    source, target = allocate(layout), allocate(layout)
    pairs = list(zip(scattered(layout, count, 1), scattered(layout, count, 2), strict=True))
    size, times = layout.region_bytes, []
    for _ in range(rounds):
        began = time.perf_counter()
        for from_block, to_block in pairs:
            ctypes.memmove(target.address + to_block * size, source.address + from_block * size, size)
        times.append(time.perf_counter() - began)
    return min(times)


async def run_target(config):
    """The child: grants on request, one JSON line each way."""
    layout = layout_for(config["blocks"])
    target = KvTarget(
        allocate(layout), "target", "1", FINGERPRINT, SECRET, TransferSettings(**config["settings"]),
        host="127.0.0.1", generation_of=lambda block: 0, on_commit=lambda *_: None,
        on_failed=lambda request_id, error: print(error, file=sys.stderr), on_released=lambda request_id: None,
    )  # fmt: skip
    await target.start()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        request = json.loads(line)
        blocks = scattered(layout, request["count"], 2)
        print(target.grant(request["id"], 0, blocks, len(blocks)).hex(), flush=True)
    await target.aclose()


class Child:
    async def start(self, config):
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--target", json.dumps(config),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24,
        )  # fmt: skip

    async def ticket(self, request_id, count):
        self.process.stdin.write(json.dumps({"id": request_id, "count": count}).encode() + b"\n")
        return bytes.fromhex((await self.process.stdout.readline()).decode())

    async def stop(self):
        self.process.stdin.close()
        await self.process.wait()


async def measure(transport, checks, count, rounds):
    """Best and median figures of one transport."""
    settings = {"transport": transport, "checks": checks}
    layout = layout_for(count)
    child = Child()
    await child.start({"settings": settings, "blocks": count})
    source = KvSource(
        allocate(layout), "source", "1", FINGERPRINT, SECRET, TransferSettings(**settings),
        host="127.0.0.1", generation_of=lambda block: 0,
    )  # fmt: skip
    await source.start()

    async def once(name, blocks):
        ticket = await child.ticket(name, len(blocks))
        began = time.perf_counter()
        transfer = source.open(name, ticket)
        transfer.announce(0, blocks, range(1))
        result = await transfer.commit(b"")
        return result.seconds, time.perf_counter() - began

    many = scattered(layout, count, 1)
    await once("warm", many)
    cpu = time.process_time()
    large = [await once(f"many{i}", many) for i in range(rounds)]
    cpu = time.process_time() - cpu
    small = [await once(f"one{i}", many[:1]) for i in range(20 * rounds)]
    await child.stop()
    await source.aclose()
    return {
        "read_s": min(seconds for seconds, _ in large),
        "whole_s": min(whole for _, whole in large),
        "one_read_us": statistics.median(seconds for seconds, _ in small) * 1e6,
        "one_whole_us": statistics.median(whole for _, whole in small) * 1e6,
        "source_cpu_s_per_gb": cpu / rounds / (count * layout.region_bytes / 1e9),
    }


async def run(args):
    layout = layout_for(args.blocks)
    size = args.blocks * layout.region_bytes
    rows = {"memcpy": {"read_s": memcpy_seconds(layout, args.blocks, args.rounds)}}
    for transport in args.transports.split(","):
        for checks in ("off", "full"):
            rows[f"{transport}, checks {checks}"] = await measure(transport, checks, args.blocks, args.rounds)
    limit = rows["memcpy"]["read_s"] = min(
        rows["memcpy"]["read_s"], memcpy_seconds(layout, args.blocks, args.rounds)
    )  # before and after: others may use this machine
    table = Table(title=f"{args.blocks} scattered blocks of {layout.region_bytes >> 10} KiB, best of {args.rounds}")
    for column in (
        "path",
        "GB/s",
        "x memcpy",
        "GB/s, open to commit",
        "1 block us",
        "1 block, open to commit us",
        "source CPU s/GB",
    ):
        table.add_column(column, justify="left" if column == "path" else "right")
    for name, row in rows.items():
        table.add_row(
            name, f"{size / row['read_s'] / 1e9:.2f}", f"{limit / row['read_s']:.2f}",
            *((f"{size / row['whole_s'] / 1e9:.2f}", f"{row['one_read_us']:.0f}", f"{row['one_whole_us']:.0f}",
               f"{row['source_cpu_s_per_gb']:.2f}") if "whole_s" in row else ("", "", "", "")),
        )  # fmt: skip
    Console(width=120).print(table)
    return {"bytes": size, "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--transports", default="shm,nixl,tcp")
    parser.add_argument("--json")
    parser.add_argument("--target", help=argparse.SUPPRESS)
    args = parser.parse_args()
    figures = asyncio.run(run_target(json.loads(args.target)) if args.target else run(args))
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
