"""`/ui` and the endpoints behind it: the state of the cluster, and the log of each request that this ingress served.

The page itself holds no data and needs no key; everything that it asks for does, where one is set. It shows what this
ingress already knows: no worker is queried. `LiveFeed` makes a snapshot once per tick for all viewers, each of which
fetches it: a slow one only misses ticks.
"""

import asyncio
import base64
import hashlib
import logging
import math
import re
import time
from collections.abc import AsyncGenerator, Callable
from functools import cache
from importlib import resources
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kvrelay import __version__
from kvrelay.errors import InvalidRequest, Overloaded
from kvrelay.plane.reports import LoadReport
from kvrelay.router.decision.router import Router
from kvrelay.serve.api.endpoint import INGRESS, EventStream, Front, encode_event, json_response
from kvrelay.serve.telemetry.observer import REQUESTS_KEPT, RequestLog, RequestRecord, ServeStats
from kvrelay.serve.workers.membership import Membership
from kvrelay.serve.workers.pairs import WorkerPair
from kvrelay.serve.workers.worker_link import WorkerLink

STALL_S = 30.0  # a viewer that reads nothing for this long counts as gone
logger = logging.getLogger(__name__)

TICK_S = 1.0
MAX_VIEWERS = 16
ROWS_SHOWN = 100  # requests in each snapshot
SILENT_S = 7.0  # a worker sends its load every 2 s
_NO_STORE = {"cache-control": "no-store"}
_FACTS = ("node_id", "host", "device", "block_size", "max_running", "max_model_len")
CHOICES_SHOWN = 64  # of one HTTP request


async def page(front: Front, request: Request) -> Response:
    """The page: no data, no secrets."""
    html, policy = _page()
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return Response(html, 200, headers, "text/html")


@cache
def _page() -> tuple[bytes, str]:
    """The file, and a content security policy that allows only its own script and style."""
    html = resources.files("kvrelay.serve.api").joinpath("ui.html").read_bytes()
    sources = {kind: _hash_of(kind, html) for kind in ("script", "style")}
    policy = (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


def _hash_of(kind: str, html: bytes) -> str:
    found = re.search(rf"<{kind}>(.*?)</{kind}>".encode(), html, re.DOTALL)
    assert found is not None, f"ui.html has no {kind}"
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1]).digest()).decode()}'"


def snapshot(
    workers: Membership, router: Router, stats: ServeStats, requests: RequestLog, *, now_s: float
) -> dict[str, Any]:
    """The whole state, as plain data. Counters count from the start of the ingress, or of the worker."""
    book, num_transfers = workers.pairs.book, requests.num_transfers()
    return {
        "version": __version__,
        "now_s": now_s,
        "is_ready": workers.is_ready(),
        "workers": [
            *(worker_view(link, is_leaving=is_leaving) for link, is_leaving in workers.all_links()),
            *({"worker_id": name, "role": one.role, "health": "warming"} for name, (one, _) in workers.warming.items()),
        ],
        "pairs": [_pair(pair, num_transfers[pair.key]) for pair in book.pairs],
        "rejected": book.rejected(),
        "front": {
            "running": stats.running,
            "deferred": router.num_deferred,
            "outcomes": dict(stats.outcomes),
            "decisions": dict(stats.decisions),
            "refusals": dict(requests.refusals),
            "retries": stats.retries,
            "prompt_tokens": stats.prompt_tokens,
            "output_tokens": stats.output_tokens,
            "cached_prefix_tokens": stats.cached_prefix_tokens,
        },
        "requests": [request_row(record, now_s) for record in requests.newest(ROWS_SHOWN)],
    }


def worker_view(link: WorkerLink, *, is_leaving: bool) -> dict[str, Any]:
    """One worker and every figure of its last load report."""
    info, load = link.info, link.load or LoadReport(seq=0)
    view: dict[str, Any] = {"worker_id": link.worker_id, "role": link.member.role if info is None else info.role}
    if info is None:
        return {**view, "health": "down"}
    health = "leaving" if is_leaving or load.is_draining else "silent" if link.silent_s > SILENT_S else "up"
    facts = {name: getattr(info, name) for name in _FACTS}
    whole = msgspec.structs.asdict(load)  # with the fields that are zero, which msgspec would omit
    whole |= {name: [msgspec.structs.asdict(one) for one in whole[name]] for name in ("kv_paths", "tiers")}
    return {**view, "health": health, "silent_s": link.silent_s, **facts, "load": msgspec.to_builtins(whole)}


def _pair(pair: WorkerPair, in_flight: int) -> dict[str, Any]:
    (source, target), path = pair.key, pair.path
    name, speed = (None, 0.0) if path is None else (path.path, path.bytes_per_s)
    ends = {"source": source, "target": target, "verdict": str(pair.verdict)}
    return {**ends, "in_flight": in_flight, "path": name, "bytes_per_s": speed}


_ROW = ("path", "prefill", "decode", "prompt_tokens", "cached_tokens", "max_tokens", "attempts", "why")


def request_row(record: RequestRecord, now_s: float) -> dict[str, Any]:
    """One row of the page's table; durations in seconds, `age_s` since it arrived."""
    end_s = now_s if record.ended_s is None else record.ended_s
    return {
        "id": record.request_id,
        "state": _state(record),
        "is_live": record.ended_s is None,
        **{name: getattr(record, name) for name in _ROW},
        "tokens": record.num_tokens,
        "age_s": now_s - record.started_s,
        "total_s": end_s - record.started_s,
        "ttft_s": None if record.first_s is None else record.first_s - record.started_s,
    }


def _state(record: RequestRecord) -> str:
    """Its outcome, or its current stage."""
    if record.outcome is not None:
        return record.outcome
    if record.num_tokens:
        return "KV in transfer" if record.is_transferring else "decoding"
    return str(record.stages[-1]["name"])


def request_detail(record: RequestRecord, now_s: float) -> dict[str, Any]:
    """The row and every stage, ordered by time."""
    stages = sorted(record.stages, key=lambda stage: stage["at_s"])
    return {**request_row(record, now_s), "tpot_s": record.tpot_s, "stages": stages}


class LiveFeed:
    """Snapshots for up to `max_viewers`; one serves all of them for a tick."""

    def __init__(
        self, make: Callable[[int], dict[str, Any]], *, tick_s: float = TICK_S, max_viewers: int = MAX_VIEWERS
    ) -> None:
        """make: is called with the number of viewers."""
        self._make, self._tick_s, self._max_viewers = make, tick_s, max_viewers
        self.num_viewers = 0
        self._latest, self._made_at_s = b"", -math.inf

    async def once(self, front: Front, request: Request) -> Response:
        return json_response(self._make(self.num_viewers), 200, _NO_STORE)

    async def stream(self, front: Front, request: Request) -> Response:
        """One viewer too many gets 429."""
        return _PatientStream(self.watch(lambda: front.dispatcher.is_stopping), {})

    async def watch(self, is_over: Callable[[], bool] = lambda: False) -> AsyncGenerator[bytes, None]:
        """A snapshot per tick, as server-sent events; a slow viewer misses ticks. Raises Overloaded."""
        if self.num_viewers >= self._max_viewers:
            raise Overloaded(f"{self._max_viewers} viewers have this page open already", 10.0)
        self.num_viewers += 1
        try:
            while not is_over():
                yield self._snapshot()
                await asyncio.sleep(self._tick_s)
        finally:
            self.num_viewers -= 1

    def _snapshot(self) -> bytes:
        now_s = time.monotonic()
        if now_s - self._made_at_s >= 0.9 * self._tick_s:  # a viewer's own timer may be a little early
            self._made_at_s = now_s
            try:
                self._latest = encode_event(self._make(self.num_viewers))
            except Exception:  # a process edge: the next tick makes another snapshot
                logger.exception("no snapshot for the viewers")
        return self._latest


def front_snapshot(front: Front, num_viewers: int) -> dict[str, Any]:
    """What `/ui` shows; every viewer sees how many there are."""
    one = front.dispatcher
    view = snapshot(one.workers, one.router, one.stats, one.requests, now_s=one.clock())
    return {"ingress": INGRESS, "model": front.model.name, "viewers": num_viewers, **view}


class _PatientStream(EventStream):
    """Ends when its client reads nothing for STALL_S, as if it had disconnected."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            async with asyncio.timeout(STALL_S):  # TimeoutError is an OSError: the client counts as gone
                await send(message)

        await super().__call__(scope, receive, sending)


async def history(front: Front, request: Request) -> Response:
    """The last 15 minutes of this ingress."""
    return json_response({"ingress": INGRESS, **front.history.view(front.dispatcher.clock())}, 200, _NO_STORE)


async def requests(front: Front, request: Request) -> Response:
    """Every request in the log, newest first."""
    now_s, log = front.dispatcher.clock(), front.dispatcher.requests
    rows = [request_row(record, now_s) for record in log.newest(len(log))]
    return json_response({"ingress": INGRESS, "requests": rows}, 200, _NO_STORE)


async def one_request(front: Front, request: Request) -> Response:
    """The log of one sequence, or of all sequences of an HTTP request. Raises InvalidRequest (404)."""
    request_id, now_s = request.path_params["request_id"], front.dispatcher.clock()
    found = front.dispatcher.requests.find(request_id)
    if not found:
        raise InvalidRequest(_not_here(request_id), None, 404, "request_not_here")
    details = [request_detail(record, now_s) for record in found[:CHOICES_SHOWN]]
    return json_response({"ingress": INGRESS, "requests": details}, 200, _NO_STORE)


def _not_here(request_id: str) -> str:
    """The id shows which ingress served it."""
    tag = re.match(r"[a-z]+-([0-9a-f]{4})[0-9a-f]{20}", request_id)
    if tag is not None and tag[1] != INGRESS:
        return f"ingress {tag[1]} served this request; this is ingress {INGRESS}: open the other one's /ui"
    return f"ingress {INGRESS} does not know this request; it remembers the last {REQUESTS_KEPT}"
