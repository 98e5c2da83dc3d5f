"""What every endpoint shares: the parts it works with, and the checks before a request is a job."""

import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from starlette.requests import Request

from kvrelay.config import Settings
from kvrelay.errors import InvalidRequest
from kvrelay.serve.api.http import check_api_key, read_json_body
from kvrelay.serve.api.schemas import Common, parse
from kvrelay.serve.api.sessions import Sessions
from kvrelay.serve.requests.generation import Generation
from kvrelay.serve.requests.sampling import check_limits, refuse_unsupported
from kvrelay.serve.telemetry.explain import Explain
from kvrelay.serve.text.choice_text import Piece
from kvrelay.serve.text.tokenizer import TextCodec
from kvrelay.serve.workers.dispatcher import Dispatcher
from kvrelay.sizes import parse_bytes

B = TypeVar("B", bound=Common)
INGRESS = secrets.token_hex(2)
"""Names this ingress process. The ids of its requests begin with it, so that each tells who has its story."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The one model that is served. `created` is in seconds since 1970."""

    name: str
    max_model_len: int
    created: int


@dataclass(frozen=True, slots=True)
class Front:
    """The parts that endpoints work with."""

    dispatcher: Dispatcher
    codec: TextCodec
    settings: Settings
    model: ModelCard
    sessions: Sessions

    @property
    def max_model_len(self) -> int:
        """Tokens, prompt and output: the model's limit, or less when a worker holds less."""
        return min(self.model.max_model_len, self.dispatcher.max_model_len() or self.model.max_model_len)

    async def read(self, request: Request, body_type: type[B]) -> B:
        """The checked body. Raises InvalidRequest, ClientLeft."""
        return self.check(body_type, await self.read_bytes(request))

    async def read_bytes(self, request: Request) -> bytes:
        """The body of a request that may be served. Raises InvalidRequest, ClientLeft."""
        check_api_key(request, self.settings.serve.api_key)
        return await read_json_body(request, parse_bytes(self.settings.serve.max_body_bytes))

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
    """When a stream tells the usage: never, at its end, or in each chunk as well."""

    def __init__(self, body: Common) -> None:
        options = body.stream_options
        self.at_end = bool(options and options.include_usage)
        self.always = bool(self.at_end and options and options.continuous_usage_stats)


async def collect(generation: Generation, take: Callable[[int, Piece], None]) -> None:
    """Run a generation to its end, handing every piece to `take`."""
    async with contextlib.aclosing(generation.pieces()) as batches:
        async for batch in batches:
            for index, piece in batch:
                take(index, piece)
