"""What clients get: OpenAI's response objects as msgspec Structs, fast enough to make per token, and the two kinds of
logprobs objects from the workers' log-probabilities. Pure.

A field that OpenAI's schema has as absent is `UNSET` here and does not appear; one that the
schema requires, though it may be null (`finish_reason`, `logprobs`, `refusal`), is None.
"""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from kvrelay.plane.messages import TokenLogprob
from kvrelay.serve.text.tokenizer import Tokenizer


class PromptDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class CompletionDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """One entry per token in each list; `text_offset` counts characters of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


PromptLogprobs = list[dict[str, dict[str, Any]] | None]
"""For each token of a prompt by its id: `logprob`, `rank` and `decoded_token`, as vLLM."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Answer(msgspec.Struct, kw_only=True):
    """A completion or chat completion, or a chunk of one: `object` names which."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # of a chat; a completion's are each choice's
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    kvrelay: Any = UNSET


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[ChatLogprob]
    refusal: None = None


class FunctionReply(msgspec.Struct, kw_only=True):
    """`arguments` is JSON text; in chunks it comes in parts, after the name."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallReply(msgspec.Struct, kw_only=True):
    """A tool call. The index is there in chunks only, id and type not in those that bring arguments alone."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionReply


class ChatMessage(msgspec.Struct, kw_only=True):
    """`reasoning` is vLLM's and OpenRouter's name for `reasoning_content`; both have the same text."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallReply] | UnsetType = UNSET
    function_call: FunctionReply | UnsetType = UNSET  # for a request with `functions`


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    token_ids: list[int] | UnsetType = UNSET


class Delta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallReply] | UnsetType = UNSET
    function_call: FunctionReply | UnsetType = UNSET  # for a request with `functions`


class ChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ErrorBody(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None
    slo: Any = UNSET


class ErrorReply(msgspec.Struct, kw_only=True):
    error: ErrorBody


# ---- log-probabilities


def token_text(codec: Tokenizer, token_id: int) -> str:
    """A token as logprobs name it; a part of a character as `bytes:\\xe2\\x80`, so that names stay distinct."""
    data = codec.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(codec: Tokenizer, logprobs: list[TokenLogprob], num_top: int) -> ChatLogprobs:
    """Chat's form: one entry per token, each with its `num_top` alternatives."""
    return ChatLogprobs(content=[_chat_logprob(codec, entry, num_top) for entry in logprobs])


def _chat_logprob(codec: Tokenizer, entry: TokenLogprob, num_top: int) -> ChatLogprob:
    return ChatLogprob(
        token=token_text(codec, entry.token_id),
        logprob=_finite(entry.logprob),
        bytes=list(codec.token_bytes(entry.token_id)),
        top_logprobs=[
            TopLogprob(token=token_text(codec, token), logprob=_finite(value), bytes=list(codec.token_bytes(token)))
            for token, value in entry.top[:num_top]
        ],
    )


def completion_logprobs(
    codec: Tokenizer, logprobs: list[TokenLogprob], offsets: list[int], num_top: int
) -> CompletionLogprobs:
    """Completions' form. The sampled token is always among `top_logprobs`, as OpenAI has it."""
    answer = CompletionLogprobs(text_offset=list(offsets), token_logprobs=[], tokens=[], top_logprobs=[])
    for entry in logprobs:
        name, value = token_text(codec, entry.token_id), _finite(entry.logprob)
        top = {token_text(codec, token): _finite(alternative) for token, alternative in entry.top[:num_top]}
        answer.tokens.append(name)
        answer.token_logprobs.append(value)
        answer.top_logprobs.append(top | {name: value})
    return answer


def _finite(logprob: float) -> float:
    """JSON has no infinity; clients know -9999 as "impossible"."""
    return max(logprob, -9999.0)


def echo_logprobs(
    codec: Tokenizer, prompt: list[int], logprobs: list[TokenLogprob], num_top: int
) -> CompletionLogprobs:
    """The prompt's own tokens: the first has no log-probability. `logprobs` is for prompt[1:]."""
    detokenizer, offsets, num_chars = codec.detokenizer(starts_text=True), [], 0
    for token_id in prompt:
        offsets.append(num_chars)
        num_chars += len(detokenizer.push(token_id))
    answer = completion_logprobs(codec, logprobs, offsets, num_top)
    answer.tokens.insert(0, token_text(codec, prompt[0]))
    answer.token_logprobs.insert(0, None)
    answer.top_logprobs.insert(0, None)
    if len(answer.tokens) != len(prompt):
        raise ValueError(f"{len(logprobs)} log-probabilities for a prompt of {len(prompt)} tokens")
    return answer


def prompt_logprobs(codec: Tokenizer, logprobs: list[TokenLogprob], num_top: int) -> PromptLogprobs:
    """`prompt_logprobs` of an answer: the first token has none; the others' own entry comes first."""
    return [None, *(_prompt_logprob(codec, entry, num_top) for entry in logprobs)]


def _prompt_logprob(codec: Tokenizer, entry: TokenLogprob, num_top: int) -> dict[str, dict[str, Any]]:
    ranks: dict[int, int | None] = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, 1)}
    ranks.setdefault(entry.token_id, entry.rank)
    return {
        str(token_id): {
            "logprob": _finite(value),
            "rank": ranks.get(token_id),
            "decoded_token": token_text(codec, token_id),
        }
        for token_id, value in [(entry.token_id, entry.logprob), *entry.top[:num_top]]
    }


def joined(parts: list[CompletionLogprobs]) -> CompletionLogprobs:
    """Several stretches of one choice as one."""
    answer = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for part in parts:
        for name in part.__struct_fields__:
            getattr(answer, name).extend(getattr(part, name))
    return answer
