"""Every spelling of structured output becomes one GrammarSpec; what cannot is refused with the field's name."""

import asyncio
import json

import llguidance
import pytest

from kvrelay.errors import InvalidRequest
from kvrelay.plane.messages import GrammarSpec
from kvrelay.serve.api.schemas import CompletionBody, parse
from kvrelay.serve.bodies.grammars import MAX_CHOICES, MAX_GBNF_CHARS, asked_grammar

pytestmark = pytest.mark.pure

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"string"}}}'  # keys keep their order
JSON = GrammarSpec("json_schema", TEXT)
OBJECT = GrammarSpec("json_schema", '{"type":"object"}')
TAG = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}
GBNF = 'root ::= "a" [0-9]+\n'
LARK = '%llguidance {}\n\nstart: "a" /[0-9]/+\n'


def asked(**fields):
    body = parse(CompletionBody, json.dumps({"prompt": "x"} | fields).encode())
    return asyncio.run(asked_grammar(body))


def format_of(**fields):
    return {"response_format": fields}


def outputs(**fields):
    return {"structured_outputs": fields}


NAMED = {"name": "answer", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("fields", "place", "spec"),
    [
        (format_of(type="json_object"), "response_format", OBJECT),
        (format_of(type="json_object", schema=SCHEMA), "response_format", JSON),
        (format_of(type="json_schema", schema=SCHEMA), "response_format.schema", JSON),
        (format_of(type="json_schema", json_schema=NAMED), "response_format.json_schema.schema", JSON),
        (
            format_of(type="json_schema", json_schema=NAMED | {"strict": False, "description": "d"}),
            "response_format.json_schema.schema",
            JSON,
        ),
        (format_of(**TAG), "response_format.format", GrammarSpec("structural_tag", json.dumps(TAG).replace(" ", ""))),
        (outputs(json=SCHEMA), "structured_outputs.json", JSON),
        (outputs(json=json.dumps(SCHEMA)), "structured_outputs.json", JSON),
        (outputs(json_object=True, disable_fallback=True), "structured_outputs.json_object", OBJECT),
        (outputs(regex="a+"), "structured_outputs.regex", GrammarSpec("regex", "a+")),
        (
            outputs(choice=["yes", 'a "no"\n']),
            "structured_outputs.choice",
            GrammarSpec("lark", "start: CHOICE\n" + r'CHOICE: "yes" | "a \"no\"\n"'),
        ),
        (outputs(grammar=GBNF), "structured_outputs.grammar", GrammarSpec("lark", LARK)),
        (outputs(structural_tag=json.dumps(TAG)), "structured_outputs.structural_tag", None),
        ({"guided_json": TEXT}, "guided_json", JSON),
        ({"guided_json_object": True}, "guided_json_object", OBJECT),
        ({"guided_regex": "[ab]"}, "guided_regex", GrammarSpec("regex", "[ab]")),
        ({"guided_choice": ["x"]}, "guided_choice", GrammarSpec("lark", 'start: CHOICE\nCHOICE: "x"')),
        ({"guided_grammar": 'start: "x"'}, "guided_grammar", GrammarSpec("lark", 'start: "x"')),
        ({"json_schema": TEXT}, "json_schema", JSON),
        ({"regex": "a"}, "regex", GrammarSpec("regex", "a")),
        ({"ebnf": GBNF}, "ebnf", GrammarSpec("lark", LARK)),
        ({"grammar": GBNF}, "grammar", GrammarSpec("lark", LARK)),
        ({"structural_tag": json.dumps(TAG)}, "structural_tag", None),
    ],
)
def test_every_spelling_is_one_spec(fields, place, spec):
    found = asked(**fields)
    assert found.field == place
    assert found.spec == (spec or GrammarSpec("structural_tag", json.dumps(TAG, separators=(",", ":"))))


@pytest.mark.parametrize(
    "fields", [{}, format_of(type="text"), {"response_format": None, "regex": None}, {"guided_json_object": False}]
)
def test_nothing_asked_is_no_grammar(fields):
    assert asked(**fields) is None


def test_an_older_structural_tag_is_one_with_a_format():
    old = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}, {"begin": "<g>", "end": "</g>"}],
        "triggers": ["<"],
        "at_least_one": True,
    }
    texts = [asked(response_format=old).spec.text, asked(structural_tag=json.dumps(old)).spec.text]
    assert texts[0] == texts[1]
    tags = [
        {"begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"},
        {"begin": "<g>", "content": {"type": "json_schema", "json_schema": True}, "end": "</g>"},
    ]
    triggered = {"type": "triggered_tags", "triggers": ["<"], "tags": tags, "at_least_one": True}
    assert json.loads(texts[0]) == {"type": "structural_tag", "format": triggered}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (format_of(type="json"), "response_format.type", ""),
        (format_of(type="json_schema"), "response_format.json_schema", "required"),
        (format_of(type="json_schema", json_schema={"schema": SCHEMA}), "response_format.json_schema.name", "required"),
        (format_of(type="json_schema", json_schema={"name": "x"}), "response_format.json_schema.schema", "required"),
        (format_of(type="json_schema", json_schema=NAMED | {"shema": 1}), "response_format.json_schema.shema", ""),
        (outputs(), "structured_outputs", "needs one of"),
        (outputs(json=SCHEMA, regex="a"), "structured_outputs.regex", "not together with structured_outputs.json"),
        (outputs(choice=[]), "structured_outputs.choice", ""),
        (outputs(choice=["x"] * (MAX_CHOICES + 1)), "structured_outputs.choice", ""),
        (
            outputs(disable_additional_properties=True, json=SCHEMA),
            "structured_outputs.disable_additional_properties",
            "",
        ),
        (outputs(regex="a", whitespace_pattern=" "), "structured_outputs.whitespace_pattern", "only with json"),
        (outputs(regex="a", disable_any_whitespace=True), "structured_outputs.disable_any_whitespace", "only with"),
        (outputs(jsn=SCHEMA), "structured_outputs.jsn", ""),
        (format_of(type="json_object") | {"regex": "a"}, "regex", "not together with response_format"),
        ({"guided_json": SCHEMA, "guided_choice": ["a"]}, "guided_choice", "not together with guided_json"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": "[" * 100_000}, "guided_json", "not valid JSON"),
        ({"guided_json": "5"}, "guided_json", "is an object"),
        ({"json_schema": '{"const": NaN}'}, "json_schema", "not valid JSON"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "only with"),
        ({"ebnf": "root ::= ("}, "ebnf", "Expected ')' at line 1"),
        ({"ebnf": "root ::= missing"}, "ebnf", "Rule 'missing' not found"),
        ({"grammar": "root ::= " + "(" * 5000}, "grammar", "nests too deeply"),
        ({"guided_grammar": 'root ::= "a"' + " " * MAX_GBNF_CHARS}, "guided_grammar", "characters of GBNF"),
        ({"structural_tag": "<tag>"}, "structural_tag", "not valid JSON"),
    ],
)
def test_a_wrong_spelling_is_named(fields, param, words):
    with pytest.raises(InvalidRequest) as caught:
        asked(**fields)
    assert caught.value.param == param
    assert words in caught.value.message


ALPHABET = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    """llguidance over a vocabulary of single bytes."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"<eos>"]

    class Bytes:
        eos_token_id = bos_token_id = 256
        special_token_ids = [256]  # noqa: RUF012

        def __init__(self):
            self.tokens = tokens

        def __call__(self, text):
            return list(text.encode() if isinstance(text, str) else text)

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


def matches(tokenizer, spec, text):
    kind = {"json_schema": "json_schema", "regex": "regex", "lark": "lark"}[spec.kind]
    grammar = getattr(llguidance.LLMatcher, f"grammar_from_{kind}")(spec.text)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def test_choices_match_themselves_alone(tokenizer):
    choices = ["yes", "no", 'with "quotes"', "a\\b\n\t", "é☃", "x | y", "yes, too"]
    spec = asked(guided_choice=choices).spec
    assert all(matches(tokenizer, spec, choice) for choice in choices)
    assert not any(matches(tokenizer, spec, other) for other in ("ye", "x", "with", "a\\b\\n\\t"))


def test_as_many_choices_as_are_allowed_compile(tokenizer):
    choices = [f"choice number {number} of many" for number in range(MAX_CHOICES)]
    spec = asked(guided_choice=choices).spec
    assert matches(tokenizer, spec, choices[1000]) and not matches(tokenizer, spec, "choice number 1")


@pytest.mark.parametrize(
    ("options", "texts"),
    [({"disable_any_whitespace": True}, ['{"a":1}']), ({"whitespace_pattern": "[ ]?"}, ['{"a":1}', '{ "a": 1}'])],
)
def test_whitespace_between_json_tokens_can_be_chosen(tokenizer, options, texts):
    spec = asked(**outputs(json=ALPHABET, **options)).spec
    every = ['{"a":1}', '{ "a": 1}', '{\n"a":1}']
    assert [text for text in every if matches(tokenizer, spec, text)] == texts
