"""Which cluster a command addresses: the given URLs, or those of a cluster that runs on this machine.

Each running `kvrelay serve` has a file with its addresses in the cache folder, read by the other commands. For any
other cluster Ray's dashboard is the one address: Serve's details there say where the API listens.
"""

import contextlib
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from kvrelay.cluster.deployments.serve_config import applications, chosen_application
from kvrelay.cluster.errors import ClusterError, ServerUnreachable
from kvrelay.cluster.launch.dashboard import RayDashboard
from kvrelay.cluster.launch.http_json import auth_headers, request_json, server_root
from kvrelay.cluster.registry.names import APP_NAME
from kvrelay.environment import cache_dir, ray_dashboard_address

DEFAULT_API = "http://127.0.0.1:8000"
DASHBOARD_PORT = 8265
DEFAULT_DASHBOARD = f"http://127.0.0.1:{DASHBOARD_PORT}"
CONNECT_S = 3.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


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
    """Write the file, which is to be deleted when the cluster ends."""
    path = _folder() / f"{cluster.pid}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(cluster)))
    return path


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


class Endpoints:
    """One cluster's API and dashboard. The API's address is looked up at the dashboard when it is first wanted."""

    def __init__(
        self,
        api_url: str | None,
        dashboard_url: str,
        *,
        noted_api: str | None = None,
        default_api: str | None = None,
        app_name: str | None = None,
    ) -> None:
        """`noted_api`: where the API was: an ingress that is replaced listens on another port. `default_api`: where it
        may be although no dashboard answers. `app_name`: None: the only one there.
        """
        self.dashboard = RayDashboard(dashboard_url)
        self._api_url, self._noted_api, self._default_api = api_url, noted_api, default_api
        self._app_name = app_name

    @property
    def app_name(self) -> str:
        """Of the application in Serve. Raises ClusterError: there is none, or there are several."""
        self._app_name = chosen_application(self.dashboard.details(), self._app_name)
        return self._app_name

    @property
    def api_url(self) -> str:
        """Raises ClusterError: kvrelay is not deployed there, or its API is not reachable from here."""
        if self._api_url is None:
            self._api_url = self._found()
        return self._api_url

    def _found(self) -> str:
        if self._noted_api is not None and _accepts(self._noted_api):
            return self._noted_api
        try:
            return reachable(api_urls(self.dashboard.details(), self.dashboard.url, self._app_name))
        except ClusterError:
            if self._noted_api is not None:
                return self._noted_api
            if self._default_api is None or not _accepts(self._default_api):
                raise
            return self._default_api


def endpoints(url: str | None, address: str | None, app_name: str | None = None) -> Endpoints:
    """The cluster to address: as given, else as Ray's variable says, else this machine's newest matching cluster, else
    a Ray at its usual port here.

    `url` is of the API alone, `address` of Ray's dashboard, `app_name` names the application there.

    Raises ConfigError: a given one is no address.
    """
    url, variable = url and server_root(url), ray_dashboard_address()
    address = address or (None if url else variable)
    address = address and server_root(address, default_port=DASHBOARD_PORT)
    for known in running():
        if url in (None, known.api_url) and address in (None, known.dashboard_url):
            noted = known.api_url if app_name in (None, APP_NAME) else None
            return Endpoints(url, known.dashboard_url, noted_api=noted, app_name=app_name or APP_NAME)
    if address is None and url and variable:
        address = server_root(variable, default_port=DASHBOARD_PORT)
    default_api = None if url or address or app_name else DEFAULT_API
    return Endpoints(url, address or DEFAULT_DASHBOARD, default_api=default_api, app_name=app_name)


def api_urls(details: dict[str, Any], dashboard_url: str, app_name: str | None = None) -> list[str]:
    """Where the API may be, by Serve's details, the likeliest first: at the dashboard's own host, which may be a public
    name or the end of a tunnel, then at each node with a proxy or an ingress.

    Raises ClusterError: kvrelay is not deployed there, or several times, or its API serves its own host alone.
    """
    apps = details.get("applications", {})
    if not applications(details):
        there = f"; other applications are: {', '.join(sorted(apps))}" if apps else ""
        raise ClusterError(f"kvrelay is not deployed at {dashboard_url}{there} (kvrelay deploy FILE)")
    ours = apps[chosen_application(details, app_name)]
    http = details.get("http_options") or {}
    host, here = str(http.get("host") or ""), urlsplit(dashboard_url).hostname or ""
    found = [
        (target["ip"], target["port"])
        for group in details.get("target_groups", [])
        if group.get("protocol") == "HTTP" and group.get("app_name") in ("", ours["name"])
        for target in group["targets"]
    ] or [(proxy["node_ip"], http.get("port", 8000)) for proxy in details.get("proxies", {}).values()]
    if not found:
        raise ClusterError(f"Serve at {dashboard_url} runs no proxy and no ingress yet; try again in a moment")
    if host in _LOOPBACK and here not in _LOOPBACK:
        raise ClusterError(
            f"the API listens on {host}:{found[0][1]} of its host alone: set http_options.host to 0.0.0.0 in the Serve "
            "file (Serve applies it after `serve shutdown`), or forward the port and give --url"
        )
    scheme, prefix = "https" if http.get("ssl_certfile") else "http", (ours.get("route_prefix") or "/").rstrip("/")
    places = [(here, found[0][1]), *(found if host not in _LOOPBACK else [])]
    return list(dict.fromkeys(f"{scheme}://{_bracketed(ip)}:{port}{prefix}" for ip, port in places))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def reachable(urls: list[str]) -> str:
    """The first that accepts a connection. Raises ServerUnreachable naming them all."""
    if found := next(filter(_accepts, urls), None):
        return found
    places = ", ".join(urlsplit(url).netloc for url in urls)
    raise ServerUnreachable(
        f"the API listens at {places}, which this machine cannot reach: open the port, or forward it and give --url"
    )


def _accepts(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 80), CONNECT_S).close()
    except OSError:
        return False
    return True


def other_clusters(api_url: str) -> str | None:
    """A line that lists this machine's other clusters; None when there are none."""
    urls = [known.api_url for known in running() if known.api_url != api_url]
    return f"also running here: {', '.join(urls)} (choose with --url)" if urls else None


@contextmanager
def addressed(url: str | None, address: str | None, app_name: str | None = None) -> Iterator[Endpoints]:
    """The cluster, for requests made inside the context.

    Adds how to start a cluster to an error that none answers, where `kvrelay serve` has started none here.
    """
    try:
        yield endpoints(url, address, app_name)
    except ServerUnreachable as error:
        if running() or url or address or ray_dashboard_address():
            raise
        raise ServerUnreachable(f"{error}. Start one with `kvrelay serve`, or give its --address") from error


PROMPT = "kvrelay computes a prompt on one worker, sends its keys and values to another, and answers from there. " * 3
TIMEOUT_S = 120.0


def probe(api_url: str, model: str, *, api_key: str | None, disaggregated: bool) -> dict[str, Any]:
    """Complete a few tokens over the given path; return the explain record. Raises ClusterError."""
    headers = {**auth_headers(api_key), "x-kvrelay-explain": "1"}
    headers["x-kvrelay-prefill"] = "remote" if disaggregated else "local"
    body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = request_json("POST", f"{api_url}/v1/completions", body, headers=headers, timeout_s=TIMEOUT_S)
    if answer.get("usage", {}).get("completion_tokens") != 4:
        raise ClusterError(f"the probe got {answer.get('usage')} instead of 4 tokens")
    explain: dict[str, Any] = answer.get("kvrelay") or {}
    return explain
