"""`kvrelay deploy`: checks a Serve file, has the Serve of any Ray cluster run it, and waits until the API answers."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from kvrelay import __version__
from kvrelay.cluster.commands.doctor import Address, ApiKey, App
from kvrelay.cluster.commands.progress import StartProgress, show_progress
from kvrelay.cluster.commands.serve import (
    announce,
    check_pairs,
    exposure,
    probe_path,
    report_sizes,
    require_operators_key,
)
from kvrelay.cluster.deployments.serve_file import ServeFile, cluster_warnings, read_serve_file, with_other_applications
from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.launch import switch
from kvrelay.cluster.launch.dashboard import RayDashboard
from kvrelay.cluster.launch.endpoints import Endpoints, addressed
from kvrelay.cluster.launch.http_json import auth_headers, request_json
from kvrelay.cluster.launch.rollout import wait_until_running
from kvrelay.environment import environment_api_key
from kvrelay.errors import ConfigError

INTERRUPTED = 130
STATUS_S = 10.0


def command(
    file: Annotated[Path, typer.Argument(help="a Ray Serve file, such as configs/laptop.yaml")],
    address: Address = None,
    app: App = None,
    api_key: ApiKey = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="wait until the API answers")] = True,
    check: Annotated[
        bool, typer.Option("--check", help="check the file, and with --address what the cluster has; deploy nothing")
    ] = False,
) -> None:
    """Deploy a Serve file on a Ray cluster, or change what runs there.

    The file is checked first. Other applications of the cluster stay; one of kvrelay's whose route the file gives to
    another name is replaced without losing a request. Ctrl-C stops the waiting, not the deployment.
    """
    console = Console()
    every = read_serve_file(file)
    files = [one for one in every if app in (None, one.app_name)]
    if not files:
        raise ConfigError(f"{file} has no application {app!r}, but {', '.join(one.app_name for one in every)}")
    for one in files:
        name = f"{one.app_name}: " if len(files) > 1 else ""
        console.print(f"{file} is valid: {name}{one.summary()}", highlight=False, markup=False, soft_wrap=True)
        host = (one.config.get("http_options") or {}).get("host", "0.0.0.0")  # Serve's default in files
        key = api_key or one.settings.serve.api_key or environment_api_key()
        if wait and not check:
            require_operators_key(one.settings.serve, key)
        exposed = [] if one.is_kubernetes else exposure(host, key, " where `ray start` runs, unless it is set there")
        _warn(console, [*one.warnings, *exposed])
    if check and address is None:
        return
    if files[0].is_kubernetes and not check:
        raise ConfigError(f"{file} is for KubeRay's operator: kubectl apply -f {file}")
    config = files[0].config if app is None else files[0].only()
    with addressed(None, address) as cluster:
        details = cluster.dashboard.details()
        nodes, others = cluster.dashboard.nodes(), dict[str, str]()
        for one in files:
            _warn(console, cluster_warnings(one, details, nodes))
            if old := switch.predecessor(config, details, one.app_name):
                others[one.app_name] = old
        if others and not wait:
            raise ConfigError(f"--no-wait: to replace {', '.join(others.values())} takes several steps")
        if check:
            return
        config = with_other_applications(config, details)
        cluster.dashboard.deploy(switch.beside(config, details, others))
        if not wait:
            console.print(f"deploying; kvrelay status --address {cluster.dashboard.url} shows how far it is")
            return
        try:
            for one in files:
                key = api_key or one.settings.serve.api_key or environment_api_key()
                model = _wait(console, cluster.dashboard, one, key)
                if old := others.get(one.app_name):
                    _take_over(console, cluster.dashboard, config, one.app_name, old, key)
                if model is not None:
                    url = Endpoints(None, cluster.dashboard.url, app_name=one.app_name).api_url
                    announce(url, cluster.dashboard.url, model, console, has_key=bool(key))
        except KeyboardInterrupt:
            console.print(
                f"stopped waiting; the deployment goes on (kvrelay status --address {cluster.dashboard.url}; "
                "`serve shutdown` ends it)",
                highlight=False,
            )
            raise typer.Exit(INTERRUPTED) from None


def _warn(console: Console, lines: list[str] | tuple[str, ...]) -> None:
    for line in lines:
        console.print(f"[yellow]warning:[/yellow] {escape(line)}", highlight=False, soft_wrap=True)


def _take_over(
    console: Console, dashboard: RayDashboard, config: dict[str, Any], new: str, old: str, api_key: str | None
) -> None:
    """Give the old application's route to the new one, then end the old one. Raises ClusterError."""
    console.print(f"{new} runs beside {old}; now they change routes", highlight=False)
    switch.exchange_routes(dashboard, config, new, old)
    url = Endpoints(None, dashboard.url, app_name=old).api_url
    console.print(f"{new} has the route; {old} is at /{old} until its requests have ended", highlight=False)

    def num_requests() -> int:
        status = request_json("GET", f"{url}/kvrelay/status", headers=auth_headers(api_key), timeout_s=STATUS_S)
        loads = [worker.get("load", {}) for worker in status["workers"]]
        return sum(int(load.get(name, 0)) for load in loads for name in ("running", "waiting", "receiving", "held"))

    waited_s = switch.end(dashboard, old, num_requests)
    console.print(f"{old} ends, after {waited_s:.1f} s", highlight=False)


def _wait(console: Console, dashboard: RayDashboard, file: ServeFile, api_key: str | None) -> str | None:
    """Until every replica runs, and a request succeeds; returns the model's name, None where the API cannot be reached
    from here. Raises ClusterError with the reason.
    """
    cluster = Endpoints(None, dashboard.url, app_name=file.app_name)
    started_s, shown = time.monotonic(), dict[str, str]()
    with show_progress(console) as progress:
        steps = StartProgress(progress)

        def report(part: str, state: str) -> None:
            if shown.get(part) not in (None, state) and not console.is_terminal:
                console.print(f"  {part:<8} {state}", highlight=False, markup=False, soft_wrap=True)
            shown[part] = state
            steps.report(part, state)

        wait_until_running(dashboard, report, app_name=file.app_name)
        for part in file.counts:
            steps.done(part, shown.get(part, "running"))
        try:
            url = cluster.api_url
        except ClusterError as error:
            console.print(f"[yellow]every replica runs, but[/yellow] {escape(str(error))}", soft_wrap=True)
            return None
        status = request_json("GET", f"{url}/kvrelay/status", headers=auth_headers(api_key), timeout_s=STATUS_S)
        model, prefill, decode = status["model"], *(file.counts.get(role, (0, 0))[0] for role in ("prefill", "decode"))
        if prefill:
            steps.report("pairs", "measuring the paths between workers")
            steps.done("pairs", check_pairs(url, api_key, console, prefill=prefill, decode=decode))
        steps.report("probe", "a request through the whole path")
        steps.done("probe", probe_path(url, api_key, model, prefill=prefill, decode=decode))
        report_sizes(url, api_key, console)
        if status["version"] != __version__:
            _warn(console, [f"the cluster runs kvrelay {status['version']}, this machine has {__version__}"])
        console.print(f"[dim]deployed in {time.monotonic() - started_s:.1f} s[/dim]", highlight=False)
    return str(model)
