"""Virtual time: events in order, those of the same time in order of creation, and none that was cancelled."""

import pytest

from kvrelay.cluster.simulator.clock import Clock

pytestmark = pytest.mark.pure


def test_events_come_in_order_of_time_then_of_creation_and_cancelled_ones_never():
    clock, happened = Clock(), []

    def note(name):
        happened.append((clock.now_s, name))

    clock.after(5.0, note, "limit")
    clock.after(5.0, note, "cancelled").cancel()
    clock.at(2.0, clock.after, 3.0, note, "created later")
    clock.at(1.0, note, "first")
    clock.at(1.0, clock.at, 0.5, note, "what has passed is now")
    clock.run()
    assert happened == [(1.0, "first"), (1.0, "what has passed is now"), (5.0, "limit"), (5.0, "created later")]
