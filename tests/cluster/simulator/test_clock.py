"""Virtual time: events in order, and time limits that are over as if each had been put in the heap by itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.cluster.simulator.clock import Clock

pytestmark = pytest.mark.pure


steps = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(["limit", "event", "cancel"]), st.integers(0, 9)), max_size=60
)
"""Time passed since the one before; what; of an event its delay, of a cancelled limit which."""


def play(load, begin):
    """What happened, and when. `begin(clock, call, name)`: a time limit of 5 s."""
    clock, happened, limits = Clock(), [], []

    def note(name):
        happened.append((clock.now_s, name))

    def do(what, number, name):
        if what == "limit":
            limits.append(begin(clock, note, f"limit {name}"))
        elif what == "event":
            clock.after(number, note, f"event {name}")
        elif limits:
            limits[number % len(limits)].cancel()

    at_s = 0
    for name, (pause_s, what, number) in enumerate(load):
        at_s += pause_s
        clock.at(at_s, do, what, number, name)
    clock.run()
    return happened


@given(steps)
def test_time_limits_are_over_as_if_each_was_in_the_heap(load):
    by_timer = play(load, lambda clock, call, name: clock.timer(5.0).begin(call, name))
    alone = play(load, lambda clock, call, name: clock.after(5.0, call, name))
    assert by_timer == alone


def test_what_was_cancelled_is_forgotten_when_nothing_older_is_left():
    clock = Clock()
    timer = clock.timer(600.0)
    for number in range(1000):
        clock.at(number, lambda: clock.after(0.5, timer.begin(print).cancel))
    clock.run(2000.0)
    assert len(timer._queue) <= 1 and len(clock._heap) <= 1


def test_one_that_is_not_cancelled_keeps_those_behind_it():
    """The control of the above."""
    clock, over = Clock(), []
    timer = clock.timer(600.0)
    timer.begin(over.append, "first")
    for number in range(100):
        clock.at(number, lambda: timer.begin(print).cancel())
    clock.run(599.0)
    assert not over and len(timer._queue) > 1
    clock.run(600.0)
    assert over == ["first"]


def test_there_is_one_timer_for_each_length():
    clock = Clock()
    assert clock.timer(5.0) is clock.timer(5.0) and clock.timer(5.0) is not clock.timer(6.0)
