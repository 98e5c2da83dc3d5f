"""The OpenAI HTTP API as one ASGI app. Its host starts and closes the dispatcher."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from prometheus_client import exposition
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from kvrelay.config import Settings
from kvrelay.errors import InvalidRequest
from kvrelay.plane.messages import GrammarSpec
from kvrelay.serve.api import ui
from kvrelay.serve.api.completions import chat_completions, completions
from kvrelay.serve.api.endpoint import (
    Front,
    HttpObserver,
    ModelCard,
    bearer_token,
    endpoint,
    error_response,
    json_response,
    unknown_model,
)
from kvrelay.serve.api.kv import delete_session, get_session, prefetch, put_session
from kvrelay.serve.api.sessions import Sessions
from kvrelay.serve.chat.reasoning import find_markers
from kvrelay.serve.chat.tool_support import find_tools
from kvrelay.serve.requests.dispatcher import Dispatcher
from kvrelay.serve.telemetry.history import History
from kvrelay.serve.telemetry.metrics import ServeCollector
from kvrelay.serve.tenants.access import Access
from kvrelay.serve.text.tokenizer import Tokenizer
from kvrelay.types import sides

__all__ = ["ModelCard", "create_app"]


async def _no_grammars(spec: GrammarSpec) -> None:
    raise InvalidRequest("structured output is not available here", code="unsupported_parameter")


def create_app(
    dispatcher: Dispatcher,
    tokenizer: Tokenizer,
    settings: Settings,
    model: ModelCard,
    sessions: Sessions,
    access: Access,
    check_grammar: Callable[[GrammarSpec], Awaitable[None]] = _no_grammars,
    history: History | None = None,
) -> Starlette:
    """The app; requests before the first worker is connected get 503.

    sessions: shared with other ingresses. access: the valid API keys.
    check_grammar: raises InvalidRequest for a grammar that workers cannot use.
    history: what its host records; None: the page shows none.
    """
    slo = settings.slo if settings.slo.is_on else None
    reasoning = find_markers(settings.model.reasoning_parser, tokenizer)
    tools = find_tools(settings.model.tool_parser, tokenizer)
    rest = slo, check_grammar, history or History(), reasoning, tools
    front = Front(dispatcher, tokenizer, settings, model, sessions, access, *rest)
    operators = partial(endpoint, front, is_operators=True)
    live = ui.LiveFeed(partial(ui.front_snapshot, front))
    app = Starlette(
        routes=[
            Route("/v1/models", endpoint(front, _models), methods=["GET"]),
            Route("/v1/models/{model:path}", endpoint(front, _model), methods=["GET"]),
            Route("/v1/completions", endpoint(front, completions), methods=["POST"]),
            Route("/v1/chat/completions", endpoint(front, chat_completions), methods=["POST"]),
            Route("/v1/kv/prefetch", endpoint(front, prefetch), methods=["POST"]),
            Route("/v1/kv/sessions/{name}", endpoint(front, put_session), methods=["PUT"]),
            Route("/v1/kv/sessions/{name}", endpoint(front, get_session), methods=["GET"]),
            Route("/v1/kv/sessions/{name}", endpoint(front, delete_session), methods=["DELETE"]),
            Route("/health", endpoint(front, _health, needs_key=False), methods=["GET"]),
            Route("/kvrelay/pairs", operators(_pairs), methods=["GET", "POST"]),
            Route("/", _to_ui, methods=["GET"]),
            Route("/ui", endpoint(front, ui.page, needs_key=False), methods=["GET"]),
            Route("/kvrelay/live", operators(live.once), methods=["GET"]),
            Route("/kvrelay/live/events", operators(live.stream), methods=["GET"]),
            Route("/kvrelay/history", operators(ui.history), methods=["GET"]),
            Route("/kvrelay/requests", operators(ui.requests), methods=["GET"]),
            Route("/kvrelay/requests/{request_id}", operators(ui.one_request), methods=["GET"]),
            Route("/metrics", _metrics_endpoint(dispatcher, access), methods=["GET"]),
        ],
        exception_handlers={HTTPException: _http_error},
    )
    app.add_middleware(HttpObserver, responses=dispatcher.stats.responses)
    app.router.redirect_slashes = False  # clients handle a redirected POST badly; 404 names the path
    return app


async def _to_ui(request: Request) -> Response:
    """A browser that opens the bare address gets the page."""
    return RedirectResponse("/ui")


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and wrong methods, in OpenAI's form."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        message, code = f"{request.method} is not allowed for {request.url.path}", "method_not_allowed"
    elif error.status_code == 404:
        message, code = f"there is nothing at {request.url.path}", "not_found"
    else:
        message, code = error.detail, "http_error"
    headers = dict(error.headers) if error.headers else None
    return error_response(InvalidRequest(message, None, error.status_code, code), headers)


def _card(front: Front, name: str) -> dict[str, Any]:
    created, longest = front.model.created, front.max_model_len
    return {"id": name, "object": "model", "created": created, "owned_by": "kvrelay", "max_model_len": longest}


async def _models(front: Front, request: Request) -> Response:
    return json_response({"object": "list", "data": [_card(front, name) for name in front.model.names]})


async def _model(front: Front, request: Request) -> Response:
    name = request.path_params["model"]
    if name not in front.model.names:
        raise unknown_model(name, front.model.name)
    return json_response(_card(front, name))


async def _health(front: Front, request: Request) -> Response:
    """200 once requests can be served; 503 while no decode worker is connected, or KV can travel to none."""
    roles = [str(side) for info, _ in front.dispatcher.workers.live_workers() for side in sides(info.role)]
    body = {"prefill": roles.count("prefill"), "decode": roles.count("decode"), "model": front.model.name}
    book = front.dispatcher.workers.pairs.book
    if misfits := [*book.incompatible_pairs().values(), *book.rejected()]:
        body["incompatible_pairs"] = misfits
    is_ready = front.dispatcher.workers.is_ready()
    status = "ok" if is_ready else "no KV can travel" if book.blocked() else "no workers"
    return json_response({"status": status, **body}, 200 if is_ready else 503)


async def _pairs(front: Front, request: Request) -> Response:
    """Which workers' KV can reach which; POST measures every pair again and returns at once."""
    dispatcher = front.dispatcher
    if request.method == "POST":
        dispatcher.workers.pairs.book.measure_all(dispatcher.clock())
        dispatcher.workers.pairs.notify()
    return json_response(dispatcher.workers.pairs.book.view())


def _metrics_endpoint(dispatcher: Dispatcher, access: Access) -> Callable[[Request], Awaitable[Response]]:
    async def metrics(request: Request) -> Response:
        parts, shows_tenants = (dispatcher.stats, dispatcher.router), access.shows_tenants(bearer_token(request))
        collector = ServeCollector(*parts, dispatcher.workers, shows_tenants=shows_tenants)
        encode, content_type = exposition.choose_encoder(request.headers.get("accept", ""))
        return Response(encode(collector), headers={"content-type": content_type})

    return metrics
