"""`kvrelay status`, `scale`, `role` and `rotate`, over HTTP from the ingress and Ray's dashboard, outside Ray."""

import json
import time
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvrelay.cluster.commands.doctor import Address, ApiKey, App, Url, chosen
from kvrelay.cluster.commands.progress import StartProgress, show_progress
from kvrelay.cluster.deployments.serve_config import scaled
from kvrelay.cluster.errors import ClusterError, RequestRefused
from kvrelay.cluster.launch.dashboard import dashboard_token_hint
from kvrelay.cluster.launch.endpoints import Endpoints, addressed, other_clusters
from kvrelay.cluster.launch.http_json import auth_headers, request_json
from kvrelay.cluster.launch.rollout import latest_lines, progress, wait_until_running
from kvrelay.cluster.registry.rotation import STEPS
from kvrelay.environment import environment_api_key
from kvrelay.errors import ConfigError
from kvrelay.settings.cluster import NEVER_NONE

TIMEOUT_S = 10.0
ANSWER_S = 30.0  # for a change of role
LOOK_S = 0.5  # between looks at a rotation
LOST_S = 60.0  # how long an ingress or the registry may not answer meanwhile: both may be replaced
_STEPS = (
    "every process trusts the new authority besides the old one",
    "every process shows a certificate of the new one",
    "no process trusts the old one",
)


def gather(cluster: Endpoints, api_key: str | None) -> dict[str, Any]:
    """The whole status, as plain data. While no ingress answers and Serve says that the application does not run yet,
    or no more, Serve's part of it, with the `error`.

    Raises ClusterError when the ingress does not answer otherwise.
    """
    serve = _serve_status(cluster)
    found: dict[str, Any] = {"serve": serve, "dashboard_url": cluster.dashboard.url}
    found["dashboard_token"] = dashboard_token_hint(cluster.dashboard.url)
    try:
        url = f"{cluster.api_url}/kvrelay/status"
        found |= request_json("GET", url, headers=auth_headers(api_key), timeout_s=TIMEOUT_S)
    except ClusterError as error:
        if serve.get("status") in (None, "RUNNING"):
            raise
        return found | {"error": str(error), "workers": []}
    return found | {"api_url": f"{cluster.api_url}/v1"}


def _serve_status(cluster: Endpoints) -> dict[str, Any]:
    """Serve's account of kvrelay: of each deployment its replicas' states, and in `progress` what they lack, and what
    those that start logged last, such as a download's share.
    """
    try:
        app = cluster.dashboard.application(cluster.app_name)
        lines = latest_lines(cluster.dashboard, app)
    except ClusterError as error:
        return {"error": str(error)}
    return {
        "status": app.get("status"),
        "is_planned": "autoscaling_policy" in (app.get("deployed_app_config") or {}),
        "deployments": {
            name: {
                "status": one["status"],
                "target": one.get("target_num_replicas"),
                "replicas": [replica["state"] for replica in one.get("replicas", [])],
                "progress": progress(one, lines.get(name, ())),
            }
            for name, one in app.get("deployments", {}).items()
        },
    }


def status(
    url: Url = None,
    address: Address = None,
    app: App = None,
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show the workers, their load and KV pools, and how KV travels between them."""
    with addressed(url, address, app) as cluster:
        found = gather(cluster, api_key or environment_api_key())
    console = Console()
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        console.print(render(found))
    if "error" in found:
        raise typer.Exit(1)
    if not as_json and (line := other_clusters(cluster.api_url)):
        console.print(f"[dim]{line}[/dim]", highlight=False)


def render(status: dict[str, Any]) -> RenderableType:
    """The tables."""
    serve = status.get("serve", {})
    head = Table.grid(padding=(0, 2))
    if "error" in status:
        head.add_row("API", Text(status["error"], "yellow"))
    else:
        head.add_row("model", f"{status.get('model')} (up to {status.get('max_model_len')} tokens)")
        head.add_row("API", str(status.get("api_url")))
    head.add_row("dashboard", str(status.get("dashboard_url")))
    if status.get("dashboard_token"):
        head.add_row("", Text(status["dashboard_token"], "dim"))
    for name, deployment in sorted(serve.get("deployments", {}).items()):
        head.add_row(name, Text(f"{deployment['status']}, {deployment['progress']}"))
    for line in status.get("planner", []) if serve.get("is_planned", True) else []:
        head.add_row("planner", Text(line, "yellow"))
    if "error" in serve:
        head.add_row("Serve", Text(serve["error"], "red"))
    if "error" in status:
        return head
    workers = status.get("workers", [])
    down = [Text(f"{one['worker_id']}: {one.get('error')}", "red") for one in workers if not one.get("is_up")]
    workers = sorted(workers, key=lambda worker: (worker["role"], worker["worker_id"]), reverse=True)
    up = [(worker["worker_id"], worker["load"]) for worker in workers if worker.get("is_up") and "load" in worker]
    tables = [_workers_table([*workers, *_changing(status)], status.get("pairs", [])), _queues_table(up)]
    if tiers := [(name, *_tier(tier)) for name, load in up for tier in load.get("tiers", [])]:
        tables.append(_table("worker|tier|blocks|MiB|down|up|refused|evicted|wrong", tiers))
    if stores := status.get("stores", []):
        tables.append(_stores_table(stores))
    down += [Text(f"{one['worker_id']}: {one.get('error')}", "red") for one in stores if not one.get("is_up")]
    return Group(head, *tables, *down)


def _table(columns: str, rows: Iterable[Iterable[object]]) -> Table:
    """columns: titles with `|` between them."""
    made = Table(*columns.split("|"), box=box.SIMPLE, padding=(0, 1, 0, 0))
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else str(cell) for cell in row))
    return made


def host_of(worker: dict[str, Any]) -> str:
    """The address of the host on which it runs."""
    return str(worker.get("address", "")).rpartition(":")[0]


def _place(worker: dict[str, Any], hosts: set[str]) -> str:
    """The worker's id, with its host where there are several."""
    return f"{worker['worker_id']} {host_of(worker)}" if len(hosts) > 1 else str(worker["worker_id"])


def _tier(tier: dict[str, Any]) -> tuple[object, ...]:
    room = f" of {tier['capacity_bytes'] / 2**20:.0f}" if tier["capacity_bytes"] else ""
    counts = (tier[f"{name}_blocks"] for name in ("stored", "loaded", "rejected", "evicted", "corrupt"))
    return tier["tier"], tier["num_blocks"], f"{tier['num_bytes'] / 2**20:.0f}{room}", *counts


def _over(worker_id: str, pairs: list[dict[str, Any]]) -> str:
    """The paths of this worker's KV and the speed of the slowest; `doctor` lists the pairs."""
    mine = [pair for pair in pairs if worker_id in (pair["source"], pair["target"])]
    if any(pair["verdict"] == "incompatible" for pair in mine):
        return "[red]incompatible[/red]"
    paths = [path for pair in mine if (path := chosen(pair))]
    names = "/".join(sorted({path["path"] for path in paths}))
    slowest = min((path["bytes_per_s"] for path in paths if path["bytes_per_s"]), default=0.0)
    return f"{names} {slowest / 1e9:.1f} GB/s" if slowest else names


def _workers_table(workers: list[dict[str, Any]], pairs: list[dict[str, Any]]) -> Table:
    """At most 80 columns wide where there is one host. Blocks: in use, cached (reusable at once), all."""
    hosts = {host_of(worker) for worker in workers}

    def row(worker: dict[str, Any]) -> tuple[object, ...]:
        name, pid, load = _place(worker, hosts), worker.get("pid", ""), worker.get("load", {})
        if "state" in worker:
            return name, pid, Text(worker["state"], "yellow")
        role_now = worker.get("info", {}).get("role", worker["role"])
        shown = name if role_now == worker["role"] else f"{name} ({role_now} now)"
        if not worker.get("is_up"):
            return name, pid, Text("down", "red")
        blocks = "/".join(str(load.get(f"{state}_blocks", 0)) for state in ("used", "cached", "total"))
        own = "/".join(one for one in worker.get("info", {}).get("transports", []) if one != "loopback")
        over = Text.from_markup(_over(worker["worker_id"], pairs)) or load.get("transport") or own
        moved = f"{load.get('kv_bytes', 0) / 2**20:.1f} MiB"
        return shown, pid, load.get("running", 0), load.get("waiting", 0), blocks, over, moved

    return _table("worker|pid|run|wait|used/cached/all|KV over|moved", map(row, workers))


def _changing(status: dict[str, Any]) -> list[dict[str, Any]]:
    """The workers that load their model, with the seconds since this ingress knows of them, and those that drain."""
    warming = [one | {"state": f"warming {one['seconds']:.0f} s"} for one in status.get("warming", [])]
    return warming + [one | {"state": "draining"} for one in status.get("draining", [])]


def _queues_table(loads: list[tuple[str, dict[str, Any]]]) -> Table:
    """Prompt tokens still to compute; sequences receiving KV, held for a decode worker and swapped; a step's time;
    tokens found in prefix caches, of those looked up; preemptions, and transfers refused since the start.
    """

    def row(name: str, load: dict[str, Any]) -> tuple[object, ...]:
        queues = "/".join(str(load.get(state, 0)) for state in ("receiving", "held", "swapped"))
        hits = f"{load.get('prefix_hit_tokens', 0) / max(load.get('prefix_query_tokens', 0), 1):.0%}"
        refused = ", ".join(f"{why} {count}" for why, count in load.get("kv_refused", {}).items()) or 0
        step = f"{1e3 * load.get('step_s', 0.0):.1f}"
        return name, load.get("queued_tokens", 0), queues, step, hits, load.get("preemptions", 0), refused

    rows = (row(name, load) for name, load in loads)
    return _table("worker|todo|recv/held/swap|step ms|hits|preempts|refused", rows)


def _stores_table(stores: list[dict[str, Any]]) -> Table:
    """The nodes of the cluster's KV store. Hits: blocks read, of those requested."""

    def row(store: dict[str, Any]) -> tuple[object, ...]:
        name, pid = store["worker_id"], store["pid"]
        if not store.get("is_up"):
            return name, pid, Text("down", "red")
        stats, used = store["stats"], f"{store['used_bytes'] / 2**20:.0f}/{store['capacity_bytes'] / 2**20:.0f} MiB"
        hits, moved = (
            f"{stats['leased']}/{stats['leased'] + stats['missed']}",
            f"{stats['to_disk']}/{stats['from_disk']}",
        )
        return name, pid, store["blocks"], used, hits, moved

    rows = map(row, sorted(stores, key=lambda store: str(store["worker_id"])))
    return _table("KV store|pid|blocks|used/all|hits|to/from disk", rows)


def scale(
    prefill: Annotated[int | None, typer.Option(min=0, help="prefill workers, at least 1")] = None,
    decode: Annotated[int | None, typer.Option(min=0, help="decode workers, at least 1")] = None,
    ingress: Annotated[int | None, typer.Option(min=1, help="ingresses")] = None,
    url: Url = None,
    address: Address = None,
    app: App = None,
    api_key: ApiKey = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="wait until the new count runs")] = True,
) -> None:
    """Change how many workers run, without restarting the others.

    Of workers that are too many, those with the least KV to move leave; their sequences go on elsewhere. With --no-wait
    Ray Serve chooses which.
    """
    from kvrelay.cluster.launch.scale_down import scale_down

    given = {"prefill": prefill, "decode": decode, "ingress": ingress}
    counts = {name: count for name, count in given.items() if count is not None}
    for role, why in NEVER_NONE.items():
        if counts.get(role) == 0:
            raise ConfigError(f"--{role} 0: {why}")
    if not counts:
        raise ConfigError("nothing to scale: give --prefill N, --decode N or --ingress N")
    target = ", ".join(f"{name} {count}" for name, count in counts.items())
    key, console = api_key or environment_api_key(), Console(highlight=False)
    with addressed(url, address, app) as cluster:

        def retire(names: list[str]) -> float:
            at, body = f"{cluster.api_url}/kvrelay/retire", {"workers": names}
            answer = request_json("POST", at, body, headers=auth_headers(key), timeout_s=TIMEOUT_S)
            return float(answer["drain_timeout_s"])

        name = cluster.app_name
        config = scaled(cluster.dashboard.details(), counts, name)
        if wait and (prefill or decode):
            scale_down(cluster.dashboard, lambda: gather(cluster, key)["workers"], counts, retire, console.print, name)
            config = scaled(cluster.dashboard.details(), counts, name)
        cluster.dashboard.deploy(config)
        if wait:
            with show_progress(console) as bars:
                steps = StartProgress(bars)

                def report(part: str, state: str) -> None:
                    if part in counts and console.is_terminal:
                        steps.report(part, state)

                wait_until_running(cluster.dashboard, report, app_name=name, counts=counts)
    console.print(f"now at {target}" if wait else f"scaling to {target}")


def role(
    worker: Annotated[str, typer.Argument(help="the worker's name, as `kvrelay status` shows it")],
    new_role: Annotated[str, typer.Argument(metavar="ROLE", help="prefill, decode or both")],
    drain: Annotated[
        float | None, typer.Option(min=0, help="seconds for what runs there to move or end; default: the cluster's")
    ] = None,
    url: Url = None,
    address: Address = None,
    app: App = None,
    api_key: ApiKey = None,
) -> None:
    """Change a worker's role in place. It takes the new role's requests at once; what it still has moves or ends."""
    body = {"worker": worker, "role": new_role, "drain_s": drain}
    with addressed(url, address, app) as cluster:
        try:
            answer = request_json(
                "POST",
                f"{cluster.api_url}/kvrelay/role",
                body,
                headers=auth_headers(api_key or environment_api_key()),
                timeout_s=ANSWER_S,
            )
        except RequestRefused as error:
            raise ClusterError(error.message) from error
    console = Console()
    what = "are computed again elsewhere" if answer["failed"] else "of the old role move or end now"
    there = f"; {answer['sequences']} requests {what}" if answer["sequences"] else ""
    line = f"{worker}: {answer['before']} -> {answer['role']} in {answer['seconds']:.3f} s{there}"
    console.print(line, highlight=False, soft_wrap=True)
    if answer["notice"]:
        console.print(answer["notice"], style="yellow", highlight=False, soft_wrap=True)


def rotate(url: Url = None, address: Address = None, app: App = None, api_key: ApiKey = None) -> None:
    """Give the cluster's TLS a new authority, in three steps; the old one then ends, and no request fails meanwhile.

    With cluster.tls_dir every process reads its files again. Ctrl-C ends the display alone.
    """
    console, began_s = Console(highlight=False), time.monotonic()
    with addressed(url, address, app) as cluster:

        def ask(method: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
            headers = auth_headers(api_key or environment_api_key())
            return request_json(method, f"{cluster.api_url}/kvrelay/rotate", body, headers=headers, timeout_s=TIMEOUT_S)

        try:
            found = ask("POST", {})
        except RequestRefused as error:
            raise ClusterError(error.message) from error
        has_files, last = found["has_files"], -(-found["number"] // STEPS) * STEPS
        if not found["is_begun"]:
            console.print("a rotation is under way: waiting for its end")
        answered_s, shown = time.monotonic(), last if has_files else found["number"] - 1
        with console.status("") as display:
            while True:
                for number in range(shown + 1, min(found["number"], last) + 1):
                    console.print(rotation_step(number))
                    shown = number
                if found["number"] >= last and not found["waiting_for"]:
                    break
                display.update(rotation_waits(found["waiting_for"]))
                time.sleep(LOOK_S)
                try:
                    found, answered_s = ask("GET"), time.monotonic()
                except ClusterError:
                    if time.monotonic() - answered_s > LOST_S:
                        raise
    faults = rotation_faults(found["processes"]) if has_files else []
    for line in faults:
        console.print(line, style="red", soft_wrap=True, markup=False)
    console.print(rotation_end(found, time.monotonic() - began_s, has_files=has_files), soft_wrap=True)
    if faults:
        raise typer.Exit(1)


def rotation_step(number: int) -> str:
    """What the authorities of this number mean."""
    step = (number - 1) % STEPS
    return f"step {step + 1} of {STEPS}: {_STEPS[step]}"


def rotation_waits(processes: list[str]) -> str:
    """What the next step waits for."""
    return f"waiting for {', '.join(processes)}" if processes else "letting handshakes end"


def rotation_faults(processes: dict[str, dict[str, Any]]) -> list[str]:
    """Hosts whose files could not be read, or whose ca.crt differs from that of most processes; a line for each."""
    problems = {(one["host"], one["problem"]): None for one in processes.values() if one["problem"]}
    digests = Counter(one["authority"] for one in processes.values() if not one["problem"])
    most = digests.most_common(1)[0][0] if digests else ""
    others = {one["host"]: None for one in processes.values() if not one["problem"] and one["authority"] != most}
    return [f"host {host}: {problem}" for host, problem in problems] + [
        f"host {host}: ca.crt differs from that of most processes" for host in others
    ]


def rotation_end(found: dict[str, Any], seconds: float, *, has_files: bool) -> str:
    """The last line."""
    processes = found["processes"].values()
    hosts = {one["host"] for one in processes}
    where = f"{len(processes)} processes on {len(hosts)} {'host' if len(hosts) == 1 else 'hosts'}"
    if has_files:
        expiries = [one["expires"] for one in processes if not one["problem"]]
        until = f"; the first certificate expires on {min(expiries)}" if expiries else ""
        return f"{len(expiries)} of {where} use what they read in cluster.tls_dir now{until}"
    return f"rotated: {where} show and trust the new authority alone, after {seconds:.1f} s"
