"""A decode worker tells its engine how fast KV comes from prefill workers, as its paths measured it."""

from types import SimpleNamespace

import pytest

from kvrelay.decode.worker import DecodeWorker
from kvrelay.plane.messages import PairReport, PathReport

pytestmark = pytest.mark.pure


def pair(*paths: PathReport, ok: bool = True) -> PairReport:
    return PairReport(source="p", target="d", target_epoch="e", ok=ok, paths=list(paths))


def told(*pairs: PairReport) -> list[tuple[float, float]]:
    heard: list[tuple[float, float]] = []
    engine = SimpleNamespace(note_transfer_speed=lambda speed, latency_s: heard.append((speed, latency_s)))
    worker = SimpleNamespace(
        _told=None, _pairs=lambda: list(pairs), thread=SimpleNamespace(post=lambda action: action(engine))
    )
    worker._tell_hop = lambda found: DecodeWorker._tell_hop(worker, found)
    assert DecodeWorker._news(worker) is not None and DecodeWorker._news(worker) is None  # once
    return heard


def path(speed: float, latency_s: float, *, is_chosen: bool = True) -> PathReport:
    return PathReport(path="shm", why="", is_chosen=is_chosen, bytes_per_s=speed, latency_s=latency_s)


def test_the_slowest_of_the_chosen_paths_counts():
    assert told(pair(path(9e9, 1e-3), path(1.0, 9.0, is_chosen=False)), pair(path(5e9, 2e-3))) == [(5e9, 2e-3)]


def test_what_does_not_fit_or_was_not_measured_says_nothing():
    assert told(pair(path(9e9, 1e-3), ok=False), pair(path(0.0, 0.0))) == []
