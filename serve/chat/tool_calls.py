"""Finds the tool calls in an output's text as it comes: content, the beginnings of calls, their arguments as JSON text.

The result depends on the text alone, never on where it was cut. What is no call is content; nothing raises. A call is
announced once its name and the beginning of its arguments are there; arguments are passed on as the model writes them.
"""

import json
import re
import secrets
import string
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvrelay.serve.chat.arguments import copy_json, copy_unquoted, copy_xml, read_string, read_value, xml_begins
from kvrelay.serve.chat.families import TOOL_FORMATS, ToolFormat
from kvrelay.serve.chat.output import AfterReasoning, Content, ToolArguments, ToolCallStart
from kvrelay.serve.chat.stepwise import SPACE, Malformed, PiecedText, Steps
from kvrelay.serve.text.stop import overlap

MAX_NAME_CHARS = 256
_NOT_IN_NAMES = frozenset(SPACE + "<>\"'{}[]()|,")
_CALL_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})
_ALPHANUMERIC = string.ascii_letters + string.digits


def new_call_id(tool_format: ToolFormat) -> str:
    """An id for a call, as the family's templates expect them in the next request."""
    if tool_format.id_form == "mistral":
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    return random_call_id()


def random_call_id() -> str:
    """An id as OpenAI writes them."""
    return "call_" + secrets.token_hex(12)


class ToolCallParser:
    """One output's parser: `push` its text, then `flush`."""

    def __init__(
        self,
        tool_format: ToolFormat,
        parameters: Mapping[str, Any],
        *,
        is_parallel: bool = True,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        """parameters: each tool's JSON schema, by name; they say which values of XML forms are text.

        is_parallel: False drops every call but the first.
        """
        self._format, self._parameters, self._is_parallel = tool_format, parameters, is_parallel
        self._new_id = new_id or (lambda: new_call_id(tool_format))
        self._text = PiecedText()
        self._events: list[AfterReasoning] = []
        self._num_calls = 0
        self._space = ""  # content that is only said when other content follows it, or no call
        self._is_after_call = False
        self._steps: Iterator[None] | None = self._run()

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def push(self, text: str) -> list[AfterReasoning]:
        """What is certain with `text`."""
        if not text:
            return []
        self._text.add(text)
        return self._advance()

    def flush(self) -> list[AfterReasoning]:
        """The rest, at the output's end."""
        self._text.is_over = True
        events = self._advance()
        if self._space and not self.has_calls:
            events.append(Content(self._space))
        return events

    def _advance(self) -> list[AfterReasoning]:
        if self._steps is not None and next(self._steps, self) is self:
            self._steps = None
        events, self._events = self._events, []
        return events

    # ---- events

    def _say(self, text: str) -> None:
        """Content. Whitespace beside calls is theirs."""
        if self._is_after_call:
            text = text.lstrip(SPACE)
        if not text:
            return
        self._is_after_call = False
        whole = self._space + text
        said = whole.rstrip(SPACE)
        self._space = whole[len(said) :]
        last = self._events[-1] if self._events else None
        if isinstance(last, Content):
            self._events[-1] = Content(last.text + said)
        elif said:
            self._events.append(Content(said))

    def _begin(self, name: str, call_id: str | None = None) -> Callable[[str], None]:
        """A call begins; returns what takes its arguments."""
        index, self._num_calls = self._num_calls, self._num_calls + 1
        self._space, self._is_after_call = "", True
        if index and not self._is_parallel:
            return lambda text: None
        self._events.append(ToolCallStart(index, call_id or self._new_id(), name))

        def write(text: str) -> None:
            last = self._events[-1] if self._events else None
            if isinstance(last, ToolArguments) and last.index == index:
                self._events[-1] = ToolArguments(index, last.text + text)
            elif text:
                self._events.append(ToolArguments(index, text))

        return write

    # ---- the text

    def _run(self) -> Steps[None]:
        if self._format.at_start:
            yield from self._text.skip_space()
            if (yield from self._text.peek()) != "{" or not (yield from self._calls(None, "")):
                self._text.at = 0
        while trigger := (yield from self._content()):
            mark = self._text.at
            self._text.at += len(trigger)
            if not (yield from self._section(trigger)):
                self._text.at = mark + len(trigger)
                self._say(trigger)

    def _content(self) -> Steps[str | None]:
        """Say what comes before the next text that calls begin with; returns that, None at the end."""
        source, triggers = self._text, self._format.triggers
        while True:
            found = [(at, trigger) for trigger in triggers if (at := source.text.find(trigger, source.at)) >= 0]
            end, trigger = min(found, default=(len(source.text), None))
            if trigger is None and not source.is_over:
                end -= max((overlap(source.text[source.at :], one) for one in triggers), default=0)
            self._say(source.text[source.at : end])
            source.at = end
            source.forget()
            if trigger is not None:
                return trigger
            if source.is_over:
                return None
            yield from source.more()

    def _section(self, trigger: str) -> Steps[bool]:
        """The calls after a trigger; False when there is none."""
        source, own = self._text, self._format
        if own.id_form == "mistral":  # either tokenizer's form, whichever comes
            yield from source.skip_space()
            char = yield from source.peek()
            if char == "[":
                source.at += 1
                return (yield from self._calls("]", ""))
            return (yield from (self._calls(None, "") if char == "{" else self._call("")))
        if trigger in own.also:
            return (yield from self._calls(None, ""))
        if own.open:
            return (yield from self._calls(own.close.strip(), own.begin))
        source.at -= len(trigger)
        return (yield from self._call(own.begin))

    def _calls(self, close: str | None, begin: str) -> Steps[bool]:
        """Calls one after another, each after `begin`, up to `close`; False when there is none."""
        before = self._num_calls
        while close is None or not (yield from self._text.take_loosely(close)):
            if not (yield from self._call(begin)):
                break
            mark = self._text.at
            is_next = yield from self._text.take_loosely(self._format.separator.strip() or ",")
            if close is None and not is_next:
                self._text.at = mark
                break
        return self._num_calls > before

    def _call(self, begin: str) -> Steps[bool]:
        """One call. Where there is none, nothing is read."""
        mark, before = self._text.at, self._num_calls
        try:
            if begin and not (yield from self._text.take_loosely(begin)):
                raise Malformed
            is_object = (yield from self._next_char()) == "{"
            can_be_object = self._format.is_object or self._format.id_form == "mistral"
            yield from (self._object_call() if is_object and can_be_object else self._named_call())
        except Malformed:
            if self._num_calls == before:
                self._text.at = mark
                return False
        yield from self._text.take_loosely(self._format.end)
        return True

    def _next_char(self) -> Steps[str]:
        yield from self._text.skip_space()
        return (yield from self._text.peek())

    def _named_call(self) -> Steps[None]:
        """The name, what stands between, the arguments. Raises Malformed."""
        source, own = self._text, TOOL_FORMATS["mistral_args"] if self._format.id_form == "mistral" else self._format
        if own.is_object:
            raise Malformed
        called, call_id = (yield from self._name()), None
        if own.id_form == "mistral" and (yield from source.take("[CALL_ID]")):
            call_id = yield from self._name()
        has_middle = yield from source.take_loosely(own.middle)
        if not has_middle and own.id_form != "mistral":
            raise Malformed
        name = called
        if own.id_form == "kimi":
            name, call_id = re.sub(r":\d+$", "", called), called
        name = name.removeprefix(own.name_prefix)
        if own.arguments == "json":
            if (yield from self._next_char()) != "{":
                raise Malformed
            write = self._begin(name, call_id)
            yield from (copy_unquoted(source, own.string_mark, write) if own.string_mark else copy_json(source, write))
        else:
            if not (yield from xml_begins(source, own.arguments, own.end)):
                raise Malformed
            schema = self._parameters.get(name)
            yield from copy_xml(source, own.arguments, schema, self._begin(name, call_id))

    def _name(self) -> Steps[str]:
        source = self._text
        yield from source.skip_space()
        mark = source.at
        while (char := (yield from source.peek())) and char not in _NOT_IN_NAMES:
            source.at += 1
            if source.at - mark > MAX_NAME_CHARS:
                raise Malformed
        if not char or source.at == mark:  # at the text's end a name may be half of one
            raise Malformed
        return source.text[mark : source.at]

    def _object_call(self) -> Steps[None]:
        """A JSON object with the keys name and arguments or parameters, in any order. Raises Malformed."""
        source = self._text
        source.at += 1
        name, held, has_arguments = "", "", False
        while not (yield from source.take_loosely("}")):
            key = yield from self._key()
            if key == "name" and not name:
                name = yield from read_string(source)
                if not name or len(name) > MAX_NAME_CHARS:
                    raise Malformed
                if held:
                    self._begin(name)(held)
                    has_arguments = True
            elif key in ("arguments", "parameters") and not held and not has_arguments:
                if name and (yield from source.peek()) == "{":
                    yield from copy_json(source, self._begin(name))
                    has_arguments = True
                else:
                    held = _as_arguments((yield from read_value(source)))
                    if name:
                        self._begin(name)(held)
                        has_arguments = True
            elif key not in _CALL_KEYS and self._format.at_start:
                raise Malformed
            else:
                yield from read_value(source)
            yield from source.take_loosely(",")
        if not has_arguments:
            if not name or self._format.at_start:
                raise Malformed
            self._begin(name)("{}")

    def _key(self) -> Steps[str]:
        """A key of an object, and the colon after it; what follows is no whitespace."""
        source = self._text
        yield from source.skip_space()
        key = yield from read_string(source)
        if not (yield from source.take_loosely(":")):
            raise Malformed
        yield from source.skip_space()
        return key


def _as_arguments(value: str) -> str:
    """The arguments that a JSON value stands for: an object, one written as text, or null for none."""
    if value == "null":
        return "{}"
    if value.startswith('"'):
        try:
            text = str(json.loads(value, strict=False))
            if isinstance(json.loads(text), dict):
                return text
        except (ValueError, RecursionError):
            pass
    elif value.startswith("{"):
        return value
    raise Malformed
