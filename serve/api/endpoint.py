"""What every endpoint shares: the parts that it works with, a request's first checks, bodies with a limit, OpenAI's
error objects, clients that leave, server-sent events, and a request's span.
"""

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote

import msgspec
from msgspec import UNSET
from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrelay import tracing
from kvrelay.config import Settings
from kvrelay.errors import InvalidRequest, KvrelayError, RequestError, WorkerError
from kvrelay.logs import ACCESS_LOGGER
from kvrelay.plane.messages import GrammarSpec
from kvrelay.serve.api.parameters import check_limits, refuse_unsupported
from kvrelay.serve.api.replies import ErrorBody, ErrorReply
from kvrelay.serve.api.schemas import ChatBody, Common, parse
from kvrelay.serve.api.sessions import Sessions
from kvrelay.serve.bodies.unknown_fields import count_ignored, unknown
from kvrelay.serve.chat.reasoning import ReasoningMarkers
from kvrelay.serve.chat.tool_support import ToolSupport
from kvrelay.serve.requests.dispatcher import Dispatcher, Force
from kvrelay.serve.telemetry.history import History
from kvrelay.serve.tenants.access import Access, Caller
from kvrelay.serve.text.tokenizer import Tokenizer
from kvrelay.settings.router import SloSettings

B = TypeVar("B", bound=Common)
T = TypeVar("T")
logger = logging.getLogger(__name__)
access_logger = logging.getLogger(ACCESS_LOGGER)

LEAST_BODY_LIMIT_BYTES = 4 << 20  # the limit for models with short contexts; larger bodies get 413
BODY_BYTES_PER_TOKEN = 16  # of the context length: a token id as JSON takes 8, a token of escaped text seldom more
MAX_CLIENTS_ID = 128  # characters of the client's own id that are logged
CLIENT_LEFT_STATUS = 499  # for access logs; no client reads it
INGRESS = secrets.token_hex(2)
"""Names this ingress process.

Its request ids begin with it, so that an id shows which ingress has the request's log.
"""
DONE_EVENT = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()


class ClientLeft(Exception):
    """The client closed the connection: there is no one to answer. Never leaves serve/."""


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


async def unless_client_leaves(receive: Receive, work: Awaitable[T]) -> T:
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
            logger.debug("request %s: the client left during the stream", _id_of(scope))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            try:
                first = await anext(events, b"")
            except Exception as error:
                await error_response(error, self._extra_headers, _id_of(scope))(scope, receive, send)
                return
            try:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": first, "more_body": True})
                await self._send_rest(events, send, _id_of(scope))
            except OSError as error:
                raise ClientLeft from error

    @staticmethod
    async def _send_rest(events: AsyncGenerator[bytes, None], send: Send, request_id: str) -> None:
        tail = b""
        try:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except OSError:
            raise
        except Exception as error:
            tail = encode_event(describe(error, request_id)[1])
        await send({"type": "http.response.body", "body": tail, "more_body": False})


# ---- every error as OpenAI's error object with its HTTP status

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def describe(error: Exception, request_id: str = "-") -> tuple[int, ErrorReply, float | None]:
    """(status, body, Retry-After in seconds or None) of any error. `request_id`: for the log of an unexpected one."""
    if isinstance(error, RequestError):
        kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
        body = ErrorBody(message=error.message, type=kind, param=error.param, code=error.code)
        body.slo = getattr(error, "slo", UNSET)
        return error.status, ErrorReply(error=body), getattr(error, "retry_after_s", None)
    if isinstance(error, WorkerError):
        body = ErrorBody(message=str(error), type="server_error", code="worker_failed")
        return 503, ErrorReply(error=body), 1.0
    if isinstance(error, KvrelayError):
        return 500, ErrorReply(error=ErrorBody(message=str(error), type="server_error", code="internal_error")), None
    logger.error("request %s: unexpected error", request_id, exc_info=error)
    body = ErrorBody(message="internal error; see the server's log", type="server_error", code="internal_error")
    return 500, ErrorReply(error=body), None


def json_response(reply: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encoder.encode(reply), status, headers, "application/json")


def error_response(error: Exception, headers: dict[str, str] | None = None, request_id: str = "-") -> Response:
    """The response for an error before the first byte."""
    status, reply, retry_after_s = describe(error, request_id)
    headers = dict(headers or {})
    if retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    return json_response(reply, status, headers)


def encode_event(reply: object) -> bytes:
    """A reply as one server-sent event."""
    return b"data: " + _encoder.encode(reply) + b"\n\n"


# ---- endpoints


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The one model that is served. `created` is in seconds since 1970; `aliases` are its other names in requests."""

    name: str
    max_model_len: int
    created: int
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, *self.aliases


Endpoint = Callable[["Front", Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Front:
    """The parts that endpoints work with."""

    dispatcher: Dispatcher
    codec: Tokenizer
    settings: Settings
    model: ModelCard
    sessions: Sessions
    access: Access
    slo: SloSettings | None  # None: no request has one
    check_grammar: Callable[[GrammarSpec], Awaitable[None]]  # raises InvalidRequest
    history: History
    reasoning: ReasoningMarkers | None = None  # None: the model does not reason
    tools: ToolSupport | None = None  # None: tools are refused

    @property
    def max_model_len(self) -> int:
        """Tokens, prompt and output: the model's limit, or less when a worker holds less."""
        return min(self.model.max_model_len, self.dispatcher.workers.max_model_len() or self.model.max_model_len)

    @property
    def max_body_bytes(self) -> int:
        """The longest request body, in proportion to the context length; a longer one gets 413."""
        return max(LEAST_BODY_LIMIT_BYTES, BODY_BYTES_PER_TOKEN * self.max_model_len)

    async def read(self, request: Request, body_type: type[B]) -> B:
        """The checked body. Raises InvalidRequest, ClientLeft."""
        body = self.check(body_type, await read_json_body(request, self.max_body_bytes))
        if body.model is None:
            raise InvalidRequest(f"model: required; this server has {self.model.name!r}", "model", 400, "missing")
        return body

    def check(self, body_type: type[B], data: bytes) -> B:
        """The checked body. Raises InvalidRequest."""
        body = parse(body_type, data)
        if body.ignored_fields:
            self._note_ignored(body.ignored_fields)
        if body.model is not None and body.model not in self.model.names:
            raise unknown_model(body.model, self.model.name)
        refuse_unsupported(body)
        if isinstance(body, ChatBody) and body.chat_template and not self.settings.serve.trust_request_chat_template:
            message = "chat_template: not from requests here; see the setting serve.trust_request_chat_template"
            raise InvalidRequest(message, "chat_template", 400, "unsupported_parameter")
        check_limits(body, self.codec.vocab_size)
        return body

    def _note_ignored(self, names: tuple[str, ...]) -> None:
        if self.settings.serve.unknown_fields == "refuse":
            raise unknown(names[0])
        count_ignored(names, self.dispatcher.stats.ignored_fields)


def unknown_model(asked: str, served: str) -> InvalidRequest:
    message = f"the model {asked[:128]!r} does not exist here; this server has {served!r}"
    return InvalidRequest(message, "model", 404, "model_not_found")


def forced_path(request: Request) -> Force:
    """The header x-kvrelay-prefill. Raises InvalidRequest."""
    value = request.headers.get("x-kvrelay-prefill")
    if value is None:
        return None
    if value in ("local", "remote"):
        return "local" if value == "local" else "remote"
    raise InvalidRequest("x-kvrelay-prefill: must be local or remote", "x-kvrelay-prefill")


def new_id(prefix: str) -> str:
    return prefix + INGRESS + secrets.token_hex(10)


def request_id_header(request: Request, request_id: str) -> dict[str, str]:
    """Our id, unless the request came with one: then the server around this app (Ray Serve) returns that."""
    request.scope[_REQUEST_ID] = request_id
    return {} if "x-request-id" in request.headers else {"x-request-id": request_id}


def endpoint(
    front: Front, handler: Endpoint, *, needs_key: bool = True, is_operators: bool = False
) -> Callable[[Request], Awaitable[Response]]:
    """The process edge: the API key is checked, where one is set, and every error becomes a response."""

    async def handle(request: Request) -> Response:
        try:
            if needs_key:
                check = front.access.operator if is_operators else front.access.caller
                request.scope[_CALLER] = check(bearer_token(request))
            return await handler(front, request)
        except ClientLeft:
            logger.debug("request %s: the client left %s", _id_of(request.scope), request.url.path)
            return Response(status_code=CLIENT_LEFT_STATUS)
        except Exception as error:
            return error_response(error, None, _id_of(request.scope))

    return handle


def caller_of(request: Request) -> Caller:
    """What came with the API key of a request to an endpoint that needs one."""
    caller: Caller = request.scope[_CALLER]
    return caller


# ---- the log line and the span of an HTTP request: from its head to its last byte, streams included

_CALLER = "kvrelay.caller"
_REQUEST_ID = "kvrelay.request_id"
_TRACEPARENT = "kvrelay.traceparent"
_TRACED = ("/v1/completions", "/v1/chat/completions")


class HttpObserver:
    """An ASGI app that logs each request: method, path, status, time to its last byte, our id, its tenant, never its
    key or what it holds; it counts the responses to completions by status in `responses`, and puts completions under a
    span. Without an exporter it only passes the client's traceparent on.
    """

    def __init__(self, app: ASGIApp, responses: Counter[str]) -> None:
        self._app, self._responses = app, responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_http = scope["type"] == "http"
        is_completion = is_http and scope["method"] == "POST" and scope["path"].endswith(_TRACED)
        span = _span_of(scope) if is_completion else None
        is_logged = is_http and access_logger.isEnabledFor(logging.INFO)
        if not is_completion and not is_logged:
            await self._app(scope, receive, send)
            return
        started_s, status = time.perf_counter(), 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except BaseException as error:
            if span is not None:
                span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            if is_completion and status:
                self._responses[str(status)] += 1
            if span is not None:
                if status:
                    span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    span.set_status(Status(StatusCode.ERROR))
                span.end()
            if is_logged:
                ms, path = 1000 * (time.perf_counter() - started_s), quote(scope["path"])
                line, more = "request %s: %s %s %d %.1f ms%s%s", (_tenant(scope), _clients_id(scope))
                access_logger.info(line, _id_of(scope), scope["method"], path, status, ms, *more)


def _id_of(scope: Scope) -> str:
    """Our id of a request; "-": it has none yet, or none at all."""
    return str(scope.get(_REQUEST_ID, "-"))


def _tenant(scope: Scope) -> str:
    caller: Caller | None = scope.get(_CALLER)
    return f", tenant={caller.name}" if caller is not None and caller.name else ""


def _clients_id(scope: Scope) -> str:
    given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return f", x-request-id={quote(given[:MAX_CLIENTS_ID])}" if given else ""


def _span_of(scope: Scope) -> Span | None:
    """The request's span, if it is recorded; its trace context goes on in any case."""
    given = dict(scope["headers"]).get(b"traceparent", b"").decode("latin-1")
    if not given and isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):  # nothing exports spans
        return None
    span = tracing.begin_request(given, scope["path"])
    scope[_TRACEPARENT] = tracing.traceparent_of(span)
    return span if span.is_recording() else None


def traceparent_of(request: Request) -> str:
    """The trace context that the request's sequences carry to the workers; empty: it is not traced."""
    return str(request.scope.get(_TRACEPARENT, ""))
