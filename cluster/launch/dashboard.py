"""Ray's dashboard over HTTP: Serve's details and configuration, the cluster's nodes, the log lines of replicas, and
Ray's token.

Ray itself is not imported: commands address a cluster from a machine that is no part of it.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from kvrelay.cluster.deployments.serve_config import APPLICATIONS, DEPLOY_S
from kvrelay.cluster.errors import ClusterError, RequestRefused, ServerUnreachable
from kvrelay.cluster.launch.http_json import request_json, request_text
from kvrelay.cluster.registry.names import APP_NAME

TIMEOUT_S = 10.0
HINT_S = 3.0
DEPLOY_TRIES = 3
DEPLOY_PAUSE_S = 2.0
_MOST_ROWS = 1000  # of Ray's state API in one answer


class RayDashboard:
    """The dashboard at `url`. Every call raises ClusterError: nothing answers, or it refuses the token."""

    def __init__(self, url: str) -> None:
        self.url = url

    def details(self) -> dict[str, Any]:
        """Serve's own status of every application and proxy."""
        return self._request("GET", APPLICATIONS)

    def application(self, name: str = APP_NAME) -> dict[str, Any]:
        """Serve's status of an application; empty when it is not deployed."""
        return dict(self.details().get("applications", {}).get(name, {}))

    def deploy(self, config: dict[str, Any]) -> None:
        """Have Serve run this configuration; returns before its replicas run.

        Asks again where the dashboard fails, as it may on a busy host whose Ray has just been started.
        """
        for left in reversed(range(DEPLOY_TRIES)):
            try:
                self._request("PUT", APPLICATIONS, config, timeout_s=DEPLOY_S)
                return
            except RequestRefused as error:
                if not left or error.status < 500:
                    raise
            time.sleep(DEPLOY_PAUSE_S)

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that are alive: node_id, node_ip, resources_total."""
        return self._rows("nodes", state="ALIVE")

    def actors(self) -> list[dict[str, Any]]:
        """The actors that are alive: name, class_name, node_id."""
        return self._rows("actors", state="ALIVE")

    def latest_lines(self, app_name: str, deployment: str, replica_ids: Iterable[str]) -> dict[str, str]:
        """For each of these replicas that has a place, its latest log message, as `message (node's address)`."""
        names = {f"SERVE_REPLICA::{app_name}#{deployment}#{one}": one for one in replica_ids}
        hosts = {node["node_id"]: node["node_ip"] for node in self.nodes()}
        found: dict[str, str] = {}
        for actor in self.actors():
            one, node_id = names.get(str(actor.get("name"))), str(actor.get("node_id"))
            if one is None or node_id not in hosts:
                continue
            file = f"serve/replica_{app_name}_{deployment}_{one}.log"
            with contextlib.suppress(ClusterError):  # the file does not exist yet
                if line := self._last_message(node_id, file):
                    found[one] = f"{line} ({hosts[node_id]})"
        return found

    def _last_message(self, node_id: str, file: str) -> str:
        query = urlencode({"node_id": node_id, "filename": file, "lines": 1})
        url = f"{self.url}/api/v0/logs/file?{query}"
        text = request_text("GET", url, headers=ray_auth_headers(), timeout_s=TIMEOUT_S)
        return text.strip().rpartition(" -- ")[2]

    def _rows(self, kind: str, *, state: str) -> list[dict[str, Any]]:
        """Rows of Ray's state API."""
        query = f"filter_keys=state&filter_predicates={quote('=')}&filter_values={state}&limit={_MOST_ROWS}"
        answer = self._request("GET", f"/api/v0/{kind}?{query}")
        try:
            return list(answer["data"]["result"]["result"])
        except (KeyError, TypeError) as error:
            raise ClusterError(f"{self.url} does not list its {kind}: {answer.get('msg') or answer}") from error

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> dict[str, Any]:
        headers = ray_auth_headers()
        try:
            return request_json(method, self.url + path, body, headers=headers, timeout_s=timeout_s)
        except RequestRefused as error:
            if error.status not in (401, 403):
                raise
            raise ClusterError(f"Ray's dashboard at {self.url} {_token_remedy(has_token=bool(headers))}") from error
        except ServerUnreachable as error:
            raise ServerUnreachable(
                f"no Ray dashboard answers at {self.url}: {str(error).rpartition(': ')[2]} (a head that was started "
                "without --dashboard-host 0.0.0.0 serves it on 127.0.0.1 alone: ssh -L 8265:127.0.0.1:8265 HEAD)"
            ) from error


def _token_remedy(*, has_token: bool) -> str:
    if not has_token:
        return (
            f"asks for Ray's token: save what `ray get-auth-token` prints on the head as {token_path()} (mode 600), or "
            "set RAY_AUTH_TOKEN"
        )
    place = "RAY_AUTH_TOKEN" if os.environ.get("RAY_AUTH_TOKEN") else str(token_path())
    return f"refuses the token of {place}: `ray get-auth-token` on the head prints the right one"


# ---- Ray's token


def dashboard_token_hint(dashboard_url: str) -> str | None:
    """How to get the token that this dashboard asks its users for; None when it asks for none or does not answer."""
    try:
        answer = request_json("GET", dashboard_url + "/api/authentication_mode", timeout_s=HINT_S)
    except ClusterError:
        return None
    if answer.get("authentication_mode") != "token":
        return None
    return "asks for Ray's token: `ray get-auth-token` prints it (RAY_AUTH_MODE=token for `serve`)"


def keep_ray_token_private() -> None:
    """Create Ray's token file readable by this user alone; Ray itself would create it readable by all.

    An existing one stays.

    Raises OSError when the home folder cannot be written; Ray itself fails then too.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "token").lower()
    if mode != "token" or os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    path = token_path()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (
        contextlib.suppress(FileExistsError),
        open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file,
    ):
        file.write(secrets.token_hex(32))


def token_path() -> Path:
    """The file in which Ray looks for its token."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def ray_auth_headers() -> dict[str, str]:
    """The dashboard's request headers for Ray's token authentication: the token is looked up in Ray's own order of
    places.
    """
    token = os.environ.get("RAY_AUTH_TOKEN")
    if not token:
        path = token_path()
        token = path.read_text().strip() if path.is_file() else None
    return {"authorization": f"Bearer {token}"} if token else {}
