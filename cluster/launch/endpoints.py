"""Which cluster a command addresses: the given URLs, or those of a cluster that runs on this machine; and requests to
it, with the standard library's HTTP.

Each running `kvrelay serve` has a file with its addresses in the cache folder, read by the other commands.
"""

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from kvrelay.cluster.errors import ClusterError, ServerUnreachable
from kvrelay.environment import cache_dir
from kvrelay.errors import ConfigError

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


PROMPT = "kvrelay computes a prompt on one worker, sends its keys and values to another, and answers from there. " * 3
TIMEOUT_S = 120.0
HINT_S = 3.0


def server_root(text: str) -> str:
    """The root URL of a server's address as users write it: host:port, or a URL that may end in /v1.

    Raises:
        ConfigError: the text is no address.
    """
    url = text if "://" in text else f"http://{text}"
    problem = ConfigError(f"{text!r} is not a server's address; write for example http://127.0.0.1:8000")
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:  # a port that is no number or too large, half an IPv6 address
        raise problem from error
    if not is_address or any(character.isspace() or not character.isprintable() for character in url):
        raise problem
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def request_json(
    method: str,
    url: str,
    body: dict[str, Any] | None = None,
    *,
    headers: dict[str, str] | None = None,
    timeout_s: float,
) -> dict[str, Any]:
    """The JSON answer.

    Raises:
        ServerUnreachable: no server answers.
        ClusterError: with the server's error message, or because the answer is no JSON.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            text = answer.read()
            try:
                return dict(json.loads(text or b"{}"))
            except (ValueError, TypeError) as error:
                start = text.decode(errors="replace").strip()[:80]
                raise ClusterError(f"{url}: is another server at this address? It answers {start!r}") from error
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        try:
            text = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            text = text.strip()[:200] or str(error)
        raise ClusterError(f"{url}: {text}") from error
    except (ValueError, http.client.HTTPException) as error:
        raise ClusterError(f"{url} does not answer: {error}") from error
    except OSError as error:
        raise ServerUnreachable(f"{url} does not answer: {getattr(error, 'reason', error)}") from error


def auth_headers(api_key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def dashboard_token_hint(dashboard_url: str) -> str | None:
    """How to get the token that this dashboard asks its users for; None when it asks for none or does not answer."""
    try:
        answer = request_json("GET", dashboard_url + "/api/authentication_mode", timeout_s=HINT_S)
    except ClusterError:
        return None
    if answer.get("authentication_mode") != "token":
        return None
    return "asks for Ray's token: `ray get-auth-token` prints it (RAY_AUTH_MODE=token for `serve`)"


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
