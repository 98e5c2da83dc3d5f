"""What `kvrelay serve` waits for and prints, with Serve's answers made up."""

import io
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from unittest.mock import Mock

import pytest
from rich.console import Console

from kvrelay.cluster.commands import serve
from kvrelay.cluster.commands.cli import USAGE_ERROR, run
from kvrelay.cluster.commands.serve import announce, exposure, report_sizes, require_operators_key
from kvrelay.cluster.errors import ClusterError, RequestRefused
from kvrelay.config import settings_from
from kvrelay.errors import ConfigError

pytestmark = pytest.mark.alone


def nobody():
    """An address at which no server answers."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_the_probe_waits_for_an_ingress_that_has_no_worker_yet_and_for_no_other_refusal(monkeypatch):
    """The proxy may choose another ingress than the one that was asked for its workers."""
    answers = []

    def probed(*args, **kwargs):
        status = answers.pop(0)
        if status != 200:
            raise RequestRefused("http://x", "no decode worker is up", status)
        return {"path": "disaggregated", "transfer": {"transport": "shm"}}

    monkeypatch.setattr(serve.doctor, "settled", lambda *args, **kwargs: {"decode": 1})
    monkeypatch.setattr(serve.doctor, "POLL_S", 0.0)
    monkeypatch.setattr(serve, "probe", probed)
    answers += [503, 503, 200]
    assert serve.probe_path("http://x", None, "m", prefill=1, decode=1) == "disaggregated path works, KV over shm"
    answers += [500, 200]
    with pytest.raises(RequestRefused):
        serve.probe_path("http://x", None, "m", prefill=1, decode=1)
    monkeypatch.setattr(serve, "PROBE_S", -1.0)
    answers[:] = [503, 200]
    with pytest.raises(RequestRefused):
        serve.probe_path("http://x", None, "m", prefill=1, decode=1)


def test_where_there_are_tenants_the_operator_has_a_key_too():
    settings = settings_from({"serve": {"api_keys_file": "/keys.yaml"}}).serve
    with pytest.raises(ConfigError, match="set KVRELAY_API_KEY"):
        require_operators_key(settings, None)
    require_operators_key(settings, "key")
    require_operators_key(settings_from({}).serve, None)


def test_a_bad_file_of_keys_ends_serve_before_anything_starts(tmp_path, capsys):
    file = tmp_path / "keys.yaml"
    file.write_text("tenants: [{name: search}]")
    assert run(["serve", "--api-key", "k", "--set", f"serve.api_keys_file={file}"]) == USAGE_ERROR
    assert "(tenant search)" in " ".join(capsys.readouterr().err.split())


def test_a_bad_file_of_past_days_ends_serve_before_anything_starts(tmp_path, capsys):
    file = tmp_path / "past.csv"
    file.write_text("time,requests\n0,1\n60,1\n")
    flags = ["--set", "planner.mode=auto", "--set", f"planner.history={file}"]
    assert run(["serve", *flags]) == USAGE_ERROR
    assert "no whole day" in " ".join(capsys.readouterr().err.split())


class Dashboard(BaseHTTPRequestHandler):
    """Ray's, as far as it tells how it knows its users."""

    mode = "token"

    def do_GET(self):
        is_known = self.path == "/api/authentication_mode"
        self.send_response(200 if is_known else 404)
        self.end_headers()
        self.wfile.write(json.dumps({"authentication_mode": self.mode} if is_known else {}).encode())

    def log_message(self, *args):
        pass


@pytest.mark.parametrize(("mode", "is_shown"), [("token", True), ("disabled", False)])
def test_a_dashboard_that_asks_for_a_token_is_announced_with_the_command_that_prints_it(mode, is_shown):
    console = Console(file=io.StringIO(), width=200, record=True)
    handler = type("Handler", (Dashboard,), {"mode": mode})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        dashboard_url = f"http://127.0.0.1:{server.server_port}"
        announce("http://a", dashboard_url, "m", console, has_key=False)
        server.shutdown()
    text = console.export_text()
    assert dashboard_url in text and ("`ray get-auth-token` prints it" in text) is is_shown


def test_the_curl_line_names_the_variable_of_the_key_and_never_the_key():
    console = Console(file=io.StringIO(), width=200, record=True)
    announce("http://a", nobody(), "m", console, has_key=True)
    text = console.export_text()
    line = next(line for line in text.splitlines() if line.startswith("curl "))
    assert '-H "Authorization: Bearer $KVRELAY_API_KEY"' in line


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "gpu-host"])
def test_an_address_beyond_this_machine_without_a_key_is_warned_of(host):
    (line,) = exposure(host, None)
    assert line.startswith(f"the API listens on {host} without an API key") and line.endswith("set KVRELAY_API_KEY")
    assert exposure(host, "key") == []


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_an_address_of_this_machine_alone_needs_no_key(host):
    assert exposure(host, None) == []


def test_serve_warns_before_it_starts_anything(monkeypatch):
    def start(*args):
        raise ClusterError("started")

    monkeypatch.setattr(serve, "_start", start)
    monkeypatch.setattr(serve, "RaySession", lambda *args, **options: Mock(has_ray=False, stop=lambda **how: None))
    console = Console(file=io.StringIO(), width=200, record=True)
    with pytest.raises(ClusterError, match="started"):
        serve.serve(settings_from({"serve": {"host": "0.0.0.0"}}), console)
    assert "warning: the API listens on 0.0.0.0 without an API key" in console.export_text()


def test_a_line_for_each_role_says_what_it_chose_and_warnings_say_what_limits_or_slows_it(monkeypatch):
    notice = "the context is cut from 32,768 to 7,280 tokens, which is what the KV pool holds: raise engine.kv_memory"
    slow = {"backend": "cpu", "warning": "compiled CPU kernels are off (no C compiler): several times slower"}
    workers = [
        {"role": "decode", "worker_id": "d1", "sizes": ["KV pool 9 MiB", notice], "backend": slow},
        {"role": "decode", "worker_id": "d2", "sizes": ["KV pool 9 MiB", notice], "backend": slow},
        {"role": "prefill", "worker_id": "p1", "sizes": ["KV pool 8 MiB"], "backend": {"backend": "cpu"}},
        {"role": "prefill", "worker_id": "p2", "is_up": False},
    ]
    monkeypatch.setattr(serve, "request_json", lambda *args, **options: {"workers": workers})
    console = Console(file=io.StringIO(), width=60, record=True)
    report_sizes("http://a", None, console)
    assert console.export_text().splitlines() == [
        "  prefill  KV pool 8 MiB",
        "  decode   KV pool 9 MiB",
        f"warning: decode: {notice}",
        f"warning: decode: {slow['warning']}",
    ]
