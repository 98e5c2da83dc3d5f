"""Every error as OpenAI's error object with its HTTP status. What is unexpected is logged and told as 500."""

import logging
import math

from msgspec import UNSET
from starlette.responses import Response

from kvrelay.errors import KvrelayError, RequestError, WorkerError
from kvrelay.serve.api.replies import ErrorBody, ErrorReply, encode_json

logger = logging.getLogger(__name__)

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
    body = ErrorBody(message="internal error; the server's log has it", type="server_error", code="internal_error")
    return 500, ErrorReply(error=body), None


def json_response(reply: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(reply), status, headers, "application/json")


def error_response(error: Exception, headers: dict[str, str] | None = None) -> Response:
    """The response for an error that came before the first byte."""
    status, reply, retry_after_s = describe(error)
    headers = dict(headers or {})
    if retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    return json_response(reply, status, headers)
