"""`kvrelay status --watch`: the ingress's live view every second, on a terminal, into a pipe, or as JSON lines.

Queries the ingress over HTTP for the data of `/ui`; no worker is queried, and Ray is not joined.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.box import Box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.launch.probe import auth_headers, request_json

TIMEOUT_S = 10.0
PERIOD_S = 1.0
LIVE_SHOWN = 8  # requests
TENANTS_SHOWN = 3  # of each worker
QUEUES = ("waiting", "receiving", "running", "held", "swapped")
_PLACED = {
    *QUEUES,
    "seq", "queued_tokens", "free_blocks", "cached_blocks", "used_blocks", "total_blocks", "leased_blocks",
    "pinned_blocks", "step_s", "decode_step_s", "prefill_tokens_per_s", "preemptions", "kv_bytes", "kv_seconds",
    "kv_refusals", "kv_refused", "kv_check_s", "kv_leases", "prefix_hit_tokens", "prefix_query_tokens",
    "tier_hit_tokens", "steps", "batch_sequences", "batch_tokens", "reserving", "fetching", "is_draining",
    "preempted", "swapped_blocks", "swapped_bytes", "swap_out_s", "swap_in_s", "waiting_by_priority",
    "waiting_tenants", "tenant_tokens", "other_tenant_tokens", "deadline_refusals", "displaced",
    "recomputed_tokens", "drafted_tokens", "accepted_tokens", "model_drafted_tokens", "model_accepted_tokens",
    "cascade_saved_tokens",
}  # fmt: skip
"""Fields of a load report that have a place of their own, or none; any other counter is listed by its name."""
_HEALTH = {"up": "green", "leaving": "yellow", "silent": "yellow", "down": "red"}

View = dict[str, Any]


def fetch(api_url: str, api_key: str | None) -> View:
    """The ingress's view now. Raises ClusterError."""
    return request_json("GET", f"{api_url}/kvrelay/live", headers=auth_headers(api_key), timeout_s=TIMEOUT_S)


def watch(
    console: Console, api_url: str, api_key: str | None, *, as_json: bool, sleep: Callable[[float], object] = time.sleep
) -> None:
    """Show it every PERIOD_S until Ctrl-C, or until the reader closes the pipe.

    Raises ClusterError when the first view fails.
    """
    views = _views(lambda: fetch(api_url, api_key), sleep)
    try:
        if as_json:
            for view in views:
                print(json.dumps(view), flush=True)
        elif console.is_terminal:
            _watch_live(console, views)
        else:
            previous: View | None = None
            for view in views:
                console.print(render(view, previous), f"{'':─<79}\n")
                console.file.flush()
                previous = view
    except KeyboardInterrupt:
        return
    except BrokenPipeError:  # Python's last writes at exit would fail as well
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _watch_live(console: Console, views: Iterator[View]) -> None:
    previous: View | None = None
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for view in views:
            live.update(render(view, previous), refresh=True)
            previous = view


def _views(get: Callable[[], View], sleep: Callable[[float], object]) -> Iterator[View]:
    """A view each period. A request that fails after the first yields the last view with the reason as `problem`."""
    last = get()
    while True:
        yield last
        sleep(PERIOD_S)
        try:
            last = get()
        except ClusterError as error:
            last = {**last, "problem": str(error)}


def render(view: View, previous: View | None = None) -> RenderableType:
    """Tables that fit 80 columns; rates are since `previous`."""
    before = previous or view
    seconds = view["now_s"] - before["now_s"]
    old = {worker["worker_id"]: worker.get("load", {}) for worker in before["workers"]}
    workers = sorted(view["workers"], key=lambda worker: (worker["role"] != "prefill", worker["worker_id"]))
    parts: list[RenderableType] = [_head(view, before, seconds), _load_table(workers), _blocks_table(workers, old)]
    if tiers := list(tier_rows(workers, "stored", "loaded", "rejected", "evicted")):
        parts.append(table("lower tiers|tier|blocks|MiB|in|out|rejected|evicted", tiers, left=2))
    if view["pairs"]:
        parts.append(_transfers_table(view, workers))
    parts += [_events(workers, view["front"]), _requests_table(view["requests"])]
    parts += [Text(line, "red") for line in view["rejected"]]
    if problem := view.get("problem"):
        parts.append(Text(f"no answer since then: {problem}", "red"))
    return Group(*(line for part in parts for line in (part, "")))


def _head(view: View, before: View, seconds: float) -> Text:
    front, old = view["front"], before["front"]
    rates = ", ".join(
        f"{_rate(front[name], old[name], seconds):.0f} {what}/s"
        for name, what in (("prompt_tokens", "prompt tokens"), ("output_tokens", "output tokens"))
    )
    text = Text.assemble((view["model"], "bold"), f"  ingress {view['ingress']}: {front['running']} running\n{rates}")
    return text if view["is_ready"] else text.append("  not ready", "red")


def table(columns: str, rows: Iterable[Iterable[object]], *, left: int, frame: Box | None = None) -> Table:
    """columns: titles with `|` between them; the first `left` are text, the others numbers."""
    made = Table(box=frame, padding=(0, 1, 0, 0), header_style=None if frame else "dim")
    for index, title in enumerate(columns.split("|")):
        made.add_column(title, no_wrap=True, justify="left" if index < left else "right")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else str(cell) for cell in row))
    return made


def _load_table(workers: list[View]) -> Table:
    """Queues, in sequences; the last step's sequences and tokens; a step's time; prompt tokens not computed yet."""

    def row(worker: View) -> tuple[object, ...]:
        name, health = worker["worker_id"], Text(worker["health"], _HEALTH.get(worker["health"], ""))
        if (load := worker.get("load")) is None:
            return name, health
        queues, batch = (load.get(queue, "–") for queue in QUEUES), (load["batch_sequences"], load["batch_tokens"])
        return name, health, *queues, *batch, _time(load["step_s"]), load["queued_tokens"]

    return table("worker|health|wait|recv|run|held|swap|batch|tokens|step|todo", map(row, workers), left=2)


def _blocks_table(workers: list[View], old: dict[str, View]) -> Table:
    """Blocks of the pools by state; pinned ones are cached or used.

    Hits: of all prompt tokens looked up, those cached.
    """

    def row(worker: View) -> tuple[object, ...]:
        name, load = worker["worker_id"], worker["load"]
        before, hit, query = old.get(name, {}), "prefix_hit_tokens", "prefix_query_tokens"
        free = load["total_blocks"] - load["used_blocks"] - load["cached_blocks"]
        states = (load[f"{state}_blocks"] for state in ("used", "cached", "pinned", "total"))
        now = _share(load[hit] - before.get(hit, load[hit]), load[query] - before.get(query, load[query]))
        return name, free, *states, _share(load[hit], load[query]), now, _share(load["tier_hit_tokens"], load[hit])

    rows = (row(worker) for worker in workers if "load" in worker)
    return table("blocks|free|used|cached|pinned|all|hits|now|from tiers", rows, left=1)


def tier_rows(workers: list[View], *counts: str) -> Iterator[tuple[object, ...]]:
    """A row for each tier below a worker's pool, with these counts of blocks."""
    for worker in workers:
        for tier in worker.get("load", {}).get("tiers", []):
            room = f" of {tier['capacity_bytes'] / 2**20:.0f}" if tier["capacity_bytes"] else ""
            size = f"{tier['num_bytes'] / 2**20:.0f}{room}"
            yield (
                worker["worker_id"],
                tier["tier"],
                tier["num_blocks"],
                size,
                *(tier[f"{name}_blocks"] for name in counts),
            )


def _transfers_table(view: View, workers: list[View]) -> Table:
    """In flight: of this ingress's requests. Read: all that the decode worker has read, from anyone, by path."""
    loads = {worker["worker_id"]: worker.get("load", {}) for worker in workers}

    def row(pair: View) -> tuple[object, ...]:
        paths = loads.get(pair["target"], {}).get("kv_paths", [])
        moved = ", ".join(f"{path['path']} {path['num_bytes'] / 2**20:.1f} MiB" for path in paths if path["num_bytes"])
        speed = f" {pair['bytes_per_s'] / 1e9:.2f} GB/s" if pair["bytes_per_s"] else ""
        over = f"{pair['path']}{speed}" if pair["verdict"] == "ok" else Text(pair["verdict"], "red")
        return f"{pair['source']} → {pair['target']}", pair["in_flight"], over, moved

    return table("KV from → to|in flight|over|read there", map(row, view["pairs"]), left=4)


def _events(workers: list[View], front: View) -> Table:
    """Counts since the start: preemptions, refusals and their reasons."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    loads = {worker["worker_id"]: worker["load"] for worker in workers if "load" in worker}

    def each(text_of: Callable[[View], str]) -> str:
        return ", ".join(f"{name} {text}" for name, load in loads.items() if (text := text_of(load)))

    for title, text in (
        ("ended", _counts(front["outcomes"])),
        ("queued", each(_queued)),
        ("preempted", each(_preempted)),
        ("swapped out", each(_swap)),
        ("drafted", each(_drafted)),
        ("KV reads saved", each(lambda load: f"{saved} tokens" if (saved := load.get("cascade_saved_tokens")) else "")),
        ("by tenant", each(_tenants)),
        ("refused", _counts(front["refusals"])),
        ("transfers refused", each(lambda load: _counts(load["kv_refused"]))),
        ("also", ", ".join(f"{name} {text}" for name, load in loads.items() for text in _others(load))),
    ):
        if text or title in ("ended", "preempted", "refused", "transfers refused"):
            grid.add_row(Text(title, "dim"), text or "none")
    return grid


def _preempted(load: View) -> str:
    if not load["preemptions"]:
        return ""
    tokens = load.get("recomputed_tokens")
    by = _counts(load.get("preempted", {})) + (f"; {tokens} tokens recomputed" if tokens else "")
    return f"{load['preemptions']}" + (f" ({by})" if by else "")


def _drafted(load: View) -> str:
    drafted = load.get("drafted_tokens")
    if not drafted:
        return ""
    text = f"{drafted} tokens, {_share(load['accepted_tokens'], drafted)} right"
    if by_model := load.get("model_drafted_tokens"):
        text += f"; {by_model} of them by the draft model, {_share(load['model_accepted_tokens'], by_model)} right"
    return text


def _queued(load: View) -> str:
    """Waiting sequences by priority (the smallest is served first), and those removed from the queue."""
    classes = sorted(load.get("waiting_by_priority", {}).items(), key=lambda item: int(item[0]))
    text = [f"priority {priority}: {count}" for priority, count in classes if count]
    gone = {"past their deadline": load.get("deadline_refusals", 0), "displaced": load.get("displaced", 0)}
    return ", ".join(text + [f"{count} {why}" for why, count in gone.items() if count])


def _swap(load: View) -> str:
    if not load.get("swap_out_s"):
        return ""
    now = f"{load['swapped_blocks']} blocks now" if load["swapped_blocks"] else "nothing now"
    return f"{now} ({_time(load['swap_out_s'])} out, {_time(load['swap_in_s'])} back)"


def _tenants(load: View) -> str:
    """Computed tokens by tenant, most first. A tenant is shown by its digest."""
    tenants = sorted(load.get("tenant_tokens", {}).items(), key=lambda item: -item[1])
    if not any(name for name, _ in tenants):
        return ""
    others = sum(count for _, count in tenants[TENANTS_SHOWN:]) + load.get("other_tenant_tokens", 0)
    text = [f"{name[:6] or 'none'} {count}" for name, count in tenants[:TENANTS_SHOWN] if count]
    return ", ".join(text + [f"others {others}"] * bool(others))


def _others(load: View) -> list[str]:
    """Counters without a place of their own, those of newer workers included."""
    text: list[str] = []
    for name, value in load.items():
        if name in _PLACED:
            continue
        counts = {f"{name} {key}": count for key, count in value.items()} if isinstance(value, dict) else {name: value}
        text += [
            f"{key.replace('_', ' ')} {count:g}"
            for key, count in counts.items()
            if isinstance(count, int | float) and count
        ]
    return text


def _requests_table(requests: list[View]) -> Table:
    live = [row for row in requests if row["is_live"]]

    def row(one: View) -> tuple[object, ...]:
        path = " → ".join(name.rpartition("-")[2] for name in (one["prefill"], one["decode"]) if name)
        first = _time(one["ttft_s"]) if one["ttft_s"] is not None else "–"
        return _short(one["id"]), one["state"], path, one["prompt_tokens"], one["tokens"], first, _time(one["total_s"])

    title = "live request" if live else "last requests"
    shown = live[:LIVE_SHOWN] or requests[:LIVE_SHOWN]
    made = table(f"{title}|state|workers|in|out|first|total", map(row, shown), left=3)
    if len(live) > LIVE_SHOWN:
        made.add_row(f"and {len(live) - LIVE_SHOWN} more")
    return made


def _short(request_id: str) -> str:
    return request_id if len(request_id) <= 16 else f"…{request_id[-9:]}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}ms" if seconds < 1 else f"{seconds:.1f}s"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole > 0 else "–"


def _rate(now: float, before: float, seconds: float) -> float:
    """Growth per second; 0 after a counter's restart."""
    return (now - before) / seconds if seconds > 0 and now >= before else 0.0
