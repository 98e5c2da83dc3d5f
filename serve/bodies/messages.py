"""What chat bodies are made of: messages with the calls of tools in them, tools, and the choice among tools."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvrelay.errors import InvalidRequest

MAX_TOOLS = 128  # as in OpenAI's API
MAX_MESSAGE_ITEMS = 8192  # messages, parts of their content and calls in them: to check each takes the event loop 20 µs
FUNCTION_NAME = r"^[a-zA-Z0-9_-]{1,64}$"

FunctionName = Annotated[str, Field(pattern=FUNCTION_NAME)]


class Body(BaseModel):
    """The base of what clients send: frozen, with strict types, and unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


# ---- messages


class ContentPart(Body):
    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Body):
    """`arguments` is JSON text, as the model wrote it."""

    name: str
    arguments: str = ""


class ToolCall(Body):
    """A call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None  # of before there were tools
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's name for it
    refusal: str | None = None


# ---- tools


class Function(Body):
    """A function that the model may call. parameters: a JSON schema; none: it takes no arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: FunctionName


class NamedTool(Body):
    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


def _mode_as_object(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


class _Choice(Body):
    type: Literal["none", "auto", "required", "function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        for name in ("function", "allowed_tools"):
            if (self.type == name) != (getattr(self, name) is not None):
                raise ValueError(f"the type {name!r} goes with the field {name!r}")
        return self

    @property
    def mode(self) -> Literal["none", "auto", "required"]:
        """Whether tools may, must or must not be called."""
        if self.allowed_tools is not None:
            return self.allowed_tools.mode
        return "required" if self.type in ("required", "function") else "none" if self.type == "none" else "auto"

    @property
    def names(self) -> tuple[str, ...] | None:
        """The only tools that may be called; None: all."""
        if self.function is not None:
            return (self.function.name,)
        return None if self.allowed_tools is None else tuple(one.function.name for one in self.allowed_tools.tools)


ToolChoice = Annotated[_Choice, BeforeValidator(_mode_as_object)]
"""`none`, `auto`, `required`, one function, or the tools allowed. A mode's name is read as an object with that type."""


def _function_as_object(value: Any) -> Any:
    if isinstance(value, Mapping) and "name" in value and "type" not in value:
        return {"type": "function", "function": {"name": value["name"]}}
    return _mode_as_object(value)


FunctionCall = Annotated[_Choice, BeforeValidator(_function_as_object)]
"""`function_call`, which chose among `functions` before there were tools, as a `tool_choice`."""


def check_tools(
    tools: list[Tool], choice: _Choice | None, field: str = "tools", choice_field: str = "tool_choice"
) -> None:
    """Raise InvalidRequest for a name given twice, and for a choice among tools that are not there."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        place = f"{field}[{index}].function.name" if field == "tools" else f"{field}[{index}].name"
        if tool.function.name in names:
            raise InvalidRequest(f"{place}: there are two functions {tool.function.name!r}", place)
        names.add(tool.function.name)
    if choice is None or choice.mode == "none":
        return
    if not names:
        raise InvalidRequest(f"{choice_field}: only allowed when {field} are given", choice_field)
    for name in choice.names or ():
        if name not in names:
            raise InvalidRequest(f"{choice_field}: there is no function {name!r} among {field}", choice_field)
