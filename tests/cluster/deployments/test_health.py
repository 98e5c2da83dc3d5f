"""When Serve is told to replace a worker: its engine has stopped or hangs, or it is no longer listed."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.cluster.deployments import worker as worker_deployment
from kvrelay.cluster.deployments.worker import HUNG_S, StepWatch, WorkerReplica
from kvrelay.errors import EngineFailed

pytestmark = pytest.mark.alone


class Thread:
    """An engine's thread that answers when the test says so."""

    def __init__(self, *, has_work: bool) -> None:
        self.engine = SimpleNamespace(scheduler=SimpleNamespace(has_work=has_work))
        self.asked: list[asyncio.Future[Any]] = []

    def call(self, action: Any) -> "asyncio.Future[Any]":
        self.asked.append(asyncio.get_running_loop().create_future())
        return self.asked[-1]


async def test_an_engine_with_work_that_does_not_answer_is_silent():
    thread = Thread(has_work=True)
    watch = StepWatch(thread)
    assert [watch.silence_s(now_s) for now_s in (100.0, 105.0, 170.0)] == [0.0, 5.0, 70.0]
    thread.asked[0].set_result(None)
    assert [watch.silence_s(now_s) for now_s in (175.0, 180.0)] == [0.0, 5.0]


async def test_an_idle_engine_is_not_woken_however_long_it_idles():
    thread = Thread(has_work=False)
    watch = StepWatch(thread)
    assert [watch.silence_s(now_s) for now_s in (0.0, 1000.0)] == [0.0, 0.0] and not thread.asked
    thread.engine.scheduler.has_work = True
    assert watch.silence_s(2000.0) == 0.0  # work that has just come


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def replica(thread: Thread, *, is_alive: bool = True) -> Any:
    """A started replica, as far as its health goes; no real one, whose __del__ Serve awaits."""
    listing = asyncio.get_running_loop().create_future()
    return SimpleNamespace(
        _record=SimpleNamespace(worker_id="decode-1"),
        _ending=None,
        _worker=SimpleNamespace(healthy=lambda: is_alive),
        _watch=StepWatch(thread),
        _listing=listing,
    )


async def unhealthy(one: Any, why: str) -> None:
    with pytest.raises(EngineFailed, match=why):
        await WorkerReplica.check_health(one)


async def test_a_worker_whose_heartbeats_have_ended_is_replaced():
    one = replica(Thread(has_work=False))
    await WorkerReplica.check_health(one)
    one._listing.set_exception(ValueError("a bug"))
    await unhealthy(one, "registry")


async def test_a_worker_whose_engine_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr(worker_deployment, "time", clock)
    one = replica(Thread(has_work=True))
    for clock.now_s in (0.0, HUNG_S):
        await WorkerReplica.check_health(one)
    clock.now_s = HUNG_S + 5.0
    await unhealthy(one, "has not finished a step for 65 s")


async def test_a_worker_whose_engine_has_stopped_is_replaced():
    await unhealthy(replica(Thread(has_work=False), is_alive=False), "has stopped")
