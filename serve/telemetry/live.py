"""What `/ui` shows: this ingress's view of the cluster, from state that it already has.

`LiveFeed` makes it once per tick for all viewers, each of which fetches it: a slow one only misses ticks. No worker is
queried.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from kvrelay import __version__
from kvrelay.errors import Overloaded
from kvrelay.plane.reports import LoadReport
from kvrelay.router.decision.router import Router
from kvrelay.serve.telemetry.observer import RequestLog, RequestRecord, ServeStats
from kvrelay.serve.workers.membership import Membership
from kvrelay.serve.workers.pairs import WorkerPair
from kvrelay.serve.workers.worker_link import WorkerLink

logger = logging.getLogger(__name__)

TICK_S = 1.0
MAX_VIEWERS = 16
ROWS_SHOWN = 100  # requests in each snapshot
SILENT_S = 7.0  # a worker sends its load every 2 s

_encoder = msgspec.json.Encoder()


def snapshot(
    workers: Membership, router: Router, stats: ServeStats, requests: RequestLog, *, now_s: float
) -> dict[str, Any]:
    """The whole state, as plain data. Counters count from the start of the ingress, or of the worker."""
    book, num_transfers = workers.pairs.book, requests.num_transfers()
    return {
        "version": __version__,
        "now_s": now_s,
        "is_ready": workers.is_ready(),
        "workers": [worker_view(link, is_leaving=is_leaving) for link, is_leaving in workers.all_links()],
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
    view: dict[str, Any] = {"worker_id": link.worker_id, "role": link.member.role}
    info, load = link.info, link.load or LoadReport(seq=0)
    if info is None:
        return {**view, "health": "down"}
    health = "leaving" if is_leaving or load.is_draining else "silent" if link.silent_s > SILENT_S else "up"
    facts = {name: getattr(info, name) for name in ("node_id", "device", "block_size", "max_running", "max_model_len")}
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

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """A snapshot per tick, as server-sent events; a slow viewer misses ticks. Raises Overloaded."""
        if self.num_viewers >= self._max_viewers:
            raise Overloaded(f"{self._max_viewers} viewers have this page open already", 10.0)
        self.num_viewers += 1
        try:
            while True:
                yield self._snapshot()
                await asyncio.sleep(self._tick_s)
        finally:
            self.num_viewers -= 1

    def _snapshot(self) -> bytes:
        now_s = time.monotonic()
        if now_s - self._made_at_s >= 0.9 * self._tick_s:  # a viewer's own timer may be a little early
            self._made_at_s = now_s
            try:
                self._latest = b"data: " + _encoder.encode(self._make(self.num_viewers)) + b"\n\n"
            except Exception:  # a process edge: the next tick makes another snapshot
                logger.exception("no snapshot for the viewers")
        return self._latest
