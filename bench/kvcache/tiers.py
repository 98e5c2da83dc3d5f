"""The host tier's copies against memcpy, and a prompt found in each tier against computing it again, in one run.

    python -m bench.kvcache.tiers copies [--model M] [--megabytes N] [--json FILE]
    python -m bench.kvcache.tiers ttft [--model M] [--lengths 2048 8000] [--disk FOLDER] [--json FILE]

copies: blocks of the model's shape between a pool and a slab, in batches as the cache controller moves them, with and
without their checksums; memcpy moves the same bytes in pieces of one block. Both memories have been touched before.
ttft: one engine with a host tier, then with a disk below it, then with a node of the cluster's store (a process of its
own); and a worker process from which the other reads what it computed; the store nodes hold nothing themselves.
Before each measurement the nearer tiers forget the prompt. Sides alternate; medians count.
"""

import argparse
import asyncio
import ctypes
import secrets
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.engine import inprocess
from bench.figures import available_cores, show
from kvrelay.cluster.launch.local import HOST, LocalCluster, local_cluster
from kvrelay.cluster.store.factory import ClusterStores
from kvrelay.cluster.store.process import spawn_store
from kvrelay.config import settings_from
from kvrelay.engine.scheduling.tier_requests import LowerTiers
from kvrelay.engine.step.build import Extensions, load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.step.kv_cache import KvCache
from kvrelay.engine.worker.tier_setup import make_lower_tiers
from kvrelay.hashing import block_hashes
from kvrelay.kernels.select import select_backend
from kvrelay.kvcache.memory.host import HostSlab
from kvrelay.kvcache.memory.storage import KvStorage
from kvrelay.kvcache.stores.namespace import namespace_of
from kvrelay.serve.workers.worker_link import Member
from kvrelay.settings.engine import DEFAULT_MODEL
from kvrelay.types import BlockId, KvLayout

BATCH_BYTES = 8 << 20  # of the cache controller's jobs


# ---- copies


def layout_of(folder: Path, dtype: str, num_bytes: int, block_size: int) -> KvLayout:
    """A pool of so many bytes for this model."""
    count = inprocess.count_weights(folder)
    heads = count.kv_values_per_token // (2 * count.num_layers * count.head_dim)
    layout = KvLayout(count.num_layers, 1, block_size, heads, count.head_dim, dtype)
    return replace(layout, num_blocks=max(8, num_bytes // layout.block_bytes))


def best_of(repeats: int, actions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The shortest time of each, in seconds; they take turns."""
    seconds = dict.fromkeys(actions, float("inf"))
    for _ in range(repeats):
        for name, action in actions.items():
            seconds[name] = min(seconds[name], inprocess.time_of(action))
    return seconds


def measure_copies(layout: KvLayout, repeats: int) -> list[dict[str, Any]]:
    storage = KvStorage(layout, torch.device("cpu"))
    slab = HostSlab(storage.memory, layout.num_bytes)
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(layout.num_blocks, generator=generator).tolist()  # a chain's blocks lie anywhere
    storage.fill_with_noise([BlockId(block) for block in order])
    step = max(1, BATCH_BYTES // layout.block_bytes)
    batches = [(order[i : i + step], list(range(i, min(i + step, len(order))))) for i in range(0, len(order), step)]
    known = slab.save(order, range(layout.num_blocks))
    layers = range(layout.num_layers)

    def memcpy(target: int, source: int) -> None:
        for begin in range(0, layout.num_bytes, layout.block_bytes):
            ctypes.memmove(target + begin, source + begin, layout.block_bytes)

    def save() -> None:
        for blocks, rows in batches:
            slab.save(blocks, rows)

    def load_unchecked() -> None:
        for layer in layers:
            slab.load(range(layout.num_blocks), order, range(layer, layer + 1))

    def load() -> None:
        if slab.checksums(range(layout.num_blocks)) != known:
            raise SystemExit("a checksum is wrong")
        load_unchecked()

    pool, host = storage.memory.address, slab.memory.address
    seconds = best_of(
        repeats,
        {
            "memcpy pool to slab": lambda: memcpy(host, pool),
            "save with checksums": save,
            "memcpy slab to pool": lambda: memcpy(pool, host),
            "load": load_unchecked,
            "load with checksums": load,
        },
    )
    rows = []
    for name, taken_s in seconds.items():
        base = seconds["memcpy pool to slab" if "save" in name or "pool to" in name else "memcpy slab to pool"]
        rows.append({"what": name, "GB/s": layout.num_bytes / taken_s / 1e9, "of memcpy": base / taken_s})
    return rows


# ---- time to the first token


@dataclass
class Driven:
    """An engine with tiers below its pool, in this thread."""

    engine: Engine
    woken: threading.Semaphore
    count: int = 0

    @property
    def tiers(self) -> Any:
        assert self.engine.tiers is not None
        return self.engine.tiers.controller

    def first(self, prompt: list[int]) -> tuple[float, int]:
        """(seconds from the prompt's arrival to its first token, tokens that were found)."""
        self.count += 1
        wanted = inprocess.request(self.count, prompt, 1, self.engine.config.block_size)
        if (refusal := self.engine.refusal(wanted)) is not None:
            raise SystemExit(f"the engine refuses: {refusal}")
        outputs = []
        began_s = time.perf_counter()
        self.engine.add(wanted)
        while self.engine.scheduler.has_work:
            result = self.engine.step()
            outputs += result.outputs
            if result.is_stuck:
                self.woken.acquire(timeout=self.engine.max_wait_s() or 0.001)
        seconds = time.perf_counter() - began_s
        if len(outputs) != 1:
            raise SystemExit(f"expected one token, got {len(outputs)}")
        return seconds, outputs[0].cached_tokens or 0

    def settle(self) -> None:
        while not self.tiers.is_idle:
            self.woken.acquire(timeout=0.01)
            self.tiers.poll()

    def forget(self, *, below: bool) -> None:
        """What the pool has cached, and with `below` the host tier."""
        self.settle()
        if below:
            self.tiers.reset()
        self.engine.pool.reset_cache()


@contextmanager
def driven(folder: Path, options: argparse.Namespace, cache: dict[str, Any], stores: Any = None) -> Iterator[Driven]:
    """An engine whose pool and host tier each hold two of the longest prompts."""
    torch.set_num_threads(options.threads)
    count = inprocess.count_weights(folder)
    item = 2 if options.dtype == "bfloat16" else 4
    memory = 2 * (max(options.lengths) + 64) * count.kv_values_per_token * item
    config = EngineConfig(kv_memory_bytes=memory, token_budget=options.token_budget)
    backend = select_backend(options.backend, "auto", options.threads)
    woken = threading.Semaphore(0)
    settings = settings_from(
        {"cache": {"host_memory": str(memory), "prefetch": "wait", "write_policy": "selective", **cache}}
    )

    def tiers(kv: KvCache) -> LowerTiers:
        namespace = namespace_of(kv.fingerprint, kv.memory.layout)
        return make_lower_tiers(
            kv.pool, kv.memory, settings.cache, settings.transfer.checks, namespace, woken.release, stores
        )

    engine = load_engine(folder, backend, inprocess.DTYPES[options.dtype], config, Extensions(tiers))
    try:
        yield Driven(engine, woken)
    finally:
        engine.close()


def measure_tier(it: Driven, tier: str, lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    """One row for each length: computed, and found in this tier."""
    rows = []
    vocab, below = it.engine.model.spec.vocab_size, tier != "host"
    it.first(inprocess.random_prompt(1, min(lengths), vocab))  # warm
    for length in lengths:
        computed: list[float] = []
        found: list[float] = []
        for repeat in range(repeats):
            prompt = inprocess.random_prompt(100 * length + repeat, length, vocab)
            computed.append(it.first(prompt)[0])
            it.first(prompt)  # a hit in the pool: saved
            it.forget(below=below)
            it.first(prompt)  # and once more for those tiers that want to see a block twice
            it.forget(below=below)
            seconds, cached = it.first(prompt)
            if cached < (length - 1) // it.engine.config.block_size * it.engine.config.block_size:
                raise SystemExit(f"only {cached} of {length} tokens were found in {tier}")
            found.append(seconds)
            it.forget(below=True)
        again, there = 1000 * statistics.median(computed), 1000 * statistics.median(found)
        rows.append(
            {"found in": tier, "prompt tokens": length, "TTFT ms": there, "computed ms": again, "ratio": there / again}
        )
    return rows


async def measure_ttft(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    def measure(tier: str, cache: dict[str, Any], stores: Any = None) -> list[dict[str, Any]]:
        with driven(folder, options, cache, stores) as it:
            return measure_tier(it, tier, options.lengths, options.repeats)

    if options.only_peer:
        return await measure_peer(folder, options)
    rows = await asyncio.to_thread(measure, "host", {})
    scratch = Path(tempfile.mkdtemp(dir=options.disk, prefix="kvrelay-bench-"))
    try:
        rows += await asyncio.to_thread(measure, "disk", {"disk_path": str(scratch), "disk_size": "8GiB"})
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    settings, secret = settings_from({"store": {"memory": options.store_memory}}), secrets.token_bytes(32)
    node = await spawn_store("store-0", settings, secret)
    try:
        stores = ClusterStores(settings, secret, worker_id="bench", host="127.0.0.1")
        stores.set_nodes([node.address])
        rows += await asyncio.to_thread(measure, "cluster", {"remote": "cluster"}, stores)
    finally:
        await node.aclose()
    return rows + await measure_peer(folder, options)


async def measure_peer(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Computed by a worker process, then found there by a worker of this process; both through the request plane."""
    count = inprocess.count_weights(folder)
    memory = 2 * (max(options.lengths) + 64) * count.kv_values_per_token * (2 if options.dtype == "bfloat16" else 4)
    settings = settings_from(
        {
            "model": {"dtype": options.dtype},
            "engine": {
                "kv_memory": str(memory), "token_budget": options.token_budget, "num_threads": options.threads,
                "backend": options.backend,
            },
            # a quarter may be read by peers
            "cache": {"host_memory": str(3 * memory), "remote": "cluster", "prefetch": "wait"},
            "store": {"memory": options.store_memory},
            "cluster": {"prefill": 0},
        }
    )  # fmt: skip
    rows = []
    async with local_cluster(settings, folder, num_prefill=0, num_decode=1, num_inside=1) as cluster:
        (peer,), (inside,) = cluster.decode, cluster.inside
        assert inside.info is not None and isinstance(inside.cluster_store, ClusterStores)
        here = Member(inside.worker_id, str(inside.role), HOST, inside.info.port)
        (store,) = inside.cluster_store._made
        for length in [min(options.lengths), *options.lengths]:  # the first one warms up
            computed, found = [], []
            for repeat in range(options.repeats):
                prompt = inprocess.random_prompt(300 * length + repeat + len(rows), length, count.vocab_size)
                computed.append((await first_from(cluster, peer.member, prompt))[0])
                hashes = block_hashes(prompt, settings.engine.block_size)
                while not all(await asyncio.to_thread(store.contains, hashes)):
                    await asyncio.sleep(0.05)
                await asyncio.to_thread(store.delete, hashes)  # of the nodes: from now on only the peer has them
                seconds, cached = await first_from(cluster, here, prompt)
                if cached < (length - 1) // settings.engine.block_size * settings.engine.block_size:
                    raise SystemExit(f"only {cached} of {length} tokens were found at the other worker")
                found.append(seconds)
            again, there = 1000 * statistics.median(computed), 1000 * statistics.median(found)
            rows.append(
                {
                    "found in": "another worker",
                    "prompt tokens": length,
                    "TTFT ms": there,
                    "computed ms": again,
                    "ratio": there / again,
                }
            )
    return rows[1:]


async def first_from(cluster: LocalCluster, member: Member, prompt: list[int]) -> tuple[float, int]:
    """(seconds to this worker's first token, tokens that it found)."""
    cluster.dispatcher.workers.set_members([member])
    await cluster.dispatcher.workers.wait_for(
        lambda d: [i.worker_id for i, _ in d.live_workers()] == [member.worker_id]
    )
    wanted = inprocess.request(secrets.randbits(31), prompt, 1, 16)
    began_s, seconds, cached = time.perf_counter(), 0.0, 0
    async for output in cluster.dispatcher.generate(wanted):
        if output.token_ids and not seconds:
            seconds = time.perf_counter() - began_s
        cached = output.cached_tokens if output.cached_tokens is not None else cached
    return seconds, cached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["copies", "ttft"])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", choices=list(inprocess.DTYPES), default="bfloat16")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--token-budget", type=int, default=512, help="tokens in one step")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8000], help="of prompts, in tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=512, help="of the pool whose blocks are copied")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--disk", type=Path, help="folder on the disk to measure; default: the system's temporary one")
    parser.add_argument("--only-peer", action="store_true", help="ttft at another worker alone")
    parser.add_argument("--store-memory", default="4GiB", help="of the cluster store's node")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = inprocess.prepare(options.model)
    if options.what == "copies":
        layout = layout_of(folder, options.dtype, options.megabytes << 20, options.block_size)
        title = f"{layout.num_blocks} blocks of {layout.block_bytes >> 10} KiB, {layout.region_bytes} bytes a layer"
        show(f"host tier, {options.model}, {title}", measure_copies(layout, options.repeats), options.json)
    else:
        rows = asyncio.run(measure_ttft(folder, options))
        show(f"time to first token, {options.model}, {options.dtype}, {options.threads} threads", rows, options.json)


if __name__ == "__main__":
    main()
