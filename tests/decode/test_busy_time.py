"""busy_s: the seconds with a read under way, each counted once."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.decode.grants import Grant

pytestmark = pytest.mark.alone


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda s: (s[0], s[0] + s[1])), max_size=8)


times = []  # the clock's, last now


def grant():
    return Grant(SimpleNamespace(target_blocks=[], generations=[]), b"", None, 0.0)


def busy_s(spans):
    """What a grant counts whose reads begin and end so."""
    counting, reads = grant(), {}
    begins = [(begin, False, i) for i, (begin, _) in enumerate(spans)]
    for now, is_end, i in sorted(begins + [(end, True, i) for i, (_, end) in enumerate(spans)]):
        times.append(now)
        if is_end:
            reads[i].__exit__(None, None, None)
        else:
            reads[i] = counting.busy(lambda: times[-1])
            reads[i].__enter__()
    assert counting.began == []
    return counting.busy_s


@given(SPANS)
def test_overlapping_reads_count_once_and_pauses_not_at_all(spans):
    covered = {second for begin, end in spans for second in range(begin, end)}
    assert busy_s(spans) == len(covered)


def test_a_read_that_fails_was_under_way_too():
    counting, clock = grant(), iter([3.0, 5.0])
    with pytest.raises(OSError), counting.busy(lambda: next(clock)):
        raise OSError
    assert (counting.busy_s, counting.began) == (2.0, [])
