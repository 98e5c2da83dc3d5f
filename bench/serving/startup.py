"""From a fresh clone to the first streamed token with `make serve`, and a second start; the start of one more worker.

    python -m bench.serving.startup [--repo .] [--port 8765] [--second-only FOLDER] [--no-pip-cache] [--json FILE]
    python -m bench.serving.startup --worker [--rounds 3] [--model M] [--dtype bfloat16] [--json FILE]

Clones the repository (committed state) into a temporary folder, with a cache folder of its own, so that
the environment, the model and compiled kernels are all made anew; pip's download cache stays unless
--no-pip-cache. Each start waits for the line with the `curl` command, streams one completion, presses
Ctrl-C, and checks that no process is left: every process inherits a mark in its environment.
Goals: 300 s from the clone, 40 s for a second start.

--worker: a cluster of one worker (aggregated) runs, and gets a second one, `--rounds` times with the weights packed
before (prepared) and not, in turn; a plain process (kvrelay.cluster.launch.local) likewise. Phases: until Ray has
started the process (negative: it had one ready), until its replica is listed as warming (Python, Ray and Serve), until
it takes requests (torch, weights, first steps). CPU seconds are the process's, user and system, until then: they do not
grow when other programs run. Goal: 10 s when prepared.
"""

import argparse
import asyncio
import os
import queue
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

from bench.figures import show
from kvrelay.cluster.chaos import processes
from kvrelay.cluster.chaos.served import ServeProcess, running_serve
from kvrelay.cluster.deployments.serve_config import scaled
from kvrelay.cluster.launch.dashboard import RayDashboard
from kvrelay.cluster.launch.http_json import request_json
from kvrelay.cluster.launch.local import spawn
from kvrelay.cluster.loadgen.client import LoadRequest, LoadResult, LoadTarget, open_session, send, served_model
from kvrelay.cluster.loadgen.stats import OK
from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint
from kvrelay.environment import cache_dir
from kvrelay.settings.engine import ModelSettings

WORKER_LIMIT_S = 120.0
GOALS_S = {"fresh clone": 300.0, "second start": 40.0}
MARK = "KVRELAY_BENCH_MARK"
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CURL = re.compile(r"\bcurl\b.*https?://", re.DOTALL)


def environment(folder: Path, mark: str, *, pip_cache: bool) -> dict[str, str]:
    """This one's, but for the virtual environment that runs this script, and with caches of its own."""
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    path = kept.get("PATH", "")
    if venv := os.environ.get("VIRTUAL_ENV"):
        path = os.pathsep.join(part for part in path.split(os.pathsep) if not part.startswith(venv))
    kept |= {MARK: mark, "PATH": path, "KVRELAY_CACHE": str(folder / "cache"), "PYTHONUNBUFFERED": "1"}
    return kept if pip_cache else {**kept, "PIP_NO_CACHE_DIR": "1"}


class Server:
    """One `make serve` in its own process group; its output is kept."""

    def __init__(self, clone: Path, port: int, env: dict[str, str]) -> None:
        command = ["make", "serve", f"ARGS=--port {port}"]
        self._process = subprocess.Popen(
            command, cwd=clone, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.output: list[str] = []
        threading.Thread(target=self._pump, daemon=True).start()

    def _pump(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(_ANSI.sub("", line.decode("utf-8", "replace")))
        self._lines.put(None)

    def wait_ready(self, deadline_s: float) -> None:
        """Return at the line with the curl command (the address may be on the next one). Exits on failure."""
        recent = ""
        while True:
            try:
                line = self._lines.get(timeout=max(deadline_s - time.monotonic(), 0.01))
            except queue.Empty:
                self.give_up("not ready in time")
            if line is None:
                self.give_up("`make serve` ended")
            self.output.append(line)
            recent = (recent + line)[-2000:]
            if _CURL.search(recent):
                return

    def give_up(self, why: str) -> None:
        self.kill()
        raise SystemExit(f"{why}; its last words:\n{''.join(self.output[-40:])}")

    def stop(self) -> float:
        """Ctrl-C, as a terminal sends it to the whole group; seconds until the process has ended."""
        start_s = time.monotonic()
        os.killpg(self._process.pid, signal.SIGINT)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.give_up("Ctrl-C did not end it in 60 s")
        return time.monotonic() - start_s

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


async def first_token(url: str) -> float:
    """Stream one short completion; seconds to its first token. Exits when it fails."""
    target, result = LoadTarget(url, served_model(url)), LoadResult()
    async with open_session(target) as session:
        job = LoadRequest(0, list(range(1000, 1064)), 8)
        record = await send(session, target, job, result, run_start_s=time.perf_counter())
    if record.outcome != OK or record.ttft_s is None:
        raise SystemExit(f"the first request failed: {record.outcome} {result.first_failure}")
    return record.ttft_s


def start(name: str, clone: Path, port: int, *, limit_s: float, pip_cache: bool, begun_s: float) -> dict[str, Any]:
    """One start, measured from `begun_s` (monotonic) on."""
    mark = uuid.uuid4().hex
    shared_before = set(os.listdir("/dev/shm"))
    server = Server(clone, port, environment(clone.parent, mark, pip_cache=pip_cache))
    try:
        server.wait_ready(time.monotonic() + limit_s)
        ready_s = time.monotonic() - begun_s
        ttft_s = asyncio.run(first_token(f"http://127.0.0.1:{port}"))
        total_s = time.monotonic() - begun_s
        stop_s = server.stop()
    finally:
        server.kill()
    left = processes.carrying(MARK, mark)
    names = sorted({found.name for pid in left if (found := processes.usage(pid)) is not None})
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    new_files = set(os.listdir("/dev/shm")) - shared_before
    return {
        "start": name,
        "ready s": ready_s,
        "first token s": total_s,
        "its TTFT ms": 1000 * ttft_s,
        "goal s": GOALS_S[name],
        "met": "yes" if total_s <= GOALS_S[name] else "no",
        "Ctrl-C s": stop_s,
        "left processes": ", ".join(names) or "none",
        "left in /dev/shm": ", ".join(sorted(new_files)) or "none",
    }


# ---- one more worker


def own_cache(folder: Path) -> Path:
    """A cache folder with this machine's kernels and converted models, and no packed weights."""
    cache = folder / "cache"
    cache.mkdir()
    for name in ("native", "checkpoints"):
        (cache / name).symlink_to(cache_dir() / name)
    return cache


def worker_starts(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row for each start."""
    prepare_checkpoint(ModelSettings(source=options.model))
    cache, rows = own_cache(folder), []
    flags = ("--model", options.model, "--dtype", options.dtype, "--prefill", "0", "--decode", "1")
    environment = {"KVRELAY_CACHE": str(cache)}
    with running_serve(folder, *flags, environment=environment) as served:
        for number in range(2 * options.rounds):
            if not (cache / "packed").exists():
                raise SystemExit(f"{options.dtype} weights are not packed on this processor: choose another --dtype")
            if not (is_prepared := number % 2 == 0):
                shutil.rmtree(cache / "packed")
            rows.append({"start": _start_name("replica", is_prepared), **one_more_replica(served)})
    os.environ.update(environment)
    for number in range(2 * options.rounds):
        if not (is_prepared := number % 2 == 0):
            shutil.rmtree(cache / "packed")
        rows.append({"start": _start_name("process", is_prepared), **asyncio.run(one_process(options))})
    return rows


def _start_name(what: str, is_prepared: bool) -> str:
    return f"{what}, {'prepared' if is_prepared else 'packs its weights'}"


def one_more_replica(served: ServeProcess) -> dict[str, Any]:
    """Scale to two workers, and back to one. Exits when the second one does not come."""
    dashboard, known = RayDashboard(served.dashboard), {one["pid"] for one in _status(served)["workers"]}
    asked_s, listed_s = time.time(), None
    dashboard.deploy(scaled(dashboard.details(), {"decode": 2}))
    while not (new := [one for one in _status(served)["workers"] if one.get("pid") not in {None, *known}]):
        if listed_s is None and _status(served)["warming"]:
            listed_s = time.time()
        if time.time() - asked_s > WORKER_LIMIT_S:
            raise SystemExit("the second worker did not start")
        time.sleep(0.05)
    ready_s, pid = time.time(), int(new[0]["pid"])
    found, born_s = processes.usage(pid), psutil.Process(pid).create_time()
    assert found is not None, "it has just answered"
    dashboard.deploy(scaled(dashboard.details(), {"decode": 1}))
    while _decode_states(dashboard) != ["RUNNING"]:
        time.sleep(0.5)
    listed_s = listed_s or ready_s
    return {
        "asked to process s": born_s - asked_s,
        "to listed s": listed_s - max(born_s, asked_s),
        "to ready s": ready_s - listed_s,
        "all s": ready_s - asked_s,
        "CPU s": found.cpu_s,
        "PSS MiB": found.pss_bytes / (1 << 20),
    }


def _decode_states(dashboard: RayDashboard) -> list[str]:
    return [one["state"] for one in dashboard.application()["deployments"]["decode"]["replicas"]]


def _status(served: ServeProcess) -> dict[str, Any]:
    return request_json("GET", f"{served.url}/kvrelay/status", timeout_s=30.0)


async def one_process(options: argparse.Namespace) -> dict[str, Any]:
    """A decode worker without Ray."""
    settings, begun_s = settings_from({"model": {"source": options.model, "dtype": options.dtype}}), time.monotonic()
    child = await spawn("decode", settings, secrets.token_bytes(32), "w", prepare_checkpoint(settings.model))
    ready_s, found = time.monotonic(), processes.usage(child.pid)
    await child.aclose()
    assert found is not None, "it has just answered"
    return {"all s": ready_s - begun_s, "CPU s": found.cpu_s, "PSS MiB": found.pss_bytes / (1 << 20)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", default=str(Path(__file__).resolve().parents[2]), help="what to clone")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--second-only", type=Path, help="a checkout with its .venv: time a second start only")
    parser.add_argument("--limit-s", type=float, default=1200.0, help="give up after so long")
    parser.add_argument("--no-pip-cache", action="store_true")
    parser.add_argument("--keep", action="store_true", help="leave the temporary folder")
    parser.add_argument("--worker", action="store_true", help="time the start of one more worker")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="--worker only")
    parser.add_argument("--dtype", default="bfloat16", help="--worker only")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvrelay-startup-"))
    rows: list[dict[str, Any]] = []
    try:
        if options.worker:
            show("start of one more worker", worker_starts(options, folder), options.json)
            return
        clone = options.second_only or folder / "kvrelay"
        common = {"limit_s": options.limit_s, "pip_cache": not options.no_pip_cache}
        if options.second_only is None:
            begun_s = time.monotonic()
            subprocess.run(["git", "clone", "--quiet", options.repo, str(clone)], check=True)
            rows.append(start("fresh clone", clone, options.port, begun_s=begun_s, **common))
        rows.append(start("second start", clone, options.port, begun_s=time.monotonic(), **common))
        show("make serve to the first streamed token", rows, options.json)
    finally:
        if options.keep:
            print(f"kept {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
