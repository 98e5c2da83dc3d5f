"""The span of an HTTP request: from its head to its last byte, streams included."""

from collections.abc import Awaitable, Callable

from opentelemetry.trace import Span, Status, StatusCode
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import request_response
from starlette.types import Message, Receive, Scope, Send

from kvrelay import tracing

_KEY = "kvrelay.traceparent"


class Traced:
    """An endpoint as an ASGI app. Where nobody records spans it only hands on what the client's header says."""

    def __init__(self, endpoint: Callable[[Request], Awaitable[Response]]) -> None:
        self._app = request_response(endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(b"traceparent", b"").decode("latin-1")
        span = tracing.begin_request(given, scope["path"])
        scope[_KEY] = tracing.traceparent_of(span)
        if not span.is_recording():
            await self._app(scope, receive, send)
            return
        try:
            await self._app(scope, receive, _told(span, send))
        except BaseException as error:
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            span.end()


def _told(span: Span, send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            span.set_attribute("http.response.status_code", message["status"])
            if message["status"] >= 500:
                span.set_status(Status(StatusCode.ERROR))
        await send(message)

    return sending


def traceparent_of(request: Request) -> str:
    """What the request's sequences carry to the workers; empty: nobody traces it."""
    return str(request.scope.get(_KEY, ""))
