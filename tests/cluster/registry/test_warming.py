"""A worker is listed while its model loads: it stays when that succeeds, and leaves at once when it fails."""

import asyncio
import io
from typing import Any

import pytest
from ray.exceptions import RayError
from rich.console import Console

from kvrelay.cluster.commands.status import render
from kvrelay.cluster.registry.actor import listed_as_warming, send_heartbeats
from kvrelay.cluster.registry.members import HEARTBEAT_S, Registry, WorkerRecord

pytestmark = pytest.mark.pure

WARMING = WorkerRecord("decode-a", "decode", "", "127.0.0.1", 0, "node", 1)


class Method:
    """One of the actor's, called as Ray calls it."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def remote(self, *arguments: object) -> Any:
        return self._call(*arguments)


class Actor:
    """The registry's actor, as far as a worker that starts calls it."""

    def __init__(self) -> None:
        self.registry = Registry("i", 0.0)
        self.seen: list[WorkerRecord] = []
        self.heartbeat, self.leave = Method(self._heartbeat), Method(self.registry.leave)

    def _heartbeat(self, record: WorkerRecord) -> None:
        self.seen.append(record)
        self.registry.heartbeat(record, 0.0)

    def ports(self) -> dict[str, int]:
        return {member.worker_id: member.port for member in self.registry.roster(0.0).members}


async def until_listed(actor: Actor) -> None:
    while not actor.seen:
        await asyncio.sleep(0)


async def test_a_worker_is_listed_without_a_port_until_its_own_record_takes_the_place():
    actor = Actor()
    async with listed_as_warming(actor, WARMING):
        await until_listed(actor)
        assert actor.ports() == {"decode-a": 0}
    assert actor.ports() == {"decode-a": 0}  # no gap in between
    actor.registry.heartbeat(WorkerRecord("decode-a", "decode", "e", "127.0.0.1", 4000, "node", 1), 1.0)
    assert actor.ports() == {"decode-a": 4000}


async def test_a_worker_that_fails_while_it_loads_leaves_at_once():
    actor = Actor()
    with pytest.raises(MemoryError):
        async with listed_as_warming(actor, WARMING):
            await until_listed(actor)
            raise MemoryError
    assert actor.ports() == {}


async def test_a_worker_is_soon_listed_again_by_a_registry_that_has_restarted(monkeypatch: pytest.MonkeyPatch):
    actor, slept = Actor(), list[float]()
    failures = [RayError(), RayError()]

    def heartbeat(record: WorkerRecord) -> None:
        if failures:
            raise failures.pop()
        actor._heartbeat(record)

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if actor.seen:
            raise asyncio.CancelledError

    actor.heartbeat = Method(heartbeat)
    monkeypatch.setattr("kvrelay.cluster.registry.actor.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await send_heartbeats(actor, WARMING)
    assert actor.ports() == {"decode-a": 0} and slept == [1.0, 1.0, HEARTBEAT_S]


def test_status_shows_workers_that_warm_up_and_those_that_drain_in_80_columns():
    warming = {"worker_id": "decode-8f3a0b1c", "role": "decode", "pid": 123, "address": "h:0", "seconds": 12.4}
    draining = {"worker_id": "decode-00000002", "role": "decode", "address": "h:1"}
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(render({"workers": [], "warming": [warming], "draining": [draining]}))
    text = console.export_text()
    rows = {name: next(line for line in text.splitlines() if name in line) for name in ("decode-8f3a", "decode-0000")}
    assert "warming 12 s" in " ".join(rows["decode-8f3a"].split()) and "draining" in rows["decode-0000"]
