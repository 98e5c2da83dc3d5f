"""The same transports between two processes, one of which may die or freeze."""

import asyncio
import signal

import numpy as np
import pytest

from kvrelay.decode.read_queue import ReadQueue
from kvrelay.errors import LeaseExpired, PeerLost, TransferTimeout

pytestmark = [pytest.mark.slow, pytest.mark.processes]

TRANSPORTS = ["shm", "tcp", "tcp x3", "tcp+tls", "nixl"]
BLOCKS = [5, 2, 9, 63, 0, 31, 30, 29]


async def begin(kv, target, peer, request_id, blocks, layers=(0, 4)):
    """Grant, and let the source in the other process open and announce."""
    ticket = target.grant(request_id, 0, blocks, len(blocks))
    peer.tell("open", request_id=request_id, ticket=ticket.hex())
    peer.tell("announce", request_id=request_id, blocks=blocks, layers=layers)


async def soon(target, event):
    """Says how the grants ended where the event that a test is sure of does not come."""
    try:
        await asyncio.wait_for(event.wait(), 60)
    except TimeoutError:
        raise AssertionError(f"it did not happen; the grants: {target.ends}") from None


async def first_region(kv, target):
    seen = asyncio.Event()
    kv.tamper(lambda *_: seen.set())
    await soon(target, seen)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_blocks_cross_processes_unchanged(kv, transport):
    peer = await kv.process("source", transport=transport)
    target = await kv.target(transport)
    for request_id in ("r1", "r2"):
        await begin(kv, target, peer, request_id, BLOCKS)
        peer.tell("commit", request_id=request_id)
        payload, result = await target.event("commit", request_id)
        assert payload == f"payload of {request_id}".encode()
        assert result.transport == kv.lib.table(transport)[0]
        assert (await peer.hear("committed"))["num_bytes"] == result.num_bytes
    peer.tell("digest", blocks=BLOCKS)
    assert (await peer.hear("digest"))["value"] == kv.lib.digest(target.memory, BLOCKS)


async def test_auto_takes_shared_memory_between_processes_of_one_host(kv):
    peer = await kv.process("source", transport="auto")
    target = await kv.target("auto")
    await begin(kv, target, peer, "r1", BLOCKS)
    peer.tell("commit", request_id="r1")
    assert (await target.event("commit", "r1"))[1].transport == "shm"


def refuse(*_):
    raise PermissionError("not here")


async def test_auto_goes_over_tcp_when_the_pool_cannot_be_mapped(kv, monkeypatch):
    """As between containers that share a host, but not its network namespace."""
    monkeypatch.setattr("kvrelay.kvtransfer.transports.memory.ShmReader._receive", refuse)
    peer = await kv.process("source", transport="auto")
    target = await kv.target("auto")
    await begin(kv, target, peer, "r1", BLOCKS)
    peer.tell("commit", request_id="r1")
    assert (await target.event("commit", "r1"))[1].transport == "tcp"
    peer.tell("digest", blocks=BLOCKS)
    assert (await peer.hear("digest"))["value"] == kv.lib.digest(target.memory, BLOCKS)


def freeze_when_reading(monkeypatch, target, peer):
    """The source is stopped (SIGSTOP) right before the target's next read; returns the event of that."""
    is_frozen = asyncio.Event()
    read_unit = ReadQueue._read_unit

    async def freeze_first(self, grant, unit):
        if not is_frozen.is_set():
            peer.signal(signal.SIGSTOP)
            is_frozen.set()
        await read_unit(self, grant, unit)

    monkeypatch.setattr(ReadQueue, "_read_unit", freeze_first)
    return is_frozen


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_source_killed_during_a_read_fails_and_releases_within_two_seconds(kv, transport, monkeypatch):
    peer = await kv.process("source", transport=transport)
    target = await kv.target(transport)
    await begin(kv, target, peer, "r1", BLOCKS, layers=(0, 2))
    await first_region(kv, target)
    is_frozen = freeze_when_reading(monkeypatch, target, peer)
    await begin(kv, target, peer, "r2", list(range(32, 60)))
    await soon(target, is_frozen)
    peer.signal(signal.SIGKILL)
    async with asyncio.timeout(2):
        for request_id in ("r1", "r2"):
            assert isinstance(await target.event("failed", request_id), PeerLost)
            await target.event("released", request_id)
    assert target.stats().quarantined_blocks == 0


@pytest.mark.parametrize("transport", ["tcp", "tcp x3", "tcp+tls"])
async def test_a_source_frozen_during_a_read_is_let_go_of(kv, monkeypatch, transport):
    peer = await kv.process("source", transport=transport, fill=3)
    target = await kv.target(transport, lease_s=0.5)
    is_frozen = freeze_when_reading(monkeypatch, target, peer)
    await begin(kv, target, peer, "r1", BLOCKS)
    await soon(target, is_frozen)
    assert isinstance(await target.event("failed", "r1"), LeaseExpired)
    await target.event("released", "r1")
    landed = kv.lib.digest(target.memory, BLOCKS)
    peer.signal(signal.SIGCONT)
    peer.tell("cpu")
    await peer.hear("cpu")  # it runs again, and what it still sends goes nowhere
    assert kv.lib.digest(target.memory, BLOCKS) == landed


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_killed_target_is_a_lost_peer_for_the_source(kv, transport):
    peer = await kv.process("target", transport=transport)
    source = await kv.source(transport)
    peer.tell("grant", request_id="r1", blocks=BLOCKS)
    ticket = bytes.fromhex((await peer.hear("ticket"))["ticket"])
    transfer = source.open("r1", ticket)
    transfer.announce(0, BLOCKS, range(2))
    await next(iter(source.links.values())).ready("r1")
    peer.signal(signal.SIGSTOP)
    commit = asyncio.create_task(transfer.commit(b""))
    peer.signal(signal.SIGKILL)
    async with asyncio.timeout(2):
        with pytest.raises(PeerLost):
            await commit
    assert source.stats().open_transfers == 0


@pytest.mark.parametrize("transport", ["nixl"])
async def test_a_restarted_source_is_served_anew(kv, transport):
    target = await kv.target(transport)
    for epoch in ("p1", "p2"):
        peer = await kv.process("source", transport=transport, epoch=epoch, fill=ord(epoch[1]))
        await begin(kv, target, peer, epoch, BLOCKS)
        peer.tell("commit", request_id=epoch)
        await target.event("commit", epoch)
        peer.tell("digest", blocks=BLOCKS)
        assert (await peer.hear("digest"))["value"] == kv.lib.digest(target.memory, BLOCKS)
        peer.signal(signal.SIGKILL)


@pytest.mark.parametrize("transport", ["shm"])
async def test_a_frozen_source_is_read_all_the_same_but_confirms_nothing(kv, transport, monkeypatch):
    """The bytes need nothing of it; the commit does, so that its lease ends the transfer."""
    peer = await kv.process("source", transport=transport, fill=5)
    target = await kv.target(transport, lease_s=0.5)
    peer.tell("digest", blocks=BLOCKS)
    sent = (await peer.hear("digest"))["value"]
    is_frozen = freeze_when_reading(monkeypatch, target, peer)
    await begin(kv, target, peer, "r1", BLOCKS)
    await soon(target, is_frozen)
    assert isinstance(await target.event("failed", "r1"), LeaseExpired)
    await target.event("released", "r1")
    assert kv.lib.digest(target.memory, BLOCKS) == sent
    peer.signal(signal.SIGCONT)


async def test_a_nixl_read_of_a_frozen_source_stays_in_quarantine_until_it_lands(kv, monkeypatch):
    """Over TCP a READ needs the owner: frozen, it stays PROC; woken, it writes. Nobody may have the blocks
    meanwhile.
    """
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    peer = await kv.process("source", transport="nixl", fill=4)
    target = await kv.target("nixl", lease_s=60.0)
    await begin(kv, target, peer, "warm", [1])
    peer.tell("commit", request_id="warm")
    await target.event("commit", "warm")
    blocks = list(range(8, 60))
    is_frozen = freeze_when_reading(monkeypatch, target, peer)
    await begin(kv, target, peer, "r1", blocks)
    await soon(target, is_frozen)
    assert isinstance(await target.event("failed", "r1"), TransferTimeout)
    assert target.stats().quarantined_blocks == len(blocks)
    assert target.kinds("r1") == ["failed"]
    before = kv.lib.regions(target.memory)[:, blocks].copy()
    peer.signal(signal.SIGCONT)
    await target.event("released", "r1")
    after = kv.lib.regions(target.memory)[:, blocks]
    assert target.stats().quarantined_blocks == 0
    assert not np.array_equal(before, after)  # the late write did land: only the quarantine kept it harmless


@pytest.mark.alone
async def test_idle_sides_use_almost_no_cpu(kv):
    """Both ends of a NIXL pair with nothing in flight: the stock agent would use a whole core here."""
    peer = await kv.process("source", transport="nixl")
    target = await kv.target("nixl")
    await begin(kv, target, peer, "r1", BLOCKS)
    peer.tell("commit", request_id="r1")
    await target.event("commit", "r1")
    peer.tell("cpu")
    before = (await peer.hear("cpu"))["seconds"]
    await asyncio.sleep(2)
    peer.tell("cpu")
    assert (await peer.hear("cpu"))["seconds"] - before <= 0.1
