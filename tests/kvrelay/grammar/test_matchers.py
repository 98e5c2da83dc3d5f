"""Compiled grammars over every family's vocabulary: what a matcher takes, takes back, and the masks it leads to."""

import json

import numpy as np
import pytest

from kvrelay.errors import InvalidRequest
from kvrelay.grammar.compiler import GrammarCompiler
from kvrelay.grammar.masks import fill_masks
from kvrelay.plane.messages import GrammarSpec
from tests.serve.text.family_folders import FAMILIES, write_family

TOOL = {
    "begin": "<call>",
    "content": {"type": "json_schema", "json_schema": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    "end": "</call>",
}
TAG = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [TOOL], "at_least_one": True, "stop_after_first": True}
SAMPLES = {
    "json_schema": (
        '{"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}',
        '{"x": "né\\n🎉"}',
    ),
    "regex": ("[a-z]+ [0-9]{3}", "the 123"),
    "lark": ('start: "yes" | "no"', "yes"),
    "structural_tag": (json.dumps({"type": "structural_tag", "format": TAG}), '<call>{"x": 12}</call>'),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    folder, tokenizer = write_family(request.param, tmp_path_factory.mktemp(request.param))
    size = json.loads((folder / "config.json").read_text())
    size = (size.get("text_config") or size)["vocab_size"]
    eos_ids = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    return GrammarCompiler(folder, size, eos_ids if isinstance(eos_ids, list) else [eos_ids]), tokenizer, size


def tokens_of(tokenizer, text):
    """Tokens of `text` as an output has them: without a dummy space in front."""
    marked = tokenizer.encode("\n" + text, add_special_tokens=False).ids
    ends = (end for end in range(1, len(marked)) if tokenizer.decode(marked[:end]).endswith("\n"))
    return marked[next(ends) :]


def allowed(row):
    return set(np.nonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[0].tolist())


@pytest.mark.parametrize("kind", SAMPLES)
def test_an_output_of_each_kind_is_taken_token_by_token_and_then_only_the_end(family, kind):
    compiler, tokenizer, size = family
    text, sample = SAMPLES[kind]
    matcher = compiler.compile(GrammarSpec(kind, text)).matcher()
    eos_ids = sorted(matcher.eos_ids)
    token_ids = tokens_of(tokenizer, sample)
    masks = np.full((len(token_ids) + 3, compiler.num_words), -7, np.int32)
    fill_masks([(matcher, [*token_ids, eos_ids[0]], 1)], masks)
    assert (masks[0] == -7).all()
    for token_id, mask in zip(token_ids, masks[1:], strict=False):
        assert token_id in allowed(mask)
        assert max(allowed(mask)) < size
    assert set(eos_ids) <= allowed(masks[len(token_ids) + 1])
    assert allowed(masks[-1]) == set(eos_ids)
    assert matcher.accept([eos_ids[0]]) == 0  # not before it is complete
    assert matcher.accept([*token_ids, eos_ids[-1], token_ids[0]]) == len(token_ids) + 1
    assert matcher.is_over and matcher.problem is None


@pytest.mark.parametrize("kind", SAMPLES)
def test_tokens_are_taken_back_across_the_end(family, kind):
    compiler, tokenizer, _ = family
    text, sample = SAMPLES[kind]
    grammar = compiler.compile(GrammarSpec(kind, text))
    matcher, fresh = grammar.matcher(), grammar.matcher()
    token_ids = tokens_of(tokenizer, sample)
    eos = min(matcher.eos_ids)
    assert matcher.valid_prefix([*token_ids, eos, eos]) == len(token_ids) + 2
    assert matcher.accept([*token_ids, eos]) == len(token_ids) + 1
    matcher.rollback(3)
    assert fresh.accept(token_ids[:-2]) == len(token_ids) - 2
    masks = np.zeros((2, compiler.num_words), np.int32)
    fill_masks([(matcher, [], 0), (fresh, [], 1)], masks)
    assert (masks[0] == masks[1]).all()
    assert matcher.accept([*token_ids[-2:], eos]) == 3
    with pytest.raises(ValueError, match="cannot take back"):
        matcher.rollback(len(token_ids) + 2)


def test_a_refused_draft_ends_its_masks(family):
    compiler, tokenizer, _ = family
    matcher = compiler.compile(GrammarSpec("lark", 'start: "yes" | "no"')).matcher()
    first, *_ = tokens_of(tokenizer, "the")
    masks = np.zeros((3, compiler.num_words), np.int32)
    fill_masks([(matcher, [first, first], 0)], masks)
    assert matcher.valid_prefix([first]) == 0
    assert allowed(masks[1]) == allowed(masks[2]) == set(matcher.eos_ids)
    assert allowed(masks[0]) > set(tokens_of(tokenizer, "yes")[:1])


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"type": "object", "properties": {"a": {"type": "string", "format": "iri"}}}', "iri"),
        ("json_schema", "{", "JSON"),
        ("regex", "(", "unclosed"),
        ("lark", "start: x", '"x"'),
        ("structural_tag", '{"type": "structural_tag"}', "format"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(family, kind, text, named):
    with pytest.raises(InvalidRequest, match=named):
        family[0].compile(GrammarSpec(kind, text))


def test_a_format_that_json_schema_does_not_define_is_an_annotation(family):
    """As pydantic's paths and secrets have."""
    compiler, tokenizer, _ = family
    matcher = compiler.compile(GrammarSpec("json_schema", '{"type": "string", "format": "password"}')).matcher()
    tokens = tokens_of(tokenizer, '"the word"')
    assert matcher.accept(tokens) == len(tokens) and matcher.is_over


@pytest.mark.parametrize(
    ("schema", "key"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"oneOf": [{}, {}]}, "oneOf"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "maxLength": 10**9}, "maxLength"),
    ],
)
def test_a_schema_in_a_structural_tag_is_refused_by_key_and_tag(family, schema, key):
    tools = [TOOL, {**TOOL, "begin": "<call>x", "content": {"json_schema": schema}}]
    tag = {"type": "structural_tag", "format": {**TAG, "tags": tools}}
    with pytest.raises(InvalidRequest, match=rf'{key}.*\(in the tag that begins with "<call>x"\)'):
        family[0].compile(GrammarSpec("structural_tag", json.dumps(tag)))


def test_alternatives_that_a_discriminator_tells_apart_are_one_of(family):
    compiler, tokenizer, _ = family
    kinds = {
        name: {"type": "object", "properties": {"t": {"const": name}, "x": {"type": "null"}}, "required": ["t", "x"]}
        for name in ("a", "b")
    }
    schema = {"$defs": kinds, "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}
    matcher = compiler.compile(GrammarSpec("json_schema", json.dumps(schema))).matcher()
    token_ids = tokens_of(tokenizer, '{"t":"b","x":null}')
    assert matcher.accept(token_ids) == len(token_ids) and matcher.is_over
    kinds["b"]["properties"]["t"] = {"enum": ["a", "b"]}
    with pytest.raises(InvalidRequest, match="oneOf"):
        compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(
    "inner",
    [
        {"type": "grammar", "grammar": 'root ::= root root | "a"'},
        {"type": "star", "content": {"type": "any_text"}},
        {"type": "any_text", "max_tokens": 3},
        {"type": "const_string", "value": "x", "colour": "red"},
    ],
)
def test_a_format_that_is_not_supported_is_refused_by_name(family, inner):
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": [inner]}}
    with pytest.raises(InvalidRequest, match=inner["type"]):
        family[0].compile(GrammarSpec("structural_tag", json.dumps(tag)))
