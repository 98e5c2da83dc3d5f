"""`kvrelay serve` as a user runs it: real model, real Ray, real processes; then scaling, a killed worker, Ctrl-C."""

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.cluster.autoscaling.policies import worker_name
from kvrelay.cluster.chaos.served import ServeProcess, start_serve
from kvrelay.cluster.dashboards.panels import DASHBOARDS
from kvrelay.cluster.deployments.serve_config import scaled
from kvrelay.cluster.launch.dashboard import RayDashboard, token_path
from kvrelay.cluster.registry.names import store_name
from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint
from kvrelay.errors import ModelNotFound
from kvrelay.settings.engine import ModelSettings
from tests.browser import page
from tests.cluster.dashboards.prometheus import Prometheus, need, running
from tests.cluster.telemetry.otlp_receiver import Receiver
from tests.ports import open_ports

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


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvrelay.cluster.commands.cli", *arguments], capture_output=True, text=True, timeout=200
    )


def kvrelay(*arguments: str) -> str:
    done = command(*arguments)
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
    spans: Receiver

    @property
    def where(self) -> tuple[str, ...]:
        return ("--url", self.url, "--address", self.dashboard, "--api-key", API_KEY)

    def status(self) -> dict[str, Any]:
        return dict(json.loads(kvrelay("status", "--json", *self.where)))

    def workers(self, role: str) -> list[dict[str, Any]]:
        """Those that were started as such."""
        return [worker for worker in self.status()["workers"] if worker["role"] == role]

    def scale_decode(self, count: int) -> str:
        """What the command prints; returns when an ingress sees as many workers."""
        printed = kvrelay("scale", "--decode", str(count), *self.where)
        until(lambda: len(self.workers("decode")) == count, RECOVER_S, f"{count} decode workers")
        return printed

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=API_KEY, max_retries=0, timeout=60.0)

    def model(self) -> str:
        with self.client() as client:
            return client.models.list().data[0].id

    def answer(
        self, max_tokens: int = 12, *, prompt: str = PROMPT, headers: dict[str, str] | None = None, **fields: object
    ) -> str:
        """A greedy completion, prefilled remotely."""
        with self.client() as client:
            reply = client.completions.create(
                model=self.model(),
                prompt=prompt,
                max_tokens=max_tokens,
                temperature=0,
                extra_headers={"x-kvrelay-prefill": "remote"} | (headers or {}),
                extra_body=fields,
            )
            return reply.choices[0].text


def start(temp: Path, *flags: str, **more: str) -> ServeProcess:
    """The command with a temporary folder of its own, so that what it leaves behind can be seen."""
    scratch = temp / "t"
    scratch.mkdir()
    environment = {"TMPDIR": str(scratch), "RAY_metrics_report_interval_ms": "5000", "KVRELAY_SECRET": SECRET} | more
    return start_serve(temp, *flags, environment=environment)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    try:
        prepare_checkpoint(ModelSettings())
    except ModelNotFound as error:
        pytest.skip(f"the default model cannot be had here: {error}")
    temp = Path(f"/tmp/kv{os.getpid()}")  # short: Ray's socket paths are limited to 107 bytes
    temp.mkdir()
    shared = frozenset(Path("/dev/shm").iterdir())
    settings = (
        "cache.host_memory=64MiB",
        "cache.remote=cluster",
        "store.memory=64MiB",
        "slo.classes={patient: {ttft_s: 60}}",
    )
    flags = ("--dtype", "float32", "--api-key", API_KEY, *(part for one in settings for part in ("--set", one)))
    spans = Receiver()
    started = start(temp, *flags, OTEL_EXPORTER_OTLP_ENDPOINT=spans.url, OTEL_BSP_SCHEDULE_DELAY="500")
    try:
        started.wait_until_started(START_S)
        yield Served(started.process, started.url, started.dashboard, started.log, temp, shared, spans)
    finally:
        started.kill()
        spans.close()
        subprocess.run(["rm", "-rf", str(temp)], check=True)


def test_the_probe_went_through_a_prefill_worker(served: Served):
    assert re.search(r"probe.*disaggregated path works, KV over \w+", served.log.read_text())


def test_the_printed_curl_line_works_as_printed(served: Served):
    line = next(line for line in served.log.read_text().splitlines() if line.startswith("curl "))
    assert API_KEY not in line
    env = {**os.environ, "KVRELAY_API_KEY": API_KEY}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, env=env)
    assert done.stdout.startswith("data: {") and done.stdout.rstrip().endswith("data: [DONE]"), done.stdout[-500:]


def test_no_other_user_can_enter_the_folder_in_which_rays_folders_are_open(served: Served):
    (folder,) = (served.temp / "t").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_without_the_key_nothing_is_answered(served: Served):
    with served.client().with_options(api_key="another") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_the_dashboards_account_of_the_application_holds_no_secret(served: Served):
    details = RayDashboard(served.dashboard).details()
    assert details["applications"]["kvrelay"]["deployed_app_config"]["args"]["model"] == {"dtype": "float32"}
    assert API_KEY not in json.dumps(details) and SECRET not in json.dumps(details)


def test_no_process_shows_a_secret_in_its_arguments_or_environment_and_no_log_has_one(served: Served):
    front = psutil.Process(served.process.pid)
    family = [Path("/proc", str(one.pid)) for one in (front, *front.children(recursive=True))]
    shown = {one / name for one in family for name in ("cmdline", "environ")}
    written = {path for path in (served.temp / "t").rglob("*") if path.is_file()} | {served.log}
    assert len(shown) > 20 and len(written) > 20
    secrets, token = (API_KEY.encode(), SECRET.encode()), token_path().read_bytes().strip()
    for path in shown | written:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            text = path.read_bytes()
            assert not any(secret in text for secret in (*secrets, token)), path


def test_other_machines_reach_no_port(served: Served):
    assert open_ports(served.process.pid) == {}


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


def test_rays_lists_of_actors_and_replicas_have_the_workers_names_and_states(served: Served):
    dashboard, workers = RayDashboard(served.dashboard), {one["worker_id"]: one for one in served.status()["workers"]}
    listed_actors = dashboard.actors()  # `ray list actors`
    actors = {actor["name"]: actor for actor in listed_actors}
    assert len(actors) == len(listed_actors) and all(actors)  # each has a name of its own
    assert actors["kvrelay-registry"]["class_name"] == "RegistryActor"
    assert actors[store_name("kvrelay", listed_actors[0]["node_id"])]["class_name"] == "StoreActor"
    app = dashboard.application()  # Serve's page
    listed = {role: app["deployments"][role]["replicas"] for role in ("prefill", "decode")}
    replicas = {worker_name(role, one["replica_id"]): one for role in listed for one in listed[role]}
    assert app["status"] == "RUNNING" and replicas.keys() == workers.keys()
    for name, replica in replicas.items():
        role, _, unique = name.partition("-")
        actor = actors[f"SERVE_REPLICA::kvrelay#{role}#{unique}"]
        assert actor["class_name"] == f"ServeReplica:kvrelay:{role}" and actor["state"] == "ALIVE"
        assert (replica["state"], replica["actor_name"]) == ("RUNNING", actor["name"])
        assert replica["pid"] == actor["pid"] == workers[name]["pid"]


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

    def of_operator() -> str:
        return httpx.get(f"{served.url}/metrics", headers={"authorization": f"Bearer {API_KEY}"}).text

    (folder,) = (served.temp / "t").glob("kvrelay-*/r/session_latest/metrics")
    with running(folder / "prometheus" / "prometheus.yml", tmp_path, every_s=2.0) as prometheus:

        def differences() -> list[str]:
            here, there = exposed(of_operator()), given_to_ray(prometheus)
            if missing := here.keys() - there.keys():
                return sorted(f"missing: {name} {sorted(labels)}" for name, labels in missing)
            counted = [key for key in here if key[0].endswith(("_total", "_bucket", "_sum", "_count"))]
            return [f"{key}: {here[key]} {there[key]}" for key in counted if here[key] != pytest.approx(there[key])]

        served.answer()
        deadline_s = time.monotonic() + RECOVER_S
        while different := differences():
            assert time.monotonic() < deadline_s, different
            time.sleep(0.5)
        assert {name.partition("{")[0] for name, _ in given_to_ray(prometheus)} <= {
            name for name, _ in exposed(of_operator())
        }
        assert len(prometheus.alerts()) >= 15

        pages = [json.loads(file.read_text()) for file in (folder / "grafana" / "dashboards").glob("kvrelay-*.json")]
        assert len(pages) == len(DASHBOARDS)
        deadline_s = time.monotonic() + RECOVER_S
        while silent := [line for shown in pages for line in prometheus.silent(shown)]:
            assert time.monotonic() < deadline_s, silent
            served.answer(a_field_of_the_clients=1, slo={"class": "patient"})
            time.sleep(2)
    serve_page = json.loads((folder / "grafana" / "dashboards" / "serve_grafana_dashboard.json").read_text())
    assert "ray_kvrelay_requests_total" in json.dumps(serve_page) and "ray_serve_" in json.dumps(serve_page)


def test_spans_of_ingress_prefill_and_decode_replicas_join_the_clients_trace(served: Served):
    trace_id, clients_span = secrets.token_hex(16), secrets.token_hex(8)
    served.answer(headers={"traceparent": f"00-{trace_id}-{clients_span}-01"})
    names = {"request", "route", "reserve", "prefill", "kv send", "kv transfer", "decode"}

    def all_of_them() -> dict[str, list[Any]] | None:
        found = served.spans.by_name(trace_id)
        return found if found.keys() >= names else None

    found = until(all_of_them, RECOVER_S, "the spans of each process")
    ((ingress, root),) = found.pop("request")
    assert root.parent_span_id.hex() == clients_span and ingress.startswith("ingress-")
    assert {span.parent_span_id for spans in found.values() for _, span in spans} == {root.span_id}
    (prefill,), (decode,) = served.workers("prefill"), served.workers("decode")
    made_by = {name: {instance for instance, _ in spans} for name, spans in found.items()}
    assert made_by == {
        **{name: {ingress} for name in ("route", "reserve")},
        **{name: {prefill["worker_id"]} for name in ("prefill", "kv send")},
        **{name: {decode["worker_id"]} for name in ("kv transfer", "decode")},
    }


@pytest.mark.parametrize(("width", "height"), [(1440, 1000), (420, 900)])
async def test_the_page_draws_the_flow_of_kv_without_an_error_or_overflow(
    served: Served, tmp_path: Path, width: int, height: int
):
    await asyncio.to_thread(served.answer, prompt=f"{width} times {PROMPT}")
    async with page(tmp_path / "profile") as shown:
        key = f"sessionStorage.setItem('kvrelay.api_key', {json.dumps(API_KEY)})"
        await shown.call("Page.addScriptToEvaluateOnNewDocument", source=key)
        await shown.open(f"{served.url}/ui", width, height)
        nodes = "[...document.querySelectorAll('#flows svg .node .name')].map(node => node.textContent)"
        await shown.until(f"{nodes}.length === 2 && document.querySelectorAll('#flows svg text.rate').length === 1")
        assert await shown.value("document.documentElement.scrollWidth") <= width
        assert {name.partition("-")[0] for name in await shown.value(nodes)} == {"prefill", "decode"}
        assert await shown.value("document.querySelectorAll('#charts .plot path').length") > 5
        assert shown.errors == []
        (tmp_path / "ui.png").write_bytes(await shown.picture())


def states_of_decode_replicas(dashboard: RayDashboard, change: Callable[[], object]) -> dict[str, list[str]]:
    """The states that Serve's page shows of each while `change` runs, in order."""
    seen = dict[str, list[str]]()
    with ThreadPoolExecutor() as pool:
        changing = pool.submit(change)
        while not changing.done():
            for one in dashboard.application()["deployments"]["decode"]["replicas"]:
                states = seen.setdefault(worker_name("decode", one["replica_id"]), [])
                states += [] if states[-1:] == [one["state"]] else [one["state"]]
            time.sleep(0.1)
        changing.result()
    return seen


def test_scaling_up_and_down_leaves_the_others_running_and_serves_page_shows_it(served: Served):
    dashboard, pids = RayDashboard(served.dashboard), {worker["pid"] for worker in served.status()["workers"]}
    (name,) = (worker["worker_id"] for worker in served.workers("decode"))
    states = states_of_decode_replicas(dashboard, lambda: served.scale_decode(2))
    assert pids < {worker["pid"] for worker in served.status()["workers"]}
    assert states.pop(name) == ["RUNNING"] and list(states.values()) == [["STARTING", "RUNNING"]]
    assert served.answer()

    def let_serve_stop_one() -> None:
        dashboard.deploy(scaled(dashboard.details(), {"decode": 1}))
        listed = lambda: dashboard.application()["deployments"]["decode"]["replicas"]  # noqa: E731
        until(lambda: len(listed()) == len(served.workers("decode")) == 1, RECOVER_S, "one decode worker")

    states = states_of_decode_replicas(dashboard, let_serve_stop_one)
    assert sorted(states.values()) == [["RUNNING"], ["RUNNING", "STOPPING"]]
    assert served.answer()


def test_a_worker_changes_its_role_and_back_while_requests_are_answered_and_the_last_that_decodes_may_not(
    served: Served,
):
    served.scale_decode(2)
    expected, (changing, other) = served.answer(64), [worker["worker_id"] for worker in served.workers("decode")]
    answers, is_over = list[str](), threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            answers.append(served.answer(64))

    def wait_for_more() -> None:
        wanted = len(answers) + 3
        until(lambda: len(answers) >= wanted, RECOVER_S, "more answers")

    with ThreadPoolExecutor() as pool:
        clients = [pool.submit(ask) for _ in range(3)]
        try:
            for before, role in (("decode", "prefill"), ("prefill", "decode")):
                wait_for_more()
                assert f"{changing}: {before} -> {role} in " in kvrelay("role", changing, role, *served.where)
                now = {worker["worker_id"]: worker["info"]["role"] for worker in served.status()["workers"]}
                assert (now[changing], now[other]) == (role, "decode")
                if role == "prefill":
                    refused = command("role", other, role, *served.where)
                    assert (refused.returncode, refused.stdout) == (1, "")
                    assert f"{other} is the last worker that decodes: without one, nothing can" in refused.stderr
        finally:
            is_over.set()
        for client in clients:
            client.result()
    assert set(answers) == {expected}
    assert re.search(r"decode-\w+ has left after", served.scale_decode(1))  # it retired; Serve stopped none


def test_a_killed_decode_worker_ends_its_stream_cleanly_and_is_replaced(served: Served):
    expected = served.answer()
    victim = served.workers("decode")[0]
    pieces, failure = 0, None
    with served.client() as client:
        stream = client.completions.create(
            model=served.model(), prompt=PROMPT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        try:
            for _ in stream:
                pieces += 1
                if pieces == 5:
                    os.kill(victim["pid"], signal.SIGKILL)
        except openai.APIError as error:
            failure = error
    assert pieces >= 5
    assert failure is not None or pieces >= 200  # told, or carried on by another worker
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
            found = []
            for one in family.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                    found += [one] if "raylet" in one.name() else []
            return found

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
    psutil.Process(process.pid).children()[0].children()[0].kill()  # the supervisor's child
    assert process.wait(STOP_S) == 128 + signal.SIGKILL, log.read_text()
    assert [child for child in family if child.is_running() and child.status() != "zombie"] == []
    assert "has died" in log.read_text() and len(list((log.parent / "t").iterdir())) == 1  # its logs


def test_a_killed_kvrelay_serve_takes_every_process_and_its_folder_with_it(starting):
    process, log, _ = starting
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGKILL)
    assert psutil.wait_procs(family, timeout=STOP_S)[1] == []
    assert list((log.parent / "t").iterdir()) == []
