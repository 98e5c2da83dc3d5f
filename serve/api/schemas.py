"""What clients send: the bodies of /v1/completions and /v1/chat/completions, checked field by field.

Types are strict (no "5" for 5); numbers are finite. What happens to unknown fields: unknown_fields.py.
"""

import re
from functools import cache
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_core import from_json

from kvrelay.errors import InvalidRequest
from kvrelay.plane.messages import MAX_PRIORITY
from kvrelay.serve.bodies.grammars import GrammarFields
from kvrelay.serve.bodies.messages import (
    MAX_MESSAGE_ITEMS,
    MAX_TOOLS,
    Body,
    Function,
    FunctionCall,
    Message,
    Tool,
    ToolChoice,
)
from kvrelay.serve.bodies.unknown_fields import refuse_or_ignore

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
INT32_MAX = 2**31 - 1
MAX_TEMPLATE_CHARS = 64 << 10

Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_stops),
]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


SESSION_NAME = r"^[A-Za-z0-9._:-]{1,128}$"
MAX_PIN_S = 86400.0
MAX_PREFETCH_HOLD_S = 600.0
MAX_DEADLINE_S = 86400.0


def is_session_name(name: str) -> bool:
    """Whether this is a valid session name."""
    return re.fullmatch(SESSION_NAME[1:-1], name) is not None


class SessionBody(BaseModel):
    """PUT /v1/kv/sessions/{name}: what requests of the session inherit. Unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    keep: bool | None = None  # false: this KV will not be reused
    priority: Annotated[int, Field(ge=-8, le=8)] | None = None  # higher stays longer
    pin_s: Annotated[Real, Field(ge=0, le=MAX_PIN_S)] | None = None  # how long the prompt's blocks are pinned

    @model_validator(mode="after")
    def _check_pin(self) -> Self:
        if self.keep is False and self.pin_s:
            raise ValueError("what is not to be kept (keep: false) cannot be pinned (pin_s)")
        return self


class KvFields(SessionBody):
    """The field `kv`: hints about the reuse of the prompt's KV."""

    session: Annotated[str, Field(pattern=SESSION_NAME)] | None = None  # its hints are inherited


class SloFields(BaseModel):
    """The request's field `slo`: the targets that a client wants, and what happens when they cannot be met."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    class_name: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(None, alias="class")
    ttft_s: Seconds | None = None  # overrides that of the class
    tpot_s: Seconds | None = None  # overrides that of the class
    on_miss: Literal["refuse", "queue"] | None = None


class Common(GrammarFields):
    """The fields of both bodies."""

    _ignored: tuple[str, ...] = PrivateAttr(())

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: Annotated[Real, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Real, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[Real, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Real, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[Real, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Real, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    logit_bias: Annotated[dict[str, Annotated[Real, Field(ge=-100, le=100)]], Field(max_length=4096)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    kv: KvFields | None = None
    slo: SloFields | None = None
    user: str | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None  # in queues: lower is earlier
    deadline_s: Annotated[Real, Field(gt=0, le=MAX_DEADLINE_S)] | None = None  # for the first token
    best_of: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[Real, Field(ge=-100, le=100)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    bad_words: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=256)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    prompt_logprobs: Count | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None  # -1: as many as fit

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Names of the fields that were ignored."""
        return self._ignored

    @model_validator(mode="wrap")
    @classmethod
    def _check_names(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Refuse or note the fields that are not known."""
        if not isinstance(data, dict) or data.keys() <= cls.model_fields.keys():
            return handler(data)
        ignored = refuse_or_ignore(data, frozenset(cls.model_fields), _all_fields())
        body = handler(data)
        body._ignored = ignored
        return body


class CompletionBody(Common):
    """POST /v1/completions."""

    prompt: Any
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None


class ChatBody(Common):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE_CHARS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Function], Field(max_length=MAX_TOOLS)] | None = None
    function_call: FunctionCall | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Count | None = None
    enable_thinking: bool | None = None  # as in chat_template_kwargs
    documents: list[dict[str, Any]] | None = None
    modalities: list[str] | None = None


@cache
def _all_fields() -> frozenset[str]:
    return frozenset(CompletionBody.model_fields.keys() | ChatBody.model_fields.keys())


HoldTime = Annotated[Real, Field(gt=0, le=MAX_PREFETCH_HOLD_S)]


class PrefetchCompletionBody(CompletionBody):
    """POST /v1/kv/prefetch, for a completion."""

    hold_s: HoldTime | None = None  # how long the blocks found and loaded are kept for the request


class PrefetchChatBody(ChatBody):
    """POST /v1/kv/prefetch, for a chat completion."""

    hold_s: HoldTime | None = None


def _place(location: tuple[int | str, ...]) -> str:
    """`messages[0].content` from pydantic's location; the names of union branches are left out."""
    place = ""
    for part in location:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool") and not part.startswith("list"):
            place += f".{part}" if place else part
    return place


def _check_num_messages(body: bytes) -> None:
    """Raise InvalidRequest for a chat body with too many messages, parts and calls, before each of them is checked."""
    if body.count(b"{") <= MAX_MESSAGE_ITEMS:  # as in almost every body
        return
    try:
        messages = from_json(body).get("messages")
    except (ValueError, AttributeError):  # the schema reports it
        return
    count = 0
    for message in messages if isinstance(messages, list) else ():
        lists = (message.get("content"), message.get("tool_calls")) if isinstance(message, dict) else ()
        count += 1 + sum(len(one) for one in lists if isinstance(one, list))
    if count > MAX_MESSAGE_ITEMS:
        what = f"at most {MAX_MESSAGE_ITEMS} messages, parts of content and tool calls in all, not {count}"
        raise InvalidRequest(f"messages: {what}", "messages", 400, "invalid_value")


B = TypeVar("B", bound=BaseModel)


def parse(body_type: type[B], body: bytes) -> B:
    """The checked body. Raises InvalidRequest naming the first field at fault."""
    if issubclass(body_type, ChatBody):
        _check_num_messages(body)
    try:
        return body_type.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        raise InvalidRequest(f"the body is not valid JSON: {first['msg']}", None, 400, "invalid_json")
    place = _place(first["loc"])
    message = f"{place}: {first['msg']}" if place else f"the body must be a JSON object: {first['msg']}"
    raise InvalidRequest(message, place or None, 400, "missing" if first["type"] == "missing" else "invalid_value")
