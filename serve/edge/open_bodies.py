"""Request bodies that are not complete: how long each may take, and how many bytes all of them may hold. Counted in
front of the server around the API, which queues whatever comes. And headers that it can read.
"""

import asyncio
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrelay.errors import InvalidRequest, RequestError
from kvrelay.serve.api.endpoint import error_response
from kvrelay.serve.requests.retries import Unavailable

MAX_OPEN_BYTES = 128 << 20
BODY_S = 30.0
LEAST_BYTES_PER_S = 16 << 10  # a body that is as fast may take longer


class OpenBodies:
    """ASGI middleware: 503 when the unfinished bodies fill the budget, 408 for one that takes too long."""

    def __init__(
        self,
        max_bytes: int = MAX_OPEN_BYTES,
        body_s: float = BODY_S,
        least_bytes_per_s: float = LEAST_BYTES_PER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_bytes = 0
        self._max_bytes, self._body_s, self._rate, self._clock = max_bytes, body_s, least_bytes_per_s, clock

    def before(self, app: ASGIApp) -> ASGIApp:
        async def limited(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            body = _OpenBody(self, self._clock(), receive, send, scope)
            try:
                await app(scope, body.receive, body.send)
            finally:
                body.release()

        return limited

    def take(self, num_bytes: int, held: int) -> bool:
        """Whether a body that holds `held` bytes gets more. One alone does, however large: the API has a limit."""
        if self.num_bytes > held and self.num_bytes + num_bytes > self._max_bytes:
            return False
        self.num_bytes += num_bytes
        return True

    def left_s(self, began_s: float, num_bytes: int) -> float:
        """Until more must come of a body that began then and has so many bytes."""
        return min(self._body_s, began_s + self._body_s + num_bytes / self._rate - self._clock())


class _OpenBody:
    """One request's body, until it is complete or the request ends. After a refusal the client has left, to the app."""

    def __init__(self, bodies: OpenBodies, began_s: float, receive: Receive, send: Send, scope: Scope) -> None:
        self._bodies, self._began_s = bodies, began_s
        self._receive, self._send, self._scope = receive, send, scope
        self._held = self._received = 0
        self._is_complete = self._is_refused = self._is_answered = False

    async def receive(self) -> Message:
        if self._is_complete or self._is_refused:
            return {"type": "http.disconnect"} if self._is_refused else await self._receive()
        try:
            async with asyncio.timeout(self._bodies.left_s(self._began_s, self._received)):
                message = await self._receive()
        except TimeoutError:
            error = InvalidRequest("the body took too long", None, 408, "body_timeout")
            return await self._refuse(error, {"connection": "close"})
        size = len(message.get("body", b""))
        self._received += size
        if message["type"] != "http.request" or not message.get("more_body"):
            self._is_complete = True
            self.release()
        elif self._bodies.take(size, self._held):
            self._held += size
        else:
            return await self._refuse(Unavailable("too many request bodies are unfinished", 1.0, "too_many_bodies"))
        return message

    async def send(self, message: Message) -> None:
        if not self._is_refused:
            self._is_answered = True
            await self._send(message)

    async def _refuse(self, error: RequestError, headers: dict[str, str] | None = None) -> Message:
        self._is_refused = True
        self.release()
        if not self._is_answered:
            await error_response(error, headers)(self._scope, self._receive, self._send)
        return {"type": "http.disconnect"}

    def release(self) -> None:
        self._bodies.num_bytes -= self._held
        self._held = 0


def with_readable_headers(app: ASGIApp) -> ASGIApp:
    """Ray Serve decodes headers such as x-request-id as UTF-8, and fails where they are not: such bytes become `?`. The
    API's own headers stay as they are: it names what is wrong.
    """

    async def cleaned(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "headers": [(name, _readable(name, value)) for name, value in scope["headers"]]}
        await app(scope, receive, send)

    return cleaned


def _readable(name: bytes, value: bytes) -> bytes:
    if value.isascii() or name.startswith(b"x-kvrelay-"):
        return value
    try:
        value.decode()
    except UnicodeDecodeError:
        return value.decode("ascii", "replace").replace("\N{REPLACEMENT CHARACTER}", "?").encode()
    return value
