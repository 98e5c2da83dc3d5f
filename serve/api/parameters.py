"""From a checked body to the request's parameters: sampling, choices, limits, queue rank, KV hints. Refuses by
field name.

`best_of` has OpenAI's and vLLM's meaning: of so many samples, the n with the largest summed log-probability are
returned. With `use_beam_search` it is the beam width, as in vLLM.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from kvrelay.errors import InvalidRequest
from kvrelay.hashing import tenant_of
from kvrelay.plane.messages import Beams, KvHints, Sampling
from kvrelay.router.types import SloRequirement, SloTarget
from kvrelay.serve.api.schemas import ChatBody, Common, CompletionBody, KvFields, SloFields
from kvrelay.serve.api.sessions import SessionHints, SessionKey, Sessions, no_such_session
from kvrelay.serve.bodies.messages import Tool, check_tools
from kvrelay.serve.bodies.unknown_fields import unsupported
from kvrelay.serve.requests.generation import SEED_MASK
from kvrelay.serve.telemetry.explain import SloRecord
from kvrelay.serve.tenants.access import Caller
from kvrelay.serve.text.tokenising import margin
from kvrelay.settings.router import SchedulerSettings, SloSettings

DEFAULT_COMPLETION_TOKENS = 16
T = TypeVar("T")
MAX_BEAMS = 16
MAX_LOGPROBS = 20  # alternatives per token, as in OpenAI's API
MAX_N = 16  # choices share one KV transfer, but each holds a place in the batch; more belong in several requests
_MIN_TOP_P = 1e-6


def refuse_unsupported(body: Common) -> None:
    """Raise InvalidRequest for what this server cannot honour, rather than ignore it."""
    checks: list[tuple[str, Any]] = []
    if isinstance(body, ChatBody):
        if body.tools or body.tool_choice:
            check_tools(body.tools or [], body.tool_choice)
        if body.functions or body.function_call:
            own = [Tool(type="function", function=one) for one in body.functions or ()]
            check_tools(own, body.function_call, "functions", "function_call")
        checks += [
            ("functions", body.functions and body.tools),
            ("modalities", set(body.modalities or ["text"]) != {"text"}),
        ]
    for name, is_used in checks:
        if is_used:
            raise unsupported(name)
    check_choices(body)
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs: not with stream", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options: only allowed when stream is true", "stream_options")


def check_limits(body: Common, vocab_size: int) -> None:
    """What pydantic cannot know: this server's limits and vocabulary. Raises InvalidRequest."""
    if (body.n or 1) > MAX_N:
        raise InvalidRequest(f"n: at most {MAX_N}", "n")
    for token_id in body.stop_token_ids or ():
        check_token(token_id, "stop_token_ids", vocab_size)
    for field in ("top_logprobs" if isinstance(body, ChatBody) else "logprobs", "prompt_logprobs"):
        if (getattr(body, field) or 0) > MAX_LOGPROBS:
            raise InvalidRequest(f"{field}: at most {MAX_LOGPROBS}", field)
    if isinstance(body, ChatBody) and body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs to be true", "top_logprobs")


def check_count(num_prompts: int, body: Common, max_inflight: int) -> None:
    """Raise InvalidRequest when the server could never run all of the request's sequences at once."""
    samples = num_computed(body)
    if num_prompts * samples > max_inflight:
        own = "n" if samples == (body.n or 1) else "best_of"
        field = "prompt" if num_prompts > 1 else own
        counted = f"{num_prompts} prompts times {own} = {samples}" if num_prompts > 1 else str(samples)
        raise InvalidRequest(f"{field}: {counted} are more sequences than the {max_inflight} that run at once", field)


def check_token(token_id: int, field: str, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidRequest(f"{field}: {token_id} is not a token id; the vocabulary has {vocab_size}", field)


def _logit_bias(bias: Mapping[str, float] | None, vocab_size: int) -> dict[int, float]:
    checked: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidRequest(f"logit_bias: {key[:32]!r} is not a token id", "logit_bias")
        check_token(int(key), "logit_bias", vocab_size)
        checked[int(key)] = value
    return checked


def asked_tokens(body: Common) -> tuple[int | None, str]:
    """The most output tokens that the body allows, if it says so, and the field that does."""
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return body.max_completion_tokens, "max_completion_tokens"
    return body.max_tokens, "max_tokens"


def output_limit(body: Common, num_prompt_tokens: int, max_model_len: int) -> int:
    """Most output tokens. Raises InvalidRequest when prompt and output do not fit the context."""
    room = max_model_len - num_prompt_tokens
    asked, field = asked_tokens(body)
    if room < 1 and not (asked == 0 and room == 0):
        least = "at least " if num_prompt_tokens > max_model_len + margin(max_model_len) else ""  # not all was counted
        raise InvalidRequest(
            # litellm knows a prompt that is too long by OpenAI's own first words
            f"this model's maximum context length is {max_model_len} tokens, prompt and output; "
            f"the prompt has {least}{num_prompt_tokens}",
            "messages" if isinstance(body, ChatBody) else "prompt",
            400,
            "context_length_exceeded",
        )
    if asked is None:
        return room if isinstance(body, ChatBody) else min(DEFAULT_COMPLETION_TOKENS, room)
    if asked == 0 and not getattr(body, "echo", None):
        raise InvalidRequest(f"{field}: at least 1", field)
    if asked > room:
        raise InvalidRequest(
            f"{field}: {asked} tokens after a prompt of {num_prompt_tokens} exceed the context of {max_model_len}",
            field,
            400,
            "context_length_exceeded",
        )
    return asked


def _logprobs(body: Common) -> int | None:
    if isinstance(body, ChatBody):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs if isinstance(body, CompletionBody) else None


def _prompt_logprobs(body: Common) -> int | None:
    """Alternatives for each token of the prompt: as many as `echo` or `prompt_logprobs` asks for."""
    echoed = body.logprobs if isinstance(body, CompletionBody) and body.echo else None
    return max((count for count in (echoed, body.prompt_logprobs) if count is not None), default=None)


def _first(*values: T | None) -> T:
    """The first that is given; the last is."""
    return next(value for value in values if value is not None)


def make_sampling(body: Common, max_tokens: int, vocab_size: int) -> Sampling:
    """The engines' view of the body; a seed is drawn when none is given. Raises InvalidRequest."""
    if (body.min_tokens or 0) > max_tokens:
        raise InvalidRequest(f"min_tokens: more than the {max_tokens} tokens allowed", "min_tokens")
    logprobs = _logprobs(body)
    counted = 0 if logprobs is None and is_ranked(body) else logprobs  # the ranking needs each token's
    return Sampling(
        max_tokens=max(max_tokens, 1),
        min_tokens=body.min_tokens or 0,
        temperature=_first(body.temperature, 1.0),
        top_k=max(body.top_k or 0, 0),
        top_p=max(_first(body.top_p, 1.0), _MIN_TOP_P),
        min_p=_first(body.min_p, 0.0),
        seed=(secrets.randbits(63) if body.seed is None else body.seed) & SEED_MASK,
        repetition_penalty=_first(body.repetition_penalty, 1.0),
        presence_penalty=_first(body.presence_penalty, 0.0),
        frequency_penalty=_first(body.frequency_penalty, 0.0),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=counted,
        prompt_logprobs=_prompt_logprobs(body),
        logit_bias=_logit_bias(body.logit_bias, vocab_size),
    )


def tenant_share(body: Common, settings: SchedulerSettings, api_key: str, caller: Caller) -> tuple[str, float]:
    """The tenant in fair shares, and its weight: the API key's where keys have names, else from the body or the API
    key, as `tenant_by` has it.
    """
    names = {"cache_salt": body.cache_salt or "", "user": body.user or "", "api_key": api_key}
    by = settings.tenant_by
    name = caller.name or (next(filter(None, names.values()), "") if by == "auto" else names[by])
    weight = caller.limits.weight
    return tenant_of(name), settings.tenant_weights.get(name, 1.0) if weight is None else weight


# ---- SLO

DEFAULT_CLASS = "default"


def slo_of(
    fields: SloFields | None, settings: SloSettings | None, num_sequences: int, *, own_priority: int | None = None
) -> SloRecord | None:
    """What the request asks; None when it asks for nothing and nothing is configured. Raises InvalidRequest.

    settings: None where none are configured.
    own_priority: of the body; overrides those of the classes.
    """
    if settings is None:
        if fields is not None:
            raise InvalidRequest("slo: this server has no SLOs configured; see the settings slo.*", "slo")
        return None
    fields = fields or SloFields()
    targets = _targets(fields.class_name or DEFAULT_CLASS, settings)
    own = targets[0]
    ttft_s = own.ttft_s if fields.ttft_s is None else fields.ttft_s
    tpot_s = own.tpot_s if fields.tpot_s is None else fields.tpot_s
    asked = [SloTarget(own.name, ttft_s, tpot_s, own.priority), *targets[1:]]
    if own_priority is not None:
        asked = [replace(target, priority=None) for target in asked]
    return SloRecord(SloRequirement(tuple(asked), fields.on_miss or settings.on_miss), num_sequences)


def _targets(name: str, settings: SloSettings) -> list[SloTarget]:
    """The class and those that it degrades to. Raises InvalidRequest."""
    if name == DEFAULT_CLASS:
        return [SloTarget(name, settings.ttft_s, settings.tpot_s)]
    targets: list[SloTarget] = []
    following: str | None = name
    while following is not None:
        found = settings.classes.get(following)
        if found is None:
            known = ", ".join([DEFAULT_CLASS, *settings.classes])
            raise InvalidRequest(f"slo.class: there is no class {following[:64]!r}, only {known}", "slo.class")
        targets.append(SloTarget(following, found.ttft_s, found.tpot_s, found.priority))
        following = found.degrade_to
    return targets


# ---- KV hints


async def kv_hints(sessions: Sessions, body: Common, salt: str, pin_share: float | None) -> KvHints:
    """The hints of the body's field `kv` and of the session that it names. pin_share: of its tenant.

    Raises InvalidRequest (404): there is no such session of this salt.
    """
    fields = body.kv
    if fields is None:
        return KvHints(pin_share=pin_share)
    inherited, session = SessionHints(), ""
    if fields.session is not None:
        key = SessionKey.of(salt, fields.session)
        found = await sessions.get(key)
        if found is None:
            raise no_such_session(fields.session, "kv.session")
        inherited, session = found, pins_name(key, found)
    return msgspec.structs.replace(merged_hints(fields, inherited, session), pin_share=pin_share)


def pins_name(key: SessionKey, hints: SessionHints) -> str:
    """The session's name in the cluster: workers keep its pins under it, the routing policy `session` hashes it."""
    return f"{key}#{hints.made}"


def merged_hints(fields: KvFields, inherited: SessionHints, session: str) -> KvHints:
    """The request's own fields, else the session's, else the defaults. KV that is not kept is not pinned either."""
    keep = _first(fields.keep, inherited.keep, True)
    pin_s = _first(fields.pin_s, inherited.pin_s, 0.0) if keep else 0.0
    priority = _first(fields.priority, inherited.priority, 0)
    return KvHints(keep=keep, priority=priority, pin_s=pin_s, session=session)


# ---- choices: n, best_of, beam search


def num_computed(body: Common) -> int:
    """Sequences that run for each prompt."""
    return max(body.n or 1, body.best_of or 1)


def num_sampled(body: Common) -> int:
    """Choices that the workers send for each prompt: of a beam search, its results."""
    return body.n or 1 if body.use_beam_search else num_computed(body)


def is_ranked(body: Common) -> bool:
    """Whether more samples are computed than returned."""
    return not body.use_beam_search and num_computed(body) > (body.n or 1)


def beams_of(body: Common) -> Beams | None:
    """The requested beam search, if any, of a checked body."""
    if not body.use_beam_search:
        return None
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    return Beams(
        width=num_computed(body),
        num_returned=body.n or 1,
        length_penalty=penalty,
        early_stopping=body.early_stopping or False,
    )


def check_choices(body: Common) -> None:
    """Raise InvalidRequest where n, best_of and the fields of a beam search conflict."""
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise InvalidRequest(f"best_of: must not be less than n, which is {body.n or 1}", "best_of")
    if body.use_beam_search:
        _check_beams(body)
        return
    if is_ranked(body) and body.stream:
        raise InvalidRequest("best_of: not with stream, as the best are known only at the end", "best_of")
    if is_ranked(body) and isinstance(body, ChatBody):
        raise InvalidRequest("best_of: not with chat completions", "best_of", 400, "unsupported_parameter")
    for name in ("length_penalty", "early_stopping"):
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name}: only with use_beam_search", name)


_NOT_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1.0), "top_k": (None, 0, -1), "min_p": (None, 0.0), "repetition_penalty": (None, 1.0),
    "presence_penalty": (None, 0.0), "frequency_penalty": (None, 0.0), "logit_bias": (None, {}), "stop": (None, []),
    "logprobs": (None, False), "bad_words": (None, []), "allowed_token_ids": (None,), "prompt_logprobs": (None,),
}  # fmt: skip


def _check_beams(body: Common) -> None:
    if num_computed(body) > MAX_BEAMS:
        field = "best_of" if (body.best_of or 0) > MAX_BEAMS else "n"
        raise InvalidRequest(f"{field}: a beam search has at most {MAX_BEAMS} beams", field)
    if body.stream:
        raise InvalidRequest("stream: not with use_beam_search, whose results come at its end", "stream")
    for name, neutral in _NOT_WITH_BEAMS.items():
        if getattr(body, name, None) not in neutral:
            raise InvalidRequest(f"{name}: not with use_beam_search", name, 400, "unsupported_parameter")


def ranked(scores: Sequence[float], num_samples: int, num_kept: int) -> list[int]:
    """Indices of the samples to return: of each prompt's `num_samples`, the best first; the earlier of equal ones."""
    kept: list[int] = []
    for first in range(0, len(scores), num_samples):
        order = sorted(range(first, first + num_samples), key=lambda index: (-scores[index], index))
        kept += order[:num_kept]
    return kept
