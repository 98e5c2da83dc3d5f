"""Structural tags: what each format takes, beside xgrammar's own reading of it; markers that are tokens; free text."""

import json

import numpy as np
import pytest
import tokenizers

from kvrelay.grammar.compiler import GrammarCompiler
from kvrelay.grammar.masks import fill_masks
from kvrelay.plane.messages import GrammarSpec
from tests.checkpoints import chat_checkpoint
from tests.kvrelay.grammar.schema_fuzz import token_bytes_of

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


def tag(begin, end="</a>", content=None):
    content = content or {"type": "json_schema", "json_schema": SCHEMA}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


ANY = {"type": "any_text"}
TAGS = [tag("<a>"), tag("<a=b>", "</a=b>")]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<a"], "tags": TAGS}
THINK = tag("<think>", "</think>", ANY)
FORMATS = {
    "triggered": TRIGGERED,
    "at least one": TRIGGERED | {"at_least_one": True},
    "at most one": TRIGGERED | {"stop_after_first": True},
    "one": TRIGGERED | {"at_least_one": True, "stop_after_first": True},
    "excludes": TRIGGERED | {"excludes": ["bad"]},
    "after reasoning": {"type": "sequence", "elements": [THINK, TRIGGERED]},
    "two ends": tag("<a>", ["</a>", "</b>"]),
    "text of two ends": tag("<a>", ["</a>", "</b>"], ANY),
    "optional": {
        "type": "sequence",
        "elements": [{"type": "optional", "content": THINK}, {"type": "json_schema", "json_schema": SCHEMA}],
    },
    "separated": {"type": "tags_with_separator", "tags": TAGS, "separator": ", "},
    "one of tags": {
        "type": "tags_with_separator", "tags": TAGS, "separator": ", ", "at_least_one": True, "stop_after_first": True,
    },
    "regex and text": {
        "type": "sequence",
        "elements": [{"type": "regex", "pattern": "[a-z/]*"}, {"type": "const_string", "value": "yy"}],
    },
    "repeat": {"type": "repeat", "min": 1, "max": 2, "content": {"type": "const_string", "value": "ab"}},
    "star": {"type": "star", "content": {"type": "const_string", "value": "ab"}},
    "plus": {"type": "plus", "content": {"type": "const_string", "value": "ab"}},
    "text, then JSON": {
        "type": "sequence",
        "elements": [ANY, {"type": "const_string", "value": "END"}, {"type": "json_schema", "json_schema": SCHEMA}],
    },
    "tags in a tag": tag("<o>", "</o>", TRIGGERED),
    "or": {
        "type": "or",
        "elements": [tag("<a>"), {"type": "const_string", "value": "<a"}, {"type": "regex", "pattern": "b+"}],
    },
}  # fmt: skip
A, B = '<a>{"x": 1}</a>', '<a=b>{"x":2}</a=b>'
TEXTS = [
    "", A, B, "hi", f"hi {A}", f"{A} yo", f"hi{A} x {B} z", f"{A}{B}", f"{A}, {B}", "bad", f"{A} bad", "<a", "<a>",
    "x <a y", "<think>ok</think>", f"<think>ok <a> </think>{A}", f"<think>ok</think>yes {B}", '<a>{"x": 1}</b>',
    "<a>any</b>", "<a>any <b></a>", '{"x": 1}', '<think>a</think>{"x": 1}', "abyy", "ab", "abab", "ababab", "bb",
    'what END{"x": 3}', "a/b/yy", "yy", f"<o>{A} t</o>", "<o></o>", "<o> t</o> more", f"<o>{A}{B}</o>",
    '<a>{"x": "1"}</a>', '<a>{"y": 1}</a>', "🎉é", "a<|im_start|>b", "<tool_response>",
]  # fmt: skip


class Vocabulary:
    """Qwen's markers: <think> and <tool_call> are tokens that are not special."""

    def __init__(self, folder):
        chat_checkpoint("qwen3", folder)
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.size = json.loads((folder / "config.json").read_text())["vocab_size"]
        self.eos = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        self.compiler = GrammarCompiler(folder, self.size, self.eos)

    def compiled(self, given):
        return self.compiler.compile(GrammarSpec("structural_tag", text_of(given)))

    def tokens(self, text):
        return [*self.tokenizer.encode(text, add_special_tokens=False).ids, self.eos[0]]

    def accepts(self, given, text):
        tokens = self.tokens(text)
        return self.compiled(given).matcher().accept(tokens) == len(tokens)

    def token_bytes(self):
        """As xgrammar wants them; special tokens have none."""
        found = token_bytes_of(self.compiler)
        for token_id, token in self.tokenizer.get_added_tokens_decoder().items():
            found[token_id] = b"" if token.special else token.content.encode()
        return found


def text_of(given):
    return json.dumps({"type": "structural_tag", "format": given})


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    found = Vocabulary(tmp_path_factory.mktemp("model"))
    found.compiler.load()
    return found


@pytest.fixture(scope="module")
def theirs(vocabulary):
    xgrammar = pytest.importorskip("xgrammar")
    info = xgrammar.TokenizerInfo(
        vocabulary.token_bytes(), xgrammar.VocabType.RAW, vocab_size=vocabulary.size, stop_token_ids=vocabulary.eos
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def accepts(given, text):
        matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(text_of(given)))
        return all(map(matcher.accept_token, vocabulary.tokens(text)))

    return accepts


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_takes_what_xgrammar_takes(vocabulary, theirs, name):
    taken = {text for text in TEXTS if vocabulary.accepts(FORMATS[name], text)}
    assert taken == {text for text in TEXTS if theirs(FORMATS[name], text)}
    assert taken and len(taken) < len(TEXTS)


def test_a_marker_that_is_a_token_is_written_as_that_token(vocabulary):
    call = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [tag("<tool_call>", "</tool_call>")]}
    begin, end = (vocabulary.tokenizer.token_to_id(one) for one in ("<tool_call>", "</tool_call>"))
    inside = vocabulary.tokens('{"x": 1}')[:-1]
    matcher = vocabulary.compiled(call).matcher()
    assert matcher.accept([begin, *inside, end]) == len(inside) + 2
    pieces = [token for one in ("<", "tool", "_", "call", ">") for token in vocabulary.tokens(one)[:-1]]
    matcher = vocabulary.compiled(call).matcher()
    assert matcher.valid_prefix(pieces[:-1]) == len(pieces) - 1
    assert matcher.valid_prefix(pieces) == len(pieces) - 1  # the parser would see a call
    assert matcher.valid_prefix([begin, *inside, *vocabulary.tokens("</tool")[:-1]]) == 1 + len(inside)
    assert matcher.valid_prefix([begin, *vocabulary.tokens("x")[:-1]]) == 1


def test_free_text_has_no_special_tokens(vocabulary):
    out = np.zeros((1, vocabulary.compiler.num_words), np.int32)
    fill_masks([(vocabulary.compiled(TRIGGERED).matcher(), (), 0)], out)
    allowed = np.unpackbits(out.view(np.uint8)[0], bitorder="little")[: vocabulary.size].astype(bool)
    added = vocabulary.tokenizer.get_added_tokens_decoder()
    special = [token_id for token_id, token in added.items() if token.special]
    assert {token_id for token_id in special if allowed[token_id]} == set(vocabulary.eos)
    assert all(allowed[token_id] for token_id in added if token_id not in special)  # text as any other
    assert allowed[: min(added)].mean() > 0.7


def test_white_space_does_not_go_on_and_on(vocabulary):
    matcher = vocabulary.compiled(tag("<a>")).matcher()
    assert matcher.accept(vocabulary.tokens('<a>{\n  "x":')[:-1])
    (space,) = vocabulary.tokens(" ")[:-1]
    assert matcher.valid_prefix([space] * 50) < 4
    compact = tag("<a>", content={"type": "json_schema", "json_schema": SCHEMA, "max_whitespace_cnt": 0})
    assert vocabulary.accepts(compact, '<a>{"x":1}</a>')
    assert not vocabulary.accepts(compact, '<a>{"x": 1}</a>')


def test_an_output_that_may_be_read_in_many_ways_is_ended_by_name(vocabulary):
    again = {
        "type": "star",
        "content": tag("a", "", {"type": "star", "content": {"type": "const_string", "value": "a"}}),
    }
    matcher = vocabulary.compiled(again).matcher()
    (token,) = vocabulary.tokens("a")[:-1]
    assert 50 < sum(matcher.accept([token]) for _ in range(1000)) < 500
    assert "limits" in matcher.problem
