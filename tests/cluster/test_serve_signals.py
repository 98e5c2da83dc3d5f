"""Ctrl-C while Ray starts counts, even where Ray's code swallows the exception."""

import os
import signal
from types import SimpleNamespace

import pytest
from rich.console import Console

from kvrelay.cluster.serve_command import StopRequested, _on_signals


@pytest.fixture
def session():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield SimpleNamespace(has_ray=False, after_ray=None, kill=lambda: None)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def interrupted():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # the handler runs between two of these
        sum(range(100))


def test_a_swallowed_interrupt_is_raised_again_once_ray_runs(session):
    _on_signals(Console(), session)
    with pytest.raises(StopRequested):
        interrupted()
    with pytest.raises(StopRequested):
        session.after_ray()


def test_without_an_interrupt_the_start_goes_on_with_our_handlers(session):
    _on_signals(Console(), session)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as ray.init would
    session.after_ray()
    with pytest.raises(StopRequested):
        interrupted()
