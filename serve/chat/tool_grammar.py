"""The structural tag of a request with tools: what the output may be so that its calls are of these tools and valid.

A tag is JSON that xgrammar compiles (kvrelay/grammar). It allows what the family's format is, and the parser finds the
calls in it. Built here rather than by xgrammar's own templates: those import torch, know other forms of some families
than their chat templates render, and could disagree with the parser.
"""

import json
from collections.abc import Mapping
from typing import Any

from kvrelay.serve.chat.families import ToolFormat

MOST_SPACE = 16  # characters in a row between the parts of arguments
ANY_ARGUMENTS: dict[str, Any] = {"type": "object", "additionalProperties": True}

_NEWLINES = {"type": "regex", "pattern": r"\n{0,2}"}  # between reasoning and calls
# text that does not begin as a call without a marker does
_NO_BARE_CALL = {
    "type": "regex",
    "pattern": r'([ \n\r\t]{0,8}([^{ \n\r\t]|\{[ \n\r\t]{0,8}[^" \n\r\t]|\{[ \n\r\t]{0,8}"[^nt"])[\s\S]*)?',
}


def tool_tag(
    own: ToolFormat, tools: Mapping[str, Any], *, is_required: bool, is_parallel: bool, content_schema: Any = None
) -> str:
    """The tag's text. tools: arguments' schemas by name, from kvrelay.grammar.tag_schema.

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
        return _text({"type": "or", "elements": [alone, _json(content_schema)]})
    if not own.trigger:
        return _text({"type": "or", "elements": [alone, _NO_BARE_CALL]})
    tags = [whole] if own.open else calls["tags"]
    triggered = {"type": "triggered_tags", "triggers": [own.trigger], "tags": tags}
    return _text(triggered | {"stop_after_first": not is_parallel})


def _text(tag: Mapping[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": tag}, ensure_ascii=False)


def _json(schema: Any, style: str = "json") -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "style": style, "max_whitespace_cnt": MOST_SPACE}


def _tag(own: ToolFormat, name: str, schema: Any) -> dict[str, Any]:
    arguments = _json(schema, own.arguments)
    if own.id_form != "kimi":
        return {"type": "tag", "begin": own.call_begin(name), "content": arguments, "end": own.call_end}
    index = {"type": "regex", "pattern": "[0-9]{1,3}"}
    elements = [index, {"type": "const_string", "value": own.middle}, arguments]
    begin = f"{own.begin}{own.name_prefix}{name}:"
    return {"type": "tag", "begin": begin, "content": {"type": "sequence", "elements": elements}, "end": own.call_end}
