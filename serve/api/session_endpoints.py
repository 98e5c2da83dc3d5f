"""The endpoints of sessions: KV hints under a name, which requests inherit."""

import secrets

from starlette.requests import Request
from starlette.responses import Response

from kvrelay.errors import InvalidRequest
from kvrelay.plane import messages as wire
from kvrelay.serve.api.endpoint import Front
from kvrelay.serve.api.http import check_api_key, json_response, read_json_body
from kvrelay.serve.api.parameters import merged_hints, pins_name
from kvrelay.serve.api.replies import DeletedSession, SessionReply
from kvrelay.serve.api.schemas import KvFields, SessionBody, is_session_name, parse
from kvrelay.serve.api.sessions import IDLE_S, SessionHints, SessionKey, no_such_session

SALT_HEADER = "x-kvrelay-cache-salt"
_MAX_SALT_CHARS = 256
_MAX_SESSION_BYTES = 4096


async def put_session(front: Front, request: Request) -> Response:
    """PUT /v1/kv/sessions/{name}: make it, or replace its hints."""
    key = _key(front, request)
    body = parse(SessionBody, await read_json_body(request, _MAX_SESSION_BYTES))
    hints = SessionHints(body.keep, body.priority, body.pin_s, made=secrets.token_hex(8))
    await front.sessions.put(key, hints)
    return json_response(_reply(key, hints))


async def get_session(front: Front, request: Request) -> Response:
    """GET /v1/kv/sessions/{name}. Counts as a use."""
    key = _key(front, request)
    hints = await front.sessions.get(key)
    if hints is None:
        raise no_such_session(key.name, None)
    return json_response(_reply(key, hints))


async def delete_session(front: Front, request: Request) -> Response:
    """DELETE /v1/kv/sessions/{name}: its pins end at once, and no new ones are made."""
    key = _key(front, request)
    hints = await front.sessions.delete(key)
    if hints is None:
        raise no_such_session(key.name, None)
    front.dispatcher.links.send_to_all(wire.EndPins(session=pins_name(key, hints)))
    return json_response(DeletedSession(name=key.name))


def _key(front: Front, request: Request) -> SessionKey:
    """Raises InvalidRequest."""
    check_api_key(request, front.settings.serve.api_key)
    name = request.path_params["name"]
    if not is_session_name(name):
        raise InvalidRequest("a session's name is 1 to 128 of the characters A-Z a-z 0-9 . _ : -", "name")
    try:
        salt = request.headers.get(SALT_HEADER, "").encode("latin-1").decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{SALT_HEADER}: must be UTF-8", SALT_HEADER) from error
    if len(salt) > _MAX_SALT_CHARS:
        raise InvalidRequest(f"{SALT_HEADER}: longer than {_MAX_SALT_CHARS} characters", SALT_HEADER)
    return SessionKey.of(salt, name)


def _reply(key: SessionKey, hints: SessionHints) -> SessionReply:
    plain = merged_hints(KvFields(), hints, "")
    return SessionReply(
        name=key.name, keep=plain.keep, priority=plain.priority, pin_s=plain.pin_s, expires_after_idle_s=IDLE_S
    )
