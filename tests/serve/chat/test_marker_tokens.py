"""Markers as tokens of a tokenizer: found in the checkpoint, kept in the text though they are special, and placed."""

import pytest
from tokenizers import AddedToken

from kvrelay.plane.messages import TokenOutput
from kvrelay.serve.chat.output import ChoiceOutput, Content, OutputFormat, Reasoning
from kvrelay.serve.chat.reasoning import ReasoningSplitter, find_markers
from kvrelay.serve.text.tokenizer import ChoiceText, TextOptions, Tokenizer
from tests.serve.text.family_folders import CORPUS, QWEN, byte_level, special

CUT = "🎉".encode()[:2]  # of a character that is never completed


def folder_with(tmp_path, markers, *, is_special):
    """A tokenizer of bytes whose chat template has these markers; with `is_special` None they are plain text."""
    tokenizer = byte_level(QWEN, corpus=CORPUS, vocab_size=300)
    tokenizer.add_special_tokens(special("<|im_end|>"))
    if is_special is not None:
        tokenizer.add_tokens([AddedToken(one, special=is_special, normalized=False) for one in markers])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"vocab_size": 400}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}" + "{# #}".join(markers))
    return Tokenizer(tmp_path)


def read(codec, markers, token_ids):
    """The parts of an output of these tokens, one by one, and its tokens of reasoning."""
    form, kept = markers.form, markers.kept_ids
    text = ChoiceText(codec, TextOptions(kept_ids=kept, starts_text=True))
    output = ChoiceOutput(OutputFormat(lambda: ReasoningSplitter(form.start, form.end), kept_ids=kept))
    parts = []
    for index, token in enumerate(token_ids):
        reason = "length" if index == len(token_ids) - 1 else None
        parts += output.push(
            text.add(TokenOutput(request_id="", position=index, token_ids=[token], finish_reason=reason))
        )
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return reasoning, "".join(part.text for part in parts if isinstance(part, Content)), output.num_reasoning_tokens


@pytest.mark.parametrize("is_special", [True, False, None], ids=["special", "added", "plain"])
@pytest.mark.parametrize("markers", [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷")])
def test_markers_are_seen_whatever_tokens_they_are(tmp_path, markers, is_special):
    codec = folder_with(tmp_path, markers, is_special=is_special)
    found = find_markers("auto", codec)
    assert (found.form.start, found.form.end) == markers
    assert [codec.decode(list(ids), skip_special_tokens=False) for ids in (found.start, found.end)] == list(markers)
    assert (len(found.start) == 1) == (is_special is not None)
    inside = codec.encode("because it is so")
    [hidden] = codec.encode("<|im_end|>")
    token_ids = [*found.start, *inside, hidden, *found.end, *codec.encode("Yes"), hidden]
    *texts, count = read(codec, found, token_ids)
    assert texts == ["because it is so", "Yes"]
    is_cut = is_special is None and markers[1] == "◁/think▷"  # its first tokens are parts of a character: silent
    assert count == len(inside) + 1 + 2 * is_cut


@pytest.mark.parametrize("is_special", [True, False])
def test_a_character_left_incomplete_before_the_marker_is_of_reasoning(tmp_path, is_special):
    codec = folder_with(tmp_path, ("<think>", "</think>"), is_special=is_special)
    found = find_markers("auto", codec)
    by_bytes = {codec.token_bytes(token): token for token in range(256)}
    broken = [by_bytes[bytes([byte])] for byte in CUT]
    token_ids = [*found.start, *codec.encode("a"), *broken, *found.end, *codec.encode("Yes")]
    reasoning, content, count = read(codec, found, token_ids)
    assert reasoning.startswith("a\N{REPLACEMENT CHARACTER}") and content == "Yes"
    assert count == 1 + len(broken)


def test_a_checkpoint_without_markers_has_none(tmp_path):
    assert find_markers("auto", folder_with(tmp_path, (), is_special=None)) is None
    assert find_markers("none", folder_with(tmp_path, ("<think>",), is_special=True)) is None


def test_tokens_that_may_stand_for_a_marker_of_several(tmp_path):
    """In a text the marker's first and last characters may be parts of longer tokens."""
    codec = folder_with(tmp_path, ("<think>", "</think>"), is_special=None)
    found = find_markers("auto", codec)
    assert len(found.end) > 1 and len(found.end_like) == len(found.end)
    for token, like in zip(found.end, found.end_like, strict=True):
        assert token in like
    assert all(codec.token_bytes(token).endswith(b"<") for token in found.end_like[0])
    assert all(codec.token_bytes(token).startswith(b">") for token in found.end_like[-1])
    single = folder_with(tmp_path, ("<think>", "</think>"), is_special=True)
    assert find_markers("auto", single).end_like == ()
