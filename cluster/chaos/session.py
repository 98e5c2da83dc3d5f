"""One session: a cluster of its own is started, harmed and ended, and what came of it is reported."""

import asyncio
import json
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from kvrelay.cluster.chaos.clients import ChaosClients, catalogue
from kvrelay.cluster.chaos.cluster import COUNTS, Cluster, ServeCluster
from kvrelay.cluster.chaos.faults import FAULTS, FULL_DISK, FaultTargets, small_disk
from kvrelay.cluster.chaos.history import StreamHistory
from kvrelay.cluster.chaos.report import ChaosReport, plot, render
from kvrelay.cluster.chaos.run import ChaosObservations, ChaosRun, shared_left
from kvrelay.errors import ConfigError

SETTINGS = {"model.max_model_len": 1024, "engine.num_threads": 1, "cache.disk_size": "16MiB"}
TINY_KV, OTHER_KV = "16MiB", "128MiB"  # of the pool and of the host tier: small, so that blocks are evicted


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """What one run does: `rate` in faults per second; `model` None: a tiny one with random weights."""

    seconds: float
    seed: int
    kinds: tuple[str, ...]
    rate: float
    num_clients: int
    model: str | None


def kinds_of(names: str) -> tuple[str, ...]:
    """The kinds of faults that `names` lists, with commas between them; "all". Raises ConfigError."""
    kinds = tuple(FAULTS) if names == "all" else tuple(dict.fromkeys(names.split(",")))
    if unknown := [kind for kind in kinds if kind not in FAULTS]:
        raise ConfigError(f"--faults: unknown {', '.join(unknown)}; choose from {', '.join(FAULTS)}")
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

    kinds, left_out = options.kinds, dict[str, str]()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="kvrelay-chaos-")))
        disk = scratch / "disk"
        if not stack.enter_context(small_disk(disk)) and FULL_DISK in kinds:
            left_out[FULL_DISK] = "this user may not mount a file system"
            kinds = tuple(kind for kind in kinds if kind != FULL_DISK)
        source = options.model or str(tiny_checkpoint("llama", scratch / "tiny-llama"))
        kv = OTHER_KV if options.model else TINY_KV
        own = {"engine.kv_memory": kv, "cache.host_memory": kv, "cache.disk_path": disk}
        with console.status("starting a cluster"):
            cluster = stack.enter_context(ServeCluster(source, COUNTS, SETTINGS | own))
        with console.status(f"faults for {options.seconds:g} s"):
            seen, history = asyncio.run(_harm(cluster, options, kinds, disk))
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
            left_out=left_out,
        )
        return report, cluster.log


async def _harm(
    cluster: Cluster, options: ChaosOptions, kinds: tuple[str, ...], disk: Path
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
        await run.run(
            {kind: FAULTS[kind](FaultTargets(cluster, clients, disk)) for kind in kinds},
            num_clients=options.num_clients,
            seconds=options.seconds,
            rate=options.rate,
            seed=options.seed,
        )
    return run.seen, history
