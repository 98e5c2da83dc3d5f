"""Ctrl-C while Ray starts counts, even where Ray's code swallows the exception; and when the process in front does
what.
"""

import os
import signal

import pytest

from kvrelay.cluster.launch.supervisor import (
    AGAIN,
    END_S,
    REACH_S,
    STOPS,
    StopRequested,
    StopSignals,
    Supervisor,
    next_step,
)

pytestmark = pytest.mark.alone


@pytest.fixture
def signals():
    one = StopSignals()
    yield one
    one.close()


def sent(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)
    for _ in range(1000):  # the handler runs between two of these
        sum(range(100))


def test_a_swallowed_interrupt_is_raised_again_once_ray_runs(signals):
    with signals:
        with pytest.raises(StopRequested):
            sent()
        with pytest.raises(StopRequested):
            signals.after_ray_start()


def test_without_an_interrupt_the_start_goes_on_with_our_handlers(signals):
    with signals:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as ray.init would
        signals.after_ray_start()
        with pytest.raises(StopRequested):
            sent()


def test_the_same_interrupt_twice_is_raised_once_until_asked_again(signals):
    with signals:
        with pytest.raises(StopRequested):
            sent()
        sent()
        with pytest.raises(StopRequested):
            sent(AGAIN)


def test_asked_again_while_the_exception_is_on_its_way_changes_nothing(signals):
    with signals, pytest.raises(StopRequested):
        try:
            sent()
        finally:
            sent(AGAIN)
            cleared_up = True
    assert cleared_up


def test_after_the_context_nothing_is_raised(signals):
    with pytest.raises(StopRequested), signals:
        sent()
    sent()
    sent(AGAIN)
    assert signals.is_requested


def test_close_puts_the_handlers_back(signals):
    before = [signal.getsignal(number) for number in (*STOPS, AGAIN)]
    with signals:
        assert [signal.getsignal(number) for number in (*STOPS, AGAIN)] != before
    signals.close()
    assert [signal.getsignal(number) for number in (*STOPS, AGAIN)] == before


def test_raised_is_what_ray_lets_through():
    """Its C++ leaves a wait for a KeyboardInterrupt, and drops what is neither this nor SystemExit."""
    assert issubclass(StopRequested, KeyboardInterrupt) and not issubclass(StopRequested, Exception)


def test_nothing_happens_while_nobody_has_asked():
    assert next_step(1e9, None, None) == "wait"
    assert next_step(1e9, None, 5.0) == "wait"  # stops because of an error


def test_who_was_asked_is_asked_again_and_then_ended():
    assert next_step(7.0 + REACH_S, 7.0, None) == "repeat"
    assert next_step(7.1 + REACH_S, 7.0, None) == "end"


def test_who_stops_is_left_alone_and_then_ended():
    assert next_step(9.0 + END_S, 7.0, 9.0) == "wait"
    assert next_step(9.1 + END_S, 7.0, 9.0) == "end"


@pytest.fixture
def supervisor():
    """(one without processes, what its driver writes to)"""
    receiver, sender = os.pipe()
    yield Supervisor(0, receiver, lambda line: None), sender
    os.close(receiver)
    os.close(sender)


def test_a_driver_that_finishes_requests_has_that_long_in_addition(supervisor, monkeypatch):
    one, sender = supervisor
    monkeypatch.setattr("kvrelay.cluster.launch.supervisor.time.monotonic", lambda: 100.0)
    os.write(sender, b"stopping\nfinishing 75.0\n")
    one._read_pipe()
    assert next_step(174.0 + END_S, 100.0, one._stopping_s) == "wait"
    assert next_step(176.0 + END_S, 100.0, one._stopping_s) == "end"
    monkeypatch.setattr("kvrelay.cluster.launch.supervisor.time.monotonic", lambda: 103.0)
    os.write(sender, b"stopping\n")  # they have ended: Ray is stopped
    one._read_pipe()
    assert next_step(104.0 + END_S, 100.0, one._stopping_s) == "end"


def test_a_second_press_ends_it_while_requests_finish(supervisor, monkeypatch):
    one, sender = supervisor
    now_s = 100.0
    monkeypatch.setattr("kvrelay.cluster.launch.supervisor.time.monotonic", lambda: now_s)
    monkeypatch.setattr("kvrelay.cluster.launch.supervisor.os.kill", lambda pid, number: None)
    assert not one._is_second_press()
    os.write(sender, b"finishing 75.0\n")
    one._read_pipe()
    now_s += 2.0
    assert one._is_second_press()
