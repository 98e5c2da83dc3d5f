"""A real worker between two ingresses: it tells each what the other has assigned there, and forgets who goes."""

import asyncio

import pytest

from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.plane import messages as wire
from kvrelay.plane.messages import Assigned
from kvrelay.plane.reports import AssignedByOthers
from tests.cluster.live.one_worker import worker_and_peers

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


async def hears(connection, want):
    """Read on until this is told."""
    async with asyncio.timeout(60):
        while wire.decode_from_worker(await connection.receive()) != want:
            pass


async def test_it_relays_what_each_ingress_has_assigned(folder):
    async with worker_and_peers(folder, 3) as (_, (one, other, stranger)):
        for connection in (one, other):
            connection.send_nowait(wire.encode(wire.Subscribe()))
        await hears(one, AssignedByOthers(1, False))
        await hears(other, AssignedByOthers(1, False))
        stranger.send_nowait(wire.encode(Assigned(tokens=9)))  # it does not listen: it is no ingress that routes
        one.send_nowait(wire.encode(Assigned(tokens=700, prompts=2, sequences=3, blocks=44)))
        await hears(other, AssignedByOthers(1, True, tokens=700, prompts=2, sequences=3, blocks=44))
        one.send_nowait(wire.encode(Assigned()))
        await hears(other, AssignedByOthers(1, True))


async def test_an_ingress_that_is_gone_has_assigned_nothing(folder):
    async with worker_and_peers(folder, 2) as (_, (one, other)):
        for connection in (one, other):
            connection.send_nowait(wire.encode(wire.Subscribe()))
        await hears(one, AssignedByOthers(1, False))
        for connection in (one, other):
            connection.send_nowait(wire.encode(Assigned(tokens=5)))
        await hears(other, AssignedByOthers(1, True, tokens=5))
        await one.aclose()
        await hears(other, AssignedByOthers(0, True))
