"""Streaming: announcements go in pieces, in turns, and no further ahead of the reads than the window."""

import asyncio
import dataclasses

import numpy as np
import pytest

from kvrelay.kvtransfer.transports.memory import LOOPBACK, LoopbackReader
from tests.kvtransfer.held_reader import has_room, settled

REGION = 4096


@pytest.fixture
async def slow(kv, monkeypatch):
    """(source, target, reads that wait for the test): pieces of 4 regions, a window of 8."""
    reads = []

    class Slow(LoopbackReader):
        max_in_flight = 1

        def read(self, copies, landed=None):
            done = asyncio.get_running_loop().create_future()

            def finish():
                self.copy(copies, landed)
                done.set_result(None)

            reads.append(finish)
            return done

    monkeypatch.setattr("kvrelay.prefill.source.ANNOUNCE_BYTES", 4 * REGION)
    table = {"loopback": dataclasses.replace(LOOPBACK, make_reader=Slow, turn_bytes=4 * REGION)}
    source = await kv.source(window_bytes=8 * REGION, transports=table)
    target = await kv.target(transports=table, stall_s=60.0)
    return source, target, reads


def num_announced(target, request_id):
    (grant,) = [grant for grant in target.grants.live if grant.request_id == request_id]
    return int(grant.announced.sum())


async def drive(reads, tasks):
    """Let the reads end one after the other until the tasks are done."""
    done = asyncio.gather(*tasks)
    while not done.done():
        if reads:
            reads.pop(0)()
        await asyncio.sleep(0)
    return await done


async def test_a_source_announces_no_more_than_a_window_ahead_of_the_reads(kv, slow):
    source, target, reads = slow
    transfer = kv.send(source, target, "r1", list(range(32)), list(range(32)))
    while not reads:
        await asyncio.sleep(0)
    await settled(source)
    assert num_announced(target, "r1") == 8
    reads.pop(0)()
    while not reads:
        await asyncio.sleep(0)
    await settled(source)
    assert num_announced(target, "r1") == 12  # one piece read, one more announced
    await drive(reads, [transfer.commit(b"")])
    assert np.array_equal(kv.lib.regions(target.memory)[:, :32], kv.lib.regions(source.memory)[:, :32])
    (link,) = source.links.values()
    assert await has_room(link.window, 8 * REGION)


@pytest.mark.parametrize(("turn", "num_reads"), [(1, 32), (4, 8), (16, 2)])
async def test_a_transports_turn_is_what_is_announced_and_read_at_once(kv, monkeypatch, turn, num_reads):
    monkeypatch.setattr("kvrelay.prefill.source.ANNOUNCE_BYTES", 4 * REGION)
    sizes = []

    class Counting(LoopbackReader):
        def read(self, copies, landed=None):
            sizes.append(copies.total_bytes)
            return super().read(copies, landed)

    table = {"loopback": dataclasses.replace(LOOPBACK, make_reader=Counting, turn_bytes=turn * REGION)}
    source, target = await kv.source(transports=table), await kv.target(transports=table)
    await kv.send(source, target, "r1", list(range(8)), list(range(8))).commit(b"")  # of 4 layers
    assert sizes == [turn * REGION] * num_reads


async def test_a_short_transfer_takes_its_turn_between_the_pieces_of_a_long_one(kv, slow):
    source, target, reads = slow
    long = kv.send(source, target, "long", list(range(56)), list(range(56)))
    while not reads:
        await asyncio.sleep(0)
    short = kv.send(source, target, "short", [60], [60])
    commits = [asyncio.create_task(transfer.commit(b"")) for transfer in (long, short)]
    num_reads = 0
    while not commits[1].done():
        if reads:
            reads.pop(0)()
            num_reads += 1
        await asyncio.sleep(0)
    assert num_reads <= 6  # of 57 pieces: what was announced before it, its own, and one between each
    assert not commits[0].done()
    await drive(reads, commits)
    assert [name for _, name, _ in target.ends] == ["short", "long"]


@pytest.mark.parametrize("end", ["cancel", "revoke", "commit"])
async def test_a_transfer_gives_its_part_of_the_window_back_however_it_ends(kv, slow, end):
    source, target, reads = slow
    transfer = kv.send(source, target, "r1", list(range(32)), list(range(32)))
    waiting = kv.send(source, target, "r2", [40], [40])
    while not reads:
        await asyncio.sleep(0)
    await settled(source)
    if end == "cancel":
        transfer.cancel()
    elif end == "revoke":
        target.revoke("r1")
    commits = [waiting.commit(b"")] + ([transfer.commit(b"")] if end == "commit" else [])
    await drive(reads, [asyncio.ensure_future(commit) for commit in commits])
    (link,) = source.links.values()
    assert await has_room(link.window, 8 * REGION)
    assert "commit" in target.kinds("r2")
