"""The endpoints under /v1/kv: sessions of KV hints, and loading a prompt's KV before its request comes."""

import asyncio
import contextlib
import secrets
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from kvrelay.errors import InvalidRequest, Overloaded
from kvrelay.plane import messages as wire
from kvrelay.plane.messages import KvHints, Prefetched, SequenceRequest
from kvrelay.serve.api.completions import chat_prompt, completion_prompt, prompts_of
from kvrelay.serve.api.endpoint import (
    Front,
    caller_of,
    forced_path,
    json_response,
    new_id,
    read_json_body,
    unless_client_leaves,
)
from kvrelay.serve.api.parameters import check_count, kv_hints, merged_hints, pins_name
from kvrelay.serve.api.schemas import (
    KvFields,
    PrefetchChatBody,
    PrefetchCompletionBody,
    SessionBody,
    is_session_name,
    parse,
)
from kvrelay.serve.api.sessions import IDLE_S, SessionHints, SessionKey, no_such_session
from kvrelay.serve.requests.dispatcher import Force
from kvrelay.serve.requests.generation import Prompt, hashes_of

SALT_HEADER = "x-kvrelay-cache-salt"
_MAX_SALT_CHARS = 256
_MAX_SESSION_BYTES = 4096
DEFAULT_HOLD_S = 30.0
_RETRY_AFTER_S = 1.0


async def put_session(front: Front, request: Request) -> Response:
    """PUT /v1/kv/sessions/{name}: make it, or replace its hints."""
    key = _key(request)
    body = parse(SessionBody, await read_json_body(request, _MAX_SESSION_BYTES))
    hints = SessionHints(body.keep, body.priority, body.pin_s, made=secrets.token_hex(8))
    await front.sessions.put(key, hints)
    return json_response(_reply(key, hints))


async def get_session(front: Front, request: Request) -> Response:
    """GET /v1/kv/sessions/{name}. Counts as a use."""
    key = _key(request)
    hints = await front.sessions.get(key)
    if hints is None:
        raise no_such_session(key.name, None)
    return json_response(_reply(key, hints))


async def delete_session(front: Front, request: Request) -> Response:
    """DELETE /v1/kv/sessions/{name}: its pins end at once, and no new ones are made."""
    key = _key(request)
    hints = await front.sessions.delete(key)
    if hints is None:
        raise no_such_session(key.name, None)
    front.dispatcher.links.send_to_all(wire.EndPins(session=pins_name(key, hints)))
    return json_response({"object": "kv.session.deleted", "name": key.name, "deleted": True})


def _key(request: Request) -> SessionKey:
    """Raises InvalidRequest."""
    name = request.path_params["name"]
    if not is_session_name(name):
        raise InvalidRequest("a session's name is 1 to 128 of the characters A-Z a-z 0-9 . _ : -", "name")
    try:
        salt = request.headers.get(SALT_HEADER, "").encode("latin-1").decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{SALT_HEADER}: must be UTF-8", SALT_HEADER) from error
    if len(salt) > _MAX_SALT_CHARS:
        raise InvalidRequest(f"{SALT_HEADER}: longer than {_MAX_SALT_CHARS} characters", SALT_HEADER)
    return SessionKey.of(caller_of(request).salt(salt), name)


def _reply(key: SessionKey, hints: SessionHints) -> dict[str, Any]:
    """The session as it stands, defaults filled in."""
    plain = merged_hints(KvFields(), hints, "")
    shown = {"keep": plain.keep, "priority": plain.priority, "pin_s": plain.pin_s, "expires_after_idle_s": IDLE_S}
    return {"object": "kv.session", "name": key.name, **shown}


# ---- prefetch


async def prefetch(front: Front, request: Request) -> Response:
    """The body is that of the expected request. Raises RequestError, WorkerError, ClientLeft."""
    data = await read_json_body(request, front.max_body_bytes)
    body: PrefetchChatBody | PrefetchCompletionBody
    if _is_chat(data):
        body = front.check(PrefetchChatBody, data)
        prompts = [await chat_prompt(front, body)]
    else:
        body = front.check(PrefetchCompletionBody, data)
        given = prompts_of(body, front.codec.vocab_size)
        check_count(len(given), body, front.settings.router.max_inflight)
        prompts = [await completion_prompt(front, body, item) for item in given]
    caller = caller_of(request)
    salt = caller.salt(body.cache_salt)
    hints = await kv_hints(front.sessions, body, salt, caller.limits.pin_share)
    if not hints.keep:
        raise InvalidRequest("kv.keep: what is not to be kept cannot be prefetched", "kv.keep")
    hold_s = DEFAULT_HOLD_S if body.hold_s is None else body.hold_s
    force = forced_path(request)
    meter = front.access.meter(caller)
    with contextlib.nullcontext() if meter is None else meter.running(len(prompts), 0):  # nothing is computed
        prefetches = (_prefetch_prompt(front, salt, prompt, hints, hold_s, force) for prompt in prompts)
        answers = await unless_client_leaves(request.receive, asyncio.gather(*prefetches))
    return json_response(_prefetch_reply(prompts, answers, hold_s))


def _is_chat(data: bytes) -> bool:
    try:
        plain: Any = from_json(data)
    except ValueError:  # also where it is nested too deep; the schema reports it
        return False
    return isinstance(plain, dict) and "messages" in plain


async def _prefetch_prompt(
    front: Front, salt: str, prompt: Prompt, hints: KvHints, hold_s: float, force: Force
) -> tuple[str, Prefetched]:
    """(worker, its answer)."""
    tokens_per_hash = front.settings.tokens_per_hash
    sequence = SequenceRequest(
        request_id=new_id("prefetch-"),
        token_ids=prompt.token_ids,
        num_prompt_tokens=len(prompt.token_ids),
        block_hashes=await hashes_of(prompt.token_ids, tokens_per_hash, salt),
        sampling=prompt.sampling,
        salt=salt,
        tokens_per_hash=tokens_per_hash,
        hints=hints,
    )
    worker_id, answer = await front.dispatcher.prefetch(sequence, hold_s, force=force)
    if answer.problem == "invalid":
        raise InvalidRequest(answer.message)
    if answer.problem:
        raise Overloaded(answer.message or "the worker is shutting down", _RETRY_AFTER_S)
    return worker_id, answer


def _prefetch_reply(prompts: list[Prompt], answers: list[tuple[str, Prefetched]], hold_s: float) -> dict[str, Any]:
    """Where the prompt's tokens are; the four counts add up to `prompt_tokens`."""
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    found = {name: sum(getattr(answer, name) for _, answer in answers) for name in _PLACES}
    return {
        "object": "kv.prefetch",
        "prompt_tokens": num_tokens,
        **found,
        "missing_tokens": num_tokens - sum(found.values()),
        "hold_s": hold_s,
        "workers": sorted({worker_id for worker_id, _ in answers}),
    }


_PLACES = ("pool_tokens", "host_tokens", "coming_tokens")
