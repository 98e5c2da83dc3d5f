"""One Ray cluster of our own on this machine: start, deploy, stop without a trace. Imports Ray when started.

The driver of this cluster is the `kvrelay serve` process: when it dies, however, Ray's processes go too.
"""

import contextlib
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.probe import request_json
from kvrelay.cluster.processes import adopt_orphans, end_descendants
from kvrelay.cluster.ray_env import ray_auth_headers, set_ray_environment
from kvrelay.cluster.serve_config import APP_NAME, APPLICATIONS, DEPLOY_S, serve_config
from kvrelay.config import Settings

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 80 << 20  # Ray's least; KV never passes through it
POLL_S = 0.25
LONGEST_FOLDER = 16
STOP_GRACE_S = 2.0
Report = Callable[[str, str], None]  # part of the cluster, and its state in a few words


class RaySession:
    """A local Ray cluster with the application on it; or, with `address`, the application on another's cluster."""

    def __init__(self, settings: Settings, *, address: str | None = None) -> None:
        self._settings, self._address = settings, address
        self._folder: Path | None = None
        self._has_ray = False
        self.dashboard_url = ""
        self.after_ray: Callable[[], None] = lambda: None  # called once Ray has set its signal handlers

    @property
    def has_ray(self) -> bool:
        """Whether there is something to stop."""
        return self._has_ray

    # ---- start

    def check_ports(self) -> None:
        """Before anything is started. Raises ClusterError when the API's port is taken."""
        serve = self._settings.serve
        adopt_orphans()
        if self._address is None and not is_free(serve.host, serve.port):
            raise ClusterError(
                f"port {serve.port} is taken by another program; choose another with --port, "
                "or stop the other (kvrelay status shows whether it is kvrelay)"
            )

    def start_ray(self) -> None:
        """Start Ray here (or join `address`). Takes seconds. Raises ClusterError."""
        if self._address is None:
            set_ray_environment(self._settings.serve.port)
        import ray

        quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "kvrelay"}
        self._has_ray = True
        try:
            if self._address is not None:
                context = ray.init(address=self._address, **quiet)
            else:
                context = self._start_own_ray(quiet)
        except Exception as error:  # Ray raises bare ones, with pages of its logs
            said = [line.strip() for line in str(error).splitlines() if line.strip()]
            logger.debug("ray.init failed", exc_info=True)
            raise ClusterError(f"Ray did not start: {said[-1] if said else repr(error)}") from error
        self.after_ray()
        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.ERROR)
        if not context.dashboard_url:
            raise ClusterError("Ray runs without its dashboard, through which kvrelay deploys")
        self.dashboard_url = f"http://{context.dashboard_url}"

    def _start_own_ray(self, options: dict[str, Any]) -> Any:
        import ray

        self._folder = Path(tempfile.mkdtemp(prefix="kvrelay-", dir=temporary_folder()))
        os.environ["TMPDIR"] = str(self._folder)  # what its processes leave there goes with the folder
        wanted = self._settings.cluster.dashboard_port
        without_log_monitor()
        return ray.init(
            include_dashboard=True, dashboard_host=LOOPBACK,
            dashboard_port=wanted if is_free(LOOPBACK, wanted) else free_port(LOOPBACK),
            object_store_memory=OBJECT_STORE_BYTES, _node_ip_address=LOOPBACK, _temp_dir=str(self._folder), **options,
        )  # fmt: skip

    def deploy(self) -> None:
        """Give Serve the application; returns before its replicas run. Raises ClusterError."""
        from ray import serve

        from kvrelay.cluster.registry_actor import connect_registry

        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # the import has set it to INFO
        config = serve_config(self._settings, http_port=free_port(self._settings.serve.host))
        if self._address is None:
            connect_registry(self._settings.cluster.secret, LOOPBACK)
            serve.start(http_options=config["http_options"], proxy_location=config["proxy_location"],
                        logging_config={"enable_access_log": False})  # fmt: skip
        request_json("PUT", self.dashboard_url + APPLICATIONS, config, headers=ray_auth_headers(), timeout_s=DEPLOY_S)

    def wait_until_running(self, report: Report) -> None:
        """Wait until every replica runs, reporting counts. Raises ClusterError with the replica's own error."""
        from ray import serve

        while True:
            app = serve.status().applications.get(APP_NAME)
            if app is not None:
                for name, deployment in app.deployments.items():
                    running = sum(count for state, count in deployment.replica_states.items() if state == "RUNNING")
                    report(name, f"{running} of {sum(deployment.replica_states.values())} running")
                if app.status == "RUNNING":
                    return
                if app.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                    raise ClusterError(failure(app))
            time.sleep(POLL_S)

    def dashboard_token_hint(self) -> str | None:
        """Where the token is that the dashboard asks for, when it asks."""
        from ray._private.authentication.authentication_token_setup import AuthenticationMode, get_authentication_mode

        if get_authentication_mode() != AuthenticationMode.TOKEN:
            return None
        return "asks for the token in ~/.ray/auth_token"

    # ---- stop

    def stop(self, *, keep_logs: bool = False) -> str | None:
        """End everything that was started; the folder of Ray's logs when kept. Safe at any time, and twice."""
        if self._has_ray:
            self._has_ray = False
            import ray

            if self._address is not None:
                self._delete_application()
            with contextlib.suppress(Exception):  # a half-started Ray cannot say goodbye; the kill below can
                ray.shutdown()
        end_descendants(grace_s=STOP_GRACE_S)
        return self._remove_folder(keep_logs=keep_logs)

    def kill(self) -> None:
        """The impatient `stop`."""
        end_descendants(grace_s=0.0)
        self._remove_folder(keep_logs=False)

    def _delete_application(self) -> None:
        from ray import serve

        with contextlib.suppress(Exception):
            serve.delete(APP_NAME)

    def _remove_folder(self, *, keep_logs: bool) -> str | None:
        if self._folder is None:
            return None
        if keep_logs:
            return str(self._folder)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None
        return None


def temporary_folder() -> str:
    """Where Ray's session goes: the usual place, unless its sockets' paths would pass the system's 107 bytes."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= LONGEST_FOLDER else "/tmp"


def failure(app: Any) -> str:
    """The last line of what went wrong, out of Serve's long messages."""
    texts = [deployment.message for deployment in app.deployments.values() if deployment.message] or [app.message]
    lines = [line.strip() for line in max(texts, key=len).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("kvrelay.errors.")]
    text: str = (told or lines or ["the application did not start"])[-1]
    return text.removeprefix("kvrelay.errors.")


def without_log_monitor() -> None:
    """Keep Ray from starting its log monitor, which polls ten times a second to feed a driver that does not listen."""
    from ray._private.node import Node

    if hasattr(Node, "start_log_monitor"):
        Node.start_log_monitor = lambda self: None


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port(host: str) -> int:
    """A port that was free a moment ago."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
