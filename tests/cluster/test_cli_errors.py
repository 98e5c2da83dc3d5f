"""Wrong use of the command line: one clear line, the nearest known word, the right exit code, never a traceback."""

import json
import signal
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from kvrelay import __version__
from kvrelay.cluster.cli import run
from kvrelay.cluster.ray_session import RaySession


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
        (["serve", "--dtype", "fp8"], "model.dtype"),
        (["serve", "--decode", "0"], "cluster.decode"),
        (["serve", "--kv-memory", "lots"], "not a size"),
        (["serve", "--set", "engine.token_budge=3"], "engine.token_budget"),
        (["serve", "--set", "engin.token_budget=3"], "engine"),
        (["serve", "--config", "no/such.yaml"], "no/such.yaml"),
        (["sreve"], "serve"),
        (["scale"], "--decode"),
        (["scale", "--decode", "0"], "--decode"),
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
    file.write_text("router: {retry_bugdet: 1}\n")
    code, text = said(capsys, ["serve", "--config", str(file)])
    assert code == 2 and "router.retry_budget" in text


def test_a_taken_port_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text = said(capsys, ["serve", "--port", str(port)])
    assert code == 1 and f"port {port} is taken" in text


def test_a_missing_model_is_told_before_ray_starts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def never(session: RaySession) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(RaySession, "start_ray", never)
    monkeypatch.setattr("kvrelay.cluster.serve_command.LOOK_S", 60.0)
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        code = run(["serve", "--port", "0", "--model", "./no-such-model.gguf"])
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)
    text = capsys.readouterr()
    assert code == 1 and "no-such-model.gguf: no such folder or file" in text.err
    assert "stopping" not in text.out


def test_status_of_nothing_says_what_does_not_answer(capsys: pytest.CaptureFixture[str]):
    code, text = said(capsys, ["status", "--url", "http://127.0.0.1:9", "--dashboard", "http://127.0.0.1:9"])
    assert code == 1 and "127.0.0.1:9" in text and "does not answer" in text


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
        code, text = said(capsys, ["scale", "--decode", "2", "--dashboard", f"http://127.0.0.1:{server.server_port}"])
        thread.join()
    assert code == 1 and "not deployed" in text


def test_the_command_starts_without_ray_torch_or_transformers():
    program = (
        "import sys; from kvrelay.cluster import cli, serve_command, status_command; cli.run(['version']);"
        "print([name for name in ('ray', 'torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [__version__, "[]"], done.stderr


def test_building_the_application_imports_no_torch():
    program = "import sys; import kvrelay.cluster.app; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False"], done.stderr
