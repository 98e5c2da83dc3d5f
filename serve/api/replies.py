"""What clients get: OpenAI's response objects as msgspec Structs, fast enough to make per token.

A field that OpenAI's schema has as absent is `UNSET` here and does not appear; one that the
schema requires, though it may be null (`finish_reason`, `logprobs`, `refusal`), is None.
"""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class _Reply(msgspec.Struct, kw_only=True):
    """Base of all reply objects."""


class PromptDetails(_Reply, kw_only=True):
    cached_tokens: int


class Usage(_Reply, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class SessionReply(_Reply, kw_only=True):
    """A session of KV hints as it stands, defaults filled in."""

    object: str = "kv.session"
    name: str
    keep: bool
    priority: int
    pin_s: float
    expires_after_idle_s: float


class DeletedSession(_Reply, kw_only=True):
    object: str = "kv.session.deleted"
    name: str
    deleted: bool = True


class PrefetchReply(_Reply, kw_only=True):
    """Where the prompt's tokens are; the four counts add up to `prompt_tokens`."""

    object: str = "kv.prefetch"
    prompt_tokens: int
    pool_tokens: int
    host_tokens: int
    coming_tokens: int
    missing_tokens: int
    hold_s: float
    workers: list[str]


class CompletionLogprobs(_Reply, kw_only=True):
    """One entry per token in each list; `text_offset` counts characters of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(_Reply, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(_Reply, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
    kvrelay: Any = UNSET


class TopLogprob(_Reply, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(_Reply, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Reply, kw_only=True):
    content: list[ChatLogprob]
    refusal: None = None


class ChatMessage(_Reply, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(_Reply, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str


class Chat(_Reply, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    kvrelay: Any = UNSET


class Delta(_Reply, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(_Reply, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class Chunk(_Reply, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    kvrelay: Any = UNSET


class Model(_Reply, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "kvrelay"
    max_model_len: int


class ModelList(_Reply, kw_only=True):
    object: str = "list"
    data: list[Model]


class ErrorBody(_Reply, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None
    slo: Any = UNSET


class ErrorReply(_Reply, kw_only=True):
    error: ErrorBody
