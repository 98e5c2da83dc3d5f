"""Beam search on plain numbers: which beams go on, which are done, when it stops."""

import math

import pytest

from kvrelay.engine.scheduling.beam import BeamRules, BeamSearch

pytestmark = pytest.mark.pure


A, B, END = 0, 1, 2


def search(width: int = 2, max_tokens: int = 3, **options) -> BeamSearch:
    return BeamSearch(BeamRules(width, max_tokens, frozenset({END}), **options))


def test_children_of_one_beam_fork_it_and_a_beam_without_children_is_dropped():
    beams = search()
    assert beams.step([[(A, -0.1), (B, -3.0), (END, -9.0)]]).parents == (0, 0)
    step = beams.step([[(A, -0.1), (B, -0.2), (END, -9.0)], [(A, -0.1), (B, -0.2), (END, -9.0)]])
    assert (step.parents, step.token_ids, step.is_done) == ((0, 0), (A, B), False)
    assert beams.outputs == [[A, A], [A, B]]


def test_an_end_beyond_the_first_width_candidates_is_no_result():
    beams = search(max_tokens=9)
    beams.step([[(A, -0.1), (B, -0.2), (END, -0.3)]])
    assert beams.best(2) == []
    beams.step([[(END, -0.1), (A, -0.2), (B, -0.3)], [(A, -5.0), (B, -6.0), (END, -7.0)]])
    assert [one.token_ids for one in beams.best(2)] == [(A, END)]


def test_the_length_penalty_decides_between_short_and_long():
    def best(penalty: float) -> tuple[int, ...]:
        beams = search(width=1, max_tokens=2, length_penalty=penalty, early_stopping="never")
        beams.step([[(END, -1.0), (A, -1.1), (B, -9.0)]])
        if not beams.is_done:
            beams.step([[(B, -0.1), (A, -9.0), (END, -9.5)]])
        return beams.best(1)[0].token_ids

    assert (best(0.0), best(2.0)) == ((END,), (A, B))


def test_early_stopping_ends_with_as_many_results_as_beams():
    beams = search(max_tokens=9, early_stopping=True)
    beams.step([[(END, -0.1), (A, -0.2), (B, -0.3)]])
    step = beams.step([[(END, -5.0), (A, -6.0), (B, -7.0)], [(A, -9.0), (B, -9.0), (END, -9.0)]])
    assert step.is_done and len(beams.best(2)) == 2


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_broken_models_search_ends(value):
    beams = search()
    for _ in range(3):
        if not beams.is_done:
            beams.step([[(A, value), (B, value), (END, value)] for _ in beams.outputs])
    assert beams.is_done
