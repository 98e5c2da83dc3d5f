"""Wrong use of the command line: one clear line, the nearest known word, the right exit code, never a traceback."""

import ast
import json
import os
import signal
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import get_args

import pytest
import typer

from kvrelay import __version__
from kvrelay.cluster.commands import kv
from kvrelay.cluster.commands.cli import run
from kvrelay.cluster.launch import endpoints
from kvrelay.cluster.launch.concealment import secrets_among
from kvrelay.cluster.launch.ray_session import RaySession, free_port
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.errors import ConfigError
from kvrelay.settings.choices import ChecksMode, TransportName

pytestmark = pytest.mark.processes


CONFIGS = Path(__file__).parents[3] / "configs"


def said(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> tuple[int, str]:
    code = run(arguments)
    text = capsys.readouterr()
    assert "Traceback" not in text.err + text.out
    return code, text.err.strip()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "--prefil", "2"], "--prefill"),
        (["serve", "--port", "abc"], "--port"),
        (["serve", "--port", "70000"], "serve.port"),
        (["serve", "--port", "0"], "serve.port"),
        (["serve", "--address", "auto"], "--address"),
        (["serve", "--kv-memory", "infG"], "engine.kv_memory"),
        (["serve", "--set", "cache.disk_size=lots"], "cache.disk_size"),
        (["serve", "--set", "engine.kv_memory=[1"], "--set engine.kv_memory=[1"),
        (["serve", "--config", str(CONFIGS / "gpu-1p1d.yaml")], "serve deploy"),
        (["serve", "--config", str(CONFIGS / "kuberay.yaml")], "kubectl apply -f"),
        (["serve", "--config", str(CONFIGS / "ray-cluster.yaml")], "ray up"),
        (["status", "--url", "http://"], "'http://' is not a server's address"),
        (["status", "--address", "a:x"], "'a:x' is not a server's address"),
        (["scale", "--decode", "1", "--address", "ftp://a"], "'ftp://a' is not a server's address"),
        (["serve", "--dtype", "fp8"], "model.dtype"),
        (["serve", "--decode", "0"], "cluster.decode"),
        (["serve", "--kv-memory", "lots"], "not a size"),
        (["serve", "--set", "engine.token_budge=3"], "engine.token_budget"),
        (["serve", "--set", "engin.token_budget=3"], "engine"),
        (["serve", "--set", "prefill.block_size=24"], "prefill.block_size: a block holds a power of two"),
        (["serve", "--set", "decode.dtype=float32"], "transfer.convert_dtype"),
        (["serve", "--config", "no/such.yaml"], "no/such.yaml"),
        (["serve", "--log-level", "loud"], "--log-level loud: must be one of debug, info, warning, error"),
        (["sreve"], "serve"),
        (["scale"], "--decode"),
        (["scale", "--decode", "0"], "--decode 0: without a decode worker no request can be answered"),
        (["scale", "--prefill", "0"], "--prefill 0: requests that are on their way"),
    ],
)
def test_a_usage_error_is_one_line_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
):
    code, text = said(capsys, arguments)
    assert code == 2
    assert expected in text and len(text.splitlines()) == 1 and text.startswith("kvrelay:")


def test_an_unknown_key_in_the_file_is_told_with_the_nearest(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "k.yaml"
    file.write_text("router: {max_inflihgt: 1}\n")
    code, text = said(capsys, ["serve", "--config", str(file)])
    assert code == 2 and "router.max_inflight" in text


def test_a_taken_port_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text = said(capsys, ["serve", "--port", str(port)])
    assert code == 1 and f"port {port} is taken" in text


def test_a_missing_model_is_told_before_ray_starts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def never(session: RaySession) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(RaySession, "start_ray", never)
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    try:
        code = run(["serve", "--port", str(free_port("127.0.0.1")), "--model", "./no-such-model.gguf"])
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)
    text = capsys.readouterr()
    assert code == 1 and "no-such-model.gguf: no such folder or file" in text.err
    assert "stopping" not in text.out


def test_status_of_nothing_says_what_does_not_answer(capsys: pytest.CaptureFixture[str]):
    code, text = said(capsys, ["status", "--url", "http://127.0.0.1:9", "--address", "http://127.0.0.1:9"])
    assert code == 1 and "127.0.0.1:9" in text and "does not answer" in text


@pytest.mark.parametrize("url", ["foo.invalid", "127.0.0.1:9", "localhost:9/v1"])
def test_a_url_needs_no_scheme(capsys: pytest.CaptureFixture[str], url: str):
    code, text = said(capsys, ["status", "--url", url, "--address", url])
    assert code == 1 and "does not answer" in text and len(text.splitlines()) == 1


def said_of_a_server(capsys: pytest.CaptureFixture[str], answer: bytes) -> tuple[int, str]:
    """What `status` says of a server that answers its first client so, and closes."""

    def serve(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = Thread(target=serve, args=(server,))
        thread.start()
        code, text = said(capsys, ["status", "--url", f"127.0.0.1:{server.getsockname()[1]}"])
        thread.join()
    return code, text


def test_a_server_that_speaks_no_http_is_told_in_one_line(capsys: pytest.CaptureFixture[str]):
    code, text = said_of_a_server(capsys, b"\x00\x01 no http\r\n\r\n")
    assert code == 1 and "does not answer" in text and len(text.splitlines()) == 1


def test_another_server_at_the_address_is_told_with_what_it_says(capsys: pytest.CaptureFixture[str]):
    code, text = said_of_a_server(capsys, b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n# HELP steps")
    assert code == 1 and "another server" in text and "# HELP" in text and len(text.splitlines()) == 1


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the command is only put in place by the console script."""
    command = [sys.executable, "-m", "kvrelay.cluster.commands.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_bench_refuses_a_kind_of_picture_before_it_asks_the_server():
    done = bench("--url", "http://127.0.0.1:9", "--plot", "x.foo")
    assert done.returncode == 2 and "x.foo" in done.stderr and ".png" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_bench_refuses_what_is_no_address():
    done = bench("--url", "ftp://a")
    assert done.returncode == 2 and "'ftp://a' is not a server's address" in done.stderr


def test_bench_goes_to_this_machines_newest_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    endpoints.note(endpoints.RunningCluster(os.getpid(), "http://127.0.0.1:9", "http://127.0.0.1:10", "m"))
    assert "http://127.0.0.1:9 does not list a model" in bench().stderr
    assert "http://localhost:11 does not list a model" in bench("--url", "localhost:11/v1").stderr


def test_scaling_a_ray_without_kvrelay_says_so(capsys: pytest.CaptureFixture[str]):
    class Empty(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"applications": {}}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Empty) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        code, text = said(capsys, ["scale", "--decode", "2", "--address", f"http://127.0.0.1:{server.server_port}"])
        thread.join()
    assert code == 1 and "not deployed" in text


def test_the_command_starts_without_ray_torch_or_transformers():
    program = (
        "import sys; from kvrelay.cluster.commands import cli, serve, status; cli.run(['version']);"
        "print([name for name in ('ray', 'torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [__version__, "[]"], done.stderr


@pytest.mark.parametrize(
    "command",
    ["serve", "status", "doctor", "scale", "kv", "profile", "trace", "simulate", "plan", "verify", "bench", "chaos"],
)
def test_help_imports_nothing_heavy(command: str):
    program = (
        "import sys; from kvrelay.cluster.commands import cli; sys.argv = ['kvrelay', sys.argv[1], '--help'];"
        "cli.run(sys.argv[1:]);"
        "print([name for name in ('ray', 'torch', 'transformers', 'numpy', 'aiohttp') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, command], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_the_version_is_a_flag_and_a_command(capsys: pytest.CaptureFixture[str]):
    assert [run(["--version"]), run(["version"])] == [0, 0]
    assert capsys.readouterr().out.split() == [__version__, __version__]


def test_serve_lists_every_transport_and_check_mode(capsys: pytest.CaptureFixture[str]):
    assert run(["serve", "--help"]) == 0
    words = capsys.readouterr().out.replace(",", " ").split()
    assert {*get_args(TransportName), *get_args(ChecksMode)} <= set(words)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["import", "missing.kv"], "no such file"), (["export", "x.kv", "--prompt", "a", "--format", "KV"], "KV_2LTD")],
)
def test_kv_finds_mistakes_before_it_loads_a_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], expected: str
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kv, "_engine", lambda settings: pytest.fail("loads a model"))
    with pytest.raises(ConfigError, match=expected):
        typer.main.get_command(kv_app())(args=arguments, standalone_mode=False)


def kv_app() -> typer.Typer:
    app = typer.Typer()
    app.command()(kv.command)
    return app


def test_building_the_application_imports_no_torch():
    program = "import sys; import kvrelay.cluster.deployments.app\n"
    program += "print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False"], done.stderr


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--kv-memory", "1KiB"], "engine.kv_memory: 1024 bytes hold 0 blocks"),
        (
            ["--max-model-len", "100000000"],
            "model.max_model_len: 100000000 tokens, but this model's longest context is 2048",
        ),
        (["--host", "192.0.2.7"], "cannot listen on 192.0.2.7"),
        (["--set", "decode.kv_memory=1KiB"], "decode.kv_memory: 1024 bytes hold 0 blocks"),
    ],
)
def test_settings_that_the_model_or_machine_cannot_take_are_told_before_ray_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str], told: str
):
    def never(session: RaySession) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(RaySession, "start_ray", never)
    folder = tiny_checkpoint("llama", tmp_path / "tiny-llama")
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [(number, signal.getsignal(number)) for number in numbers]
    try:
        code, text = said(capsys, ["serve", "--port", str(free_port("127.0.0.1")), "--model", str(folder), *flags])
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)
    assert code == 1 and told in text


PEEP = """
import os, subprocess, sys
from pathlib import Path
from kvrelay.cluster.launch.concealment import conceal
from kvrelay.environment import environment_api_key, environment_secret
conceal(sys.argv[1:])
child = subprocess.run([sys.executable, "-c", "import os; print(sorted(os.environ))"], capture_output=True, text=True)
seen = [Path(f"/proc/self/{name}").read_text() for name in ("cmdline", "environ")]
print([*seen, child.stdout, environment_api_key(), environment_secret(), sys.argv[1:]])
"""


@pytest.mark.parametrize("flags", [["--api-key", "k3y"], ["--api-key=k3y"], ["--set", "serve.api_key=k3y"]])
def test_a_secret_is_soon_gone_from_the_command_line_the_environment_and_every_child(flags: list[str]):
    env = {**os.environ, "KVRELAY_API_KEY": "of the environment", "KVRELAY_SECRET": "s3cret"}
    command = [sys.executable, "-c", PEEP, "serve", "--port", "80", *flags, "--model", "keyk3ys"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    cmdline, environ, childs, key, secret, arguments = ast.literal_eval(done.stdout)
    given = cmdline.split("\0")[3:-1]
    assert given == [*(flag.replace("k3y", "xxx") for flag in ("serve", "--port", "80", *flags)), "--model", "keyk3ys"]
    assert "of the environment" not in environ and "s3cret" not in environ
    assert "KVRELAY_API_KEY" not in childs and "KVRELAY_SECRET" not in childs and "PATH" in childs
    assert (key, secret) == ("of the environment", "s3cret") and arguments[3:-2] == flags  # this process has them


def test_the_secrets_of_a_command_are_known_by_their_flags():
    given = ["serve", "--api-key", "a", "--set", "engine.block_size=16", "--set=cluster.secret=b", "--config", "c"]
    assert secrets_among(given) == ["a", "b"]
    assert secrets_among(["bench", "--api-key"]) == secrets_among(["status", "--api-key="]) == []
