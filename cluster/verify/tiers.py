"""The rows of `kvrelay verify` for the tiers below the pool: host memory, disk, the cluster's store.

Each prompt is computed once, sinks into the tier, is forgotten above it and asked for again: its KV must come from that tier
and give Hugging Face's tokens. Negative controls change bytes there: with checks on the prompt is computed anew, with
checks off the answer changes.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.cluster.verify.rows import Verifier
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.service import WorkerService
from kvrelay.kvcache.tiers.controller import TierController
from kvrelay.settings.cache import CacheSettings

if TYPE_CHECKING:
    from kvrelay.cluster.launch.local import LocalCluster

_SETTLE_S = 30.0
_OFFERS = 2  # the disk wants to see a block twice


class TierRows:
    """Runs the rows with one worker in this process, whose tiers it can reach into."""

    def __init__(self, verifier: Verifier, model_dir: Path, scratch: Path, kv_bytes: int) -> None:
        self._verifier, self._model_dir, self._scratch, self._kv_bytes = verifier, model_dir, scratch, kv_bytes

    async def run(self) -> None:
        disk = {"disk_path": str(self._scratch / "disk"), "disk_size": 4 * self._kv_bytes}
        await self._tier("host memory", {}, _forget_pool)
        await self._tier("disk", disk, _forget_memory)
        await self._restarted("disk, after a restart", disk)
        await self._tier("the cluster's store", {"remote": "cluster"}, _forget_memory)

    async def _tier(self, name: str, below: dict[str, Any], forget: Callable[[Engine], object]) -> None:
        self._verifier.tell(f"KV from {name}")
        async with self._cluster(below, "full") as (cluster, worker):
            await self._fill(cluster, worker)
            await worker.thread.call(forget)
            await self._row(f"KV from {name}", cluster, worker)
            await self._rotten_row(name, cluster, worker)
        async with self._cluster(below, "off") as (cluster, worker):
            await self._control_row(name, cluster, worker)

    async def _restarted(self, name: str, below: dict[str, Any]) -> None:
        async with self._cluster(below, "full") as (cluster, worker):
            await self._fill(cluster, worker)
        async with self._cluster(below, "full") as (cluster, worker):
            await self._row(f"KV from {name}", cluster, worker)

    @asynccontextmanager
    async def _cluster(self, below: dict[str, Any], checks: str) -> AsyncIterator[tuple["LocalCluster", WorkerService]]:
        from kvrelay.cluster.launch.local import local_cluster

        cache = CacheSettings.model_validate({"host_memory": self._kv_bytes, "prefetch": "wait", **below})
        settings = self._verifier.settings_over("auto", checks).model_copy(update={"cache": cache})
        async with local_cluster(settings, self._model_dir, num_prefill=0) as cluster:
            yield cluster, cluster.inside[0]

    async def _fill(self, cluster: "LocalCluster", worker: WorkerService) -> None:
        for _ in range(_OFFERS):
            for case in self._verifier.cases:
                await self._verifier.tokens_of(cluster, case)
            await _settle(worker)

    async def _row(self, name: str, cluster: "LocalCluster", worker: WorkerService) -> None:
        row, hits = self._verifier.add_row(name), 0
        before = await _brought_up(worker)
        for index, case in enumerate(self._verifier.cases):
            tokens, cached = await self._verifier.tokens_of(cluster, case)
            hits += cached > 0
            row.count(case.name, self._verifier.expected(index), tokens)
        tokens_up = await _brought_up(worker) - before
        row.claim(
            holds=tokens_up > 0, note=f"{tokens_up} tokens came up, {hits} of {len(self._verifier.cases)} prompts hit"
        )

    async def _rotten_row(self, name: str, cluster: "LocalCluster", worker: WorkerService) -> None:
        """Bytes that changed in the host tier, through which all KV comes up, are never decoded from."""
        row = self._verifier.add_row(f"changed bytes refused ({name})")
        tokens, found = await self._with_rot(cluster, worker)
        row.count("3 blocks", self._expected_of("3 blocks"), tokens)
        row.claim(holds=found > 0, note=f"{found} blocks found wrong, the prompt was computed anew")

    async def _control_row(self, name: str, cluster: "LocalCluster", worker: WorkerService) -> None:
        """The oracle itself can fail."""
        row = self._verifier.add_row(f"changed bytes with checks off change the answer ({name})")
        tokens, _ = await self._with_rot(cluster, worker)
        changed = tokens != self._expected_of("3 blocks")
        row.claim(holds=changed, note="the answer changed" if changed else "UNDETECTED: the same answer from wrong KV")

    async def _with_rot(self, cluster: "LocalCluster", worker: WorkerService) -> tuple[list[int], int]:
        """(tokens, blocks found wrong) of a prompt whose KV was changed in the host tier."""
        case = self._case("3 blocks")
        await self._verifier.tokens_of(cluster, case)
        await _settle(worker)
        before = await worker.thread.call(lambda engine: _tiers(engine).sums.corrupt)
        await worker.thread.call(_rot)
        await worker.thread.call(_forget_pool)
        tokens, _ = await self._verifier.tokens_of(cluster, case)
        await _settle(worker)
        return tokens, await worker.thread.call(lambda engine: _tiers(engine).sums.corrupt) - before

    def _case(self, name: str) -> Any:
        return next(case for case in self._verifier.cases if case.name == name)

    def _expected_of(self, name: str) -> list[int]:
        return self._verifier.expected([case.name for case in self._verifier.cases].index(name))


def _tiers(engine: Engine) -> TierController:
    assert engine.tiers is not None
    return engine.tiers.tiers


def _forget_pool(engine: Engine) -> None:
    engine.pool.reset_cache()


def _forget_memory(engine: Engine) -> None:
    engine.reset_cache()


def _rot(engine: Engine) -> None:
    """Change every byte of what the host tier holds: exponents, too."""
    tiers = _tiers(engine)
    for digest in tiers.index.hashes():
        slot = tiers.index.slot(digest)
        assert slot is not None
        view = tiers.slab.slot(slot)
        view[:] = bytes(byte ^ 0x5A for byte in view[:4096]) + bytes(view[4096:])


async def _brought_up(worker: WorkerService) -> int:
    return await worker.thread.call(lambda engine: engine.load().tier_hit_tokens)


async def _settle(worker: WorkerService) -> None:
    """Until nothing is on its way between the worker's tiers."""
    async with asyncio.timeout(_SETTLE_S):
        while not await worker.thread.call(lambda engine: _tiers(engine).is_idle):
            await asyncio.sleep(0.02)
