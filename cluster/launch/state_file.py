"""The addresses of running `kvrelay serve` processes: a file for each in the cache folder, read by the other
commands.
"""

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from kvrelay.environment import cache_dir


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """One `kvrelay serve`. Its URLs have no trailing slash."""

    pid: int
    api_url: str
    dashboard_url: str
    model: str


def _folder() -> Path:
    return cache_dir() / "running"


def note(cluster: RunningCluster) -> Path:
    """Write the file; `forget` takes its path."""
    path = _folder() / f"{cluster.pid}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(cluster)))
    return path


def forget(path: Path) -> None:
    path.unlink(missing_ok=True)


def running() -> list[RunningCluster]:
    """This user's clusters on this machine, newest first. Files of ended processes are removed."""
    found: list[tuple[float, RunningCluster]] = []
    for path in _folder().glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            cluster = RunningCluster(**json.loads(path.read_text()))
            if psutil.pid_exists(cluster.pid):
                found.append((path.stat().st_mtime, cluster))
            else:
                path.unlink(missing_ok=True)
    return [cluster for _, cluster in sorted(found, key=lambda pair: -pair[0])]
