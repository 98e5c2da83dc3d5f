"""A read that is still under way keeps its blocks, whatever became of its transfer (fake transport)."""

import asyncio

import numpy as np
import pytest

from kvrelay.errors import ChecksumMismatch, LeaseExpired, PeerLost, TransferTimeout, TransportError
from tests.kvtransfer.held_reader import held_transport

pytestmark = pytest.mark.alone


@pytest.fixture
async def held(kv):
    """(source, target, the held reads' finish functions, event of the first)."""
    table, reads, has_begun = held_transport()
    source = await kv.source(lease_s=0.3, deadline_s=0.3)

    async def target(**settings):
        return await kv.target(transports=table, **settings)

    return source, target, reads, has_begun


async def test_a_late_write_finds_its_blocks_still_in_quarantine(kv, held):
    source, make_target, reads, _has_begun = held
    target = await make_target(stall_s=0.2)
    kv.send(source, target, "r1", [1, 2], [7, 8])
    assert isinstance(await target.event("failed", "r1"), TransferTimeout)
    assert target.stats().quarantined_blocks == 2
    assert target.kinds("r1") == ["failed"]  # not released: the bytes may still land
    with pytest.raises(ValueError, match="earlier grant"):
        target.grant("r1", 0, [3], 1)
    reads[0]()  # the write that was held back lands now
    await target.event("released", "r1")
    assert np.array_equal(kv.lib.regions(target.memory)[:, [7, 8]], kv.lib.regions(source.memory)[:, [1, 2]])
    assert target.kinds("r1") == ["failed", "released"]
    assert target.stats().quarantined_blocks == 0


@pytest.mark.parametrize("how", ["revoke", "cancel", "link", "shutdown"])
async def test_every_end_waits_for_the_read_in_flight(kv, held, how):
    source, make_target, reads, has_begun = held
    target = await make_target()
    transfer = kv.send(source, target, "r1", [1], [7])
    await has_begun.wait()
    if how == "revoke":
        target.revoke("r1")
    elif how == "cancel":
        transfer.cancel()
        await target.event("failed", "r1")
    elif how == "link":
        next(iter(source.links.values()))._connection.abort()
        assert isinstance(await target.event("failed", "r1"), PeerLost)
    else:
        closing = asyncio.create_task(target.aclose())
        await asyncio.sleep(0)
    assert target.stats().quarantined_blocks == 1
    assert "released" not in target.kinds("r1")
    reads[0](TransportError("the peer is gone"))
    await target.event("released", "r1")
    assert target.stats().quarantined_blocks == 0
    if how == "shutdown":
        await closing


async def test_a_source_that_falls_silent_during_a_read_is_quarantined_too(kv, held):
    source, make_target, reads, has_begun = held
    target = await make_target(lease_s=0.2)
    kv.send(source, target, "r1", [1], [7])
    await has_begun.wait()
    next(iter(source.links.values()))._renewing.cancel()  # what a frozen process looks like from here
    assert isinstance(await target.event("failed", "r1"), LeaseExpired)
    assert target.stats().quarantined_blocks == 1
    reads[0]()
    await target.event("released", "r1")


async def test_a_source_that_let_go_before_the_read_ended_is_not_confirmed(kv, held):
    source, make_target, reads, has_begun = held
    target = await make_target()
    transfer = kv.send(source, target, "r1", [1], [7])
    commit = asyncio.create_task(transfer.commit(b""))
    await has_begun.wait()
    transfer.cancel("its blocks were needed")
    kv.lib.regions(source.memory)[:, 1] = 0  # another sequence writes there
    await target.event("failed", "r1")
    reads[0]()
    await target.event("released", "r1")
    assert target.kinds("r1") == ["failed", "released"]
    assert (await asyncio.gather(commit, return_exceptions=True))[0].why.startswith("cancelled")


async def test_bytes_that_changed_between_checksum_and_read_are_refused(kv, held):
    source, make_target, reads, has_begun = held
    target = await make_target()
    transfer = kv.send(source, target, "r1", [1], [7])
    await has_begun.wait()
    kv.lib.regions(source.memory)[2, 1, 100] ^= 1
    reads[0]()
    with pytest.raises(ChecksumMismatch, match="layer 2 of block 7"):
        await transfer.commit(b"")


async def test_a_long_transfer_does_not_hold_up_a_short_one(kv, held):
    source, make_target, reads, has_begun = held
    target = await make_target()
    layers = [range(i, i + 1) for i in kv.lib.ALL_LAYERS]
    long = kv.send(source, target, "long", list(range(32)), list(range(32)), layer_groups=layers)
    await has_begun.wait()
    short = kv.send(source, target, "short", [40], [40])
    done = asyncio.gather(short.commit(b""), long.commit(b""))
    order = []
    while not done.done():
        if reads:
            reads.pop(0)()
            order.append(target.kinds("short") == ["commit"])
        await asyncio.sleep(0)
    await done
    assert [name for _, name, _ in target.ends] == ["short", "long"]
