"""Calls written as each family writes them, and parsers' events put together again."""

import itertools
import json

from kvrelay.serve.chat.families import ToolFormat
from kvrelay.serve.chat.output import Content, ToolArguments, ToolCallStart
from kvrelay.serve.chat.tool_calls import ToolCallParser

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "high": {"type": "number"},
        "is_metric": {"type": "boolean"},
        "options": {"type": "object"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "note": {"type": ["string", "null"]},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
}
TOOLS = {"get_weather": CITY, "now": {"type": "object", "properties": {}}}


def _gemma(value, mark):
    if isinstance(value, str):
        return mark + value + mark
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(item, mark)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma(item, mark) for item in value) + "]"
    return json.dumps(value)


def _text(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def written(own: ToolFormat, arguments: dict) -> str:
    """Arguments as the family's template renders them."""
    items = [(key, _text(value), isinstance(value, str)) for key, value in arguments.items()]
    if own.arguments == "qwen_xml":
        return "\n".join(f"<parameter={key}>\n{text}\n</parameter>" for key, text, _ in items)
    if own.arguments == "glm_xml":
        return "\n".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>" for key, text, _ in items)
    if own.arguments == "minimax_xml":
        return "\n".join(f'<parameter name="{key}">{text}</parameter>' for key, text, _ in items)
    if own.arguments == "deepseek_xml":
        form = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>'
        return "\n".join(form.format(key, "true" if is_text else "false", text) for key, text, is_text in items)
    if own.string_mark:
        return _gemma(arguments, own.string_mark)
    return json.dumps(arguments, ensure_ascii=False)


def rendered(own: ToolFormat, calls: list[tuple[str, dict]]) -> str:
    """Calls one after another, as the family's template renders them."""
    each = [own.call_begin(name) + written(own, arguments) + own.call_end for name, arguments in calls]
    return own.open + own.separator.join(each) + own.close


def parse(own: ToolFormat, pieces: list[str], **options):
    """(content, [(id, name, arguments text)]) of an output that comes in pieces."""
    numbers = itertools.count()
    parser = ToolCallParser(own, TOOLS, new_id=lambda: f"id{next(numbers)}", **options)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.flush()
    content, calls = "", []
    for event in events:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, ToolCallStart):
            assert event.index == len(calls)
            calls.append([event.id, event.name, ""])
        else:
            assert isinstance(event, ToolArguments)
            assert event.index == len(calls) - 1
            calls[-1][2] += event.text
    return content, calls


def cut(text: str, places: list[int]) -> list[str]:
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(ends)]
