"""Splitting reasoning from content: the same result however the text is cut, and every token on its side."""

import itertools
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.plane.messages import TokenLogprob
from kvrelay.serve.chat.output import ChoiceOutput, Content, OutputFormat, Reasoning, ToolArguments, ToolCallStart
from kvrelay.serve.chat.reasoning import REASONING_FORMATS, ReasoningSplitter, Stage, reasoning_format
from kvrelay.serve.text.tokenizer import TextPiece
from kvrelay.settings.choices import ReasoningParser

pytestmark = pytest.mark.pure


def split(pieces, **options):
    splitter = ReasoningSplitter("<think>", "</think>", **options)
    pairs = [splitter.push(piece) for piece in pieces] + [splitter.flush()]
    return "".join(pair[0] for pair in pairs), "".join(pair[1] for pair in pairs)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nbecause\n</think>\n\nyes", "because", "yes"),
        ("\n <think>because</think>yes", "because", "yes"),
        ("<think>\n\n</think>\n\nyes", "", "yes"),
        ("no markers", "", "no markers"),
        ("  spaces stay", "", "  spaces stay"),
        ("an answer about <think>tags</think>", "", "an answer about <think>tags</think>"),
        ("<think>a</think>b</think><think>c", "a", "b</think><think>c"),
        ("<think>cut of", "cut of", ""),
        ("<think>cut in the marker</thi", "cut in the marker</thi", ""),
        ("<thi", "", "<thi"),
        ("<thinking>", "", "<thinking>"),
        ("", "", ""),
    ],
)
def test_reasoning_is_one_block_at_the_beginning(text, reasoning, content):
    assert split([text]) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("because\n</think>\n\nyes", "because", "yes"),
        ("<think>\nopened again\n</think>yes", "opened again", "yes"),
        ("never closed", "never closed", ""),
        ("</think>yes", "", "yes"),
        ("", "", ""),
    ],
)
def test_a_prompt_that_opened_reasoning_needs_no_marker(text, reasoning, content):
    assert split([text], is_open=True) == (reasoning, content)


def test_an_exact_content_keeps_the_newlines_that_its_grammar_has_put_there():
    assert split(["<think>a</think>\n{}"], is_exact=True) == ("a", "\n{}")


PARTS = st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think>", "\n", " ", "a", "ü"]), max_size=9)


def cut(text, places):
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[start:end] for start, end in itertools.pairwise([0, *ends, len(text)])]


@settings(max_examples=300)
@given(PARTS.map("".join), st.lists(st.integers(0, 60), max_size=8), st.booleans(), st.booleans())
def test_the_result_is_the_same_however_the_text_is_cut(text, places, is_open, is_exact):
    options = {"is_open": is_open, "is_exact": is_exact}
    whole = split([text], **options)
    assert split(cut(text, places), **options) == whole == split(list(text), **options)


@settings(max_examples=300)
@given(PARTS.map("".join), st.booleans())
def test_every_character_has_one_stage_which_is_never_taken_back(text, is_open):
    """The characters of reasoning and content, newlines at the seams aside, are what the splitter returns."""
    splitter, known = ReasoningSplitter("<think>", "</think>", is_open=is_open, is_exact=True), {}
    for index, char in enumerate(text):
        splitter.push(char)
        for place in range(index + 1):
            stage = splitter.stage_at(place)
            assert known.setdefault(place, stage) in (stage, None)
            known[place] = stage
    splitter.flush()
    stages = [splitter.stage_at(place) for place in range(len(text))]
    assert all(known[place] in (stage, None) for place, stage in enumerate(stages))
    chars = {stage: "".join(c for c, one in zip(text, stages, strict=True) if one is stage) for stage in Stage}
    reasoning, content = split([text], is_open=is_open, is_exact=True)
    assert chars[Stage.CONTENT] == content
    assert chars[Stage.REASONING].strip("\n") == reasoning.strip("\n")


def test_nothing_is_held_back_but_what_may_be_a_marker():
    splitter = ReasoningSplitter("<think>", "</think>")
    given_out = [splitter.push(piece) for piece in ("<think>", "a", " b", " <", "c", "</thi", "nk>", "d", "<")]
    texts = [("", ""), ("a", ""), (" b", ""), (" ", ""), ("<c", ""), ("", ""), ("", ""), ("", "d"), ("", "<")]
    assert given_out == texts


# ---- a choice: both stages, and its tokens


class Calls:
    """A parser of our own: `[` begins a call, what follows is its arguments."""

    def __init__(self):
        self.is_called = False

    def push(self, text):
        if self.is_called:
            return [ToolArguments(0, text)]
        content, found, arguments = text.partition("[")
        self.is_called = bool(found)
        parts = [Content(content)] if content else []
        return parts + ([ToolCallStart(0, "call_1", "f"), ToolArguments(0, arguments)] if found else [])

    def flush(self):
        return [Content("!")]


def pieces_of(tokens, finish_reason="stop"):
    """One piece for each token's text, with its place and a log-probability that names it."""
    places = itertools.accumulate(map(len, tokens), initial=0)
    pieces = [
        TextPiece(text, 1, logprobs=[TokenLogprob(index, -1.0)], offsets=[place])
        for index, (text, place) in enumerate(zip(tokens, places, strict=False))
    ]
    pieces[-1].finish_reason = finish_reason
    return pieces


def output(**stages):
    splitter = stages.pop("splitter", lambda: ReasoningSplitter("<think>", "</think>"))
    return ChoiceOutput(OutputFormat(splitter, **stages))


def test_tokens_between_the_markers_are_counted_and_have_no_logprobs():
    choice, pieces = output(), pieces_of(["<think>", "a", " b", "</", "think", ">", "c", " d", ""])
    parts = [part for piece in pieces for part in choice.push(piece)]
    assert parts == [Reasoning("a"), Reasoning(" b"), Content("c"), Content(" d")]
    assert choice.num_reasoning_tokens == 2
    assert [entry.token_id for piece in pieces for entry in piece.logprobs] == [6, 7, 8]


def test_what_looked_like_a_marker_is_counted_once_it_is_known():
    choice, pieces = output(), pieces_of(["<think>", "a", "</", "th", "e"], "length")
    assert [part for piece in pieces[:4] for part in choice.push(piece)] == [Reasoning("a")]
    assert choice.num_reasoning_tokens == 1
    assert choice.push(pieces[4]) == [Reasoning("</the")]
    assert choice.num_reasoning_tokens == 4


def test_calls_are_looked_for_after_reasoning_only():
    choice = output(parser=Calls)
    parts = [part for piece in pieces_of(["<think>", "[", "</think>", "so ", "[", "{}"]) for part in choice.push(piece)]
    assert parts == [
        Reasoning("["),
        Content("so "),
        ToolCallStart(0, "call_1", "f"),
        ToolArguments(0, ""),
        ToolArguments(0, "{}"),
        Content("!"),
    ]
    assert choice.has_calls


def test_reasoning_that_is_not_wanted_is_counted_all_the_same():
    choice = output(shows_reasoning=False)
    parts = [part for piece in pieces_of(["<think>", "a", "</think>", "b"]) for part in choice.push(piece)]
    assert (parts, choice.num_reasoning_tokens) == ([Content("b")], 1)


def test_without_a_splitter_the_whole_text_is_searched_for_calls():
    choice = output(splitter=None, parser=Calls)
    [piece] = pieces_of(["<think>["])
    assert choice.push(piece)[:2] == [Content("<think>"), ToolCallStart(0, "call_1", "f")]
    assert len(piece.logprobs) == 1 and choice.num_reasoning_tokens == 0


# ---- formats


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>\\n\\n</think>\\n\\n' }}", "qwen3"),
        ("{% if '</think>' in content %}", "qwen3"),
        ("[SYSTEM_PROMPT]First draft your thinking process: [THINK]Your thoughts[/THINK]", "mistral"),
        ("<|im_start|>{{ content }}<|im_end|>", None),
        ("", None),
    ],
)
def test_the_format_is_found_by_the_markers_in_the_template(template, name):
    assert reasoning_format("auto", template) == (name and REASONING_FORMATS[name])
    assert reasoning_format("none", template) is None
    assert reasoning_format("kimi", template) == REASONING_FORMATS["kimi"]


def test_every_format_can_be_set():
    assert set(get_args(ReasoningParser)) == {"auto", "none", *REASONING_FORMATS}


@pytest.mark.parametrize(
    ("prompt", "is_open", "assumed"),
    [
        ("<|im_start|>assistant\n", None, True),
        ("<|im_start|>assistant\n<think>\n", True, True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False, False),
        ("<think> is what a user wrote<|im_start|>assistant\n", None, True),
    ],
)
def test_the_end_of_the_prompt_shows_whether_reasoning_is_open(prompt, is_open, assumed):
    assert REASONING_FORMATS["qwen3"].is_open(prompt) is is_open
    assert REASONING_FORMATS["deepseek_r1"].is_open(prompt) is assumed
