"""HTTP below the endpoints: bodies with a limit, API keys, OpenAI's error objects, clients that leave, server-sent
events.

Knows nothing of tokens. Imports no router.
"""

import asyncio
import contextlib
import hmac
import logging
import math
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrelay.errors import InvalidRequest, KvrelayError, RequestError, WorkerError
from kvrelay.serve.api.replies import ErrorBody, ErrorReply

logger = logging.getLogger(__name__)

DONE_EVENT = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()

T = TypeVar("T")


class ClientLeft(Exception):
    """The client closed the connection: there is no one to answer. Never leaves serve/."""


def check_api_key(request: Request, api_key: str | None) -> None:
    """Raises InvalidRequest (401) unless the key is right or none is set."""
    if api_key is None:
        return
    if not hmac.compare_digest(bearer_token(request).encode(), api_key.encode()):
        raise InvalidRequest("missing or wrong API key", None, 401, "invalid_api_key")


def bearer_token(request: Request) -> str:
    """The API key that came with a request; "" when there is none."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


async def read_json_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body. Raises InvalidRequest: no JSON content type, empty, or over the limit (413)."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        got = f"not {content_type}" if content_type else "but there is none"
        raise InvalidRequest(f"the content type must be application/json, {got}", None, 400, "unsupported_content_type")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit_bytes:
        raise _too_large(limit_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit_bytes:
                raise _too_large(limit_bytes)
            parts.append(part)
    except ClientDisconnect as error:
        raise ClientLeft from error
    if not size:
        raise InvalidRequest("the body is empty", None, 400, "invalid_json")
    return b"".join(parts)


def _too_large(limit_bytes: int) -> InvalidRequest:
    return InvalidRequest(f"the body is larger than {limit_bytes} bytes", None, 413, "body_too_large")


async def _left(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; the work is cancelled, and ClientLeft raised, when the client goes first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and watcher.exception() is not None:  # a server that cannot watch
            logger.debug("cannot watch for the client leaving: %r", watcher.exception())
            await asyncio.wait((task,))
        if task.done():
            return task.result()
        raise ClientLeft
    finally:
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStream(Response):
    """Server-sent events from a generator of ready-made bytes.

    The status waits for the first event, so that an error before it is a plain HTTP error; one
    after it is an error event and the end. The generator is closed whatever happens.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        super().__init__(None, 200, headers, "text/event-stream")
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        self._events = events
        self._extra_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_client_leaves(receive, self._run(scope, receive, send))
        except ClientLeft:
            logger.debug("the client left during a stream")

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            try:
                first = await anext(events, b"")
            except Exception as error:
                await error_response(error, self._extra_headers)(scope, receive, send)
                return
            try:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": first, "more_body": True})
                await self._send_rest(events, send)
            except OSError as error:
                raise ClientLeft from error

    @staticmethod
    async def _send_rest(events: AsyncGenerator[bytes, None], send: Send) -> None:
        tail = b""
        try:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except OSError:
            raise
        except Exception as error:
            tail = encode_event(describe(error)[1])
        await send({"type": "http.response.body", "body": tail, "more_body": False})


# ---- every error as OpenAI's error object with its HTTP status

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def _type_of(status: int) -> str:
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def describe(error: Exception) -> tuple[int, ErrorReply, float | None]:
    """(status, body, Retry-After in seconds or None) of any error."""
    if isinstance(error, RequestError):
        body = ErrorBody(message=error.message, type=_type_of(error.status), param=error.param, code=error.code)
        body.slo = getattr(error, "slo", UNSET)
        return error.status, ErrorReply(error=body), getattr(error, "retry_after_s", None)
    if isinstance(error, WorkerError):
        body = ErrorBody(message=str(error), type="server_error", code="worker_failed")
        return 503, ErrorReply(error=body), 1.0
    if isinstance(error, KvrelayError):
        return 500, ErrorReply(error=ErrorBody(message=str(error), type="server_error", code="internal_error")), None
    logger.error("unexpected error", exc_info=error)
    body = ErrorBody(message="internal error; see the server's log", type="server_error", code="internal_error")
    return 500, ErrorReply(error=body), None


def json_response(reply: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(reply), status, headers, "application/json")


def error_response(error: Exception, headers: dict[str, str] | None = None) -> Response:
    """The response for an error before the first byte."""
    status, reply, retry_after_s = describe(error)
    headers = dict(headers or {})
    if retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    return json_response(reply, status, headers)


def encode_json(reply: object) -> bytes:
    """A reply as JSON."""
    return _encoder.encode(reply)


def encode_event(reply: object) -> bytes:
    """A reply as one server-sent event."""
    return b"data: " + _encoder.encode(reply) + b"\n\n"
