"""The disk tier's own reads and writes beside NIXL's POSIX plugin, same blocks, same folder, direct I/O, in turns.

    python bench/nixl_posix.py [--folder DIR] [--blocks 64] [--block-bytes N] [--rounds N] [--json FILE]

Ours: DiskStore, with everything it does (headers, checksums, index). NIXL: one transfer of as many descriptors as blocks
between registered memory and a registered file, its state asked for until it is done; nothing else. Every queue that the
plugin was built with is tried. CPU: of this whole process, per GB. The best round counts for time, the median for CPU.
"""

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from disk import aligned, open_store
from figures import show

from kvrelay.kvcache.stores.disk.format import payload_checksum
from kvrelay.kvcache.stores.store import BlockMeta
from kvrelay.kvtransfer.transports.nixl.agent import import_nixl
from kvrelay.types import BlockHash

QUEUES = {"libaio": "use_aio", "io_uring": "use_uring", "posix aio": "use_posix_aio"}


class NixlFile:
    """One file, as NIXL's POSIX plugin moves blocks to and from it."""

    def __init__(self, folder: Path, queue: str, memory: memoryview, block_bytes: int) -> None:
        api = import_nixl()
        self._agent = api.nixl_agent(f"bench-{queue}", api.nixl_agent_config(backends=[]))
        chosen = {flag: str(flag == QUEUES[queue]).lower() for flag in QUEUES.values()}
        self._agent.create_backend("POSIX", chosen)
        self._path = folder / f"nixl-{QUEUES[queue]}.bin"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, memory.nbytes)
        base = int(np.frombuffer(memory, np.uint8).ctypes.data)
        self._of_memory = self._agent.register_memory([(base, memory.nbytes, 0, "")], "DRAM", backends=["POSIX"])
        self._of_file = self._agent.register_memory([(0, memory.nbytes, self._fd, "")], "FILE", backends=["POSIX"])
        count = memory.nbytes // block_bytes
        places = list(range(count))
        random.Random(3).shuffle(places)  # a prompt's blocks lie anywhere
        self._here = [(base + i * block_bytes, block_bytes, 0) for i in range(count)]
        self._there = [(place * block_bytes, block_bytes, self._fd) for place in places]
        self._name = f"bench-{queue}"

    def move(self, operation: str) -> None:
        agent = self._agent
        here, there = agent.get_xfer_descs(self._here, "DRAM"), agent.get_xfer_descs(self._there, "FILE")
        handle = agent.initialize_xfer(operation, here, there, self._name, backends=["POSIX"])
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OSError(f"NIXL: {operation} ended as {state}")

    def close(self) -> None:
        self._agent.deregister_memory(self._of_memory, backends=["POSIX"])
        self._agent.deregister_memory(self._of_file, backends=["POSIX"])
        os.close(self._fd)
        self._path.unlink()


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """(seconds, CPU seconds)."""
    cpu_s, began_s = time.process_time(), time.perf_counter()
    action()
    return time.perf_counter() - began_s, time.process_time() - cpu_s


def measure(folder: Path, num_blocks: int, block_bytes: int, rounds: int) -> list[dict[str, Any]]:
    memory = aligned(num_blocks * block_bytes)
    blocks = [memory[i * block_bytes : (i + 1) * block_bytes] for i in range(num_blocks)]
    sums = [payload_checksum(block) for block in blocks]
    store = open_store(folder, num_blocks, block_bytes, is_direct=None)
    files: dict[str, NixlFile] = {}
    rows = []
    for queue in QUEUES:
        try:
            files[queue] = NixlFile(folder, queue, memory, block_bytes)
            files[queue].move("WRITE")
        except Exception as error:  # each binding error of NIXL is a class of its own
            files.pop(queue, None)
            rows.append({"": f"NIXL {queue}", "why not": f"{type(error).__name__}: {error}"[:60]})
    times: dict[tuple[str, str], list[tuple[float, float]]] = {}
    try:
        for number in range(rounds + 1):
            hashes = [BlockHash(random.Random(f"{number} {i}").randbytes(16)) for i in range(num_blocks)]
            metas = [BlockMeta(None, 16, checksum=each) for each in sums]
            for operation, ours in (
                ("WRITE", partial(store.store, hashes, blocks, metas)),
                ("READ", partial(store.load, hashes, blocks)),
            ):
                actions: dict[str, Callable[[], object]] = {"ours": ours}
                actions |= {f"NIXL {queue}": partial(file.move, operation) for queue, file in files.items()}
                for name, action in actions.items():
                    took = timed(action)
                    if number:  # the first round is for slots that were never written
                        times.setdefault((operation, name), []).append(took)
    finally:
        store.close()
        for file in files.values():
            file.close()
    total = num_blocks * block_bytes / 1e9
    for (operation, name), taken in times.items():
        best, ours_best = min(s for s, _ in taken), min(s for s, _ in times[operation, "ours"])
        rows.append(
            {"": name, "what": operation.lower(), "GB/s": total / best, "of ours": ours_best / best,
             "CPU s per GB": statistics.median(cpu for _, cpu in taken) / total}
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary one")
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--block-bytes", type=int, default=368_640, help="default: 16 tokens of SmolLM2 in bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvrelay-nixl-posix-", dir=options.folder))
    try:
        rows = measure(folder, options.blocks, options.block_bytes, options.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(f"{options.blocks} blocks of {options.block_bytes >> 10} KiB, disk", rows, options.json)


if __name__ == "__main__":
    main()
