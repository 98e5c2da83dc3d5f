"""Tool calls in outputs' texts: every family's form, however the text is cut, and what is no call."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.serve.chat.families import TOOL_FORMATS
from kvrelay.serve.chat.output import ToolArguments
from kvrelay.serve.chat.tool_calls import ToolCallParser, new_call_id
from tests.scale import scaled
from tests.serve.chat.calls import TOOLS, cut, parse, rendered

pytestmark = pytest.mark.pure

WEATHER = {"city": 'Zürich "{[<tool_call>]}" \\n 東京 🌦', "days": 3, "options": {"a": [1, {"b": "}"}]}}
each_family = pytest.mark.parametrize("family", TOOL_FORMATS)


@each_family
def test_a_call_is_found(family):
    own = TOOL_FORMATS[family]
    content, calls = parse(own, [rendered(own, [("get_weather", WEATHER)])])
    assert content == ""
    assert [(name, json.loads(arguments)) for _, name, arguments in calls] == [("get_weather", WEATHER)]


@each_family
def test_text_before_and_after_calls_is_content(family):
    own = TOOL_FORMATS[family]
    calls = [("get_weather", {"city": "Paris"}), ("now", {})]
    if own.at_start:
        text = "<|python_tag|>" + rendered(own, calls) + "\n"
        content, found = parse(own, ["Let me see.\n", text, " Done."])
    else:
        content, found = parse(own, ["Let me see.\n\n" + rendered(own, calls) + "\n Done."])
    assert [(name, json.loads(arguments)) for _, name, arguments in found] == calls
    assert content == "Let me see.Done."


scalars = st.one_of(st.text(max_size=12), st.integers(-999, 999), st.booleans(), st.none())
texts = st.text(max_size=15).map(lambda text: text.replace("\x00", ""))
arguments_of_weather = st.fixed_dictionaries(
    {"city": texts},
    optional={
        "days": st.integers(-99, 99),
        "high": st.floats(-9, 9, allow_nan=False),
        "is_metric": st.booleans(),
        "options": st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), scalars, max_size=2),
        "tags": st.lists(texts, max_size=2),
        "unit": st.sampled_from(["C", "F"]),
    },
)
calls_of_any_kind = st.lists(
    st.one_of(st.tuples(st.just("get_weather"), arguments_of_weather), st.tuples(st.just("now"), st.just({}))),
    min_size=1,
    max_size=3,
)
places = st.lists(st.integers(0, 2000), max_size=12)


def without_markers(own, value):
    """Whether a text can stand raw in the family's arguments."""
    marks = ["</parameter>", "</arg_value>", "</｜DSML｜parameter>", *filter(None, [own.string_mark])]
    return not any(mark in json.dumps(value, ensure_ascii=False) for mark in marks)


@each_family
@settings(max_examples=scaled(200), deadline=None)
@given(calls=calls_of_any_kind, places=places, before=st.sampled_from(["", "Well,\n", "{", "a < b [ c"]))
def test_calls_are_the_same_however_the_text_is_cut(family, calls, places, before):
    own = TOOL_FORMATS[family]
    if not without_markers(own, calls):
        return
    before = before + own.also[0] if own.at_start and before else before
    text = before + rendered(own, calls)
    content, found = parse(own, cut(text, places))
    assert [(name, json.loads(arguments)) for _, name, arguments in found] == calls
    assert content == before.removesuffix(own.also[0] if own.at_start else "").rstrip()
    assert (content, found) == parse(own, [text]) == parse(own, list(text))


def words_of(own):
    whole = rendered(own, [("get_weather", {"city": "x", "days": 1}), ("now", {})])
    return [*re.findall(r"\w+|\W", whole), *filter(None, own.markers), "\n", "hello ", '"', "\\", "{", "}", "🌦"]


@each_family
@settings(max_examples=scaled(400), deadline=None)
@given(data=st.data())
def test_nothing_malformed_raises_or_depends_on_cuts(family, data):
    own = TOOL_FORMATS[family]
    text = "".join(data.draw(st.lists(st.sampled_from(words_of(own)), max_size=40)))
    whole = rendered(own, [("get_weather", {"city": "x", "days": 1}), ("now", {})])
    if data.draw(st.booleans()):  # something whole with one change
        at, size = data.draw(st.integers(0, len(whole))), data.draw(st.integers(0, 5))
        text = whole[:at] + text[:3] + whole[at + size :]
    found = parse(own, [text])
    assert found == parse(own, cut(text, data.draw(places))) == parse(own, list(text))
    if not found[1]:
        assert found[0] == text


@pytest.mark.parametrize(
    ("family", "text", "calls", "content"),
    [
        # keys in another order, arguments as text, none at all, other keys
        ("hermes", '<tool_call>{"arguments": {"city": "x"}, "name": "f"}</tool_call>', [("f", '{"city": "x"}')], ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", '{"a": 1}')], ""),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")], ""),
        ("hermes", '<tool_call>{"id": [1], "name": "f", "arguments": null}</tool_call>', [("f", "{}")], ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', [("f", '{"a": 1}')], ""),
        # no calls
        ("hermes", '<tool_call>{"name": 3}</tool_call>', [], '<tool_call>{"name": 3}</tool_call>'),
        ("hermes", "a <tool_call", [], "a <tool_call"),
        ("hermes", "\n a \n", [], "\n a \n"),
        ("llama3", ' {"answer": 42}', [], ' {"answer": 42}'),
        ("llama3", '{"name": "Bob", "age": 3}', [], '{"name": "Bob", "age": 3}'),
        ("llama3", "<|python_tag|>print(1)", [], "<|python_tag|>print(1)"),
        # a broken one, then a good one
        (
            "hermes",
            '<tool_call>{"nam <tool_call>{"name": "f", "arguments": {}}</tool_call>',
            [("f", "{}")],
            '<tool_call>{"nam',
        ),
        # cut off by max_tokens
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "x', [("f", '{"a": "x')], ""),
        # either of Mistral's tokenizers
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}', [("f", '{"a": 1}'), ("g", '{"b": 2}')], ""),
        ("mistral_args", '[TOOL_CALLS] [{"name": "f", "arguments": {}}]', [("f", "{}")], ""),
        ("mistral_args", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', [("f", '{"a": 1}')], ""),
        ("llama3", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', [("f", "{}"), ("g", "{}")], ""),
        ("llama3", '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', [("f", "{}")], ""),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=a>\n 1\n2 \n</parameter>\n</function>\n</tool_call>",
            [("f", '{"a": " 1\\n2 "}')],
            "",
        ),
        (
            "gemma3_function",
            '<start_function_call>call:f{a:<escape>x"y<escape>,b:[1,-2.5e3,true],c:{}}<end_function_call>',
            [("f", '{"a":"x\\"y","b":[1,-2.5e3,true],"c":{}}')],
            "",
        ),
        ("gemma4", '<|tool_call>call:f{"a": "x"}<tool_call|>', [("f", '{"a": "x"}')], ""),
    ],
)
def test_particular_texts(family, text, calls, content):
    own = TOOL_FORMATS[family]
    found = parse(own, [text])
    assert [tuple(call[1:]) for call in found[1]] == calls
    assert found[0] == content
    assert found == parse(own, list(text))


def test_arguments_come_while_they_are_written():
    parser = ToolCallParser(TOOL_FORMATS["hermes"], TOOLS)
    parser.push('<tool_call>\n{"name": "get_weather", "arguments": {"ci')
    assert parser.push('ty": "Par') == [ToolArguments(0, 'ty": "Par')]
    parser = ToolCallParser(TOOL_FORMATS["qwen3_coder"], TOOLS)
    parser.push("<tool_call>\n<function=get_weather>\n<parameter=city>\nPa")
    assert parser.push("ris") == [ToolArguments(0, "ris")]


def test_content_is_not_held_back():
    parser = ToolCallParser(TOOL_FORMATS["hermes"], TOOLS)
    assert [event.text for event in parser.push("Hello world <b")] == ["Hello world <b"]
    assert parser.push("<tool_cal") == []
    assert [event.text for event in parser.push("m")] == ["<tool_calm"]


def test_an_xml_value_has_its_schemas_type():
    own = TOOL_FORMATS["qwen3_coder"]
    values = {"city": "12", "days": "12", "is_metric": "True", "note": "null", "unit": "C", "else": "[1]"}
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    _, calls = parse(own, [f"<tool_call>\n<function=get_weather>\n{text}</function>\n</tool_call>"])
    expected = {"city": "12", "days": 12, "is_metric": True, "note": None, "unit": "C", "else": [1]}
    assert json.loads(calls[0][2]) == expected


def test_without_parallel_calls_only_the_first_is_returned():
    own = TOOL_FORMATS["hermes"]
    _, calls = parse(own, [rendered(own, [("now", {}), ("now", {})])], is_parallel=False)
    assert len(calls) == 1


def test_ids_are_as_the_templates_expect_them():
    assert re.fullmatch(r"call_[0-9a-f]{24}", new_call_id(TOOL_FORMATS["hermes"]))
    assert re.fullmatch(r"[A-Za-z0-9]{9}", new_call_id(TOOL_FORMATS["mistral"]))
    kimi = TOOL_FORMATS["kimi_k2"]
    assert parse(kimi, [rendered(kimi, [("now", {})])])[1][0][:2] == ["functions.now:0", "now"]
    _, calls = parse(TOOL_FORMATS["mistral_args"], ["[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}"])
    assert calls[0][0] == "abcdefghi"
