"""`kvrelay deploy`: checks a Serve file, has the Serve of any Ray cluster run it, and waits until the API answers."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from kvrelay import __version__
from kvrelay.cluster.commands.doctor import Address, ApiKey
from kvrelay.cluster.commands.progress import StartProgress, show_progress
from kvrelay.cluster.commands.serve import announce, check_pairs, probe_path, report_sizes
from kvrelay.cluster.deployments.serve_file import ServeFile, cluster_warnings, read_serve_file, with_other_applications
from kvrelay.cluster.errors import ClusterError
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
    api_key: ApiKey = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="wait until the API answers")] = True,
    check: Annotated[
        bool, typer.Option("--check", help="check the file, and with --address what the cluster has; deploy nothing")
    ] = False,
) -> None:
    """Deploy a Serve file on a Ray cluster, or change what runs there.

    The file is checked first. Other applications of the cluster stay. Ctrl-C stops the waiting, not the deployment.
    """
    console = Console()
    found = read_serve_file(file)
    console.print(f"{file} is valid: {found.summary()}", highlight=False, markup=False, soft_wrap=True)
    _warn(console, found.warnings)
    if check and address is None:
        return
    if found.is_kubernetes and not check:
        raise ConfigError(f"{file} is for KubeRay's operator: kubectl apply -f {file}")
    with addressed(None, address) as cluster:
        details = cluster.dashboard.details()
        _warn(console, cluster_warnings(found, details, cluster.dashboard.nodes()))
        if check:
            return
        cluster.dashboard.deploy(with_other_applications(found.config, details))
        if not wait:
            console.print(f"deploying; kvrelay status --address {cluster.dashboard.url} shows how far it is")
            return
        key = api_key or found.settings.serve.api_key or environment_api_key()
        try:
            _wait(console, cluster, found, key)
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


def _wait(console: Console, cluster: Endpoints, file: ServeFile, api_key: str | None) -> None:
    """Until every replica runs, and a request succeeds. Raises ClusterError with the reason."""
    started_s, shown = time.monotonic(), dict[str, str]()
    with show_progress(console) as progress:
        steps = StartProgress(progress)

        def report(part: str, state: str) -> None:
            if shown.get(part) not in (None, state) and not console.is_terminal:
                console.print(f"  {part:<8} {state}", highlight=False, markup=False, soft_wrap=True)
            shown[part] = state
            steps.report(part, state)

        wait_until_running(cluster.dashboard, report, app_name=file.app_name)
        for part in file.counts:
            steps.done(part, shown.get(part, "running"))
        try:
            url = cluster.api_url
        except ClusterError as error:
            console.print(f"[yellow]every replica runs, but[/yellow] {escape(str(error))}", soft_wrap=True)
            return
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
    announce(url, cluster.dashboard.url, model, console, has_key=bool(api_key))
