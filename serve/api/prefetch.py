"""POST /v1/kv/prefetch: load a prompt's KV from lower tiers before its request comes."""

import asyncio
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvrelay.errors import InvalidRequest, Overloaded
from kvrelay.plane.messages import KvHints, Prefetched, SequenceRequest
from kvrelay.serve.api.chat import chat_prompt
from kvrelay.serve.api.completions import completion_prompt
from kvrelay.serve.api.endpoint import Front, forced_path, new_id
from kvrelay.serve.api.http import json_response, unless_client_leaves
from kvrelay.serve.api.parameters import check_count, kv_hints, prompts_of
from kvrelay.serve.api.replies import PrefetchReply
from kvrelay.serve.api.schemas import Common, PrefetchChatBody, PrefetchCompletionBody
from kvrelay.serve.requests.dispatcher import Force
from kvrelay.serve.requests.generation import Prompt, hashes_of

DEFAULT_HOLD_S = 30.0
_RETRY_AFTER_S = 1.0


async def prefetch(front: Front, request: Request) -> Response:
    """The body is that of the expected request. Raises RequestError, WorkerError, ClientLeft."""
    data = await front.read_bytes(request)
    body: PrefetchChatBody | PrefetchCompletionBody
    if _is_chat(data):
        body = front.check(PrefetchChatBody, data)
        prompts = [await chat_prompt(front, body)]
    else:
        body = front.check(PrefetchCompletionBody, data)
        given = prompts_of(body, front.codec.vocab_size)
        check_count(len(given), body, front.settings.router.max_inflight)
        prompts = [await completion_prompt(front, body, item) for item in given]
    hints = await kv_hints(front.sessions, body)
    if not hints.keep:
        raise InvalidRequest("kv.keep: what is not to be kept cannot be prefetched", "kv.keep")
    hold_s = DEFAULT_HOLD_S if body.hold_s is None else body.hold_s
    force = forced_path(request)
    prefetches = asyncio.gather(*(_prefetch_prompt(front, body, prompt, hints, hold_s, force) for prompt in prompts))
    answers = await unless_client_leaves(request.receive, _all(prefetches))
    return json_response(_reply(prompts, answers, hold_s))


def _is_chat(data: bytes) -> bool:
    try:
        plain: Any = json.loads(data)
    except ValueError:  # the schema reports it
        return False
    return isinstance(plain, dict) and "messages" in plain


async def _all(prefetches: "asyncio.Future[list[tuple[str, Prefetched]]]") -> list[tuple[str, Prefetched]]:
    return await prefetches


async def _prefetch_prompt(
    front: Front, body: Common, prompt: Prompt, hints: KvHints, hold_s: float, force: Force
) -> tuple[str, Prefetched]:
    """(worker, its answer)."""
    tokens_per_hash, salt = front.settings.tokens_per_hash, body.cache_salt or ""
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


def _reply(prompts: list[Prompt], answers: list[tuple[str, Prefetched]], hold_s: float) -> PrefetchReply:
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    pool = sum(answer.pool_tokens for _, answer in answers)
    host = sum(answer.host_tokens for _, answer in answers)
    coming = sum(answer.coming_tokens for _, answer in answers)
    return PrefetchReply(
        prompt_tokens=num_tokens,
        pool_tokens=pool,
        host_tokens=host,
        coming_tokens=coming,
        missing_tokens=num_tokens - pool - host - coming,
        hold_s=hold_s,
        workers=sorted({worker_id for worker_id, _ in answers}),
    )
