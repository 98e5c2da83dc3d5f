"""Outputs that come early, late, twice or overlapping become one sequence."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.errors import ProtocolError
from kvrelay.plane.messages import TokenLogprob, TokenOutput
from kvrelay.serve.requests.attempt import TokenOrder

pytestmark = pytest.mark.pure


def output(position, *tokens, finish=None):
    return TokenOutput(
        request_id="x",
        position=position,
        token_ids=list(tokens),
        logprobs=[TokenLogprob(token, -float(token)) for token in tokens],
        finish_reason=finish,
    )


def test_early_outputs_wait():
    order = TokenOrder("r", 10)
    order.add(output(1, 11))
    assert order.take() is None
    order.add(output(0, 10))
    merged = order.take()
    assert (merged.request_id, merged.position, merged.token_ids) == ("r", 0, [10, 11])


def test_a_repeated_output_is_dropped():
    order = TokenOrder("r", 10)
    order.add(output(0, 10))
    order.add(output(0, 10))
    assert order.take().token_ids == [10]
    assert order.take() is None


def test_of_an_overlapping_output_only_the_new_part_counts():
    order = TokenOrder("r", 10)
    order.add(output(0, 10, 11))
    order.add(output(1, 11, 12))
    merged = order.take()
    assert merged.token_ids == [10, 11, 12]
    assert [entry.token_id for entry in merged.logprobs] == [10, 11, 12]


def test_of_two_early_outputs_for_one_position_the_longer_counts():
    order = TokenOrder("r", 10)
    for early in (output(1, 11), output(1, 11, 12), output(1, 11), output(1)):
        order.add(early)
    order.add(output(0, 10))
    assert order.tokens == [10, 11, 12]


def test_nothing_counts_after_the_end():
    order = TokenOrder("r", 10)
    order.add(output(0, 10, finish="stop"))
    order.add(output(1, 11))
    assert (order.tokens, order.finish_reason) == ([10], "stop")


def test_a_finish_without_tokens_counts():
    order = TokenOrder("r", 10)
    order.add(output(0, 10))
    order.add(output(1, finish="length"))
    assert order.take().finish_reason == "length"


@pytest.mark.parametrize("wrong", [output(2, 1), output(0, 1, 1, 1), output(-1, 1)])
def test_positions_past_the_limit_are_a_fault(wrong):
    with pytest.raises(ProtocolError):
        TokenOrder("r", 2).add(wrong)


def test_a_new_attempt_forgets_what_came_early():
    order = TokenOrder("r", 10)
    order.add(output(1, 99))
    order.early.clear()
    order.add(output(0, 10))
    assert order.tokens == [10]


@settings(max_examples=300)
@given(st.integers(1, 12), st.data())
def test_any_order_of_any_pieces_gives_the_sequence(length, data):
    tokens = list(range(length))
    cover = [(start, start + 1) for start in range(length)]
    spans = st.tuples(st.integers(0, length), st.integers(0, length)).map(sorted)
    extra = data.draw(st.lists(spans, max_size=6))
    order = TokenOrder("r", length)
    got = []
    for start, end in data.draw(st.permutations([*cover, *extra])):
        order.add(output(start, *tokens[start:end]))
        if (ready := order.take()) is not None:
            got += ready.token_ids
    assert got == order.tokens == tokens
