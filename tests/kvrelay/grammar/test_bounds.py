"""What a process keeps of the grammars that it has seen is bounded, and a token without text makes no noise."""

import json

import numpy as np
import pytest

from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.errors import InvalidRequest
from kvrelay.grammar.compiler import MOST_GRAMMARS, MOST_TEXT, GrammarCompiler
from kvrelay.grammar.masks import fill_masks
from kvrelay.plane.messages import GrammarSpec

TAG = {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "</a>"}
VOCABULARY = 320  # the tokenizer has 259 of them


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def compiler(folder):
    return GrammarCompiler(folder, VOCABULARY, [2])


def test_a_refusal_given_again_keeps_no_frames(compiler):
    def depth(error):
        return sum(1 for _ in iter_traceback(error.__traceback__))

    depths = []
    for _ in range(20):
        with pytest.raises(InvalidRequest, match="regular expression") as caught:
            compiler.compile(GrammarSpec("regex", "("))
        depths.append(depth(caught.value))
    assert depths[-1] == depths[1]


def iter_traceback(traceback):
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def test_so_many_grammars_are_kept_and_matchers_outlive_them(compiler):
    mask = np.zeros((1, compiler.num_words), np.int32)
    first = compiler.compile(GrammarSpec("regex", "first"))
    matcher = first.matcher()
    for index in range(2 * MOST_GRAMMARS):
        fill_masks([(compiler.compile(GrammarSpec("regex", f"{index}[a-z]")).matcher(), (), 0)], mask)
    assert len(compiler._grammars) == MOST_GRAMMARS
    assert compiler.compile(GrammarSpec("regex", "first")) is not first
    fill_masks([(matcher, (), 0)], mask)
    assert matcher.problem is None and mask.any()


def test_of_large_grammars_fewer_are_kept_and_the_last_one_always(compiler):
    names = [
        GrammarSpec("json_schema", json.dumps({"type": "string", "title": f"{one}" * 120_000})) for one in "abcdef"
    ]
    kept = [compiler.compile(spec) for spec in names]
    assert len(compiler._grammars) == MOST_TEXT // len(names[0].text) == 4
    assert compiler.compile(names[-1]) is kept[-1] and compiler.compile(names[2]) is kept[2]
    assert compiler.compile(names[0]) is not kept[0]
    assert compiler._sizes.keys() == compiler._grammars.keys()


def test_tokens_without_text_are_refused_silently(compiler, capfd):
    spec = GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": TAG}))
    matcher = compiler.compile(spec).matcher()
    assert [matcher.accept([token]) for token in (0, 1, 300, VOCABULARY - 1)] == [0] * 4
    assert matcher.valid_prefix([300]) == 0
    assert "".join(capfd.readouterr()) == ""
