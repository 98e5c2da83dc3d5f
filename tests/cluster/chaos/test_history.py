"""Every position once, in order, with the right token: whatever else a client sees is found, and few things excused."""

import pytest

from kvrelay.cluster.chaos.history import SETTLED_S, ClientStream, StreamHistory, difference, silence_s

pytestmark = pytest.mark.pure

WANTED = [11, 12, 13, 14, 15, 16]


@pytest.mark.parametrize(
    "got, what",
    [
        (WANTED, ""),
        ([11, 12, 12, 13, 14, 15, 16], "1 tokens twice, from position 2"),
        ([11, 12, 13, 12, 13, 14, 15, 16], "2 tokens twice, from position 3"),
        ([11, 12, 14, 15, 16], "1 tokens lost, from position 2"),
        ([15, 16], "4 tokens lost, from position 0"),
        ([11, 12, 99, 14, 15, 16], "a wrong token at position 2"),
        ([11, 12, 13, 14, 15, 16, 17], "a wrong token at position 6"),
        ([11, 12, 13, 14], "ended after 4 of 6 tokens"),
        ([], "ended after 0 of 6 tokens"),
    ],
)
def test_what_is_wrong_with_a_whole_answer_is_named(got, what):
    assert difference(WANTED, got, is_whole=True) == what


@pytest.mark.parametrize("got, is_right", [([], True), ([11, 12], True), ([11, 13], False), ([11, 12, 12, 13], False)])
def test_an_answer_that_broke_off_must_be_right_so_far(got, is_right):
    assert (difference(WANTED, got, is_whole=False) == "") is is_right


def history_of(*, tokens=(), times_s=(), error="", has_left=False, ingress="aaaa", end_s=5.0, is_streamed=True):
    """One request that was sent at 1 s."""
    history = StreamHistory()
    stream = history.begin(WANTED, 1.0, is_streamed=is_streamed)
    stream.ingress, stream.error, stream.has_left = ingress, error, has_left
    stream.tokens, stream.times_s = list(tokens), list(times_s)
    history.end(stream, end_s)
    return history


def test_a_right_answer_is_no_problem_and_one_that_its_client_left_neither():
    assert history_of(tokens=WANTED).problems() == []
    assert history_of(tokens=WANTED[:3], has_left=True).problems() == []


def test_a_wrong_token_before_the_client_leaves_is_a_problem():
    (problem,) = history_of(tokens=[11, 99], has_left=True).problems()
    assert problem.is_wrong


@pytest.mark.parametrize("error", ["http 503: no worker", "http 429: full", "error event: lost", "cut off: reset"])
def test_a_failure_without_a_kill_has_no_excuse(error):
    (problem,) = history_of(error=error).problems()
    assert (problem.is_wrong, problem.what) == (False, error)


def cut(**other):
    return history_of(**{"tokens": WANTED[:2], "times_s": [2.0, 3.0], "error": "cut off: no end", **other})


def test_an_answer_that_was_cut_off_with_its_ingress_is_excused():
    history = cut()
    assert history.problems([(3.4, 3.5)]) == []
    assert history.counts["excused"] == 1


@pytest.mark.parametrize(
    "history, kills_s",
    [
        (cut(), [(0.4, 0.5)]),  # before it was sent
        (cut(), [(5.4, 5.5)]),  # after its end
        (cut(error="error event: lost"), [(3.4, 3.5)]),  # the ingress lived to say so
        (cut(ingress=""), [(3.4, 3.5)]),  # it had not begun: another ingress should have answered
        (cut(times_s=[2.0, 4.8]), [(3.4, 3.5)]),  # its ingress was heard of afterwards
    ],
)
def test_a_kill_excuses_nothing_else(history, kills_s):
    assert len(history.problems(kills_s)) == 1


def test_an_ingress_that_answers_others_after_the_kill_was_not_the_one():
    history = cut()
    other = history.begin(WANTED, 4.0)
    other.ingress, other.tokens, other.times_s = "aaaa", list(WANTED), [6.0]
    history.end(other, 6.0)
    assert len(history.problems([(3.4, 3.5)])) == 1


def test_a_right_prefix_does_not_excuse_wrong_tokens_of_a_cut_answer():
    (problem,) = cut(tokens=[11, 99]).problems([(3.4, 3.5)])
    assert problem.is_wrong


# ---- silences


def stream(*times_s, end_s=None, sent_s=0.0, **other):
    return ClientStream(1, WANTED, sent_s, times_s=list(times_s), end_s=end_s, **other)


def test_the_silence_of_a_stream_is_the_gap_from_the_fault_on():
    assert silence_s(stream(9.0, 9.9, 12.5, 12.6, 30.0), 10.0) == pytest.approx(2.5)


def test_a_token_that_was_on_its_way_does_not_end_the_silence():
    assert silence_s(stream(9.9, 10.1, 13.0), 10.0) == pytest.approx(2.9)


def test_a_later_gap_is_not_the_faults():
    after_s = 10.0 + SETTLED_S + 0.1
    assert silence_s(stream(9.9, 10.2, after_s, 60.0), 10.0) == pytest.approx(after_s - 10.2)


def test_the_wait_for_the_first_token_and_the_end_count():
    assert silence_s(stream(14.0, sent_s=9.0), 10.0) == pytest.approx(4.0)
    assert silence_s(stream(9.0, end_s=11.5), 10.0) == pytest.approx(1.5)


def test_a_silence_that_lasts_is_not_known_yet_and_one_of_a_failed_stream_never():
    assert silence_s(stream(9.9), 10.0) is None
    assert silence_s(stream(), 10.0) is None
    assert silence_s(stream(9.9, end_s=12.0, error="cut off"), 10.0) is None
    assert silence_s(stream(9.9, end_s=12.0, has_left=True), 10.0) is None
