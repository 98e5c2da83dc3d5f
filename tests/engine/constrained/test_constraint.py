"""One sequence's constraint: its masks follow from its output alone, and drafts see what plain steps would."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.checkpoints.tiny import byte_tokenizer
from kvrelay.engine.execution.constraints import Constraint, Rules, mask_of
from kvrelay.grammar.compiler import GrammarCompiler
from kvrelay.grammar.masks import fill_masks
from kvrelay.plane.messages import GrammarSpec, Sampling, Thinking

VOCAB, EOS = 300, (2, 0)
WORDS = GrammarSpec("regex", "(yes|no)( (yes|no)){1,5}")
START, END = (70, 71), (250, 251)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    byte_tokenizer(folder)
    return GrammarCompiler(folder, VOCAB, EOS)


def made(compiler, **sampling) -> Constraint:
    params = Sampling(**{"max_tokens": 60, **sampling})
    grammar = compiler.compile(params.grammar) if params.grammar is not None else None
    return Constraint(Rules(params, grammar, EOS, VOCAB))


def masks_of(constraint: Constraint, drafts: tuple[int, ...] = ()) -> list[set[int] | None]:
    """Allowed tokens of the next row and of those behind each draft; None: any."""
    out = np.zeros((1 + len(drafts), -(-VOCAB // 32)), np.int32)
    if (row := constraint.matcher_row(drafts, 0)) is not None:
        fill_masks([row], out)
    needed = constraint.restrict(out, drafts)
    bits = np.unpackbits(out.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(bits[index]).tolist()) if needed[index] else None for index in range(len(out))]


KINDS = {
    "grammar": {"grammar": WORDS},
    "grammar to the end": {"grammar": WORDS, "ignore_eos": True},
    "open": {"grammar": WORDS, "thinking": Thinking(start=START, end=END, is_open=True, budget=6)},
    "may think": {"grammar": WORDS, "thinking": Thinking(start=START, end=END, budget=4)},
    "may think as the grammar begins": {
        "grammar": GrammarSpec("regex", "[!-~]{4,9}"),
        "thinking": Thinking(start=START, end=END, budget=4),
    },
    "budget alone": {"thinking": Thinking(start=START, end=END, budget=3), "allowed_token_ids": (70, 71, 72, 250, 251)},
    "lists": {"bad_words": ((72,), (73, 74), (73, 74, 75), (74, 73)), "allowed_token_ids": tuple(range(70, 80))},
    "all": {
        "grammar": WORDS,
        "bad_words": ((91, 71), (80, 81, 223)),
        "min_tokens": 9,
        "thinking": Thinking(start=START, end=END, is_open=True, budget=2),
    },
}


@settings(max_examples=15, deadline=None, derandomize=True)
@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32 - 1))
def test_masks_follow_from_the_output_alone(compiler, kind, seed):
    rng, output = random.Random(seed), list[int]()
    constraint = made(compiler, **KINDS[kind])
    for _ in range(25):
        [allowed] = masks_of(constraint)
        assert allowed is None or allowed
        again = constraint.fresh()
        cut = rng.randrange(len(output) + 1)
        again.follow(output[:cut])
        again.follow(output[cut:])
        assert masks_of(again) == [allowed] and again.is_done == constraint.is_done
        behind_drafts(constraint, output, rng)
        assert masks_of(constraint) == [allowed]
        if constraint.is_done:
            break
        likely = [*START, *END, 70, 72, 73, 74, 75]
        choices = range(3, VOCAB) if allowed is None else sorted(allowed)
        token = rng.choice([one for one in likely if one in choices] or choices) if rng.random() < 0.5 else None
        output.append(rng.choice(choices) if token is None else token)
        constraint.follow(output[-1:])
        assert constraint.problem is None


def behind_drafts(constraint: Constraint, output: list[int], rng: random.Random) -> None:
    """Drafts that plain steps could draw, then one at random: cut, and with the masks of plain steps."""
    plain, drafts, masks = constraint.fresh(), list[int](), list[set[int] | None]()
    plain.follow(output)
    for _ in range(rng.randrange(1, 6)):
        [allowed] = masks_of(plain)
        drafts.append(rng.choice(range(3, VOCAB) if allowed is None else sorted(allowed)))
        masks.append(allowed)
        plain.follow(drafts[-1:])
        if plain.is_done:
            break
    drafts.append(rng.randrange(VOCAB))
    cut = constraint.cut(output, drafts)
    assert cut == drafts[: len(cut)]
    found = masks_of(constraint, tuple(cut))
    assert found[: len(masks)] == masks[: len(found)]


def test_drafts_are_not_cut_for_nothing(compiler):
    constraint, whole = made(compiler, grammar=GrammarSpec("regex", "yes")), list[int]()
    for _ in range(3):  # each letter is one token
        [[token]] = masks_of(constraint)
        whole.append(token)
        constraint.follow([token])
    fresh = constraint.fresh()
    assert fresh.cut([], [*whole, 2]) == [*whole, 2]
    assert fresh.cut([], [*whole, 2, 5]) == [*whole, 2] and fresh.cut([], [*whole, 5]) == whole
    thinks = made(compiler, grammar=GrammarSpec("regex", "yes"), thinking=Thinking(start=START, end=END, is_open=True))
    assert thinks.cut([], [9, 2]) == [9]  # no end within reasoning
    assert thinks.cut([], [9, *END, *whole, 2]) == [9, *END, *whole, 2]
    assert thinks.cut([], [9, *END, 9]) == [9, *END]


def test_a_marker_that_the_grammar_could_have_written_too(compiler):
    begins = GrammarSpec("regex", "[!-~]{4,9}")
    constraint = made(compiler, grammar=begins, thinking=Thinking(start=START, end=END))
    constraint.follow([70])
    assert masks_of(constraint)[0] >= {71, 72}
    other = constraint.fresh()
    other.follow([70, 72, 73, 74])  # it was the grammar's
    assert other.problem is None and 2 in masks_of(other)[0]
    constraint.follow([71])  # it was the marker
    assert masks_of(constraint)[0] == set(range(VOCAB)) - set(EOS)
    constraint.follow([*END, 72, 73, 74])
    assert constraint.problem is None and 2 not in masks_of(constraint)[0]


def test_every_end_of_text_is_allowed_where_one_is(compiler):
    assert masks_of(made(compiler, grammar=GrammarSpec("regex", "a?")))[0] >= set(EOS)


def test_bits_of_a_mask():
    assert np.unpackbits(mask_of([0, 31, 32, 63], 70).view(np.uint8), bitorder="little").nonzero()[0].tolist() == [
        0,
        31,
        32,
        63,
    ]
    banned = np.unpackbits(mask_of([0, 69], 70, is_banned=True).view(np.uint8), bitorder="little").nonzero()[0]
    assert banned.tolist() == list(range(1, 69))  # none beyond the vocabulary


def test_a_marker_may_be_written_in_other_tokens(compiler):
    """Its last token may be the beginning of a longer one: the text closes reasoning all the same."""
    marks = Thinking(start=(40,), end=(50, 51), is_open=True, budget=4, end_like=((50, 60), (51, 61)))
    for marker in ([50, 51], [60, 51], [50, 61]):
        closed = made(compiler, thinking=marks)
        closed.follow([9, *marker, *range(9, 20)])
        assert masks_of(closed) == [None]
    spent = made(compiler, thinking=marks)
    spent.follow([9, 51, 60, 9])
    assert masks_of(spent) == [{50}]
    spent.follow([50])
    assert masks_of(spent) == [{51}]
    opened = made(compiler, thinking=Thinking(start=(40, 41), end=(50,), budget=1, start_like=((40,), (41, 42))))
    opened.follow([9, 40, 42, 9])
    assert masks_of(opened) == [{50}]
