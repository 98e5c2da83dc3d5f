"""Arguments of tool calls in the forms that models write, read as they come and written as JSON text."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvrelay.serve.chat.families import Arguments
from kvrelay.serve.chat.stepwise import SPACE, Malformed, PiecedText, Steps
from kvrelay.serve.text.stop import overlap

Write = Callable[[str], None]
MAX_KEY_CHARS = 1024
MAX_REFERENCES = 8  # one to another


def _json_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


# ---- JSON


def copy_json(source: PiecedText, write: Write) -> Steps[None]:
    """A JSON object or list that comes next, passed on as it is written, up to its closing bracket."""
    depth, in_string, is_escaped = 0, False, False
    while True:
        text, end = source.text, source.at
        is_done = False
        while end < len(text) and not is_done:
            char = text[end]
            if in_string:
                if is_escaped or char == "\\":
                    is_escaped = not is_escaped
                elif char == '"':
                    in_string = False
            elif char == '"':
                in_string = True
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1
                is_done = depth == 0
            end += 1
        write(text[source.at : end])
        source.at = end
        if is_done or not (yield from source.more()):
            return


def read_string(source: PiecedText) -> Steps[str]:
    """A JSON string that comes next, decoded. Raises Malformed."""
    value = yield from read_value(source)
    try:
        decoded = json.loads(value, strict=False) if value.startswith('"') else None
    except ValueError:
        decoded = None
    if not isinstance(decoded, str):
        raise Malformed
    return decoded


def read_value(source: PiecedText) -> Steps[str]:
    """A whole JSON value that comes next, as it is written. Raises Malformed when the text ends inside it."""
    first = yield from source.peek()
    mark = source.at
    if first and first in "{[":
        parts: list[str] = []
        yield from copy_json(source, parts.append)
        value = "".join(parts)
        try:
            json.loads(value, strict=False)
        except (ValueError, RecursionError):
            raise Malformed from None
        return value
    if first == '"':
        source.at += 1
        while (char := (yield from source.peek())) != '"':
            source.at += 2 if char == "\\" else 1
            if not char:
                raise Malformed
        source.at += 1
    else:
        while (char := (yield from source.peek())) and char not in ",}]" and char not in SPACE:
            source.at += 1
        if not char or source.at == mark:
            raise Malformed
    return source.text[mark : source.at]


# ---- JSON whose keys have no quotes, and whose strings have marks of their own


_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}


def copy_unquoted(source: PiecedText, mark: str, write: Write) -> Steps[None]:
    """An object such as {city:<escape>Paris<escape>,days:3}; plain JSON passes, too."""
    depth = 0
    while char := (yield from source.peek()):
        if char == mark[0] and (yield from source.take(mark)):
            write('"')
            yield from _copy_text(source, mark, write)
            write('"')
        elif char == '"':
            yield from _copy_string(source, write)
        elif char.isalpha() or char == "_":
            word = yield from _word(source)
            yield from source.skip_space()
            is_key = (yield from source.peek()) == ":"
            write(_WORDS[word] if word in _WORDS and not is_key else _json_text(word))
        else:
            source.at += 1
            write(char)
            depth += (char in "{[") - (char in "}]")
            if depth == 0:
                return
            if char.isdigit():
                write((yield from _word(source)))


def _word(source: PiecedText) -> Steps[str]:
    start = source.at
    while (char := (yield from source.peek())) and (char.isalnum() or char in "_-.+"):
        source.at += 1
    return source.text[start : source.at]


def _copy_string(source: PiecedText, write: Write) -> Steps[None]:
    start = source.at
    try:
        yield from read_value(source)
    except Malformed:
        source.at = len(source.text)
    write(source.text[start : source.at])


def _copy_text(source: PiecedText, end: str, write: Write, *, strips_line: bool = False) -> Steps[bool]:
    """Raw text up to `end`, which is read, too, as the inside of a JSON string; False when there is no end.

    strips_line: a line break right before `end` is no part of the text.
    """
    ends = (end, "\n" + end) if strips_line else (end,)
    while True:
        found = source.text.find(end, source.at)
        stop = found if found >= 0 else len(source.text) - max(overlap(source.text[source.at :], one) for one in ends)
        if found >= 0 and strips_line and found > source.at and source.text[found - 1] == "\n":
            stop -= 1
        write(_json_text(source.text[source.at : stop])[1:-1])
        source.at = stop
        if found >= 0:
            source.at = found + len(end)
            return True
        if not (yield from source.more()):
            return False


# ---- XML


@dataclass(frozen=True, slots=True)
class _XmlForm:
    """A parameter: `key_open`, its name, `key_close`, attributes, `value_open`, its value, `value_close`."""

    key_open: str
    key_close: str
    value_open: str
    value_close: str
    has_lines: bool = False  # a value stands on lines of its own


_XML_FORMS: Mapping[str, _XmlForm] = {
    "qwen_xml": _XmlForm("<parameter=", ">", "", "</parameter>", has_lines=True),
    "minimax_xml": _XmlForm('<parameter name="', '"', ">", "</parameter>"),
    "glm_xml": _XmlForm("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "deepseek_xml": _XmlForm('<｜DSML｜parameter name="', '"', ">", "</｜DSML｜parameter>"),
}


def xml_begins(source: PiecedText, style: Arguments, end: str) -> Steps[bool]:
    """Whether a parameter or the end of a call comes next. Nothing is read."""
    mark = source.at
    is_there = (yield from source.take_loosely(_XML_FORMS[style].key_open)) or (yield from source.take_loosely(end))
    source.at = mark
    return is_there


def copy_xml(source: PiecedText, style: Arguments, schema: Any, write: Write) -> Steps[None]:
    """Parameters as XML elements, as one JSON object. Which values are text, the tool's schema says."""
    form, separator = _XML_FORMS[style], "{"
    root = schema if isinstance(schema, Mapping) else {}
    properties = root.get("properties")
    while (yield from source.take_loosely(form.key_open)):
        key = yield from source.until(form.key_close, most=MAX_KEY_CHARS)
        if key is None:
            break
        attributes = (yield from source.until(form.value_open, most=MAX_KEY_CHARS)) if form.value_open else ""
        if attributes is None:
            break
        write(f"{separator}{_json_text(key.strip())}: ")
        separator = ", "
        own = properties.get(key.strip()) if isinstance(properties, Mapping) else None
        types = types_of(own, root)
        if "string=" in attributes:
            types = frozenset({"string"}) if 'string="true"' in attributes else types - {"string"} or frozenset({"any"})
        if form.has_lines:
            yield from source.take("\n")
        is_free = is_free_text(own, root)
        if types == {"string"} and is_free:
            write('"')
            if not (yield from _copy_text(source, form.value_close, write, strips_line=form.has_lines)):
                return
            write('"')
            continue
        value = yield from _xml_value(source, form)
        if value is None:
            source.at = len(source.text)
            return
        write(_json_text(_typed(value if is_free else value.strip(), types)))
    write("{}" if separator == "{" else "}")


def _xml_value(source: PiecedText, form: _XmlForm) -> Steps[str | None]:
    """A value's text and its end; a list's or an object's strings may hold what ends values. None: it has no end."""
    mark = source.at
    yield from source.skip_space()
    if (yield from source.peek()) in ("{", "["):
        try:
            value = yield from read_value(source)
            if (yield from source.take_loosely(form.value_close)):
                return value
        except Malformed:
            pass
    source.at = mark
    text = yield from source.until(form.value_close)
    return text.removesuffix("\n") if text is not None and form.has_lines else text


def is_free_text(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether a value may be any text: then whitespace around it is its own."""
    options = [schema] if not isinstance(schema, Mapping) else [*(schema.get("anyOf") or ()), schema]
    return any(
        not isinstance(one, Mapping) or not one.keys() & {"anyOf", "const", "enum", "format", "$ref"}
        for one in options
        if not isinstance(one, Mapping) or "string" in types_of(one, root) or not types_of(one, root)
    )


def types_of(schema: Any, root: Mapping[str, Any], depth: int = MAX_REFERENCES) -> frozenset[str]:
    """The JSON types that a schema allows, as far as it says; none: any."""
    if not isinstance(schema, Mapping) or depth == 0:
        return frozenset()
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(str(one) for one in declared)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_type_of(value) for value in values)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(options := schema.get(key), list):
            each = [types_of(option, root, depth - 1) for option in options]
            return frozenset().union(*each) if all(each) or key == "allOf" else frozenset()
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found: Any = root
        for part in reference[2:].split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        return types_of(found, root, depth - 1)
    return frozenset()


def _type_of(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _refuse(name: str) -> None:
    raise ValueError(name)


def _typed(text: str, types: frozenset[str]) -> object:
    """A value of one of the types from its text; the text itself where it is none."""
    word = text.strip()
    if "boolean" in types and word in ("True", "False"):
        return word == "True"
    if "null" in types and word == "None":
        return None
    try:
        value = json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    kind = _type_of(value)
    is_fitting = kind in types or (kind == "integer" and "number" in types)
    if is_fitting or not types or "string" not in types:
        return value
    return text
