"""`kvrelay serve`: from a model's name to a URL that answers; Ctrl-C stops and removes everything."""

import contextlib
import os
import signal
import time
from functools import partial
from http import HTTPStatus
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from kvrelay.cluster.commands import doctor
from kvrelay.cluster.commands.progress import StartProgress, show_progress
from kvrelay.cluster.dashboards.files import provision, ray_folders
from kvrelay.cluster.deployments.serve_config import CLOSE_S
from kvrelay.cluster.errors import ClusterError, RequestRefused
from kvrelay.cluster.launch import endpoints
from kvrelay.cluster.launch.dashboard import dashboard_token_hint
from kvrelay.cluster.launch.endpoints import probe
from kvrelay.cluster.launch.http_json import auth_headers, request_json
from kvrelay.cluster.launch.prepare import Preparation
from kvrelay.cluster.launch.ray_session import RaySession
from kvrelay.cluster.launch.supervisor import StopSignals, report
from kvrelay.config import Settings
from kvrelay.environment import API_KEY_VARIABLE
from kvrelay.errors import ConfigError
from kvrelay.machine import is_loopback
from kvrelay.serve.tenants.access import read_keys
from kvrelay.settings.cluster import ServeSettings
from kvrelay.types import WORKER_ROLES

PROBE_S = 15.0  # for another ingress to know its workers
EARLY_FAILURE_S = 1.5  # for a wrong model name to show; then Ray starts while the model is prepared


def serve(settings: Settings, console: Console) -> int:
    """Run until a signal stops it; returns the exit status."""
    signals = StopSignals()
    session = RaySession(settings, after_ray_start=signals.after_ray_start, show_log=partial(_show_log, console))
    note: Path | None = None
    try:
        with signals:
            _check_chat_template(settings.model.chat_template)
            require_operators_key(settings.serve, settings.serve.api_key)
            if settings.serve.api_keys_file:
                read_keys(Path(settings.serve.api_keys_file))
            if settings.planner.history:
                from kvrelay.cluster.autoscaling.history import check_history  # Serve's controller would find out later

                check_history(settings.planner.history)
            session.check_ports()
            for line in exposure(settings.serve.host, settings.serve.api_key):
                console.print(f"[yellow]warning:[/yellow] {escape(line)}", highlight=False, soft_wrap=True)
            model = _start(settings, session, console)
            note = endpoints.note(_running(settings, session, model))
            announce(api_url(settings), session.dashboard_url, model, console, has_key=bool(settings.serve.api_key))
            console.print("\n[dim]Ctrl-C stops everything[/dim]")
            while True:
                signal.pause()
    except SystemExit:  # from Ray's handler of SIGTERM, while it starts
        signals.is_requested = True
        return 0
    except BaseException:  # Ray's extension may turn a stop into any exception
        if not signals.is_requested:
            raise
        return 0
    finally:
        signals.stopping()
        report("stopping" if signals.is_requested else "failing")
        finish_s = settings.cluster.drain_timeout_s if signals.is_requested and note is not None else 0.0
        _clear_up(session, note, console, finish_s, is_fine=signals.is_requested)
        signals.close()


def exposure(host: str, api_key: str | None, where: str = "") -> list[str]:
    """A warning where the API listens beyond this machine and takes requests from anyone. `where`: to set the key."""
    if api_key or is_loopback(host):
        return []
    what = f"the API listens on {host} without an API key: open to all that can reach it"
    return [f"{what}; set {API_KEY_VARIABLE}{where}"]


def _show_log(console: Console, line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may have closed
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _clear_up(session: RaySession, note: Path | None, console: Console, finish_s: float, *, is_fine: bool) -> None:
    """finish_s: for open requests to end; 0: none has begun."""
    if session.has_ray:
        what = f"open requests end, within {finish_s:g} s" if finish_s else "stopping"
        _show_log(console, f"{what} (Ctrl-C again to kill)")
    if note is not None:
        note.unlink(missing_ok=True)
    if finish_s:
        report(f"finishing {finish_s + CLOSE_S}")
        session.finish_requests(finish_s + CLOSE_S)
        report("stopping")
    logs = session.stop(keep_logs=not is_fine)
    if logs:
        console.print(f"[dim]logs: {logs}[/dim]", highlight=False)
    elif is_fine:
        console.print("[dim]stopped[/dim]")


def require_operators_key(settings: ServeSettings, key: str | None) -> None:
    """Before anything is started. Raises ConfigError: there are tenants, and no key of the operator."""
    if settings.api_keys_file and not key:
        raise ConfigError(
            f"serve.api_keys_file needs an operator's key besides: set {API_KEY_VARIABLE}; with it kvrelay checks the "
            "cluster, and shows and changes it later"
        )


def _check_chat_template(file: str | None) -> None:
    """Before anything is started. Raises ModelError."""
    if file is not None:
        from kvrelay.serve.text.chat_template import ChatTemplate
        from kvrelay.serve.text.model_folder import template_file

        ChatTemplate(template_file(file), {}, file)


def _start(settings: Settings, session: RaySession, console: Console) -> str:
    """Start model, Ray and application, then probe them; returns the model's served name. Raises KvrelayError."""
    url, key, cluster = api_url(settings), settings.serve.api_key, settings.cluster
    with show_progress(console) as progress:
        steps = StartProgress(progress)
        started_s = time.monotonic()
        steps.report("model", settings.model.source)
        preparing = Preparation(settings, lambda what, share: steps.report("model", what, share))
        try:
            preparing.fail_early(EARLY_FAILURE_S)
            steps.report("Ray", "starting")
            session.start_ray(session.start_registry)
            steps.done("Ray", session.dashboard_url)
            model, _ = preparing.result()
        finally:
            preparing.stop()
        steps.done("model", model)
        steps.report("Serve", "deploying")
        session.deploy()
        steps.done("Serve", "deployed")
        session.wait_until_running(lambda part, state: steps.report(part, state))
        for part in ("prefill", "decode", "ingress"):
            if part != "prefill" or cluster.prefill:
                steps.done(part)
        if cluster.prefill:
            steps.report("pairs", "measuring the paths between workers")
            steps.done("pairs", check_pairs(url, key, progress.console, prefill=cluster.prefill, decode=cluster.decode))
        steps.report("probe", "a request through the whole path")
        steps.done("probe", probe_path(url, key, model, prefill=cluster.prefill, decode=cluster.decode))
        with contextlib.suppress(ClusterError):  # what it prints is not needed to serve
            report_sizes(url, key, progress.console)
        with contextlib.suppress(ClusterError, OSError):  # as above
            provision(ray_folders(session.session_folder))
            where = f"{session.session_folder}/metrics"
            progress.console.print(f"[dim]Grafana and Prometheus: {where}[/dim]", highlight=False, soft_wrap=True)
        progress.console.print(f"[dim]ready in {time.monotonic() - started_s:.1f} s[/dim]", highlight=False)
    return model


def check_pairs(url: str, api_key: str | None, console: Console, *, prefill: int, decode: int) -> str:
    """Print the table of pairs; returns their summary.

    Raises ClusterError when KV cannot travel between two workers.
    """
    view = doctor.settled(url, api_key, prefill=prefill, decode=decode)
    console.print(doctor.render(view))
    if wrong := doctor.incompatible(view):
        raise ClusterError(f"KV cannot travel everywhere: {'; '.join(wrong)}")
    for pair in view["pairs"]:
        if pair["verdict"] != "ok":
            console.print(f"[yellow]warning:[/yellow] {escape(pair['line'])}", highlight=False)
    return doctor.summary(view)


def report_sizes(url: str, api_key: str | None, console: Console) -> None:
    """Print a line for each role: what its workers chose for themselves and why. And what limits or slows them."""
    status = request_json("GET", f"{url}/kvrelay/status", headers=auth_headers(api_key), timeout_s=10.0)
    workers = status["workers"]
    for role in WORKER_ROLES:
        worker = next((one for one in workers if one["role"] == role and one.get("sizes")), None)
        if worker is None:
            continue
        line, *notices = worker["sizes"]
        console.print(f"  {role:<8} {line}", highlight=False, markup=False, soft_wrap=True)
        for notice in filter(None, [*notices, worker["backend"].get("warning")]):
            console.print(f"[yellow]warning:[/yellow] {role}: {escape(notice)}", highlight=False, soft_wrap=True)


def probe_path(url: str, api_key: str | None, model: str, *, prefill: int, decode: int) -> str:
    """Send one request; returns which path it took. Raises ClusterError when the path does not work."""
    if not doctor.settled(url, api_key, decode=decode)["decode"]:
        raise ClusterError("the ingress is not ready: it is connected to no decode worker")
    deadline_s = time.monotonic() + PROBE_S
    while True:  # of several ingresses another one may answer, and know its workers a moment later
        try:
            explain = probe(url, model, api_key=api_key, disaggregated=prefill > 0)
            break
        except RequestRefused as error:
            if error.status != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > deadline_s:
                raise
            time.sleep(doctor.POLL_S)
    path = explain.get("path", "?")
    if prefill and path != "disaggregated":
        raise ClusterError(f"the probe took the {path} path, not one through a prefill worker")
    transport = explain.get("transfer", {}).get("transport")
    return f"{path} path works" + (f", KV over {transport}" if transport else "")


def api_url(settings: Settings) -> str:
    host = settings.serve.host
    address = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return f"http://[{address}]:{settings.serve.port}" if ":" in address else f"http://{address}:{settings.serve.port}"


def _running(settings: Settings, session: RaySession, model: str) -> endpoints.RunningCluster:
    return endpoints.RunningCluster(os.getpid(), api_url(settings), session.dashboard_url, model)


def announce(url: str, dashboard_url: str, model: str, console: Console, *, has_key: bool) -> None:
    """Print where the cluster's API, live view and dashboard are, and a curl line."""
    key = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if has_key else ""  # never the key itself
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}], '
    body += '"max_tokens": 128, "stream": true}'
    lines = [f"API        {url}/v1", f"live view  {url}/ui", f"dashboard  {dashboard_url}"]
    if token := dashboard_token_hint(dashboard_url):
        lines.append(f"           {token}")
    console.print(Panel("\n".join(lines), title=f"kvrelay serves {model}", expand=False), highlight=False)
    console.print("Try it:\n", highlight=False)
    console.out(f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'")
