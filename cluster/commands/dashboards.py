"""`kvrelay dashboards`: Grafana dashboards, alert rules and Prometheus settings, beside Ray's own or in a folder."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvrelay.cluster.dashboards.files import SESSION, Source, provision, ray_folders, write_folder
from kvrelay.errors import ConfigError


def command(
    output: Annotated[
        Path | None, typer.Option(help="folder for a Prometheus and a Grafana of your own; default: beside Ray's files")
    ] = None,
    source: Annotated[
        str, typer.Option(help="what --output's Prometheus scrapes: ray (its agents), or one ingress")
    ] = "ray",
    target: Annotated[str, typer.Option(help="host:port of that ingress")] = "127.0.0.1:8000",
    serve_page: Annotated[
        bool, typer.Option("--serve-page/--no-serve-page", help="replace three panels of Ray's Serve page by ours")
    ] = True,
    session: Annotated[Path, typer.Option(help="folder of the head's Ray session")] = Path(SESSION),
    prometheus: Annotated[str, typer.Option(help="where Grafana finds Prometheus")] = "http://localhost:9090",
) -> None:
    """Write Grafana dashboards, alert rules and Prometheus settings."""
    if output is None:
        written = provision(ray_folders(session), serve_page=serve_page)
    else:
        written = write_folder(output, _source(source), target=target, session=session, prometheus=prometheus)
    for path in written:
        Console().print(str(path), highlight=False, markup=False, soft_wrap=True)


def _source(name: str) -> Source:
    if name == "ray":
        return "ray"
    if name == "ingress":
        return "ingress"
    raise ConfigError(f"--source {name}: must be ray or ingress")
