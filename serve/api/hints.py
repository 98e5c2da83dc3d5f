"""What a request's `kv` field and its session say together: KvHints. And the endpoints of sessions."""

import secrets
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from kvrelay.errors import InvalidRequest
from kvrelay.plane import messages as wire
from kvrelay.plane.messages import KvHints
from kvrelay.serve.api.endpoint import Front
from kvrelay.serve.api.http import check_api_key, json_response, read_json_body
from kvrelay.serve.api.replies import DeletedSession, SessionReply
from kvrelay.serve.api.schemas import Common, KvFields, SessionBody, is_session_name, parse
from kvrelay.serve.api.sessions import IDLE_S, SessionHints, SessionKey, no_such_session

SALT_HEADER = "x-kvrelay-cache-salt"
_MAX_SALT_CHARS = 256
_MAX_SESSION_BYTES = 4096


async def hints_of(front: Front, body: Common) -> KvHints:
    """Raises InvalidRequest: the session is not there (404)."""
    fields = body.kv or KvFields()
    inherited, session = SessionHints(), ""
    if fields.session is not None:
        key = SessionKey.of(body.cache_salt or "", fields.session)
        found = await front.sessions.get(key)
        if found is None:
            raise no_such_session(fields.session, "kv.session")
        inherited, session = found, pins_name(key, found)
    return merged(fields, inherited, session)


def pins_name(key: SessionKey, hints: SessionHints) -> str:
    """What workers know the session's pins by."""
    return f"{key}#{hints.made}"


def merged(fields: KvFields, inherited: SessionHints, session: str) -> KvHints:
    """The request's own fields, else the session's, else the defaults. What is not kept is not pinned either."""
    keep = _first(fields.keep, inherited.keep, True)
    pin_s = _first(fields.pin_s, inherited.pin_s, 0.0) if keep else 0.0
    priority = _first(fields.priority, inherited.priority, 0)
    return KvHints(keep=keep, priority=priority, pin_s=pin_s, session=session if pin_s else "")


T = TypeVar("T")


def _first(own: T | None, inherited: T | None, default: T) -> T:
    if own is not None:
        return own
    return inherited if inherited is not None else default


# ---- endpoints


async def put_session(front: Front, request: Request) -> Response:
    """PUT /v1/kv/sessions/{name}: make it, or replace all that it says."""
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
    """DELETE /v1/kv/sessions/{name}: nothing is pinned under it any more, and the pins that were made end at once."""
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
    plain = merged(KvFields(), hints, "")
    return SessionReply(
        name=key.name, keep=plain.keep, priority=plain.priority, pin_s=plain.pin_s, expires_after_idle_s=IDLE_S
    )
