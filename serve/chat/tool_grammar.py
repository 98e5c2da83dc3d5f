"""The structural tag of a request with tools: what the output may be so that its calls are of these tools and valid.

A tag is JSON that kvrelay/grammar compiles. It allows what the family's format is; the parser finds the calls in it.
"""

import json
from collections.abc import Mapping
from typing import Any

from kvrelay.errors import InvalidRequest
from kvrelay.serve.chat.families import ToolFormat

ANY_ARGUMENTS: dict[str, Any] = {"type": "object", "additionalProperties": True}
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

_OPEN = {  # with one of these, a schema may mean properties that it does not list
    *("$ref", "additionalProperties", "allOf", "anyOf", "else", "if", "oneOf", "patternProperties", "then"),
    *("unevaluatedProperties", "minProperties"),
}
_NEWLINES = {"type": "regex", "pattern": r"\n{0,2}"}  # between reasoning and calls
# text that does not begin as a call without a marker does
_NO_BARE_CALL = {
    "type": "regex",
    "pattern": r'([ \n\r\t]{0,8}([^{ \n\r\t]|\{[ \n\r\t]{0,8}[^" \n\r\t]|\{[ \n\r\t]{0,8}"[^nt"])[\s\S]*)?',
}


def arguments_schema(schema: Mapping[str, Any] | None, field: str) -> Any:
    """The schema of a function's arguments: an object of the properties that are listed, where some are.

    None: no arguments. Raises InvalidRequest naming `field`.
    """
    if schema is None:
        return NO_ARGUMENTS
    if schema.get("type", "object") != "object":
        reason = "the schema of a function's arguments must have the type object"
        raise InvalidRequest(f"{field}: {reason}", field, 400, "invalid_grammar")
    properties, required = schema.get("properties"), schema.get("required") or []
    is_open = not isinstance(properties, Mapping) or bool(schema.keys() & _OPEN)
    if is_open or not isinstance(required, list) or not set(map(str, required)) <= (properties or {}).keys():
        return {**schema, "type": "object"}
    return {**schema, "type": "object", "additionalProperties": False}


def tool_tag(
    own: ToolFormat, tools: Mapping[str, Any], *, is_required: bool, is_parallel: bool, content_schema: Any = None
) -> str:
    """The tag's text. tools: arguments' schemas by name, from arguments_schema.

    is_required: the output is calls, at least one; else text with calls in it, or where there is a content_schema,
    calls or a JSON text that fits it. is_parallel: several calls may follow each other.
    """
    calls = {
        "type": "tags_with_separator",
        "tags": [_tag(own, name, schema) for name, schema in tools.items()],
        "separator": own.separator,
        "at_least_one": True,
        "stop_after_first": not is_parallel,
    }
    whole: dict[str, Any] = calls
    if own.open:
        whole = {"type": "tag", "begin": own.open, "content": calls, "end": own.close}
    alone = {"type": "sequence", "elements": [_NEWLINES, whole]}
    if is_required:
        return _text(alone)
    if content_schema is not None:
        if own.at_start:  # both begin with {, so both are JSON
            calls["tags"] = [_object_tag(own, name, schema) for name, schema in tools.items()]
            return _text({"type": "or", "elements": [calls, _json(content_schema)]})
        return _text({"type": "or", "elements": [alone, _json(content_schema)]})
    if not own.trigger:
        return _text({"type": "or", "elements": [alone, _NO_BARE_CALL]})
    tags = [whole] if own.open else calls["tags"]
    triggered = {"type": "triggered_tags", "triggers": [own.trigger], "tags": tags}
    return _text(triggered | {"stop_after_first": not is_parallel})


def _text(tag: Mapping[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": tag}, ensure_ascii=False)


def _json(schema: Any, style: str = "json") -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "style": style}


def _object_tag(own: ToolFormat, name: str, schema: Any) -> dict[str, Any]:
    """A call that is a JSON object, as one schema."""
    inner = _moved(schema, f"#/properties/{own.key}")
    properties = {"name": {"const": name}, own.key: inner}
    whole = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "tag", "begin": "", "content": _json(whole), "end": ""}


def _moved(value: Any, place: str) -> Any:
    """A schema whose references stay right when it stands at `place`."""
    if isinstance(value, list):
        return [_moved(one, place) for one in value]
    if not isinstance(value, dict):
        return value
    found = {key: _moved(one, place) for key, one in value.items()}
    if isinstance(reference := found.get("$ref"), str) and reference.startswith("#"):
        found["$ref"] = place + reference[1:]
    return found


def tag_begin(own: ToolFormat, name: str) -> str:
    """What the tag of a tool begins with."""
    return f"{own.begin}{own.name_prefix}{name}:" if own.id_form == "kimi" else own.call_begin(name)


def _tag(own: ToolFormat, name: str, schema: Any) -> dict[str, Any]:
    arguments = _json(schema, own.arguments)
    if own.id_form != "kimi":
        return {"type": "tag", "begin": tag_begin(own, name), "content": arguments, "end": own.call_end}
    index = {"type": "regex", "pattern": "[0-9]{1,3}"}
    elements = [index, {"type": "const_string", "value": own.middle}, arguments]
    content = {"type": "sequence", "elements": elements}
    return {"type": "tag", "begin": tag_begin(own, name), "content": content, "end": own.call_end}
