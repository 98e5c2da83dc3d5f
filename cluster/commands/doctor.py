"""`kvrelay doctor`: between which workers KV can travel, over which path, how fast, and the remedy where it cannot.

Queries the ingress over HTTP, without joining Ray. `kvrelay serve` checks the same table before it announces its
address.
"""

import contextlib
import json
import time
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvrelay import __version__
from kvrelay.cluster.errors import ClusterError, RequestRefused
from kvrelay.cluster.launch.endpoints import addressed
from kvrelay.cluster.launch.http_json import auth_headers, request_json
from kvrelay.environment import environment_api_key

Url = Annotated[str | None, typer.Option(help="URL of the API alone; default: found through --address")]
Address = Annotated[
    str | None,
    typer.Option(
        help="Ray's dashboard (HEAD, HEAD:8265, URL); default: $RAY_API_SERVER_ADDRESS, else this machine's newest "
        "cluster"
    ),
]
App = Annotated[str | None, typer.Option("--app", help="the application, where several of kvrelay's run")]
ApiKey = Annotated[str | None, typer.Option(help="the cluster's API key, if it has one; default: $KVRELAY_API_KEY")]

TIMEOUT_S = 10.0
SETTLE_S = 90.0  # a prefill worker gives up on a pair within a minute
POLL_S = 0.2
_STYLES = {"ok": "green", "incompatible": "red", "failing": "yellow", "unknown": "dim"}


def fetch(api_url: str, api_key: str | None, *, is_probe: bool = False) -> dict[str, Any]:
    """The ingress's table of pairs; with `is_probe` every pair is measured again. Raises ClusterError."""
    method = "POST" if is_probe else "GET"
    return request_json(method, f"{api_url}/kvrelay/pairs", headers=auth_headers(api_key), timeout_s=TIMEOUT_S)


def settled(
    api_url: str, api_key: str | None, *, prefill: int = 0, decode: int = 0, is_probe: bool = False
) -> dict[str, Any]:
    """The table once that many workers of each role are connected and every pair has a report; after SETTLE_S, as it
    is.

    Raises ClusterError when the ingress still does not answer then.
    """
    deadline_s = time.monotonic() + SETTLE_S
    if is_probe:
        fetch(api_url, api_key, is_probe=True)
    while True:
        try:
            view = fetch(api_url, api_key)
            is_there = (view["prefill"] >= prefill and view["decode"] >= decode) or view["rejected"]
            is_complete = view["is_settled"] and is_there
        except ClusterError:
            if time.monotonic() > deadline_s or not (prefill or decode):
                raise
        else:
            if is_complete or time.monotonic() > deadline_s:
                return view
        time.sleep(POLL_S)


def incompatible(view: dict[str, Any]) -> list[str]:
    """A line for each incompatible pair, and for each worker that the ingress refused: what to correct."""
    return [*(pair["line"] for pair in view["pairs"] if pair["verdict"] == "incompatible"), *view["rejected"]]


def summary(view: dict[str, Any]) -> str:
    """The pairs by verdict, in a few words."""
    verdicts = [pair["verdict"] for pair in view["pairs"]]
    parts = [f"{verdicts.count(verdict)} {verdict}" for verdict in _STYLES if verdict in verdicts]
    return ", ".join(parts) or "no pairs"


def render(view: dict[str, Any]) -> Table:
    """The table: the paths of each pair, the chosen one first and marked. Fits 80 columns."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for title in ("from, to", "verdict", "path", "GB/s", "µs"):
        table.add_column(title, justify="right" if title in ("GB/s", "µs") else "left", no_wrap=True)
    table.add_column("why")
    for pair in view["pairs"]:
        verdict, path = pair["verdict"], chosen(pair)
        paths = [path] * bool(path) + [other for other in pair["paths"] if other is not path]
        rows = [_cells(one) for one in paths] or [
            ["", "", "", Text(": ".join(filter(None, (pair["reason"], pair["detail"]))))]
        ]
        rows += [["", "", "", ""]] * (2 - len(rows))
        ends = [pair["source"], f"→ {pair['target']}", *[""] * len(rows)]
        for index, (end, row) in enumerate(zip(ends, rows, strict=False)):
            label = Text("" if index else verdict, _STYLES.get(verdict, ""))
            table.add_row(end, label, *row, end_section=index == len(rows) - 1)
    return table


def _cells(path: dict[str, Any]) -> list[str | Text]:
    speed = f"{path['bytes_per_s'] / 1e9:.2f}" if path["bytes_per_s"] else ""
    latency = f"{path['latency_s'] * 1e6:.0f}" if path["latency_s"] else ""
    name = Text(f"▸ {path['path']}", "bold") if path["is_chosen"] else Text(f"  {path['path']}", "dim")
    return [name, speed, latency, Text(path["problem"] or path["why"])]


def chosen(pair: dict[str, Any]) -> dict[str, Any]:
    """The path of the pair's next read; empty when there is none."""
    return next((path for path in pair["paths"] if path["is_chosen"]), {})


def versions(status: dict[str, Any]) -> tuple[list[str], list[str]]:
    """A line for each host with its version and workers, and for each version that differs, from /kvrelay/status."""
    found: dict[tuple[str, str], list[str]] = {}
    for worker in status.get("workers", []):
        if worker.get("is_up"):
            host = str(worker.get("address", "")).rpartition(":")[0]
            found.setdefault((host, str(worker.get("version", "unknown"))), []).append(worker["worker_id"])
    lines = [f"{host}: kvrelay {version}, {', '.join(names)}" for (host, version), names in sorted(found.items())]
    others = sorted({version for _, version in found} - {status["version"]})
    wrong = [f"the ingress has kvrelay {status['version']}, workers have {version}" for version in others]
    if status["version"] != __version__:
        wrong.append(f"the cluster runs kvrelay {status['version']}, this machine has {__version__}")
    return lines, wrong


def doctor(
    url: Url = None,
    address: Address = None,
    app: App = None,
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    probe: Annotated[bool, typer.Option("--probe", help="measure every path again")] = False,
) -> None:
    """Show between which workers KV can travel, how fast, and the remedy where it cannot.

    The exit code is 1 when a pair is incompatible, or no decode worker is connected.
    """
    console = Console()
    with addressed(url, address, app) as cluster:
        key = api_key or environment_api_key()
        view = settled(cluster.api_url, key, is_probe=probe)
        hosts, differing = list[str](), list[str]()
        with contextlib.suppress(RequestRefused):  # an ingress without a cluster behind it
            url = f"{cluster.api_url}/kvrelay/status"
            hosts, differing = versions(request_json("GET", url, headers=auth_headers(key), timeout_s=TIMEOUT_S))
    wrong = incompatible(view)
    is_fine = not wrong and view["decode"] > 0
    if as_json:
        print(json.dumps({**view, "ok": is_fine, "hosts": hosts, "versions": differing}, indent=2))
        raise typer.Exit(not is_fine)
    if view["pairs"]:
        console.print(render(view))
    for line in hosts:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for line in differing:
        console.print(f"[yellow]warning:[/yellow] {escape(line)}", highlight=False, soft_wrap=True)
    for line in wrong:
        console.print(line, style="red", highlight=False, markup=False, soft_wrap=True)
    if not view["decode"]:
        console.print("[red]no decode worker is connected[/red]")
    elif not view["prefill"] and is_fine:
        console.print("no prefill worker is connected: the decode workers compute prompts too, no KV travels")
    else:
        console.print(summary(view), style="green" if is_fine else "red", highlight=False)
    raise typer.Exit(not is_fine)
