"""`kvrelay role`: change what a running worker does, without loading its model again."""

from typing import Annotated

import typer
from rich.console import Console

from kvrelay.cluster.commands.doctor import Address, ApiKey, Url
from kvrelay.cluster.errors import ClusterError, RequestRefused
from kvrelay.cluster.launch.endpoints import addressed
from kvrelay.cluster.launch.http_json import auth_headers, request_json
from kvrelay.environment import environment_api_key

ANSWER_S = 30.0  # beyond the drain
LONGEST_DRAIN_S = 3600.0  # the cluster's own setting is not known here


def command(
    worker: Annotated[str, typer.Argument(help="the worker's name, as `kvrelay status` shows it")],
    role: Annotated[str, typer.Argument(help="prefill, decode or both")],
    drain: Annotated[
        float | None, typer.Option(min=0, help="seconds for running sequences to move or end; default: the cluster's")
    ] = None,
    url: Url = None,
    address: Address = None,
    api_key: ApiKey = None,
) -> None:
    """Change a worker's role in place: drain, switch, announce."""
    body = {"worker": worker, "role": role, "drain_s": drain}
    with addressed(url, address) as cluster:
        try:
            answer = request_json(
                "POST",
                f"{cluster.api_url}/kvrelay/role",
                body,
                headers=auth_headers(api_key or environment_api_key()),
                timeout_s=ANSWER_S + (LONGEST_DRAIN_S if drain is None else drain),
            )
        except RequestRefused as error:
            raise ClusterError(error.message) from error
    console = Console()
    left = f", {answer['failed']} of them continue elsewhere" if answer["failed"] else ""
    there = f" ({answer['sequences']} requests were there{left})" if answer["sequences"] else ""
    line = f"{worker}: {answer['before']} -> {answer['role']} in {answer['seconds']:.3f} s{there}"
    console.print(line, highlight=False, soft_wrap=True)
    if answer["notice"]:
        console.print(answer["notice"], style="yellow", highlight=False, soft_wrap=True)
