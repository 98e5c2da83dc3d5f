"""What every endpoint shares: the parts that it works with, a request's first checks, its id and its span."""

import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from opentelemetry.trace import Span, Status, StatusCode
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import request_response
from starlette.types import Message, Receive, Scope, Send

from kvrelay import tracing
from kvrelay.config import Settings
from kvrelay.errors import InvalidRequest
from kvrelay.serve.api.http import ClientLeft, check_api_key, error_response, read_json_body
from kvrelay.serve.api.parameters import check_limits, refuse_unsupported
from kvrelay.serve.api.replies import PromptDetails, Usage
from kvrelay.serve.api.schemas import Common, parse
from kvrelay.serve.api.sessions import Sessions
from kvrelay.serve.requests.dispatcher import Dispatcher
from kvrelay.serve.requests.generation import Generation
from kvrelay.serve.telemetry.explain import Explain
from kvrelay.serve.text.tokenizer import TextPiece, Tokenizer

B = TypeVar("B", bound=Common)
logger = logging.getLogger(__name__)

CLIENT_LEFT_STATUS = 499  # for access logs; no client reads it
INGRESS = secrets.token_hex(2)
"""Names this ingress process.

Its request ids begin with it, so that an id shows which ingress has the request's log.
"""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The one model that is served. `created` is in seconds since 1970."""

    name: str
    max_model_len: int
    created: int


Endpoint = Callable[["Front", Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Front:
    """The parts that endpoints work with."""

    dispatcher: Dispatcher
    codec: Tokenizer
    settings: Settings
    model: ModelCard
    sessions: Sessions
    max_body_bytes: int

    @property
    def max_model_len(self) -> int:
        """Tokens, prompt and output: the model's limit, or less when a worker holds less."""
        return min(self.model.max_model_len, self.dispatcher.workers.max_model_len() or self.model.max_model_len)

    async def read(self, request: Request, body_type: type[B]) -> B:
        """The checked body. Raises InvalidRequest, ClientLeft."""
        return self.check(body_type, await self.read_bytes(request))

    async def read_bytes(self, request: Request) -> bytes:
        """The body of a request that may be served. Raises InvalidRequest, ClientLeft."""
        check_api_key(request, self.settings.serve.api_key)
        return await read_json_body(request, self.max_body_bytes)

    def check(self, body_type: type[B], data: bytes) -> B:
        """The checked body. Raises InvalidRequest."""
        body = parse(body_type, data)
        if body.model is not None and body.model != self.model.name:
            raise unknown_model(body.model, self.model.name)
        refuse_unsupported(body)
        check_limits(body, self.settings.serve, self.codec.vocab_size)
        return body


def unknown_model(asked: str, served: str) -> InvalidRequest:
    message = f"the model {asked[:128]!r} does not exist here; this server has {served!r}"
    return InvalidRequest(message, "model", 404, "model_not_found")


def forced_path(request: Request) -> Literal["local", "remote"] | None:
    """The header x-kvrelay-prefill. Raises InvalidRequest."""
    value = request.headers.get("x-kvrelay-prefill")
    if value is None:
        return None
    if value == "local":
        return "local"
    if value == "remote":
        return "remote"
    raise InvalidRequest("x-kvrelay-prefill: must be local or remote", "x-kvrelay-prefill")


def wants_explain(request: Request, clock: Callable[[], float]) -> Explain | None:
    """A record to be filled when the client sent x-kvrelay-explain: 1."""
    return Explain(received_s=clock()) if request.headers.get("x-kvrelay-explain") == "1" else None


def new_id(prefix: str) -> str:
    return prefix + INGRESS + secrets.token_hex(10)


def request_id_header(request: Request, request_id: str) -> dict[str, str]:
    """Our id, unless the request came with one: then the server around this app (Ray Serve) returns that."""
    return {} if "x-request-id" in request.headers else {"x-request-id": request_id}


def now_unix() -> int:
    return int(time.time())


class StreamUsage:
    """When a stream reports the usage: never, at its end, or in every chunk as well."""

    def __init__(self, body: Common) -> None:
        options = body.stream_options
        self.at_end = bool(options and options.include_usage)
        self.always = bool(self.at_end and options and options.continuous_usage_stats)


async def collect(generation: Generation, take: Callable[[int, TextPiece], None]) -> None:
    """Run a generation to its end, passing every piece to `take`."""
    async with contextlib.aclosing(generation.pieces()) as batches:
        async for batch in batches:
            for index, piece in batch:
                take(index, piece)


def usage_of(generation: Generation) -> Usage:
    """Tokens so far."""
    prompt_tokens, output_tokens = generation.num_prompt_tokens, generation.num_output_tokens
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=output_tokens,
        total_tokens=prompt_tokens + output_tokens,
        prompt_tokens_details=PromptDetails(cached_tokens=generation.num_cached_tokens),
    )


def endpoint(front: Front, handler: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """The process edge: every error becomes a response here."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(front, request)
        except ClientLeft:
            logger.debug("the client left %s", request.url.path)
            return Response(status_code=CLIENT_LEFT_STATUS)
        except Exception as error:
            return error_response(error)

    return handle


# ---- the span of an HTTP request: from its head to its last byte, streams included

_TRACEPARENT = "kvrelay.traceparent"


class Traced:
    """An endpoint as an ASGI app under a span. Without an exporter it only passes the client's traceparent on."""

    def __init__(self, endpoint: Callable[[Request], Awaitable[Response]]) -> None:
        self._app = request_response(endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(b"traceparent", b"").decode("latin-1")
        span = tracing.begin_request(given, scope["path"])
        scope[_TRACEPARENT] = tracing.traceparent_of(span)
        if not span.is_recording():
            await self._app(scope, receive, send)
            return
        try:
            await self._app(scope, receive, _with_status(span, send))
        except BaseException as error:
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            span.end()


def _with_status(span: Span, send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            span.set_attribute("http.response.status_code", message["status"])
            if message["status"] >= 500:
                span.set_status(Status(StatusCode.ERROR))
        await send(message)

    return sending


def traceparent_of(request: Request) -> str:
    """The trace context that the request's sequences carry to the workers; empty: it is not traced."""
    return str(request.scope.get(_TRACEPARENT, ""))
