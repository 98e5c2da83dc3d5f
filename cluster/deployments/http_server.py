"""What the ingress changes in its Serve replica (Ray 2.60): how the HTTP server listens, what it lets in, and how it
stops.

Serve waits for open requests until its controller kills the replica, which breaks streams; and an ingress that clients
reach directly, not through HAProxy, takes new requests while it waits, so that under load it never ends. Must not
import torch.
"""

import asyncio
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from kvrelay.serve.api.endpoint import error_response
from kvrelay.serve.edge.open_bodies import OpenBodies, with_readable_headers
from kvrelay.serve.requests.stopping import ingress_stops

logger = logging.getLogger(__name__)


class Gate:
    """ASGI middleware: once closed, new requests get 503 and a Retry-After. Ray's own checks of the server pass."""

    def __init__(self) -> None:
        self.is_closed = False

    def before(self, app: ASGIApp) -> ASGIApp:
        async def gated(scope: Scope, receive: Receive, send: Send) -> None:
            if not self.is_closed or scope["type"] != "http" or scope["path"].startswith("/-/"):
                return await app(scope, receive, send)
            await error_response(ingress_stops(""), {"connection": "close"})(scope, receive, send)

        return gated


GATE = Gate()  # of this process's replica
_OWN_PATH = re.compile(r"/(v1|kvrelay|ui|health|metrics)(/.*)?$")


def at_route(path: str, route: str) -> str:
    """The path of a request below the application's route: one that came below another route came to this one's."""
    route = route.rstrip("/")
    own = _OWN_PATH.search(path)
    return path if own is None or (route and path.startswith(f"{route}/")) else route + own[0]


def under_any_route(direct_ingress: Any) -> ASGIApp:
    """Serve's direct ingress of a replica, which also answers below the application's former or next route: while the
    route changes, HAProxy and the replica know of it at different times, and Serve would answer 404.
    """
    replica = direct_ingress.__self__

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if not scope.get("root_path"):
            scope = {**scope, "path": at_route(scope.get("path", ""), replica._route_prefix or "/")}
        await direct_ingress(scope, receive, send)

    return answer


def listen_with_limits(max_inflight: int) -> None:
    """Have Serve's direct ingress listen with SO_REUSEADDR, behind the gate and serve/edge, and answer under any route.
    One address has two connections for each request that the ingress takes at once, and 1,024 at least.

    Without SO_REUSEADDR the connections of an ended ingress block its port for a minute, and a restarted or replaced
    ingress cannot listen. SO_REUSEPORT stays off: two replicas must not share a port.
    """
    from ray.serve._private import constants, http_util, replica

    from kvrelay.serve.edge.connections import ConnectionLimits  # needs uvicorn, as Serve does

    if not hasattr(replica, "start_asgi_http_server") or not hasattr(http_util, "set_socket_reuse_port"):
        logger.warning("this version of Ray is unknown; after a restart the port may be refused for a minute")
        return
    start = replica.start_asgi_http_server
    has_proxy = constants.RAY_SERVE_ENABLE_HA_PROXY
    limits = ConnectionLimits(None if has_proxy else max(1024, 2 * max_inflight))

    def reuse_address(sock: socket.socket) -> bool:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return True

    async def start_reusing(app: ASGIApp, *args: Any, enable_so_reuseport: bool = False, **kwargs: Any) -> Any:
        inner = GATE.before(OpenBodies().before(with_readable_headers(under_any_route(app))))
        task, server = await start(inner, *args, enable_so_reuseport=True, **kwargs)
        server.config.http, server.config.ws = limits.protocol, "none"  # the task, which has not run yet, loads them
        return task, server

    http_util.set_socket_reuse_port = reuse_address
    replica.start_asgi_http_server = start_reusing


def finish_before_stop(finish: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """When Serve stops this process's replica, await `finish` on the current event loop while Serve waits for open
    requests: it ends those that take too long.

    HAProxy sends requests elsewhere whose connection is refused, and Serve closes the listener for it. Without HAProxy
    the gate closes.
    """
    from ray.serve._private import constants, replica

    stop: Callable[[Any], Awaitable[None]] | None = getattr(replica.Replica, "_perform_graceful_shutdown", None)
    if stop is None:
        logger.warning("this version of Ray is unknown; streams that outlast the drain time break when a replica stops")
        return
    loop = asyncio.get_running_loop()

    async def finish_and_stop(self: Any) -> None:
        GATE.is_closed = not constants.RAY_SERVE_ENABLE_HA_PROXY
        logger.info("the ingress stops: it finishes what it has begun")
        finishing = asyncio.run_coroutine_threadsafe(finish(), loop)
        await stop(self)
        await asyncio.wrap_future(finishing)

    replica.Replica._perform_graceful_shutdown = finish_and_stop
