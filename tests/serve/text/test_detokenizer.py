"""Tokens to text piece by piece: characters appear once whole, and nothing is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.serve.text.tokenizer import ByteDetokenizer, byte_level_bytes, bytes_function, sentencepiece_bytes

pytestmark = pytest.mark.pure


def byte_at(token):
    return bytes([token])


@pytest.mark.slow
@given(st.text())
def test_bytes_one_by_one_give_the_text(text):
    detokenizer = ByteDetokenizer(byte_at)
    assert "".join(detokenizer.push(byte) for byte in text.encode()) + detokenizer.flush() == text


def test_a_character_appears_with_its_last_byte():
    detokenizer = ByteDetokenizer(byte_at)
    assert [detokenizer.push(byte) for byte in "é€".encode()] == ["", "é", "", "", "€"]


def test_a_character_cut_off_is_replaced():
    detokenizer = ByteDetokenizer(byte_at)
    detokenizer.push(0xE2)
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"


def test_a_skipped_token_does_not_break_a_character():
    detokenizer = ByteDetokenizer(lambda token: None if token == 999 else bytes([token]))
    assert [detokenizer.push(token) for token in (0xC3, 999, 0xA9)] == ["", "", "é"]


def test_byte_level_tokens_are_bytes():
    assert byte_level_bytes("Ġhello") == b" hello"
    assert byte_level_bytes("Ċ") == b"\n"
    assert byte_level_bytes("Ã©") == "é".encode()
    assert byte_level_bytes("世") == "世".encode()  # an added token stands for itself


def test_sentencepiece_tokens_are_bytes():
    assert sentencepiece_bytes("\u2581hello") == b" hello"
    assert sentencepiece_bytes("<0xE4>") == b"\xe4"
    assert sentencepiece_bytes("<0xZZ>") == b"<0xZZ>"


@pytest.mark.parametrize(
    ("decoder", "function"),
    [
        ({"type": "ByteLevel"}, byte_level_bytes),
        ({"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}, byte_level_bytes),
        (
            {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                ],
            },
            sentencepiece_bytes,
        ),
        ({"type": "WordPiece"}, None),
        (None, None),
    ],
)
def test_the_decoder_tells_the_family(decoder, function):
    assert bytes_function(decoder) is function
