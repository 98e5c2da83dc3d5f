"""Workers as plain processes of this machine, without Ray: for `kvrelay verify`, tests and benchmarks.

They run the classes that Ray Serve hosts, started by `python -m kvrelay.cluster.launch.local`. A child ends when its
parent does, because its standard input closes.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvrelay import tracing
from kvrelay.cluster.store.process import ProcessStore, spawn_store
from kvrelay.cluster.store.remote_store import ClusterStores
from kvrelay.config import Settings, settings_from
from kvrelay.engine.worker.build import WorkerOptions
from kvrelay.engine.worker.service import WorkerService
from kvrelay.errors import KvrelayError, WorkerLost
from kvrelay.kvcache.stores.placement import StoreAddress
from kvrelay.kvcache.stores.remote import CLUSTER
from kvrelay.plane.reports import WorkerInfo
from kvrelay.router.decision.router import Router
from kvrelay.serve.requests.dispatcher import Dispatcher
from kvrelay.serve.workers.queries import run_in_slices
from kvrelay.serve.workers.worker_link import Member
from kvrelay.types import Role

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
START_TIMEOUT_S = 120.0


def make_worker(
    role: Role,
    settings: Settings,
    model_dir: Path,
    secret: bytes,
    worker_id: str,
    cores: tuple[int, ...] | None,
    stores: Sequence[StoreAddress] = (),
) -> WorkerService:
    """A worker of either role on the loopback address; not started."""
    from kvrelay.decode.worker import DecodeWorker
    from kvrelay.prefill.worker import PrefillWorker

    kind = PrefillWorker if role is Role.PREFILL else DecodeWorker
    clients = None
    if settings.cache.remote == CLUSTER:
        clients = ClusterStores(settings, secret, worker_id=worker_id, host=HOST)
        clients.set_nodes(stores)
    options = WorkerOptions(
        settings=settings,
        model_dir=model_dir,
        model_name=model_dir.name,
        worker_id=worker_id,
        node_id="local",
        secret=secret,
        host=HOST,
        cores=cores,
        cluster_store=clients,
    )
    return kind(options)


async def start_worker(worker: WorkerService) -> WorkerInfo:
    """worker.start(); with a cluster store, the worker also serves its host tier to other workers."""
    info = await worker.start()
    if isinstance(worker.cluster_store, ClusterStores):
        await worker.cluster_store.share_host_tier(worker)
    return info


@dataclass(slots=True)
class ProcessWorker:
    """A worker in a child process."""

    process: asyncio.subprocess.Process
    member: Member

    @property
    def pid(self) -> int:
        return self.process.pid

    async def aclose(self) -> None:
        """Close the process's input, which ends it; kill it after 15 s."""
        if self.process.returncode is None and self.process.stdin is not None:
            self.process.stdin.close()
            try:
                async with asyncio.timeout(15.0):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
        await self.process.wait()


async def spawn_worker(
    role: Role,
    settings: Settings,
    model_dir: Path,
    secret: bytes,
    worker_id: str,
    cores: tuple[int, ...] | None = None,
    stores: Sequence[StoreAddress] = (),
) -> ProcessWorker:
    """Start a worker process and wait until it listens. Raises WorkerLost with its error."""
    config = {
        "role": str(role),
        "settings": settings.model_dump(),
        "model_dir": str(model_dir),
        "secret": secret.hex(),
        "worker_id": worker_id,
        "cores": cores,
        "stores": [asdict(store) for store in stores],
    }
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "NIXL_LOG_LEVEL": "WARN"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvrelay.cluster.launch.local",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(config).encode() + b"\n")
    line = b""
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while line := await process.stdout.readline():
                if line.startswith(b"{"):
                    break
    except TimeoutError:
        process.kill()
    if not line:
        await process.wait()
        raise WorkerLost(worker_id, f"ended while starting (exit code {process.returncode})")
    answer = json.loads(line)
    if "error" in answer:
        await process.wait()
        raise WorkerLost(worker_id, answer["error"])
    return ProcessWorker(process, Member(worker_id, str(role), HOST, answer["port"]))


@dataclass(slots=True)
class LocalCluster:
    """Prefill processes, decode workers in this process or in processes of their own, and a dispatcher."""

    dispatcher: Dispatcher
    secret: bytes
    prefill: list[ProcessWorker] = field(default_factory=list)
    decode: list[ProcessWorker] = field(default_factory=list)
    inside: list[WorkerService] = field(default_factory=list)  # decode workers in this process
    stores: list[ProcessStore] = field(default_factory=list)  # nodes of the KV store, under `cache.remote: cluster`

    @property
    def members(self) -> list[Member]:
        own = [
            Member(worker.worker_id, str(worker.role), HOST, worker.info.port) for worker in self.inside if worker.info
        ]
        return [worker.member for worker in [*self.prefill, *self.decode]] + own

    @contextlib.asynccontextmanager
    async def another_ingress(self, settings: Settings) -> AsyncIterator[Dispatcher]:
        """A second ingress over the same workers, connected to all of them, with an empty state."""
        dispatcher = Dispatcher(_router(settings), self.secret, settings)
        try:
            await dispatcher.start()
            dispatcher.workers.set_members(self.members)
            await _all_up(dispatcher, len(self.members))
            yield dispatcher
        finally:
            await dispatcher.aclose()

    async def pool_leaks(self, within_s: float = 10.0) -> list[str]:
        """The decode workers of this process whose pools still have blocks in use after `within_s`, with the reason.

        Blocks of a failed transfer stay in quarantine while one of its reads is in flight.
        """
        end_s = time.monotonic() + within_s
        while (problems := await self._pool_problems()) and time.monotonic() < end_s:
            await asyncio.sleep(0.05)
        return problems

    async def _pool_problems(self) -> list[str]:
        problems: list[str] = []
        for worker in self.inside:
            try:
                await worker.thread.call(lambda engine: engine.check())
                used = await worker.thread.call(lambda engine: engine.pool.counts().used)
            except AssertionError as error:
                problems.append(f"{worker.worker_id}: {error}")
                continue
            if used:
                problems.append(f"{worker.worker_id}: {used} blocks are still in use")
        return problems


@contextlib.asynccontextmanager
async def local_cluster(
    settings: Settings,
    model_dir: Path,
    *,
    num_prefill: int = 1,
    num_decode: int = 0,
    num_inside: int = 1,
    num_stores: int = 1,
    cores: Sequence[tuple[int, ...] | None] = (),
    **patience: Any,
) -> AsyncIterator[LocalCluster]:
    """A running cluster, stopped at the end of the context.

    Args:
        num_inside: decode workers in this process, where a test can inspect their pools.
        num_stores: nodes of the KV store, where `cache.remote` is `cluster`.
        cores: of the prefill processes, then the decode processes; those without are not pinned.
        patience: `retry_budget` and `reserve_timeout_s` of the Dispatcher.
    """
    secret = secrets.token_bytes(32)
    pins = iter(cores)
    cluster = LocalCluster(Dispatcher(_router(settings), secret, settings, **patience), secret)
    try:
        if settings.cache.remote == CLUSTER:
            cluster.stores = await _spawn_stores(num_stores, settings, secret)
        nodes = [store.address for store in cluster.stores]
        roles = [(Role.PREFILL, i) for i in range(num_prefill)] + [(Role.DECODE, i) for i in range(num_decode)]
        starting = [
            spawn_worker(role, settings, model_dir, secret, f"{role}-{index}", next(pins, None), nodes)
            for role, index in roles
        ]
        cluster.inside = [
            make_worker(Role.DECODE, settings, model_dir, secret, f"inside-{i}", None, nodes) for i in range(num_inside)
        ]
        outcomes = await asyncio.gather(*starting, *map(start_worker, cluster.inside), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, ProcessWorker):
                (cluster.prefill if outcome.member.role == Role.PREFILL else cluster.decode).append(outcome)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        await cluster.dispatcher.start()
        cluster.dispatcher.workers.set_members(cluster.members)
        await _all_up(cluster.dispatcher, len(cluster.members))
        yield cluster
    finally:
        await cluster.dispatcher.aclose()
        await asyncio.gather(*(worker.aclose() for worker in [*cluster.prefill, *cluster.decode]))
        for inside in cluster.inside:
            await inside.aclose()
        await asyncio.gather(*(store.aclose() for store in cluster.stores))


def _router(settings: Settings) -> Router:
    return Router(
        settings.router,
        tokens_per_hash=settings.tokens_per_hash,
        max_waiting=settings.engine.max_waiting,
        slo=settings.slo,
        has_store=settings.cache.is_shared,
        schedule=run_in_slices,
    )


async def _all_up(dispatcher: Dispatcher, count: int) -> None:
    async with asyncio.timeout(30.0):
        await dispatcher.workers.wait_for(lambda d: len(d.live_workers()) == count)


async def _spawn_stores(count: int, settings: Settings, secret: bytes) -> list[ProcessStore]:
    """`count` nodes that know each other. Raises WorkerLost."""
    starting = [spawn_store(f"store-{index}", settings, secret, HOST) for index in range(count)]
    outcomes = await asyncio.gather(*starting, return_exceptions=True)
    stores = [outcome for outcome in outcomes if isinstance(outcome, ProcessStore)]
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            await asyncio.gather(*(store.aclose() for store in stores))
            raise outcome
    for store in stores:
        store.set_nodes([other.address for other in stores])
    return stores


def main() -> int:
    """One worker's process: read its configuration from standard input, serve until that closes."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    return asyncio.run(_child())


async def _child() -> int:
    config = json.loads(sys.stdin.buffer.readline())
    worker = make_worker(
        Role(config["role"]),
        settings_from(config["settings"]),
        Path(config["model_dir"]),
        bytes.fromhex(config["secret"]),
        config["worker_id"],
        tuple(config["cores"]) if config["cores"] else None,
        [StoreAddress(**store) for store in config["stores"]],
    )
    tracing.configure(worker.worker_id, config["role"])
    try:
        info = await start_worker(worker)
    except KvrelayError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    print(json.dumps({"port": info.port}), flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    await worker.aclose()
    await asyncio.to_thread(tracing.shutdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
