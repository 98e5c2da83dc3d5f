"""A draft model has the model's vocabulary; settings that cannot be are refused by name."""

import json
import logging

import pytest

from kvrelay.cluster.commands.settings_flags import with_absolute_source
from kvrelay.config import settings_from
from kvrelay.engine.speculation.draft_fit import check_vocabulary, prepare_draft_model, weight_share
from kvrelay.errors import ConfigError, ModelNotFound

pytestmark = pytest.mark.pure


WORDS = {"a": 0, "b": 1, "c": 2}
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def folder(path, *, vocab=WORDS, special=(), size=64, layers=2):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": size, "num_hidden_layers": layers}))
    if vocab is not None:
        added = [{"content": token} for token in special]
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
    return path


def test_the_same_words_go_together_whatever_the_special_tokens_and_the_padding(tmp_path):
    ours = folder(tmp_path / "ours", vocab={**WORDS, "<end>": 3}, special=["<end>"])
    theirs = folder(tmp_path / "theirs", vocab={**WORDS, "<stop>": 3}, special=["<stop>"], size=128)
    check_vocabulary(ours, theirs)


@pytest.mark.parametrize(
    ("vocab", "reason"),
    [
        ({"a": 0, "c": 1, "b": 2}, "'b' is number 2, and number 1"),
        ({"a": 0, "b": 1}, "'c' is none, and"),
        ([["a", 0.0], ["x", 0.0]], "'b' is none, and|'x' is number 1, and none"),
    ],
)
def test_other_words_do_not(tmp_path, vocab, reason):
    with pytest.raises(ConfigError, match=f"engine.draft_model: the vocabulary of theirs differs.*({reason})"):
        check_vocabulary(folder(tmp_path / "ours"), folder(tmp_path / "theirs", vocab=vocab))


def test_without_a_tokenizer_the_sizes_must_be_the_same(tmp_path):
    ours = folder(tmp_path / "ours", vocab=None)
    check_vocabulary(ours, folder(tmp_path / "same", vocab=None))
    with pytest.raises(ConfigError, match=r"engine.draft_model: a vocabulary of 65 tokens, but the model's has 64"):
        check_vocabulary(ours, folder(tmp_path / "other", vocab=None, size=65))


def test_what_is_no_tokenizer_is_named(tmp_path):
    ours = folder(tmp_path / "ours")
    (ours / "tokenizer.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"ours/tokenizer.json: this is no tokenizer"):
        check_vocabulary(ours, folder(tmp_path / "theirs"))


def test_a_draft_model_that_reads_more_than_the_model_is_worth_a_warning(tmp_path, caplog):
    small, large = folder(tmp_path / "small"), folder(tmp_path / "large", layers=8)
    settings = settings_from({"engine": {"draft_model": "x"}})
    with caplog.at_level(logging.WARNING):
        share = weight_share(large, small, settings)
        assert 0.2 < share < 0.5 and not caplog.records
        assert weight_share(small, large, settings) == pytest.approx(1 / share)
    assert "drafting with it cannot pay" in caplog.text


@pytest.mark.parametrize(("speculation", "drafts"), [("auto", True), ("model", True), ("ngram", False), ("off", False)])
def test_it_is_used_where_speculation_reports_it(speculation, drafts):
    engine = settings_from({"engine": {"speculation": speculation, "draft_model": "small"}}).engine
    assert (engine.draft_source == "small") == drafts


def test_there_is_none_to_prepare_where_none_is_to_draft(tmp_path):
    assert prepare_draft_model(settings_from({}), tmp_path) is None
    with pytest.raises(ModelNotFound, match=r"no-such-model"):
        prepare_draft_model(settings_from({"engine": {"draft_model": "no-such-model"}}), tmp_path)


def test_speculation_by_a_model_needs_one():
    with pytest.raises(ConfigError, match=r"engine: speculation: model needs engine.draft_model"):
        settings_from({"engine": {"speculation": "model"}})


def test_a_path_does_not_depend_on_the_folder_that_serve_is_started_in(tmp_path, monkeypatch):
    folder(tmp_path / "small")
    monkeypatch.chdir(tmp_path)
    given = settings_from({"engine": {"draft_model": "./small"}})
    assert with_absolute_source(given).engine.draft_model == str(tmp_path / "small")
