"""Where the API of a cluster is, by what Serve's details at Ray's dashboard say."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cluster.deployments.serve_config import IMPORT_PATH
from kvrelay.cluster.errors import ClusterError, RequestRefused, ServerUnreachable
from kvrelay.cluster.launch.dashboard import RayDashboard
from kvrelay.cluster.launch.endpoints import Endpoints, RunningCluster, api_urls, endpoints, note, reachable


def details(host: str, *targets: tuple[str, int], prefix: str = "/", app_name: str = "", **http: Any) -> dict[str, Any]:
    """Serve's details of a deployed kvrelay whose proxies or ingresses listen at `targets`."""
    app = {"name": "kvrelay", "route_prefix": prefix, "deployed_app_config": {"import_path": IMPORT_PATH}}
    group = {"protocol": "HTTP", "app_name": app_name, "targets": [{"ip": ip, "port": port} for ip, port in targets]}
    return {
        "applications": {"kvrelay": app},
        "http_options": {"host": host, "port": 8000, **http},
        "proxies": {"n": {"node_ip": "10.0.0.9"}},
        "target_groups": [group] if targets else [],
    }


@pytest.mark.parametrize(
    ("found", "dashboard", "urls"),
    [
        (details("127.0.0.1", ("10.0.0.1", 8000)), "http://127.0.0.1:8265", ["http://127.0.0.1:8000"]),
        (
            details("0.0.0.0", ("10.0.0.1", 8000), ("10.0.0.2", 8000)),
            "http://head.example:8265",
            ["http://head.example:8000", "http://10.0.0.1:8000", "http://10.0.0.2:8000"],
        ),
        (
            details("0.0.0.0", ("10.0.0.1", 8000), ("10.0.0.1", 8001), app_name="kvrelay"),  # ingresses without a proxy
            "http://10.0.0.1:8265",
            ["http://10.0.0.1:8000", "http://10.0.0.1:8001"],
        ),
        (details("0.0.0.0"), "http://10.0.0.9:8265", ["http://10.0.0.9:8000"]),  # no target yet: the proxies
        (
            details("::", ("fd00::1", 443), prefix="/llm", ssl_certfile="/tls.crt"),
            "http://[fd00::1]:8265",
            ["https://[fd00::1]:443/llm"],
        ),
    ],
    ids=["loopback", "proxies", "direct ingress", "no targets", "TLS and prefix"],
)
def test_the_api_is_looked_for_at_the_dashboards_host_then_at_each_node(
    found: dict[str, Any], dashboard: str, urls: list[str]
):
    assert api_urls(found, dashboard) == urls


def test_an_api_for_its_own_host_alone_is_refused_from_elsewhere_with_the_setting_to_change():
    with pytest.raises(ClusterError, match=r"127\.0\.0\.1:8000 of its host alone: set http_options\.host"):
        api_urls(details("127.0.0.1", ("10.0.0.1", 8000)), "http://head:8265")


def test_a_ray_without_kvrelay_names_what_is_there():
    other = {"applications": {"chat": {"name": "chat", "deployed_app_config": {"import_path": "a:b"}}}}
    with pytest.raises(ClusterError, match="not deployed at http://head:8265; other applications are: chat"):
        api_urls(other, "http://head:8265")
    with pytest.raises(ClusterError, match="runs no proxy and no ingress yet"):
        api_urls({**details("0.0.0.0"), "proxies": {}}, "http://head:8265")


def test_the_first_place_that_accepts_is_used_and_an_error_names_all():
    with socket.create_server(("127.0.0.1", 0)) as server:
        open_url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert reachable(["http://127.0.0.1:9", open_url]) == open_url
    with pytest.raises(ServerUnreachable, match=r"listens at 127\.0\.0\.1:9, 127\.0\.0\.1:11, which .* cannot reach"):
        reachable(["http://127.0.0.1:9", "http://127.0.0.1:11"])


def test_without_a_dashboard_the_usual_port_of_the_api_is_tried_where_nothing_was_given():
    with socket.create_server(("127.0.0.1", 0)) as server:
        usual = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert Endpoints(None, "http://127.0.0.1:9", default_api=usual).api_url == usual
    with pytest.raises(ServerUnreachable, match=r"no Ray dashboard answers at http://127\.0\.0\.1:9: .*refused"):
        _ = Endpoints(None, "http://127.0.0.1:9").api_url


def test_an_ingress_that_was_replaced_is_found_at_its_new_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as old, socket.create_server(("127.0.0.1", 0)) as new:
        was, now = (f"http://127.0.0.1:{one.getsockname()[1]}" for one in (old, new))
        note(RunningCluster(os.getpid(), was, "http://127.0.0.1:9", "tiny"))
        assert endpoints(None, None).api_url == was
        old.close()
        cluster = endpoints(None, "http://127.0.0.1:9")
        found = details("127.0.0.1", new.getsockname(), app_name="kvrelay")
        monkeypatch.setattr(cluster.dashboard, "details", lambda: found)
        assert cluster.api_url == now
        assert endpoints(was, None).api_url == was  # it was asked for


# ---- a dashboard that fails


@contextlib.contextmanager
def failing_dashboard(answers: list[tuple[int, str]]) -> Iterator[RayDashboard]:
    """A dashboard that gives these answers, one after the other."""

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            status, text = answers.pop(0)
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield RayDashboard(f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()


FAILED = (500, 'Traceback (most recent call last):\n  File "x.py", line 241, in decorator\nTimeoutError: too slow\n')


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.cluster.launch.dashboard.DEPLOY_PAUSE_S", 0)


@pytest.mark.usefixtures("without_pauses")
def test_a_dashboard_that_fails_is_asked_again_to_deploy():
    answers = [FAILED, FAILED, (200, ""), (200, "")]
    with failing_dashboard(answers) as dashboard:
        dashboard.deploy({})
    assert answers == [(200, "")]


@pytest.mark.usefixtures("without_pauses")
@pytest.mark.parametrize(("answer", "asked"), [(FAILED, 3), ((400, "TimeoutError: too slow"), 1)])
def test_a_dashboard_that_goes_on_failing_or_refuses_is_quoted_without_the_traceback(
    answer: tuple[int, str], asked: int
):
    answers = [answer] * 4
    with failing_dashboard(answers) as dashboard, pytest.raises(RequestRefused) as caught:
        dashboard.deploy({})
    assert caught.value.message == "TimeoutError: too slow"
    assert len(answers) == 4 - asked
