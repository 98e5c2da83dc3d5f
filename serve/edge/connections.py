"""Connections of an ingress's HTTP server (uvicorn 0.54): deadlines for heads and for connections that send nothing,
a limit for each address, and no pipelining, under which uvicorn does not see that a client leaves.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from kvrelay.errors import InvalidRequest, RequestError
from kvrelay.serve.api.endpoint import error_response
from kvrelay.serve.requests.retries import Unavailable

HEAD_S = 20.0
MAX_HEAD_BYTES = 64 << 10


@dataclass(slots=True)
class ConnectionLimits:
    """Limits of one server, and the open connections of each address."""

    per_address: int | None = None  # None: a proxy in front has them all
    head_s: float = HEAD_S
    counts: Counter[str] = field(default_factory=Counter)

    def protocol(self, **arguments: Any) -> "LimitedProtocol":
        """For uvicorn's configuration: a new connection's protocol."""
        return LimitedProtocol(self, **arguments)


class LimitedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, limits: ConnectionLimits, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None  # of a request's head
        self._head_bytes: int | None = None  # received of it; None: it is complete, or none has begun
        self._is_deaf = False  # what else comes is dropped
        self._address = ""  # as counted

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limits, address = self._limits, self.client[0] if self.client else "-"
        if limits.per_address is not None and limits.counts[address] >= limits.per_address:
            message = f"{address} has {limits.per_address} connections open"
            self._refuse(Unavailable(message, 1.0, "too_many_connections"))
            return
        self._address = address
        limits.counts[address] += 1
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        if self._address:
            counts, address, self._address = self._limits.counts, self._address, ""
            counts[address] -= 1
            if not counts[address]:
                del counts[address]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        super().data_received(data)
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                message = f"the head of the request is larger than {MAX_HEAD_BYTES} bytes"
                self._refuse(InvalidRequest(message, None, 431, "head_too_large"))
        elif self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()  # empty lines, or the rest of a body that was answered already

    # ---- of the parser

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._is_deaf = True  # reading goes on, so that the end of the connection is seen
            self.cycle.keep_alive = False
        if not self._is_deaf:
            self._head_bytes = 0
            self._await_head()
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_deaf:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_deaf:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._is_deaf:
            self._head_bytes = None
            self._cancel_deadline()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_deaf:
            super().on_message_complete()

    # ---- deadlines

    def _await_head(self) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(self._limits.head_s, self._on_deadline)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        if self._head_bytes is None:
            self.transport.close()
        else:
            self._refuse(InvalidRequest("the head of the request took too long", None, 408, "head_timeout"))

    def _refuse(self, error: RequestError) -> None:
        """Answer before there is a request, and close."""
        self._is_deaf = True
        self._cancel_deadline()
        response = error_response(error, {"connection": "close"})
        head = b"".join(b"%s: %s\r\n" % pair for pair in response.raw_headers)
        self.transport.write(STATUS_LINE[response.status_code] + head + b"\r\n" + bytes(response.body))
        self.transport.close()
