"""Texts of prompts on threads: the same tokens as at once, and none refused that would fit."""

import random
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken

from kvrelay.errors import Overloaded
from kvrelay.serve.text.tokenising import TextThreads
from kvrelay.serve.text.tokenizer import LONG_TEXT_CHARS, encode_text
from tests.serve.text.family_folders import FAMILIES

PIECES = ["the ", "fox", " " * 700, "\n" * 90, "你好", "🎉", "<mask>", "aaaaaaaa", "é", "\t x", "12345", "</s>"]


@pytest.mark.parametrize("family", sorted(FAMILIES))
async def test_a_text_has_its_tokens_or_too_many_wherever_it_may_be_cut(family):
    raw, _ = FAMILIES[family]()
    raw.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, special=True)])
    sizes = []
    codec = SimpleNamespace(
        encode=lambda text, add_special_tokens: (
            sizes.append(len(text)) or raw.encode(text, add_special_tokens=add_special_tokens).ids
        )
    )
    draw, num_partial = random.Random(5), 0
    for _ in range(40):
        text = "".join(draw.choices(PIECES, k=draw.choice((40, 400)))) + " " * draw.choice((0, 5000)) + "<mask>"
        whole = raw.encode(text).ids
        for most in (len(whole) - 1, len(whole), 64):
            found = await encode_text(codec, text, most_tokens=most)
            assert found == whole or len(found) > most < len(whole)
            num_partial += found != whole
    assert num_partial > 5


@pytest.mark.parametrize("most", [None, 10_000])
async def test_long_texts_are_tokenised_all_the_same(most):
    raw, _ = FAMILIES["llama3"]()
    codec = SimpleNamespace(
        encode=lambda text, add_special_tokens: raw.encode(text, add_special_tokens=add_special_tokens).ids
    )
    text = "hello world " * LONG_TEXT_CHARS
    assert await encode_text(codec, text, most_tokens=most and len(raw.encode(text))) == raw.encode(text).ids


async def test_one_text_may_be_longer_than_the_budget_and_what_ends_makes_room():
    threads = TextThreads(max_chars=10)
    codec = SimpleNamespace(encode=lambda text, add_special_tokens: list(text.encode()))
    for text in ("x" * 11, "x" * 11, "x"):
        assert len(await threads.encode(codec.encode, text)) == len(text)
    held = threads.encode(codec.encode, "x" * 11)
    running = held.send(None)  # on its thread
    with pytest.raises(Overloaded):
        await threads.encode(codec.encode, "x")
    held.close()
    assert running is not None and len(await threads.encode(codec.encode, "x")) == 1
