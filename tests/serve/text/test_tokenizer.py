"""The tokenizer of a prepared folder: chat template, eos, bytes, and folders that are wrong."""

import json
import subprocess
import sys
import threading

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer

from kvrelay.errors import InvalidRequest, ModelError, ModelNotFound
from kvrelay.serve.text.tokenizer import Tokenizer

TEMPLATE = """{%- for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
CORPUS = ["the quick brown fox jumps over the lazy dog", "Grüße aus München", "世界 🎉 naïve", "hello world " * 9]
TEXTS = ["hello world", "Grüße, 世界! 🎉🎉 naïve\n\n  tabs\t", "ünïcödé ✓", " leading", ""]


def make_folder(tmp_path, *, vocab_size=None, template=TEMPLATE):
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    raw.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    raw.save(str(tmp_path / "tokenizer.json"))
    eos = raw.token_to_id("<|im_end|>")
    config = {"vocab_size": vocab_size or raw.get_vocab_size() + 5, "eos_token_id": eos}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    if template:
        (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


@pytest.fixture
def tokenizer(tmp_path):
    return Tokenizer(make_folder(tmp_path))


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_way_there_and_back_token_by_token(tokenizer, text):
    ids = tokenizer.encode(text)
    detokenizer = tokenizer.detokenizer()
    assert "".join(detokenizer.push(token) for token in ids) + detokenizer.flush() == text == tokenizer.decode(ids)
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == text.encode()


def test_special_tokens_are_skipped_unless_asked_for(tokenizer):
    ids = tokenizer.encode("hello<|im_end|>")
    hidden, shown = tokenizer.detokenizer(), tokenizer.detokenizer(skip_special_tokens=False)
    assert "".join(hidden.push(token) for token in ids) == "hello"
    assert "".join(shown.push(token) for token in ids) == "hello<|im_end|>"


def test_eos_comes_from_generation_config_first(tmp_path):
    folder = make_folder(tmp_path)
    assert len(Tokenizer(folder).eos_ids) == 1
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert Tokenizer(folder).eos_ids == {7, 9}


def test_the_chat_text_is_the_template_s(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.chat_text(messages)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert not tokenizer.chat_text(messages, add_generation_prompt=False).endswith("assistant\n")


def test_the_chat_text_is_what_transformers_renders(tmp_path):
    folder = make_folder(tmp_path)
    script = (
        "import sys, json; from transformers import AutoTokenizer\n"
        "t = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "print(json.dumps(t.apply_chat_template(json.loads(sys.argv[2]), tokenize=False, add_generation_prompt=True)))"
    )
    messages = [{"role": "user", "content": "  Hi {{ 1 }}\n"}, {"role": "assistant", "content": "ö"}]
    told = subprocess.run(
        [sys.executable, "-c", script, str(folder), json.dumps(messages)], capture_output=True, text=True, check=True
    )
    assert Tokenizer(folder).chat_text(messages) == json.loads(told.stdout.splitlines()[-1])


def test_a_template_s_refusal_is_the_clients_fault(tmp_path):
    tokenizer = Tokenizer(make_folder(tmp_path, template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        tokenizer.chat_text([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("attack", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__ }}"])
def test_a_template_cannot_leave_its_sandbox(tmp_path, attack):
    tokenizer = Tokenizer(make_folder(tmp_path, template=attack))
    try:
        text = tokenizer.chat_text([{"role": "user", "content": "x"}])
    except InvalidRequest:
        return
    assert "class" not in text and "function" not in text


def test_without_a_template_chat_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer(make_folder(tmp_path, template=None)).chat_text([{"role": "user", "content": "x"}])


def test_the_operators_template_comes_before_the_models_own(tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0].content }}{{ eos_token }}!")
    for template in (None, "{{ 'the model' }}"):
        tokenizer = Tokenizer(make_folder(tmp_path, template=template), str(own))
        assert tokenizer.chat_text([{"role": "user", "content": "x"}]).startswith("x")


@pytest.mark.parametrize(("text", "words"), [(None, "cannot be read: No such file"), ("{% if %}", "does not compile")])
def test_a_bad_template_of_the_operator_is_named(tmp_path, text, words):
    own = tmp_path / "own.jinja"
    if text is not None:
        own.write_text(text)
    with pytest.raises(ModelError, match=f"own.jinja: the chat template {words}"):
        Tokenizer(make_folder(tmp_path, template="{{ 'the model' }}"), str(own))


def test_a_folder_without_tokenizer_is_told(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "tokenizer_config.json", "generation_config.json"])
def test_a_damaged_file_is_told_by_name(tmp_path, name):
    folder = make_folder(tmp_path)
    (folder / name).write_text('{"cut off')
    with pytest.raises(ModelError, match=name):
        Tokenizer(folder)


def test_another_models_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match="wrong tokenizer"):
        Tokenizer(make_folder(tmp_path, vocab_size=100))


def test_the_ingress_imports_neither_torch_nor_transformers_nor_ray():
    code = "import sys, kvrelay.serve.api.app, kvrelay.serve.text.tokenizer\n"
    code += "print([m for m in ('torch','transformers','ray') if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_a_long_text_does_not_stop_the_other_threads(tokenizer):
    """The event loop tokenises long texts on a thread: that helps only if the thread lets go of the lock."""
    done = threading.Event()

    def encode():
        tokenizer.encode("hello " * 200_000)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    turns = 0
    while not done.wait(0.002):
        turns += 1
    thread.join()
    assert turns > 5
