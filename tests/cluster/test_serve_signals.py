"""Ctrl-C while Ray starts counts, even where Ray's code swallows the exception; nobody else's signals are disturbed."""

import asyncio
import os
import signal
import socket
import threading

import pytest

from kvrelay.cluster import stop_signals
from kvrelay.cluster.stop_signals import END_S, REACH_S, Step, StopRequested, StopSignals, next_step


def never(*arguments: str) -> None:
    raise AssertionError("nothing was to be ended")


@pytest.fixture
def signals():
    one = StopSignals(never, never)
    yield one
    one.close()


def interrupted():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # the handler runs between two of these
        sum(range(100))


def test_a_swallowed_interrupt_is_raised_again_once_ray_runs(signals):
    with signals:
        with pytest.raises(StopRequested):
            interrupted()
        with pytest.raises(StopRequested):
            signals.go_on()


def test_without_an_interrupt_the_start_goes_on_with_our_handlers(signals):
    with signals:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as ray.init would
        signals.go_on()
        with pytest.raises(StopRequested):
            interrupted()


def test_after_the_context_nothing_is_raised(signals):
    with pytest.raises(StopRequested), signals:
        interrupted()
    interrupted()
    assert signals.is_asked


def test_raised_is_what_ray_lets_through():
    """Its C++ leaves a wait for a KeyboardInterrupt, and for nothing that we could raise besides."""
    assert issubclass(StopRequested, KeyboardInterrupt) and not issubclass(StopRequested, Exception)


def test_nothing_happens_while_nobody_has_asked():
    assert next_step(1e9, None, None) is Step.WAIT
    assert next_step(1e9, None, 5.0) is Step.WAIT  # stops because of an error


def test_who_was_asked_is_asked_again_and_then_ended():
    assert next_step(7.0 + REACH_S, 7.0, None) is Step.ASK_AGAIN
    assert next_step(7.1 + REACH_S, 7.0, None) is Step.END


def test_who_stops_is_left_alone_and_then_ended():
    assert next_step(9.0 + END_S, 7.0, 9.0) is Step.WAIT
    assert next_step(9.1 + END_S, 7.0, 9.0) is Step.END


def test_close_puts_everything_back(signals):
    numbers = (*stop_signals.STOPS, stop_signals.AGAIN)
    before = [signal.getsignal(number) for number in numbers]
    others, mine = socket.socketpair()
    others.setblocking(False)
    mine.setblocking(False)
    fd_before = signal.set_wakeup_fd(mine.fileno())
    try:
        with signals:
            assert [signal.getsignal(number) for number in numbers] != before
        signals.close()
        assert [signal.getsignal(number) for number in numbers] == before
        assert signal.set_wakeup_fd(mine.fileno()) == mine.fileno()
        assert "stop signals" not in [thread.name for thread in threading.enumerate()]
    finally:
        signal.set_wakeup_fd(fd_before)
        others.close()
        mine.close()


def test_whoever_was_woken_before_is_woken_still(signals):
    others, mine = socket.socketpair()
    others.settimeout(10.0)
    mine.setblocking(False)
    fd_before = signal.set_wakeup_fd(mine.fileno())
    try:
        with signals, pytest.raises(StopRequested):
            interrupted()
        assert others.recv(1) == bytes([signal.SIGINT])
        signals.close()
    finally:
        signal.set_wakeup_fd(fd_before)
        others.close()
        mine.close()


def test_an_event_loop_has_its_signals_meanwhile_and_ours_are_heard(signals):
    """asyncio sets its own wakeup fd for them, and none when it is done."""

    async def loops_own() -> None:
        heard = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, heard.set)
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.wait_for(heard.wait(), 10.0)
            with pytest.raises(StopRequested):
                interrupted()
            heard.clear()
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.wait_for(heard.wait(), 10.0)
        finally:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)

    with signals:
        asyncio.run(loops_own())
        assert signals.is_asked


def test_the_watch_learns_of_a_signal_whose_wakeup_went_to_another(signals, monkeypatch):
    """Else the second one would not kill: here the first does, for something else has begun to stop."""
    told = threading.Event()
    monkeypatch.setattr(signals, "_hear", told.set)
    with signals:
        before = signal.set_wakeup_fd(-1)
        with pytest.raises(StopRequested):
            interrupted()
        assert told.wait(10.0)
        assert signal.set_wakeup_fd(before) == -1
