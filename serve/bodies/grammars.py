"""Structured output as clients ask for it, in OpenAI's, vLLM's and SGLang's words, as the one GrammarSpec that workers
know.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from kvrelay.errors import InvalidRequest
from kvrelay.plane.messages import GrammarSpec
from kvrelay.serve.bodies.messages import Body

MAX_CHOICES = 1024
MAX_GBNF_CHARS = 32 << 10  # takes 0.2 s to convert at worst
LONG_GBNF_CHARS = 1024  # longer text is converted on a thread
ANY_OBJECT: dict[str, Any] = {"type": "object"}

JsonSchema = str | dict[str, Any] | bool
"""A JSON schema, or its text."""
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]


class _Strict(Body):
    """An object whose every field constrains the output: unknown ones are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class NamedSchema(_Strict):
    """OpenAI's `json_schema`. The schema holds whether `strict` is true or not."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TaggedSchema(_Strict):
    """One format of an older structural tag: JSON between two texts."""

    begin: str
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    end: str


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")  # beside the type, as llama.cpp has it
    format: dict[str, Any] | None = None  # of a structural tag
    structures: list[TaggedSchema] | None = None  # of a structural tag of before there was `format`
    triggers: list[str] | None = None
    at_least_one: bool | None = None


class StructuredOutputs(_Strict):
    """vLLM's `structured_outputs`: one of the first six."""

    json_: JsonSchema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None  # there is no other library to fall back to
    disable_additional_properties: Literal[False] | None = None


class GrammarFields(Body):
    """Fields of a body that constrain the output's text; at most one may be given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: JsonSchema | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    """What an output must match, and the field that asked for it, for errors."""

    spec: GrammarSpec
    field: str


@dataclass(frozen=True, slots=True)
class _Given:
    kind: str  # json, regex, choice, grammar, structural_tag
    field: str
    value: Any
    whitespace: str | None = None  # between JSON tokens, a regular expression


_PLAIN = (
    ("guided_json", "json"), ("guided_regex", "regex"), ("guided_choice", "choice"), ("guided_grammar", "grammar"),
    ("json_schema", "json"), ("regex", "regex"), ("ebnf", "grammar"), ("grammar", "grammar"),
    ("structural_tag", "structural_tag"),
)  # fmt: skip


async def asked_grammar(fields: GrammarFields) -> AskedGrammar | None:
    """The grammar that the body asks for. Whether it compiles is not checked here. Raises InvalidRequest."""
    given = list(_given(fields))
    if len(given) > 1:
        first, second = given[0].field, given[1].field
        raise InvalidRequest(f"{second}: not together with {first}", second)
    if fields.guided_whitespace_pattern is not None and not (given and given[0].kind == "json"):
        raise InvalidRequest("guided_whitespace_pattern: only with guided_json", "guided_whitespace_pattern")
    if not given:
        return None
    one = given[0]
    is_long = one.kind == "grammar" and len(one.value) > LONG_GBNF_CHARS
    return AskedGrammar(await asyncio.to_thread(_spec_of, one) if is_long else _spec_of(one), one.field)


def _given(fields: GrammarFields) -> Iterator[_Given]:
    if fields.response_format is not None and fields.response_format.type != "text":
        yield _of_format(fields.response_format)
    if fields.structured_outputs is not None:
        yield from _of_structured_outputs(fields.structured_outputs)
    if fields.guided_json_object:
        yield _Given("json", "guided_json_object", ANY_OBJECT, fields.guided_whitespace_pattern)
    for name, kind in _PLAIN:
        if (value := getattr(fields, name)) is not None:
            yield _Given(kind, name, value, fields.guided_whitespace_pattern if kind == "json" else None)


def _of_format(given: ResponseFormat) -> _Given:
    place = "response_format"
    if given.type == "structural_tag":
        if given.format is not None:
            return _Given("structural_tag", f"{place}.format", {"type": given.type, "format": given.format})
        tag = given.model_dump(include={"structures", "triggers", "at_least_one"}, by_alias=True, exclude_none=True)
        return _Given("structural_tag", place, tag)
    if given.type == "json_object":
        return _Given("json", place, ANY_OBJECT if given.schema_ is None else given.schema_)
    if given.json_schema is not None and given.json_schema.schema_ is not None:
        return _Given("json", f"{place}.json_schema.schema", given.json_schema.schema_)
    if given.json_schema is None and given.schema_ is not None:
        return _Given("json", f"{place}.schema", given.schema_)
    field = f"{place}.json_schema" + ("" if given.json_schema is None else ".schema")
    raise InvalidRequest(f"{field}: Field required", field, 400, "missing")


def _of_structured_outputs(given: StructuredOutputs) -> list[_Given]:
    place = "structured_outputs"
    whitespace = "" if given.disable_any_whitespace else given.whitespace_pattern
    values = {
        "json": given.json_, "json_object": ANY_OBJECT if given.json_object else None, "regex": given.regex,
        "choice": given.choice, "grammar": given.grammar, "structural_tag": given.structural_tag,
    }  # fmt: skip
    found = [
        _Given("json" if name == "json_object" else name, f"{place}.{name}", value, whitespace)
        for name, value in values.items()
        if value is not None
    ]
    if not found:
        raise InvalidRequest(f"{place}: needs one of {', '.join(values)}", place)
    if whitespace is not None and found[0].kind != "json":
        field = f"{place}.{'disable_any_whitespace' if given.disable_any_whitespace else 'whitespace_pattern'}"
        raise InvalidRequest(f"{field}: only with json and json_object", field)
    return found


def _spec_of(given: _Given) -> GrammarSpec:
    if given.kind == "json":
        return _json_spec(given)
    if given.kind == "structural_tag":
        return GrammarSpec("structural_tag", _text(_structural_tag(_parsed(given)), given.field))
    if given.kind == "regex":
        return GrammarSpec("regex", given.value)
    if given.kind == "choice":
        texts = " | ".join(json.dumps(one, ensure_ascii=False) for one in given.value)
        return GrammarSpec("lark", f"start: CHOICE\nCHOICE: {texts}")  # one word to the parser: 1,024 are no strain
    return GrammarSpec("lark", lark_of(given.value, given.field))


def _json_spec(given: _Given) -> GrammarSpec:
    schema = _parsed(given)
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"{given.field}: a JSON schema is an object", given.field)
    if given.whitespace is None:
        return GrammarSpec("json_schema", _text(schema, given.field))
    inner: dict[str, Any] = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
    options = {"whitespace_pattern": given.whitespace} if given.whitespace else {"whitespace_flexible": False}
    return GrammarSpec("lark", "start: %json " + _text({**inner, "x-guidance": options}, given.field))


def _parsed(given: _Given) -> Any:
    """The value, or what its text stands for."""
    if not isinstance(given.value, str):
        return given.value
    try:
        return json.loads(given.value)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{given.field}: not valid JSON: {error}", given.field) from error


def _text(value: Any, field: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field}: not valid JSON: {error}", field) from error


def _structural_tag(tag: Any) -> Any:
    """A structural tag of before there was `format`, as one with it; any other as it is."""
    if not isinstance(tag, dict) or "structures" not in tag:
        return tag
    tags = [
        {
            "begin": one.get("begin"),
            "content": {"type": "json_schema", "json_schema": True if one.get("schema") is None else one["schema"]},
            "end": one.get("end"),
        }
        for one in tag["structures"]
        if isinstance(one, dict)
    ]
    triggered = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    if tag.get("at_least_one"):
        triggered["at_least_one"] = True
    return {"type": "structural_tag", "format": triggered}


def lark_of(text: str, field: str) -> str:
    """A grammar in GBNF (llama.cpp's form of EBNF) or Lark as Lark. Raises InvalidRequest."""
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    if is_lark_syntax(text):
        return text
    if len(text) > MAX_GBNF_CHARS:
        raise InvalidRequest(f"{field}: at most {MAX_GBNF_CHARS} characters of GBNF", field)
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        message = "it nests too deeply"
    except Exception as error:  # the converter raises bare Exception
        message = " ".join(str(error).split())
    raise InvalidRequest(f"{field}: not a GBNF grammar: {message}", field)
