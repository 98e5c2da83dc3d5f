"""Memory and idle CPU of a running cluster, process by process.

    python -m bench.serving.footprint [--pid PID-of-kvrelay-serve] [--seconds 30] [--json FILE]
    python -m bench.serving.footprint --bare    # Ray alone: started as by `kvrelay serve`, three empty deployments
    python -m bench.serving.footprint --workers 1 2 4    # of so many plain workers, with shared weights and own ones

Counts the given process (default: the one whose command line runs `kvrelay serve`), its descendants, and
every process of the same Ray session. Memory is PSS: shared pages are divided among their users, so the
sum is what the cluster takes. Leave the cluster idle meanwhile.

--workers starts plain worker processes, which share their packed weights or, as a control, cannot: their cache folder
has a file in the place of the folder of packed weights. The two take turns.
"""

import argparse
import asyncio
import contextlib
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.figures import show
from kvrelay.cluster.chaos import processes
from kvrelay.cluster.launch.local import spawn
from kvrelay.cluster.launch.ray_session import RaySession, free_port
from kvrelay.config import Settings, settings_from
from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint
from kvrelay.environment import cache_dir

_SESSION = re.compile(r"session_\d{4}-\d{2}-\d{2}_[\d_-]+")


def is_serve(line: list[str]) -> bool:
    """Whether a command line is `kvrelay serve` or `python -m kvrelay.cluster.commands.cli serve`."""
    starts = any(Path(part).name == "kvrelay" or part == "kvrelay.cluster.commands.cli" for part in line[:4])
    return starts and "serve" in line


def find_root() -> int:
    """The one process that runs `kvrelay serve`. Exits when there is none or more than one."""
    found = processes.find(is_serve)
    found = [pid for pid in found if processes.parent(pid) not in found]
    if len(found) != 1:
        raise SystemExit(f"{len(found)} processes run `kvrelay serve` ({found}): name one with --pid")
    return found[0]


def members(root: int) -> set[int]:
    """The cluster's processes: descendants, and processes that name the same Ray session."""
    family = processes.descendants(root)
    sessions = {name for pid in family for name in _SESSION.findall(" ".join(processes.command_line(pid)))}
    if sessions:
        family |= set(processes.find(lambda line: any(name in " ".join(line) for name in sessions)))
    return family


@contextlib.contextmanager
def bare_ray(settle_s: float = 20.0) -> Iterator[int]:
    """Ray and Serve as kvrelay starts them, with as many actors that do nothing. Yields the driver's pid."""
    session = RaySession(Settings())
    session.check_ports()
    try:
        session.start_ray()
        import ray
        from ray import serve

        class Nothing:
            """Keeps a process."""

        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": free_port("127.0.0.1")})
        for name in ("ingress", "prefill", "decode"):
            deployment = serve.deployment(Nothing, name=name, ray_actor_options={"num_cpus": 0})
            serve.run(deployment.bind(), name=name, route_prefix=f"/{name}")
        registry = ray.remote(num_cpus=0)(Nothing).remote()
        ray.get(registry.__ray_ready__.remote())
        time.sleep(settle_s)
        yield os.getpid()
    finally:
        session.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pid", type=int)
    parser.add_argument("--bare", action="store_true", help="start and measure Ray and Serve with empty deployments")
    parser.add_argument("--workers", type=int, nargs="+", help="start and measure so many plain workers")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="--workers only")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.workers:
        workers(options)
    elif options.bare:
        with bare_ray() as root:
            measure(root, options)
    else:
        measure(options.pid or find_root(), options)


def workers(options: argparse.Namespace) -> None:
    """Show the memory of as many workers as are asked for, with shared weights and own ones."""
    settings = settings_from({"model": {"source": options.model}, "engine": {"kv_memory": "64MiB"}})
    model_dir, rows = prepare_checkpoint(settings.model), []
    with tempfile.TemporaryDirectory() as folder:
        unshared = Path(folder)
        for name in ("native", "checkpoints"):
            (unshared / name).symlink_to(cache_dir() / name)
        (unshared / "packed").touch()
        caches = {"shared": str(cache_dir()), "own": str(unshared)}
        for count in options.workers:
            for weights, cache in caches.items():
                os.environ["KVRELAY_CACHE"] = cache
                found = asyncio.run(_usages(count, settings, model_dir))
                pss, rss, file = (sum(sizes) / (1 << 20) for sizes in zip(*found, strict=True))
                row = {"workers": count, "weights": weights, "PSS MiB": pss, "PSS MiB each": pss / count}
                rows.append({**row, "RSS MiB": rss, "of files, PSS MiB": file})
    show(f"memory of workers of {options.model}", rows, options.json)


async def _usages(count: int, settings: Settings, model_dir: Path) -> list[list[int]]:
    """PSS, RSS and the PSS of mapped files of each of so many workers, bytes."""
    secret = secrets.token_bytes(32)
    found = [await spawn("decode", settings, secret, f"w{number}", model_dir) for number in range(count)]
    try:
        return [processes.memory(one.pid, "Pss", "Rss", "Pss_File") for one in found]
    finally:
        await asyncio.gather(*(one.aclose() for one in found))


def measure(root: int, options: argparse.Namespace) -> None:
    """Show what the cluster of process `root` takes while `options.seconds` pass."""
    before = {pid: found for pid in members(root) if (found := processes.usage(pid)) is not None}
    start_s = time.monotonic()
    time.sleep(options.seconds)
    seconds = time.monotonic() - start_s
    after = {pid: found for pid in members(root) if (found := processes.usage(pid)) is not None}

    rows: list[dict[str, Any]] = []
    for pid, now in sorted(after.items(), key=lambda item: -item[1].pss_bytes):
        begun_s = before[pid].cpu_s if pid in before else 0.0
        share = 100 * (now.cpu_s - begun_s) / seconds
        rows.append({"process": now.name, "pid": pid, "PSS MiB": now.pss_bytes / (1 << 20), "CPU %": share})
    total_bytes = sum(now.pss_bytes for now in after.values())
    total_cpu = sum(row["CPU %"] for row in rows)
    rows.append({"process": "all", "pid": len(after), "PSS MiB": total_bytes / (1 << 20), "CPU %": total_cpu})
    show(f"footprint of {root} over {seconds:.0f} s", rows, options.json)
    if gone := before.keys() - after.keys():
        print(f"{len(gone)} processes ended meanwhile; their CPU is not counted")


if __name__ == "__main__":
    main()
