"""A decode worker gives its engine the measured speed of KV transfers from its prefill workers."""

from types import SimpleNamespace

import pytest

from kvrelay.decode.worker import DecodeRole
from kvrelay.plane.reports import PairReport, PathReport

pytestmark = pytest.mark.pure


def pair(*paths: PathReport, ok: bool = True) -> PairReport:
    return PairReport(source="p", target="d", target_epoch="e", ok=ok, paths=list(paths))


def noted(*pairs: PairReport) -> list[tuple[float, float]]:
    """What the engine is given; the ingresses' report comes once, and again for a new subscriber."""
    calls: list[tuple[float, float]] = []
    note = SimpleNamespace(note_transfer_speed=lambda speed, latency_s: calls.append((speed, latency_s)))
    engine = SimpleNamespace(
        requests=note,
        cache=SimpleNamespace(memory=None, fingerprint=None),
        pool=SimpleNamespace(generation=None),
        model=SimpleNamespace(spec=SimpleNamespace(vocab_size=1)),
    )
    settings = SimpleNamespace(transfer=None)
    options = SimpleNamespace(worker_id="d", secret=b"", host="", settings=settings)
    role = DecodeRole(options, "e", None, engine, SimpleNamespace(post=lambda action: action(engine)), None)
    role.plane.pairs = lambda: list(pairs)
    assert role.changes().reports == list(pairs) and role.changes() is None
    once = list(calls)
    role.subscribed()
    assert role.changes() is not None
    return once


def path(speed: float, latency_s: float, *, is_chosen: bool = True) -> PathReport:
    return PathReport(path="shm", why="", is_chosen=is_chosen, bytes_per_s=speed, latency_s=latency_s)


def test_the_slowest_of_the_chosen_paths_counts():
    assert noted(pair(path(9e9, 1e-3), path(1.0, 9.0, is_chosen=False)), pair(path(5e9, 2e-3))) == [(5e9, 2e-3)]


def test_paths_that_do_not_fit_or_were_not_measured_do_not_count():
    assert noted(pair(path(9e9, 1e-3), ok=False), pair(path(0.0, 0.0))) == []
