"""What sealing costs: blocks to the disk tier, a folder and the cluster's store and back, plain and sealed.

    python -m bench.kvcache.sealing [--blocks 128] [--block-bytes 368640] [--rounds 5] [--folder DIR] [--json out.json]

Each round writes and reads blocks of random bytes, which nothing has seen before, in every store, plain and sealed in
turn, in batches as the tiers do; what comes back is compared. Medians over the rounds. The default block is one of
SmolLM2-135M: 16 tokens in 16 bits. CPU is this process's, all threads. The disk tier uses direct I/O where the file
system has it, the folder the page cache, and the cluster's store is a node in a process of its own.
"""

import argparse
import asyncio
import contextlib
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from bench.figures import show
from kvrelay.cluster.launch.local import HOST, spawn
from kvrelay.cluster.registry.members import STORE_ROLE
from kvrelay.cluster.store.remote_store import ClusterStores
from kvrelay.config import settings_from
from kvrelay.hashing import root_hash
from kvrelay.kvcache.memory.jobs import batch_blocks
from kvrelay.kvcache.stores.codecs import Codec, NoCodec
from kvrelay.kvcache.stores.disk.tier import DiskOptions, DiskStore
from kvrelay.kvcache.stores.namespace import Namespace
from kvrelay.kvcache.stores.remote import CLUSTER, make_store
from kvrelay.kvcache.stores.sealing import SealedCodec
from kvrelay.kvcache.stores.store import BlockStore
from kvrelay.kvtransfer.slabs.slabs import allocate_slab
from kvrelay.types import BlockHash, BlockMeta

SECRET, NAMESPACE = secrets.token_bytes(32), Namespace.of({"model": "bench"})
Figures = dict[str, float]


class Bench:
    """Blocks in a slab, as a host tier has them, and room for as many."""

    def __init__(self, num_blocks: int, block_bytes: int, folder: Path) -> None:
        self.num_blocks, self.block_bytes, self._folder = num_blocks, block_bytes, folder
        self.memory = allocate_slab(2 * num_blocks * block_bytes)
        view = self.memory.view
        assert view is not None
        rows = [view[at * block_bytes : (at + 1) * block_bytes] for at in range(2 * num_blocks)]
        self._blocks, self._room = rows[:num_blocks], rows[num_blocks:]

    @contextlib.contextmanager
    def opened(self, kind: str, codec: Codec) -> Iterator[BlockStore]:
        """A started store with room for all blocks."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder, contextlib.ExitStack() as ending:
            if kind == "disk":
                limit, options = 2 * self.num_blocks * (self.block_bytes + 16384), DiskOptions(is_admission_on=False)
                store: BlockStore = DiskStore(folder, limit, self.block_bytes, NAMESPACE, codec=codec, options=options)
            else:
                clients = ending.enter_context(self._cluster()) if kind == CLUSTER else None
                url = CLUSTER if kind == CLUSTER else f"file://{folder}"
                store = make_store(url, self.block_bytes, NAMESPACE, codec=codec, memory=self.memory, cluster=clients)
            store.start()
            try:
                yield store
            finally:
                store.close()

    @contextlib.contextmanager
    def _cluster(self) -> Iterator[ClusterStores]:
        memory = 2 * self.num_blocks * (self.block_bytes + 16384)
        settings = settings_from(
            {"store": {"memory": memory, "replicas": 1}, "cache": {"host_memory": 1 << 20, "remote": CLUSTER}}
        )
        with asyncio.Runner() as runner:
            node = runner.run(spawn(STORE_ROLE, settings, SECRET, "node"))
            clients = ClusterStores(settings, SECRET, worker_id="bench", host=HOST)
            clients.set_nodes([node.address])
            try:
                yield clients
            finally:
                node.process.terminate()
                runner.run(node.process.wait())

    def round(self, store: BlockStore) -> Figures:
        """Write and read all blocks once; figures per block."""
        root, metas, hashes = root_hash("tenant"), [], []
        for index, block in enumerate(self._blocks):
            block[:] = np.random.default_rng().bytes(self.block_bytes)
            checksum = xxhash.xxh3_64_intdigest(block)
            metas.append(BlockMeta(None, 16 * (index + 1), checksum=checksum, root=root))
            hashes.append(BlockHash(secrets.token_bytes(16)))
        for view in self._room:
            view[:] = bytes(self.block_bytes)

        def write(some: slice) -> bool:
            checked = zip(self._blocks[some], metas[some], strict=True)  # as Offload does where the store does not
            if not store.keeps_checksums and any(xxhash.xxh3_64_intdigest(b) != meta.checksum for b, meta in checked):
                return False
            return all(store.store(hashes[some], self._blocks[some], metas[some]))

        figures = self._timed("write", write)
        figures |= self._timed("read", lambda some: all(store.load(hashes[some], self._room[some], metas[some])))
        assert self._room == self._blocks, "other bytes came back"
        store.delete(hashes)
        return figures

    def _timed(self, name: str, call: Callable[[slice], bool]) -> Figures:
        step = batch_blocks(self.block_bytes)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for first in range(0, self.num_blocks, step):
            assert call(slice(first, first + step)), f"{name}: a block was refused"
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        speed = self.num_blocks * self.block_bytes / wall_s / 1e6
        return {f"{name} MB/s": speed, f"{name} CPU µs/block": 1e6 * cpu_s / self.num_blocks}


def compare(bench: Bench, kinds: list[str], num_rounds: int) -> list[dict[str, Any]]:
    """A row for each store, plain and sealed."""
    codecs: dict[str, Codec] = {"plain": NoCodec(), "sealed": SealedCodec(NoCodec(), SECRET, NAMESPACE)}
    with contextlib.ExitStack() as ending:
        stores = {
            (kind, name): ending.enter_context(bench.opened(kind, codec))
            for kind in kinds
            for name, codec in codecs.items()
        }
        for store in stores.values():
            bench.round(store)  # files and connections are made, memory is touched
        rounds = [{key: bench.round(store) for key, store in stores.items()} for _ in range(num_rounds)]
    rows = []
    for kind, name in stores:
        found = [one[kind, name] for one in rounds]
        figures = {key: statistics.median(one[key] for one in found) for key in found[0]}
        rows.append({"store": kind, "blocks": name, **figures})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--block-bytes", type=int, default=368_640)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stores", nargs="*", default=["disk", "folder", CLUSTER])
    parser.add_argument("--folder", type=Path, help="for the files; default: the temporary folder")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    bench = Bench(arguments.blocks, arguments.block_bytes, arguments.folder or Path(tempfile.gettempdir()))
    rows = compare(bench, arguments.stores, arguments.rounds)
    show(f"{arguments.blocks} blocks of {arguments.block_bytes} bytes, {arguments.rounds} rounds", rows, arguments.json)


if __name__ == "__main__":
    main()
