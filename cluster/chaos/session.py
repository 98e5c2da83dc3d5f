"""One session: a cluster of its own is started, harmed and ended, and what came of it is reported."""

import asyncio
import json
import time
from collections.abc import Container, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from kvrelay.cluster.chaos.clients import ChaosClients, catalogue
from kvrelay.cluster.chaos.clock import clock_library
from kvrelay.cluster.chaos.cluster import COUNTS, Cluster, ServeCluster
from kvrelay.cluster.chaos.faults import CLOCK_STEP, FAULTS, FULL_DISK, STORE, FaultKind, FaultTargets, small_disk
from kvrelay.cluster.chaos.history import StreamHistory
from kvrelay.cluster.chaos.hosts.cluster import ClusterOnHosts
from kvrelay.cluster.chaos.hosts.faults import HOST_FAULTS
from kvrelay.cluster.chaos.report import ChaosReport, plot, render
from kvrelay.cluster.chaos.run import ChaosObservations, ChaosRun, shared_left
from kvrelay.errors import ConfigError

SETTINGS = {
    "model.max_model_len": 1024,
    "engine.num_threads": 1,
    "cache.disk_size": "16MiB",
    "cache.remote": "cluster",
    "store.disk_size": "16MiB",
}
# of the pool and the host tier, and of the store: small, so that blocks are evicted, and its disk is read
TINY_KV, OTHER_KV = ("16MiB", "4MiB"), ("128MiB", "32MiB")


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """What one run does: `rate` in faults per second; `model` None: a tiny one with random weights."""

    seconds: float
    seed: int
    kinds: tuple[str, ...]
    rate: float
    num_clients: int
    model: str | None
    num_hosts: int = 1


def kinds_of(names: str, num_hosts: int) -> tuple[str, ...]:
    """The kinds of faults that `names` lists, with commas between them; "all". Raises ConfigError."""
    known = (*FAULTS, *(HOST_FAULTS if num_hosts > 1 else ()))
    kinds = known if names == "all" else tuple(dict.fromkeys(names.split(",")))
    if unknown := [kind for kind in kinds if kind not in known]:
        hint = "" if num_hosts > 1 else f"; with --hosts 2 also from {', '.join(HOST_FAULTS)}"
        raise ConfigError(f"--faults: unknown {', '.join(unknown)}; choose from {', '.join(known)}{hint}")
    return kinds


def chaos(options: ChaosOptions, folder: Path | None, console: Console, *, shows_growth: bool) -> bool:
    """Print the report, and write it into `folder`; whether all was fine. Raises KvrelayError: no cluster started."""
    report, log = _session(options, console)
    render(report, console, shows_growth=shows_growth)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "serve.log").write_text(log)
        (folder / "report.json").write_text(json.dumps(asdict(report) | {"is_fine": report.is_fine}, indent=1) + "\n")
        plot(report, folder / "report.png")
        console.print(f"report    {folder}", markup=False, highlight=False, soft_wrap=True)
    return report.is_fine


def _session(options: ChaosOptions, console: Console) -> tuple[ChaosReport, str]:
    """The report and the cluster's log."""
    from kvrelay.engine.checkpoints.tiny import tiny_checkpoint  # torch

    left_out = dict[str, str]()
    with ExitStack() as stack:
        folder = "/var/tmp" if options.num_hosts > 1 else None  # each host has a /tmp of its own
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="kvrelay-chaos-", dir=folder)))
        disk = scratch / "disk"
        if not stack.enter_context(small_disk(disk)):
            left_out[FULL_DISK] = "this user may not mount a file system"
        source = options.model or str(tiny_checkpoint("llama", scratch / "tiny-llama"))
        kv, store = OTHER_KV if options.model else TINY_KV
        own = {"engine.kv_memory": kv, "cache.host_memory": kv, "cache.disk_path": str(disk)}
        own |= {"store.memory": store, "store.disk_path": str(disk / STORE)}
        cluster: Cluster
        if options.num_hosts > 1:
            cluster = hosts = ClusterOnHosts(options.num_hosts, source, COUNTS, SETTINGS | own)
            on_hosts = {kind: make(hosts) for kind, make in HOST_FAULTS.items()}
        else:
            cluster, on_hosts = ServeCluster(source, COUNTS, SETTINGS | own), {}
        if library := clock_library(scratch):
            cluster.use_clock(library)
        else:
            left_out[CLOCK_STEP] = "there is no C compiler"
        with console.status("starting a cluster"):
            stack.enter_context(cluster)
        with console.status(f"faults for {options.seconds:g} s"):
            seen, history = asyncio.run(_harm(cluster, options, on_hosts, left_out, disk))
        with console.status("stopping the cluster"):
            left = cluster.stop()
        problems = history.problems(seen.ingress_kills_s)  # counts the excused ones, too
        report = ChaosReport(
            model=Path(source).name,
            seed=options.seed,
            seconds=options.seconds,
            counts=dict(history.counts),
            faults=sorted(seen.faults, key=lambda one: one.at_s),
            problems=problems,
            leaks=[*seen.leaks, *left, *shared_left(seen.shared_files)],
            tokens_per_s=dict(history.tokens_per_s),
            samples=seen.samples,
            left_out={kind: why for kind, why in left_out.items() if kind in options.kinds},
        )
        return report, cluster.log


async def _harm(
    cluster: Cluster, options: ChaosOptions, on_hosts: Mapping[str, FaultKind], left_out: Container[str], disk: Path
) -> tuple[ChaosObservations, StreamHistory]:
    """Learn the unharmed cluster's answers, then run clients and faults."""
    started_s, history = time.monotonic(), StreamHistory()

    def clock() -> float:
        return time.monotonic() - started_s

    model, status = await asyncio.to_thread(cluster.model), await asyncio.to_thread(cluster.status)
    requests = catalogue(status["max_model_len"], seed=options.seed)
    async with ChaosClients(cluster.url, model, requests, history, clock, options.seed) as clients:
        await clients.learn()
        run = ChaosRun(cluster, clients, history, clock)
        targets = FaultTargets(cluster, clients, disk)
        faults = {kind: make(targets) for kind, make in FAULTS.items()} | dict(on_hosts)
        await run.run(
            {kind: faults[kind] for kind in options.kinds if kind not in left_out},
            num_clients=options.num_clients,
            seconds=options.seconds,
            rate=options.rate,
            seed=options.seed,
        )
    return run.seen, history
