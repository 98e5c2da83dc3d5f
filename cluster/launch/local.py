"""Workers and store nodes as plain processes of this machine, without Ray: for `kvrelay verify`, tests and benchmarks.

They run the classes that Ray hosts, started by `python -m kvrelay.cluster.launch.local`. A child ends when its parent
does, because its standard input closes. There it reads what it is to be, then lines with all live nodes of the store.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvrelay import tracing
from kvrelay.cluster.deployments.service import worker_service
from kvrelay.cluster.registry.members import STORE_ROLE
from kvrelay.cluster.store.remote_store import ClusterStores
from kvrelay.cluster.store.service import StoreService, make_service
from kvrelay.config import Settings, settings_from
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.build import WorkerOptions
from kvrelay.engine.worker.service import WorkerService
from kvrelay.errors import KvrelayError, WorkerLost
from kvrelay.kvcache.stores.placement import StoreAddress
from kvrelay.kvcache.stores.remote import CLUSTER
from kvrelay.plane.reports import WorkerInfo
from kvrelay.serve.requests.dispatcher import Dispatcher
from kvrelay.serve.workers.queries import make_router
from kvrelay.serve.workers.worker_link import Member
from kvrelay.types import Role

HOST = "127.0.0.1"
START_TIMEOUT_S = 120.0  # without a sign of progress: compiling kernels may take longer than all the rest
_STARTING = b"starting: "


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
    clients = None
    if settings.cache.remote == CLUSTER:
        clients = ClusterStores(settings, secret, worker_id=worker_id, host=HOST)
        clients.set_nodes(stores)
    options = WorkerOptions(
        settings=settings,
        model_dir=model_dir,
        model_name=model_dir.name,
        worker_id=worker_id,
        secret=secret,
        host=HOST,
        cores=cores,
        cluster_store=clients,
    )
    return worker_service(options, role)


async def start_worker(worker: WorkerService) -> WorkerInfo:
    """worker.start(); with a cluster store, the worker also serves its host tier to other workers."""
    info = await worker.start()
    if isinstance(worker.cluster_store, ClusterStores):
        await worker.cluster_store.share_host_tier(worker)
    return info


@dataclass(slots=True)
class LocalProcess:
    """A worker, or a node of the store, in a child process. `answer`: what it said when it listened."""

    process: asyncio.subprocess.Process
    name: str
    role: str
    answer: dict[str, Any]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def member(self) -> Member:
        """Of a worker."""
        return Member(self.name, self.role, HOST, self.answer["port"])

    @property
    def address(self) -> StoreAddress:
        """Of a node of the store."""
        return StoreAddress(**self.answer)

    def set_nodes(self, nodes: Sequence[StoreAddress]) -> None:
        """Send a node of the store all live nodes; no effect on a process that has ended."""
        if self.process.stdin is not None and self.process.returncode is None:
            self.process.stdin.write(json.dumps([asdict(node) for node in nodes]).encode() + b"\n")

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


async def spawn(
    role: str,
    settings: Settings,
    secret: bytes,
    name: str,
    model_dir: Path = Path(),
    cores: tuple[int, ...] | None = None,
    stores: Sequence[StoreAddress] = (),
) -> LocalProcess:
    """Start a worker, or a node of the store (STORE_ROLE), and wait until it listens. Raises WorkerLost with its error.

    model_dir, cores, stores: of a worker.
    """
    config = {
        "role": str(role),
        "settings": settings.model_dump(),
        "model_dir": str(model_dir),
        "secret": secret.hex(),
        "name": name,
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
        async with asyncio.timeout(START_TIMEOUT_S) as limit:
            while line := await process.stdout.readline():
                if line.startswith(_STARTING):
                    limit.reschedule(asyncio.get_running_loop().time() + START_TIMEOUT_S)
                elif line.startswith(b"{"):
                    break
    except TimeoutError:
        process.kill()
    if not line:
        await process.wait()
        raise WorkerLost(name, f"ended while starting (exit code {process.returncode})")
    answer = json.loads(line)
    if "error" in answer:
        await process.wait()
        raise WorkerLost(name, answer["error"])
    return LocalProcess(process, name, str(role), answer)


@dataclass(slots=True)
class LocalCluster:
    """Workers and store nodes in processes of their own, decode workers in this process, and a dispatcher."""

    dispatcher: Dispatcher
    secret: bytes
    processes: list[LocalProcess] = field(default_factory=list)
    inside: list[WorkerService] = field(default_factory=list)  # decode workers in this process

    @property
    def prefill(self) -> list[LocalProcess]:
        return self._of(Role.PREFILL)

    @property
    def decode(self) -> list[LocalProcess]:
        return self._of(Role.DECODE)

    def _of(self, role: str) -> list[LocalProcess]:
        return [process for process in self.processes if process.role == role]

    @property
    def members(self) -> list[Member]:
        own = [
            Member(worker.worker_id, str(worker.role), HOST, worker.info.port) for worker in self.inside if worker.info
        ]
        return [process.member for process in self.processes if process.role != STORE_ROLE] + own

    async def start(self, *starting: Awaitable[LocalProcess | WorkerInfo]) -> None:
        """Await all of them, keep the processes, which are to be closed, and raise the first error."""
        outcomes = await asyncio.gather(*starting, return_exceptions=True)
        self.processes += (outcome for outcome in outcomes if isinstance(outcome, LocalProcess))
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def pool_leaks(self, within_s: float = 10.0) -> list[str]:
        """The decode workers of this process whose pools still have blocks in use after `within_s`, with the reason.

        Blocks of a failed transfer stay in quarantine while one of its reads is in flight.
        """
        end_s = time.monotonic() + within_s
        while (problems := await self._pool_problems()) and time.monotonic() < end_s:
            await asyncio.sleep(0.05)
        return problems

    async def _pool_problems(self) -> list[str]:
        def problem(engine: Engine) -> str | None:
            try:
                engine.check()
            except AssertionError as error:
                return str(error)
            used = engine.pool.counts().used
            return f"{used} blocks are still in use" if used else None

        found = [(worker.worker_id, await worker.thread.call(problem)) for worker in self.inside]
        return [f"{name}: {why}" for name, why in found if why is not None]


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
    cluster = LocalCluster(Dispatcher(make_router(settings), secret, settings, **patience), secret)
    try:
        if settings.cache.remote == CLUSTER:
            await cluster.start(*(spawn(STORE_ROLE, settings, secret, f"store-{i}") for i in range(num_stores)))
        nodes = [store.address for store in cluster.processes]
        for store in cluster.processes:
            store.set_nodes(nodes)
        roles = [(Role.PREFILL, i) for i in range(num_prefill)] + [(Role.DECODE, i) for i in range(num_decode)]
        cluster.inside = [
            make_worker(Role.DECODE, settings, model_dir, secret, f"inside-{i}", None, nodes) for i in range(num_inside)
        ]
        await cluster.start(
            *(spawn(role, settings, secret, f"{role}-{i}", model_dir, next(pins, None), nodes) for role, i in roles),
            *map(start_worker, cluster.inside),
        )
        await cluster.dispatcher.start()
        cluster.dispatcher.workers.set_members(cluster.members)
        async with asyncio.timeout(30.0):
            await cluster.dispatcher.workers.wait_for(lambda one: len(one.live_workers()) == len(cluster.members))
        yield cluster
    finally:
        await cluster.dispatcher.aclose()
        await asyncio.gather(*(worker.aclose() for worker in [*cluster.prefill, *cluster.decode]))
        for inside in cluster.inside:
            await inside.aclose()
        await asyncio.gather(*(process.aclose() for process in cluster.processes))


def main() -> int:
    """One worker's process: read its configuration from standard input, serve until that closes."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    to_parent = logging.StreamHandler(sys.stdout)
    to_parent.setFormatter(logging.Formatter(f"{_STARTING.decode()}%(message)s"))
    logging.getLogger("kvrelay.cluster.compiling").addHandler(to_parent)
    return asyncio.run(_child())


async def _child() -> int:
    config = json.loads(sys.stdin.buffer.readline())
    settings, secret, name = settings_from(config["settings"]), bytes.fromhex(config["secret"]), config["name"]
    served: WorkerService | StoreService
    try:
        if config["role"] == STORE_ROLE:
            served = make_service(name, settings, secret, HOST)
            answer = asdict(await served.start())
        else:
            cores = tuple(config["cores"]) if config["cores"] else None
            stores = [StoreAddress(**store) for store in config["stores"]]
            from kvrelay.cluster.compiling.kernels import compile_missing  # imports torch, which a store does without

            await asyncio.to_thread(compile_missing, settings, Role(config["role"]), Path(config["model_dir"]))
            served = make_worker(Role(config["role"]), settings, Path(config["model_dir"]), secret, name, cores, stores)
            tracing.configure(name, config["role"])
            answer = {"port": (await start_worker(served)).port}
    except (KvrelayError, OSError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    print(json.dumps(answer), flush=True)
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        assert isinstance(served, StoreService)
        served.set_nodes([StoreAddress(**node) for node in json.loads(line)])
    await served.aclose()
    await asyncio.to_thread(tracing.shutdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
