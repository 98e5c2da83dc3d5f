"""Stop strings over streamed text: nothing after the stop is shown, nothing before it is lost."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.serve.text.stop import StopMatcher

pytestmark = pytest.mark.pure


def run(stops, pieces, *, include=False):
    """(text shown in all, the stop found)."""
    matcher = StopMatcher(stops, include=include)
    shown = [matcher.push(piece) for piece in pieces]
    if matcher.stopped is None:
        shown.append(matcher.flush())
    return "".join(shown), matcher.stopped


def test_a_stop_string_over_several_pieces_is_found():
    assert run(["END"], ["text E", "N", "D more"]) == ("text ", "END")


def test_a_possible_beginning_is_held_back_until_it_is_none():
    matcher = StopMatcher(["\n\n"])
    assert matcher.push("line\n") == "line"
    assert matcher.push("next") == "\nnext"


def test_what_was_held_back_is_shown_at_the_end():
    assert run(["abc"], ["xab"]) == ("xab", None)


def test_the_first_complete_one_wins_and_the_longest_of_those():
    assert run(["abcdef", "cd"], ["abcdefg"]) == ("ab", "cd")
    assert run(["b", "ab"], ["xab"]) == ("x", "ab")


def test_a_stop_string_that_overlaps_itself():
    assert run(["aab"], ["a", "a", "a", "b"]) == ("a", "aab")


def test_include_keeps_the_stop_string():
    assert run(["stop"], ["do st", "op it"], include=True) == ("do stop", "stop")


def test_nothing_is_shown_after_a_stop():
    matcher = StopMatcher(["x"])
    assert matcher.push("axb") == "a"
    assert matcher.push("more") == "" and matcher.flush() == ""


text = st.text(alphabet="ab ", max_size=30)


@given(st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), min_size=1, max_size=3), text, st.data())
def test_pieces_change_nothing(stops, whole, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    edges = [0, *cuts, len(whole)]
    pieces = [whole[a:b] for a, b in itertools.pairwise(edges)]
    ends = [end for end in range(len(whole) + 1) if any(whole[:end].endswith(stop) for stop in stops)]
    if not ends:
        assert run(stops, pieces) == (whole, None)
        return
    found = max((stop for stop in stops if whole[: ends[0]].endswith(stop)), key=len)
    assert run(stops, pieces) == (whole[: ends[0] - len(found)], found)
