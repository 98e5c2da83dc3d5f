"""How fast blocks go to and from the cluster's store, as a ratio to memcpy in the same run.

    python bench/store.py [--block-kib 360] [--blocks 128] [--rounds 7] [--json FILE]

One node in a process of its own, one client with its blocks in a slab, as a worker has its host tier. Put: the node reads
from the client. Get: the client reads from the node. Both verify every block (xxh3). memcpy: the same blocks from one slab
into another within one process, on one thread. The best of all rounds counts: foreign load only ever slows down.
"""

import argparse
import asyncio
import json
import secrets
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvrelay.cluster.store.process import spawn_store
from kvrelay.cluster.store.remote_store import RemoteStore
from kvrelay.config import settings_from
from kvrelay.kvcache.stores.store import BlockMeta
from kvrelay.kvtransfer.slabs.slabs import allocate_slab

SECRET = b"of this benchmark"


def run(block_bytes: int, num_blocks: int, rounds: int, transport: str) -> dict[str, object]:
    """Seconds of each round for all blocks, and what follows from them."""
    settings = settings_from(
        {
            "store": {"memory": 3 * num_blocks * (block_bytes + 8192), "replicas": 1},
            "cache": {"host_memory": "1MiB", "remote": "cluster"},
            "transfer": {"transport": transport},
        }
    )
    loop = asyncio.new_event_loop()
    node = loop.run_until_complete(spawn_store("node", settings, SECRET))
    memory = allocate_slab(3 * num_blocks * block_bytes)
    bytes_ = np.frombuffer(memory.view, dtype=np.uint8)
    bytes_[:] = np.random.default_rng(1).integers(0, 256, len(bytes_), dtype=np.uint8)
    area = num_blocks * block_bytes
    source, into, third = ([memory.view[at + i * block_bytes : at + (i + 1) * block_bytes] for i in range(num_blocks)]
                           for at in (0, area, 2 * area))  # fmt: skip
    store = RemoteStore(
        block_bytes, b"bench-namespace!", SECRET, worker_id="bench", host="127.0.0.1", memory=memory,
        nodes=[node.address], num_replicas=1, transport=transport,
    )  # fmt: skip
    store.start()
    seconds: dict[str, list[float]] = {"memcpy": [], "put": [], "get": [], "exists": [], "get_one": []}
    metas = [
        BlockMeta(None, 16, checksum=xxhash.xxh3_64_intdigest(block)) for block in source
    ]  # as the host tier has them
    try:
        for _ in range(rounds):
            hashes = [secrets.token_bytes(16) for _ in range(num_blocks)]
            _timed(seconds["memcpy"], lambda: [np.copyto(np.frombuffer(b, np.uint8), np.frombuffer(a, np.uint8))
                                               for a, b in zip(source, third, strict=True)])  # fmt: skip
            assert all(_timed(seconds["put"], lambda hashes=hashes: store.store(hashes, source, metas)))
            assert all(_timed(seconds["exists"], lambda hashes=hashes: store.contains(hashes)))
            assert all(_timed(seconds["get"], lambda hashes=hashes: store.load(hashes, into)))
            assert all(_timed(seconds["get_one"], lambda hashes=hashes: store.load(hashes[:1], into[:1])))
            assert into == source
            store.delete(hashes)
        path = store._links.nodes[0].peer._fetchers[1].route.table.best(time.monotonic()).name
    finally:
        store.close()
        loop.run_until_complete(node.aclose())
        loop.close()
    best = {name: min(values) for name, values in seconds.items()}
    return {
        "path": path, "block_kib": block_bytes >> 10, "blocks": num_blocks, "rounds": rounds,
        "memcpy_gb_per_s": area / best["memcpy"] / 1e9, "put_gb_per_s": area / best["put"] / 1e9,
        "get_gb_per_s": area / best["get"] / 1e9, "put_to_memcpy": best["memcpy"] / best["put"],
        "get_to_memcpy": best["memcpy"] / best["get"], "exists_ms": 1e3 * best["exists"],
        "get_one_block_ms": 1e3 * best["get_one"],
        "median_get_to_memcpy": statistics.median(m / g for m, g in zip(seconds["memcpy"], seconds["get"], strict=True)),
    }  # fmt: skip


def _timed(into: list[float], work):  # type: ignore[no-untyped-def]
    began = time.perf_counter()
    result = work()
    into.append(time.perf_counter() - began)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--block-kib", type=int, nargs="*", default=[64, 360, 2048])
    parser.add_argument("--mib", type=int, default=48, help="bytes of all blocks together")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--transport", nargs="*", default=["shm", "vmread", "unix", "tcp"])
    parser.add_argument("--json", help="write the figures there")
    options = parser.parse_args()
    rows = []
    for transport in options.transport:
        for kib in options.block_kib:
            row = run(kib << 10, max((options.mib << 10) // kib, 1), options.rounds, transport)
            rows.append(row)
            print(
                f"{row['path']:7} {kib:5} KiB x {row['blocks']:4}: memcpy {row['memcpy_gb_per_s']:5.1f} GB/s, "
                f"put {row['put_gb_per_s']:5.2f} ({row['put_to_memcpy']:.2f}), get {row['get_gb_per_s']:5.2f} "
                f"({row['get_to_memcpy']:.2f}), exists {row['exists_ms']:.2f} ms, one block {row['get_one_block_ms']:.2f} ms",
                flush=True,
            )
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
