"""Which cluster a command addresses: the given URLs, or those of a cluster that runs on this machine.

Each running `kvrelay serve` has a file with its addresses in the cache folder, read by the other commands.
"""

import contextlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from kvrelay.cluster.errors import ServerUnreachable
from kvrelay.cluster.launch.probe import server_root
from kvrelay.environment import cache_dir

DEFAULT_API = "http://127.0.0.1:8000"
DEFAULT_DASHBOARD = "http://127.0.0.1:8265"


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


def endpoints(url: str | None, dashboard: str | None) -> tuple[str, str]:
    """API and dashboard URL: as given, else those of this machine's newest matching cluster, else the defaults.

    Raises:
        ConfigError: a given URL is no address.
    """
    url, dashboard = url and server_root(url), dashboard and server_root(dashboard)
    for known in running():
        if url in (None, known.api_url) and dashboard in (None, known.dashboard_url):
            return known.api_url, known.dashboard_url
    return url or DEFAULT_API, dashboard or DEFAULT_DASHBOARD


def other_clusters(api_url: str) -> str | None:
    """A line that lists this machine's other clusters; None when there are none."""
    urls = [known.api_url for known in running() if known.api_url != api_url]
    return f"also running here: {', '.join(urls)} (choose with --url)" if urls else None


@contextmanager
def addressed(url: str | None, dashboard: str | None = None) -> Iterator[tuple[str, str]]:
    """API and dashboard URL, for requests made inside the context.

    Adds how to start a cluster to an error that none answers, where `kvrelay serve` has started none here.
    """
    try:
        yield endpoints(url, dashboard)
    except ServerUnreachable as error:
        if running():
            raise
        raise ServerUnreachable(
            f"{error}. Start a cluster with `kvrelay serve`, or give its address with --url"
        ) from error
