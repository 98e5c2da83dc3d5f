"""The disk tier beside the disk itself, and what codecs make of real KV.

    python bench/disk.py [--folder DIR] [--batches 16 64 256] [--block-bytes N] [--rounds N] [--model SOURCE] [--json FILE]

The device's own rate is taken in the same round, on a file of its own in the same folder: requests of the same size as
the store's, as many under way, from aligned memory, at scattered places (`same`), and the best over more and larger ones
(`best`). A store's time includes headers, index and copies, and a load's its checksums. Rounds alternate; the best of each counts, and the
median of the rounds' ratios. Codecs run on the KV that the model computed for a text of ours, on one thread.
"""

import argparse
import mmap
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from disk_codecs import codec_rows
from figures import show

from kvrelay.kvcache.stores.disk.format import PAGE_BYTES, pages, payload_checksum
from kvrelay.kvcache.stores.disk.records import RUN_BYTES
from kvrelay.kvcache.stores.disk.tier import DiskOptions, DiskStore
from kvrelay.kvcache.stores.namespace import Namespace
from kvrelay.kvcache.stores.store import BlockMeta
from kvrelay.types import BlockHash

DEPTH = 8
SEGMENT_BYTES = 128 << 20  # as a cache of a GiB and more has them
BEST_DEPTHS = ((1, 1), (4, 1), (8, 1), (16, 1), (8, 2))  # requests under way, size over the store's


def aligned(num_bytes: int) -> memoryview:
    """Memory that direct I/O takes, filled with what no device compresses."""
    memory = mmap.mmap(-1, num_bytes)
    piece = random.Random(1).randbytes(1 << 20)
    for start in range(0, num_bytes, len(piece)):
        memory[start : start + len(piece)] = piece[: min(len(piece), num_bytes - start)]
    return memoryview(memory)


class Device:
    """A file that is read and written with nothing in between."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._path = folder / "device.bin"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, num_bytes)
        self._memory = aligned(num_bytes)
        self.seconds(os.pwritev, num_bytes, 8 << 20, 4)  # extents that were never written are slower

    def seconds(self, call: Callable[..., int], num_bytes: int, size: int, depth: int) -> float:
        """For `num_bytes` in requests of `size`, `depth` of them under way, at scattered places."""
        places = list(range(0, self.num_bytes - size + 1, size))
        random.Random(2).shuffle(places)
        jobs = places[: -(-num_bytes // size)]

        def move(place: int) -> int:
            return call(self._fd, [self._memory[place : place + size]], place)

        with ThreadPoolExecutor(depth) as pool:
            list(pool.map(len, ["warm"] * depth))
            began = time.perf_counter()
            list(pool.map(move, jobs))
            return (time.perf_counter() - began) * num_bytes / (len(jobs) * size)

    def close(self) -> None:
        os.close(self._fd)
        self._path.unlink()


def open_store(folder: Path, num_blocks: int, block_bytes: int, *, is_direct: bool | None) -> DiskStore:
    store = DiskStore(
        folder / f"store-{is_direct}", (num_blocks + num_blocks // 4 + 1) * (pages(block_bytes) + PAGE_BYTES), block_bytes,
        Namespace.of({"bench": "disk"}), options=DiskOptions(
            is_admission_on=False, is_direct=is_direct, io_depth=DEPTH, segment_bytes=SEGMENT_BYTES
        ),
    )  # fmt: skip
    store.start()
    return store


def measure(folder: Path, batches: Sequence[int], block_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each direction and batch."""
    most = max(batches)
    memory = aligned(most * block_bytes)
    blocks = [memory[index * block_bytes : (index + 1) * block_bytes] for index in range(most)]
    hashes = [BlockHash(random.Random(index).randbytes(16)) for index in range(most)]
    metas = [BlockMeta(hashes[index - 1] if index else None, 16 * (index + 1)) for index in range(most)]
    device = Device(folder, most * (pages(block_bytes) + PAGE_BYTES))
    stores = {"direct": open_store(folder, most, block_bytes, is_direct=None)}
    stores["buffered"] = open_store(folder, most, block_bytes, is_direct=False)
    for store in stores.values():  # every slot has been written once
        for salt in range(4):
            store.store([BlockHash(bytes([salt]) + digest[1:]) for digest in hashes], blocks, metas)
    rows = []
    try:
        for count in batches:
            rows += _measure_batch(device, stores, count, rounds, blocks)
    finally:
        device.close()
        for store in stores.values():
            store.close()
    return rows


def _measure_batch(
    device: Device, stores: dict[str, DiskStore], count: int, rounds: int, blocks: Sequence[memoryview]
) -> list[dict[str, Any]]:
    blocks = blocks[:count]
    block_bytes = blocks[0].nbytes
    total = count * block_bytes
    sums = [payload_checksum(block) for block in blocks]
    slot_bytes = pages(block_bytes) + PAGE_BYTES
    size = min(max(1, RUN_BYTES // slot_bytes), -(-count // DEPTH)) * slot_bytes  # as disk_slots.py cuts them
    times: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds):
        hashes = [random.Random(f"{count} {number} {index}").randbytes(16) for index in range(count)]  # evicts old ones
        metas = [  # as they come from the host tier: with the checksums of when they were saved
            BlockMeta(BlockHash(hashes[i - 1]) if i else None, 16 * (i + 1), checksum=sums[i]) for i in range(count)
        ]
        for direction, call in (("store", os.pwritev), ("load", os.preadv)):
            for name, store in stores.items():
                if direction == "load" and name == "buffered":
                    _forget_pages(store)
                took = _timed(store, direction, hashes, blocks, metas)
                times.setdefault((direction, name), []).append(took)
                if name == "direct":
                    times.setdefault((direction, "same"), []).append(device.seconds(call, total, size, DEPTH))
            best = min(device.seconds(call, total, min(size * more, total), depth) for depth, more in BEST_DEPTHS)
            times.setdefault((direction, "best"), []).append(best)
    return [_row(direction, count, total, size, times) for direction in ("store", "load")]


def _timed(store: DiskStore, direction: str, hashes: Any, blocks: Any, metas: Any) -> float:
    began = time.perf_counter()
    done = store.store(hashes, blocks, metas) if direction == "store" else store.load(hashes, blocks)
    took = time.perf_counter() - began
    assert all(done), "a block was not kept, or not found"
    return took


def _forget_pages(store: DiskStore) -> None:
    """Let a buffered store's files leave the page cache, so that its loads are the disk's."""
    for path in store.path.glob("*/segment-*.kv"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _row(
    direction: str, count: int, total: int, size: int, times: dict[tuple[str, str], list[float]]
) -> dict[str, Any]:
    def rate(name: str) -> float:
        return total / min(times[direction, name]) / 1e9

    pairs = zip(times[direction, "same"], times[direction, "direct"], strict=True)
    return {
        "": direction,
        "blocks": count,
        "request KiB": size // 1024,
        "store GB/s": rate("direct"),
        "device same GB/s": rate("same"),
        "device best GB/s": rate("best"),
        "of same": rate("direct") / rate("same"),
        "of same, median": statistics.median(device / store for device, store in pairs),
        "of best": rate("direct") / rate("best"),
        "buffered GB/s": rate("buffered"),
    }


def restart(folder: Path, block_bytes: int, num_blocks: int) -> dict[str, Any]:
    """How long it takes to find blocks again."""
    store = open_store(folder / "restart", num_blocks, block_bytes, is_direct=None)
    block = aligned(block_bytes)
    for start in range(0, num_blocks, 256):
        hashes = [BlockHash(random.Random(index).randbytes(16)) for index in range(start, start + 256)]
        store.store(hashes, [block] * 256, [BlockMeta(None, 16)] * 256)
    store.close()
    began = time.perf_counter()
    store = open_store(folder / "restart", num_blocks, block_bytes, is_direct=None)
    took = time.perf_counter() - began
    found = store.stats().num_blocks
    store.close()
    return {"blocks": found, "start() s": took, "us per block": took / max(1, found) * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary one")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--block-bytes", type=int, default=368_640, help="default: 16 tokens of SmolLM2 in bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", help="for the codecs' table; default: none is made")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvrelay-disk-", dir=options.folder))
    try:
        rows = measure(folder, options.batches, options.block_bytes, options.rounds)
        show("disk tier and device", rows, options.json)
        show("restart", [restart(folder, options.block_bytes, 2048)])
    finally:
        shutil.rmtree(folder)
    if options.model:
        out = options.json and options.json.with_stem(options.json.stem + "-codecs")
        show("codecs on real KV, one thread", codec_rows(options.model), out)


if __name__ == "__main__":
    main()
