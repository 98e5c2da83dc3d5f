"""A Ray cluster of our own on this machine: start, deploy, stop and remove everything. Imports Ray when it starts.

Its driver is the `kvrelay serve` process below the supervisor: when that ends, for whatever reason, Ray's processes end
too.
"""

import contextlib
import errno
import logging
import os
import random
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from kvrelay.cluster.deployments.serve_config import serve_config
from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.launch.dashboard import RayDashboard, keep_ray_token_private
from kvrelay.cluster.launch.ray_environment import haproxy_files, local_haproxy, set_ray_environment
from kvrelay.cluster.launch.rollout import PLACE_S, Report, wait_until_running
from kvrelay.cluster.launch.supervisor import adopt_orphans, end_descendants, report
from kvrelay.config import Settings
from kvrelay.environment import LOG_FILE_VARIABLE
from kvrelay.logs import LogFollower

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 80 << 20  # Ray's minimum; KV never passes through it
LONGEST_FOLDER = 16
OWN_PORTS = range(20_000, 32_768)  # above those of Ray's workers, below Linux's ephemeral ones
OWN_PORTS_TRIED = 100
# all parts of Ray's dashboard but those of Ray Data and Ray Train, a process each
DASHBOARD = "EventHead,JobHead,MetricsHead,NodeHead,PlatformEventsHead,ReportHead,ServeHead,StateHead,TaskEventsHead"
RAY_FOLDER = "r"  # in our own, since Ray opens its folders to every user; short, as its sockets' paths must be
STOP_GRACE_S = 2.0


class RaySession:
    """A local Ray cluster with the application on it."""

    def __init__(
        self,
        settings: Settings,
        *,
        after_ray_start: Callable[[], None] = lambda: None,
        show_log: Callable[[str], object] = lambda line: None,
    ) -> None:
        """`after_ray_start` is called once Ray has installed its signal handlers.

        `show_log` gets the lines that the cluster's processes log, from a thread.
        """
        self._settings, self._after_ray_start, self._show_log = settings, after_ray_start, show_log
        self._folder: Path | None = None
        self._logs: LogFollower | None = None
        self.has_ray = False  # whether there is something to stop
        self._held: list[socket.socket] = []
        self.dashboard_url = ""

    @property
    def session_folder(self) -> Path:
        """Ray's folder of this session: logs, and what it provisions Grafana and Prometheus with."""
        assert self._folder is not None, "Ray has not started"
        return self._folder / RAY_FOLDER / "session_latest"

    @property
    def _has_shared_address(self) -> bool:
        """Whether Serve's HAProxy takes the requests of several ingresses; one alone is reached directly."""
        return self._settings.cluster.ingress > 1

    # ---- start

    def check_ports(self) -> None:
        """Reserve the ingresses' ports until `stop`: otherwise Ray's own servers, which listen on any free port,
        sometimes take one. Raises ClusterError when the API's port is taken.
        """
        serve = self._settings.serve
        adopt_orphans()
        for port in range(serve.port, min(serve.port + self._settings.cluster.ingress + 1, 65536)):
            with contextlib.suppress(OSError):  # the API's port is checked below; Serve skips the others
                self._held.append(held_port(serve.host, port))
        why = why_not_free(serve.host, serve.port)
        if why is not None and why.errno == errno.EADDRINUSE:
            raise ClusterError(
                f"port {serve.port} is taken; choose another with --port, or stop the program that uses it "
                "(kvrelay status shows whether it is kvrelay)"
            )
        if why is not None:
            raise ClusterError(f"cannot listen on {serve.host} port {serve.port}: {why.strerror}")

    def _hold_a_port(self) -> int:
        """Reserve a free port, until `stop`, for a server that starts only with the application."""
        self._held.append(held_port(LOOPBACK, 0))
        return int(self._held[-1].getsockname()[1])

    def start_ray(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Start Ray here. Takes seconds. `meanwhile` is called once Ray starts actors, before its dashboard has
        started. Raises ClusterError.
        """
        haproxy_ports = (self._hold_a_port(), self._hold_a_port()) if self._has_shared_address else None
        set_ray_environment(self._settings.serve.port, haproxy_ports)
        self.has_ray = True
        try:
            url = self._init_ray(meanwhile)
        except Exception as error:  # Ray raises bare exceptions with pages of its logs
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            logger.debug("ray.init failed", exc_info=True)
            raise ClusterError(f"Ray did not start: {lines[-1] if lines else repr(error)}") from error
        self._after_ray_start()
        logging.getLogger("ray").setLevel(logging.ERROR)
        if not url:
            raise ClusterError("Ray runs without its dashboard, through which kvrelay deploys")
        self.dashboard_url = f"http://{url}"

    def _init_ray(self, meanwhile: Callable[[], object]) -> str:
        """Returns the dashboard's address."""
        keep_ray_token_private()
        import ray

        self._folder = Path(temporary_folder(), f"kvrelay-{secrets.token_hex(4)}")
        report(f"folder {self._folder}")
        self._folder.mkdir(mode=0o700)
        os.environ["TMPDIR"] = str(self._folder)  # files that its processes leave there are removed with the folder
        os.environ[LOG_FILE_VARIABLE] = str(self._folder / "kvrelay.log")
        os.environ.update(haproxy_files(self._folder / "h"))
        if self._has_shared_address:
            os.environ.update(local_haproxy(self._folder / "h"))
        self._logs = LogFollower(self._folder / "kvrelay.log", self._show_log)
        self._logs.start()
        # otherwise torch's idle OpenMP threads spin beside our kernels' threads: a quarter of a decode step's CPU time
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        wanted = self._settings.cluster.dashboard_port
        without_idle_processes()
        with dashboard_beside() as dashboard_url:
            ray.init(
                log_to_driver=False,
                logging_level=logging.ERROR,
                namespace="kvrelay",
                include_dashboard=True,
                dashboard_host=LOOPBACK,
                dashboard_port=wanted if why_not_free(LOOPBACK, wanted) is None else free_port(LOOPBACK),
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address=LOOPBACK,
                _temp_dir=str(self._folder / RAY_FOLDER),
            )
        meanwhile()
        return dashboard_url()

    def start_registry(self) -> None:
        """Start the application's registry; returns before it runs."""
        from kvrelay.cluster.registry.actor import connect_registry

        connect_registry(self._settings.cluster.secret, LOOPBACK, self._settings.serve.api_key)

    def deploy(self) -> None:
        """Deploy the application, whose registry has started; returns before its replicas run. Raises ClusterError."""
        serve_at = self._settings.serve
        config = serve_config(
            self._settings, http_port=serve_at.port if self._has_shared_address else free_port(serve_at.host)
        )
        # the dashboard's process starts Serve: this one does not import it, which is 1 s and 28 MiB
        RayDashboard(self.dashboard_url).deploy({**config, "logging_config": {"enable_access_log": False}})

    def wait_until_running(self, report: Report) -> None:
        """Wait until every replica runs; report the counts meanwhile. Raises ClusterError."""
        wait_until_running(RayDashboard(self.dashboard_url), report, place_s=PLACE_S, unhealthy_s=0.0)

    # ---- stop

    def finish_requests(self, timeout_s: float) -> None:
        """Have the ingresses take nothing new; returns when they have finished what they had begun, or then."""
        import ray

        with contextlib.suppress(Exception):  # a Ray that is half dead has nothing to finish
            ingress = RayDashboard(self.dashboard_url).application()["deployments"]["ingress"]["replicas"]
            actors = [ray.get_actor(one["actor_name"], "serve") for one in ingress if one["state"] == "RUNNING"]
            stopping = [actor.perform_graceful_shutdown.remote() for actor in actors]  # as Serve's controller does
            ray.wait(stopping, num_returns=len(stopping), timeout=timeout_s)

    def stop(self, *, keep_logs: bool = False) -> str | None:
        """End everything that was started; returns the folder of Ray's logs if they are kept.

        Idempotent, at any time.
        """
        if self.has_ray:
            self.has_ray = False
            with contextlib.suppress(Exception):  # a half-started Ray fails here; the kill below does not
                if ray := sys.modules.get("ray"):  # absent when its import was interrupted
                    ray.shutdown()
        end_descendants(grace_s=STOP_GRACE_S)
        if self._logs is not None:
            self._logs.stop()
        while self._held:
            self._held.pop().close()
        if self._folder is not None and keep_logs:
            return str(self._folder)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        return None


def temporary_folder() -> str:
    """The parent of Ray's session folder: the usual one, unless its sockets' paths would exceed the system's 107
    bytes.
    """
    usual = tempfile.gettempdir()
    return usual if len(usual) <= LONGEST_FOLDER else "/tmp"


def without_idle_processes() -> None:
    """Keep Ray from starting what has nothing to do here: its log monitor, which polls ten times a second for a driver
    that ignores it, its autoscaler, 50 MiB, which has no node to add or remove, and parts of its dashboard, 27 MiB.
    """
    from ray._private import services
    from ray._private.node import Node

    for name in ("start_log_monitor", "start_monitor"):
        if hasattr(Node, name):
            setattr(Node, name, lambda self: None)
    start = services.start_ray_process

    def start_process(command: list[str], process_type: str, **options: Any) -> Any:
        more = [f"--modules-to-load={DASHBOARD},UsageStatsHead"] if process_type == "dashboard" else []
        return start([*command, *more], process_type, **options)

    services.start_ray_process = start_process


@contextlib.contextmanager
def dashboard_beside() -> Iterator[Callable[[], str]]:
    """Have a Ray that starts meanwhile start its dashboard, which takes 2 s, beside everything else and not first.
    Yields the function that waits for the dashboard and returns its address.

    The thread stays: Ray has the system kill what it starts when the thread that started it ends.
    """
    from ray._private.node import Node

    start, started = Node.start_api_server, Future[str]()

    def start_in_thread(node: Any, **options: Any) -> None:
        def run() -> None:
            try:
                start(node, **options)
                started.set_result(str(node.webui_url or ""))
            except Exception as error:  # the thread's edge
                started.set_exception(error)
            threading.Event().wait()

        threading.Thread(target=run, name="dashboard", daemon=True).start()

    Node.start_api_server = start_in_thread
    try:
        yield started.result
    finally:
        Node.start_api_server = start


def why_not_free(host: str, port: int) -> OSError | None:
    """The error with which listening there fails now; None when the port is free."""
    try:
        with held_port(host, port) as probe:
            probe.listen(1)
    except OSError as error:
        return error
    return None


def held_port(host: str, port: int) -> socket.socket:
    """A bound socket that reserves the port: the system assigns it to no server that wants any free port, while a
    server that names it, with SO_REUSEADDR, can listen. Raises OSError.
    """
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind((host, port))
    except OSError:
        holder.close()
        raise
    return holder


def free_port(host: str) -> int:
    """A port that was free a moment ago. It is none that the system gives to sockets which ask for any, of which a
    starting Ray opens dozens, unless all others are taken.
    """
    for port in random.sample(OWN_PORTS, OWN_PORTS_TRIED):
        if why_not_free(host, port) is None:
            return port
    with held_port(host, 0) as probe:
        return int(probe.getsockname()[1])
