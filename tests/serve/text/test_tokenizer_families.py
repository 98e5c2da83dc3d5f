"""Real families' tokenizer files, rebuilt small: ids, chat prompts, streamed text and odd vocabularies."""

import datetime
import json

import pytest
import transformers

from kvrelay.config import settings_from
from kvrelay.errors import InvalidRequest
from kvrelay.plane.messages import TokenOutput
from kvrelay.router.decision.router import Router
from kvrelay.serve.api.app import ModelCard, create_app
from kvrelay.serve.requests.dispatcher import Dispatcher
from kvrelay.serve.tenants.access import Access
from kvrelay.serve.text.tokenizer import ChoiceText, TextOptions, Tokenizer
from tests.fakes import SECRET, OwnSessions
from tests.serve.text.family_folders import EOS, FAMILIES, NO_SYSTEM_TEMPLATE, TEMPLATES, write_family

TEXTS = [
    "Hello, world! I'LL be 12345 years",
    " leading",
    "  two   three\n\n\n x\t\ty ",
    "naïve cafe\u0301 ﬁ Å",
    "你好，世界！日本語のテスト",
    "🎉🙂👩‍👩‍👧 é",
    "हिन्दी עברית 한국어",
    "",
    "\n",
    "<|im_start|>user</s>[INST] x<end_of_turn><|eot_id|> y",
]
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hello, the 🙂 "},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "in 123"},
]


@pytest.fixture(params=sorted(FAMILIES))
def family(request, tmp_path):
    folder, raw = write_family(request.param, tmp_path / "model")
    return request.param, folder, raw, Tokenizer(folder)


def streamed(tokenizer, ids, **kwargs):
    detokenizer = tokenizer.detokenizer(**kwargs)
    return "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()


def test_ids_are_those_of_both_reference_tokenizers(family):
    _, folder, raw, tokenizer = family
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert ids == raw.encode(text, add_special_tokens=special).ids
            assert ids == theirs.encode(text, add_special_tokens=special)


def test_streamed_text_equals_the_whole_decode(family):
    _, _, raw, tokenizer = family
    for text in TEXTS:
        ids = raw.encode(text).ids
        for skip in (True, False):
            whole = raw.decode(ids, skip_special_tokens=skip)
            assert streamed(tokenizer, ids, skip_special_tokens=skip, starts_text=True) == whole
            assert tokenizer.decode(ids, skip_special_tokens=skip) == whole


def test_no_token_shows_half_a_character(family):
    _, _, raw, tokenizer = family
    detokenizer = tokenizer.detokenizer()
    shown = [detokenizer.push(token) for token in raw.encode("🎉你e\u0301👩‍👩‍👧").ids]
    assert not any("\ufffd" in part for part in shown)
    assert "".join(shown).lstrip(" ") == raw.decode(raw.encode("🎉你e\u0301👩‍👩‍👧").ids)


@pytest.mark.parametrize("name", ["mistral", "llama2", "gemma3"])
def test_a_continuation_keeps_its_first_space_and_an_answer_does_not(name, tmp_path):
    """▁Hello after a prompt is " Hello"; as a text of its own (a chat answer) it is what `decode` says."""
    folder, raw = write_family(name, tmp_path)
    tokenizer, ids = Tokenizer(folder), [raw.token_to_id("▁Hello"), raw.token_to_id("▁the")]
    assert streamed(tokenizer, ids) == " Hello the"
    assert streamed(tokenizer, ids, starts_text=True) == raw.decode(ids)
    output = TokenOutput(request_id="r", position=0, token_ids=ids, finish_reason="length")
    assert ChoiceText(tokenizer, TextOptions(starts_text=True)).add(output).text == raw.decode(ids)
    assert ChoiceText(tokenizer, TextOptions()).add(output).text == " Hello the"


@pytest.mark.parametrize("place", ["jinja", "string", "list"])
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_chat_prompts_are_transformers_own_wherever_the_template_lies(name, place, tmp_path):
    folder, _ = write_family(name, tmp_path, template=place)
    tokenizer, theirs = Tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for messages in (TURNS, TURNS[1:], TURNS[1:2]):
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
        assert tokenizer.chat_text(messages) == text
        assert tokenizer.encode(tokenizer.chat_text(messages), add_special_tokens=False) == ids


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_chat_prompt_has_one_bos_or_none(name, tmp_path):
    folder, raw = write_family(name, tmp_path)
    tokenizer = Tokenizer(folder)
    bos = json.loads((folder / "tokenizer_config.json").read_text())["bos_token"]
    ids = tokenizer.encode(tokenizer.chat_text(TURNS), add_special_tokens=False)
    assert ids.count(raw.token_to_id(bos or "<|endoftext|>")) == (0 if bos is None else 1)


def test_mistrals_instruction_marks_are_followed_by_one_space(tmp_path):
    folder, raw = write_family("mistral", tmp_path)
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode(tokenizer.chat_text([{"role": "user", "content": "the"}]), add_special_tokens=False)
    assert [raw.id_to_token(token) for token in ids] == ["<s>", "[INST]", "▁the", "[/INST]"]


def test_llama3s_prompt_has_todays_date_and_takes_another(tmp_path):
    tokenizer = Tokenizer(write_family("llama3", tmp_path)[0])
    before = datetime.datetime.now().strftime("%d %b %Y")
    text = tokenizer.chat_text(TURNS)
    assert any(f"Today Date: {day}\n\nBe brief." in text for day in (before, f"{datetime.datetime.now():%d %b %Y}"))
    assert "Today Date: 1 May 2024\n" in tokenizer.chat_text(TURNS, date_string="1 May 2024")


def test_qwens_template_renders_tools_as_transformers_does(tmp_path):
    folder, _ = write_family("qwen2.5", tmp_path)
    tools = [{"type": "function", "function": {"name": "f", "description": "<é & 'x'>"}}]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(TURNS, tools=tools, tokenize=False, add_generation_prompt=True)
    assert Tokenizer(folder).chat_text(TURNS, tools=tools) == expected
    assert "<é & 'x'>" in expected


def test_every_eos_of_a_list_counts(tmp_path):
    for name, tokens in EOS.items():
        folder, raw = write_family(name, tmp_path / name)
        assert Tokenizer(folder).eos_ids == {raw.token_to_id(token) for token in tokens}


@pytest.mark.parametrize("name", ["qwen2.5", "llama3", "mistral"])
def test_padding_ids_above_the_tokenizers_own_are_no_text(name, tmp_path):
    """Qwen2.5's embedding has 151,936 rows, its tokenizer 151,665 tokens."""
    folder, raw = write_family(name, tmp_path)
    tokenizer = Tokenizer(folder)
    ids = [raw.get_vocab_size(), *raw.encode("the", add_special_tokens=False).ids, tokenizer.vocab_size - 1]
    assert tokenizer.vocab_size > raw.get_vocab_size()
    assert streamed(tokenizer, ids).strip() == "the" == tokenizer.decode(ids)
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b""


def test_gemma3_loads_with_an_image_token_too_many_and_refuses_to_read_it(tmp_path):
    folder, raw = write_family("gemma3", tmp_path)
    tokenizer = Tokenizer(folder)
    assert raw.token_to_id("<image_soft_token>") == tokenizer.vocab_size
    with pytest.raises(InvalidRequest, match="<image_soft_token>"):
        tokenizer.encode("look: <image_soft_token>")
    source = json.loads((folder / "tokenizer.json").read_text())
    source["model"]["vocab"]["<image_soft_token>"] = tokenizer.vocab_size  # some exports list it here as well
    (folder / "tokenizer.json").write_text(json.dumps(source))
    assert Tokenizer(folder).vocab_size == tokenizer.vocab_size


# ---- over HTTP: what a template refuses is the client's fault


async def post(http_folder, messages, **body):
    import httpx

    settings = settings_from({})
    dispatcher = Dispatcher(Router(settings.router, tokens_per_hash=settings.tokens_per_hash), SECRET, settings)
    sessions = OwnSessions(dispatcher.clock)
    app = create_app(dispatcher, Tokenizer(http_folder), settings, ModelCard("m", 512, 0), sessions, Access())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return await client.post(
            "/v1/chat/completions", json={"model": "m", "messages": messages, "max_tokens": 1, **body}
        )


@pytest.mark.parametrize(
    ("name", "messages", "said"),
    [
        ("gemma3", [TURNS[1], TURNS[1]], "Conversation roles must alternate"),
        ("mistral", [TURNS[2]], "conversation roles must alternate"),
        ("mistral", [TURNS[1], TURNS[0]], "Only user and assistant roles are supported"),
    ],
)
async def test_wrong_roles_are_told_in_the_templates_words(name, messages, said, tmp_path):
    reply = await post(write_family(name, tmp_path)[0], messages)
    assert reply.status_code == 400
    assert said in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (NO_SYSTEM_TEMPLATE, "System role not supported"),
        ("{{ messages[9]['content'].split('x')[7] }}", "refuses these messages"),
        ("{{ 1 // 0 }}", "refuses these messages"),
        ("{{ messages[0]['content'].split('x')[9] + 1 }}", "refuses these messages"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses these messages"),
    ],
)
async def test_any_failure_of_a_template_is_a_400(template, said, tmp_path):
    folder, _ = write_family("gemma3", tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    reply = await post(folder, TURNS)
    assert reply.status_code == 400
    assert said in reply.json()["error"]["message"]


async def test_a_token_without_embedding_in_a_prompt_is_a_400(tmp_path):
    reply = await post(write_family("gemma3", tmp_path)[0], [{"role": "user", "content": "<image_soft_token>"}])
    assert reply.status_code == 400


def test_text_parts_become_one_text(tmp_path):
    from kvrelay.serve.api.completions import template_messages
    from kvrelay.serve.api.schemas import ChatBody

    tokenizer = Tokenizer(write_family("gemma3", tmp_path)[0])
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "the"}]
    body = ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": parts}]})
    assert "<start_of_turn>user\nHello, the<end_of_turn>" in tokenizer.chat_text(template_messages(body.messages))
