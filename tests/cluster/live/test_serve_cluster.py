"""`kvrelay serve` as a user runs it: real model, real Ray, real processes; then scaling, a killed worker, Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.served import ServeProcess, start_serve
from kvrelay.cluster.launch.dashboard import RayDashboard
from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint
from kvrelay.errors import ModelNotFound
from kvrelay.settings.engine import ModelSettings
from tests.cluster.dashboards.prometheus import Prometheus, need, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420), pytest.mark.alone]

API_KEY, SECRET = "k3y-of-$this-cluster", "a secret of its own"
START_S, RECOVER_S, STOP_S = 180.0, 120.0, 60.0
RAYS_LABELS = {"Component", "NodeAddress", "SessionName", "Version", "WorkerId", "ingress", "instance", "job"} | {
    f"otel_scope_{name}" for name in ("name", "schema_url", "version")
}
PROMPT = "Tell me in a few sentences why the sky is blue, and why sunsets are red. " * 4


def until(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """The first true value of `condition`; fails with `what` after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if value := condition():
            return value
        time.sleep(0.1)
    raise AssertionError(f"not within {timeout_s:.0f} s: {what}")


def kvrelay(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kvrelay.cluster.commands.cli", *arguments], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@dataclass(frozen=True)
class Served:
    """A running `kvrelay serve` and how to reach it."""

    process: subprocess.Popen[str]
    url: str
    dashboard: str
    log: Path
    temp: Path
    shared: frozenset[Path]  # what others had in /dev/shm before

    def status(self) -> dict[str, Any]:
        where = ("--url", self.url, "--address", self.dashboard, "--api-key", API_KEY)
        return dict(json.loads(kvrelay("status", "--json", *where)))

    def workers(self, role: str) -> list[dict[str, Any]]:
        return [worker for worker in self.status()["workers"] if worker["role"] == role]

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=API_KEY, max_retries=0, timeout=60.0)

    def model(self) -> str:
        with self.client() as client:
            return client.models.list().data[0].id

    def answer(self) -> str:
        """A greedy completion of a fixed prompt."""
        with self.client() as client:
            reply = client.completions.create(
                model=self.model(),
                prompt=PROMPT,
                max_tokens=12,
                temperature=0,
                extra_headers={"x-kvrelay-prefill": "remote"},
            )
            return reply.choices[0].text


def start(temp: Path, *flags: str) -> ServeProcess:
    """The command with a temporary folder of its own, so that what it leaves behind can be seen."""
    scratch = temp / "t"
    scratch.mkdir()
    return start_serve(temp, *flags, environment={"TMPDIR": str(scratch), "RAY_metrics_report_interval_ms": "5000"})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    try:
        prepare_checkpoint(ModelSettings())
    except ModelNotFound as error:
        pytest.skip(f"the default model cannot be had here: {error}")
    temp = Path(f"/tmp/kv{os.getpid()}")  # short: Ray's socket paths are limited to 107 bytes
    temp.mkdir()
    shared = frozenset(Path("/dev/shm").iterdir())
    started = start(temp, "--dtype", "float32", "--api-key", API_KEY, "--set", f"cluster.secret={SECRET}")
    try:
        started.wait_until_started(START_S)
        yield Served(started.process, started.url, started.dashboard, started.log, temp, shared)
    finally:
        started.kill()
        subprocess.run(["rm", "-rf", str(temp)], check=True)


def test_the_probe_went_through_a_prefill_worker(served: Served):
    assert re.search(r"probe.*disaggregated path works, KV over \w+", served.log.read_text())


def test_the_printed_curl_line_works_as_printed(served: Served):
    line = next(line for line in served.log.read_text().splitlines() if line.startswith("curl "))
    assert API_KEY not in line
    env = {**os.environ, "KVRELAY_API_KEY": API_KEY}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, env=env)
    assert done.stdout.startswith("data: {") and done.stdout.rstrip().endswith("data: [DONE]"), done.stdout[-500:]


def test_without_the_key_nothing_is_answered(served: Served):
    with served.client().with_options(api_key="another") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_the_dashboards_account_of_the_application_holds_no_secret(served: Served):
    details = RayDashboard(served.dashboard).details()
    assert details["applications"]["kvrelay"]["deployed_app_config"]["args"]["model"] == {"dtype": "float32"}
    assert API_KEY not in json.dumps(details) and SECRET not in json.dumps(details)


def test_a_chat_answers_and_streams_the_same_text(served: Served):
    model = served.model()
    ask: dict[str, Any] = {
        "model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24, "temperature": 0,
    }  # fmt: skip
    with served.client() as client:
        whole = client.chat.completions.create(**ask)
        pieces = [
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(**ask, stream=True)
            if chunk.choices
        ]
    assert whole.usage is not None and whole.usage.completion_tokens == 24
    assert len(pieces) > 5 and "".join(pieces) == whole.choices[0].message.content


def test_status_shows_both_roles_with_every_block_free_or_cached(served: Served):
    served.answer()
    until(lambda: all(worker["load"]["used_blocks"] == 0 for worker in served.status()["workers"]), RECOVER_S, "idle")
    status = served.status()
    assert {worker["role"] for worker in status["workers"]} == {"prefill", "decode"}
    assert status["serve"]["status"] == "RUNNING"
    assert all(worker["load"]["free_blocks"] == worker["load"]["total_blocks"] for worker in status["workers"])
    assert any(worker["load"]["kv_bytes"] > 0 for worker in status["workers"])


def test_the_ray_dashboard_knows_the_three_deployments(served: Served):
    assert set(served.status()["serve"]["deployments"]) == {"ingress", "prefill", "decode"}


def exposed(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of an ingress's /metrics."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def given_to_ray(prometheus: Prometheus) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """What Prometheus has of ours through Ray's agents, without Ray's prefix and labels."""
    found = prometheus.get("/api/v1/query", query='{__name__=~"ray_kvrelay_.*"}')["data"]["result"]
    ours = [(one["metric"].pop("__name__").removeprefix("ray_"), one["metric"], one["value"][1]) for one in found]
    return {
        (name, frozenset((key, value) for key, value in labels.items() if key not in RAYS_LABELS)): float(value)
        for name, labels, value in ours
    }


def test_ray_exports_what_the_ingress_does_and_its_grafana_has_our_dashboards(served: Served, tmp_path: Path):
    """Through the files in the session's folder, as an operator would use them."""
    need("prometheus")
    (folder,) = (served.temp / "t").glob("kvrelay-*/session_latest/metrics")
    with running(folder / "prometheus" / "prometheus.yml", tmp_path, every_s=2.0) as prometheus:

        def differences() -> list[str] | None:
            here, there = exposed(httpx.get(f"{served.url}/metrics").text), given_to_ray(prometheus)
            if missing := here.keys() - there.keys():
                return sorted(f"missing: {name} {sorted(labels)}" for name, labels in missing)
            counted = [key for key in here if key[0].endswith(("_total", "_bucket", "_sum", "_count"))]
            return [f"{key}: {here[key]} {there[key]}" for key in counted if here[key] != pytest.approx(there[key])]

        served.answer()
        until(lambda: not differences(), 60, "the same series and counts in Ray's metrics as in /metrics")
        assert {name.partition("{")[0] for name, _ in given_to_ray(prometheus)} <= {
            name for name, _ in exposed(httpx.get(f"{served.url}/metrics").text)
        }
        assert len(prometheus.alerts()) >= 15

        page = json.loads((folder / "grafana" / "dashboards" / "kvrelay-overview.json").read_text())
        deadline_s = time.monotonic() + 60
        while silent := prometheus.silent(page):
            assert time.monotonic() < deadline_s, silent
            served.answer()
            time.sleep(2)
    serve_page = json.loads((folder / "grafana" / "dashboards" / "serve_grafana_dashboard.json").read_text())
    assert "ray_kvrelay_requests_total" in json.dumps(serve_page) and "ray_serve_" in json.dumps(serve_page)


def test_scaling_up_and_down_leaves_the_others_running(served: Served):
    pids = {worker["pid"] for worker in served.status()["workers"]}
    kvrelay("scale", "--decode", "2", "--address", served.dashboard)
    until(lambda: len(served.workers("decode")) == 2, RECOVER_S, "two decode workers")
    assert pids < {worker["pid"] for worker in served.status()["workers"]}
    assert served.answer()
    kvrelay("scale", "--decode", "1", "--address", served.dashboard, "--api-key", API_KEY)
    until(lambda: len(served.workers("decode")) == 1, RECOVER_S, "one decode worker")
    assert served.answer()


def test_a_killed_decode_worker_ends_its_stream_cleanly_and_is_replaced(served: Served):
    expected = served.answer()
    victim = served.workers("decode")[0]
    pieces, failure = 0, None
    with served.client() as client:
        stream = client.completions.create(
            model=served.model(), prompt=PROMPT, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        try:
            for _ in stream:
                pieces += 1
                if pieces == 5:
                    os.kill(victim["pid"], signal.SIGKILL)
        except openai.APIError as error:
            failure = error
    assert pieces >= 5
    assert failure is not None or pieces >= 1000  # told, or carried on by another worker
    assert failure is None or victim["worker_id"] in str(failure) or "worker" in str(failure)

    kvrelay("scale", "--decode", "1", "--address", served.dashboard)  # waits while Serve says UNHEALTHY

    def recovered() -> bool:
        ups = [worker for worker in served.workers("decode") if worker["is_up"]]
        return any(worker["pid"] != victim["pid"] for worker in ups)

    until(recovered, RECOVER_S, "a new decode worker")
    assert served.answer() == expected


def test_ctrl_c_leaves_no_process_and_no_file(served: Served):
    before = psutil.Process(served.process.pid)
    family = before.children(recursive=True)
    assert len(family) > 5
    os.killpg(served.process.pid, signal.SIGINT)
    assert served.process.wait(STOP_S) == 0, served.log.read_text()
    assert [process for process in family if process.is_running() and process.status() != "zombie"] == []
    assert "stopped" in served.log.read_text()
    assert list((served.temp / "t").iterdir()) == []
    pids = {process.pid for process in family}
    left = [
        path
        for path in set(Path("/dev/shm").iterdir()) - served.shared
        if pids & {int(digits) for digits in re.findall(r"\d+", path.name)}
    ]
    assert left == []


@pytest.fixture
def starting() -> Iterator[tuple[subprocess.Popen[str], Path, psutil.Process]]:
    """A cluster that has just started its raylet; its log, and the raylet."""
    temp = Path(f"/tmp/ke{os.getpid()}")
    temp.mkdir()
    started = start(temp)
    try:
        family = psutil.Process(started.process.pid)

        def raylets() -> list[psutil.Process]:
            assert started.process.poll() is None, started.log.read_text()
            return [one for one in family.children(recursive=True) if "raylet" in one.name()]

        yield started.process, started.log, until(raylets, START_S, "raylet")[0]
    finally:
        started.kill()
        subprocess.run(["rm", "-rf", str(temp)], check=True)


def test_ctrl_c_during_start_up_leaves_nothing_either(starting):
    process, log, _ = starting
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(STOP_S) == 0, log.read_text()
    assert [child for child in family if child.is_running() and child.status() != "zombie"] == []
    assert list((log.parent / "t").iterdir()) == []


def test_ctrl_c_while_ray_waits_for_a_daemon_that_hangs_leaves_nothing_either(starting):
    process, log, raylet = starting
    raylet.suspend()
    time.sleep(2.0)  # until Ray asks for it, in C++
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(STOP_S) == 0, log.read_text()
    assert "killed everything" in log.read_text()  # without the process in front, Ray's wait would have gone on
    assert [child for child in family if child.is_running() and child.status() != "zombie"] == []
    assert list((log.parent / "t").iterdir()) == []


def test_a_driver_that_dies_takes_every_process_with_it(starting):
    process, log, _ = starting
    family = psutil.Process(process.pid).children(recursive=True)
    psutil.Process(process.pid).children()[0].kill()
    assert process.wait(STOP_S) == 128 + signal.SIGKILL, log.read_text()
    assert [child for child in family if child.is_running() and child.status() != "zombie"] == []
    assert "has died" in log.read_text() and len(list((log.parent / "t").iterdir())) == 1  # its logs
