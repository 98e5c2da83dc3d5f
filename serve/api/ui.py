"""`/ui` and the endpoints behind it: the state of the cluster, and the log of each request that this ingress served.

The page itself holds no data and needs no key; everything that it asks for does, where one is set.
"""

import asyncio
import base64
import hashlib
import re
from functools import cache, partial
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kvrelay.errors import InvalidRequest
from kvrelay.serve.api.endpoint import INGRESS, EventStream, Front, json_response
from kvrelay.serve.telemetry.live import LiveFeed, request_detail, request_row, snapshot
from kvrelay.serve.telemetry.observer import REQUESTS_KEPT

STALL_S = 30.0  # a viewer that reads nothing for this long counts as gone
_NO_STORE = {"cache-control": "no-store"}
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


class LiveView:
    """The current snapshot, and the stream of snapshots for as many viewers as the feed allows."""

    def __init__(self, front: Front) -> None:
        self.feed = LiveFeed(partial(_snapshot, front))

    async def once(self, front: Front, request: Request) -> Response:
        return json_response(_snapshot(front, self.feed.num_viewers), 200, _NO_STORE)

    async def stream(self, front: Front, request: Request) -> Response:
        """One viewer too many gets 429."""
        return _PatientStream(self.feed.watch(), {})


def _snapshot(front: Front, num_viewers: int) -> dict[str, Any]:
    dispatcher = front.dispatcher
    view = snapshot(
        dispatcher.workers, dispatcher.router, dispatcher.stats, dispatcher.requests, now_s=dispatcher.clock()
    )
    return {"ingress": INGRESS, "model": front.model.name, "viewers": num_viewers, **view}


class _PatientStream(EventStream):
    """Ends when its client reads nothing for STALL_S, as if it had disconnected."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            async with asyncio.timeout(STALL_S):  # TimeoutError is an OSError: the client counts as gone
                await send(message)

        await super().__call__(scope, receive, sending)


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
