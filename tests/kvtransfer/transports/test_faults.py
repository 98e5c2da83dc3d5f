"""A peer that is killed or frozen at any stage: a typed error in bounded time, and everything is given back on our
side.
"""

import asyncio
import signal

import pytest

from kvrelay.decode.read_queue import ReadQueue
from kvrelay.decode.target import SourceLink
from kvrelay.errors import LeaseExpired, PeerLost, TransferError, TransferTimeout
from kvrelay.prefill.source_link import WINDOW_BYTES, TargetLink
from tests.fakes import until
from tests.kvtransfer.held_reader import has_room

pytestmark = [pytest.mark.slow, pytest.mark.processes]

TRANSPORTS = ["shm", "tcp"]
FAULTS = {signal.SIGKILL: PeerLost, signal.SIGSTOP: LeaseExpired}
BLOCKS = [5, 2, 9, 63, 0, 31, 30, 29]
LEASE_S = 1.0
BOUND_S = {signal.SIGKILL: 2.0, signal.SIGSTOP: 2.0 + LEASE_S}


def before(monkeypatch, kind, method, action):
    """`action` happens right before `kind.method` runs for the first time; returns the event of that."""
    done, original = asyncio.Event(), getattr(kind, method)

    def hooked(self, *args, **kwargs):
        if not done.is_set():
            action()
            done.set()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(kind, method, hooked)
    return done


# ---- the source fails, the target is here


async def source_until(kv, monkeypatch, target, peer, stage, fault):
    """Lead a transfer to this stage and let the source fail there."""
    ticket = target.grant("r1", 0, BLOCKS, len(BLOCKS)).hex()
    hit = None
    if stage == "opening":
        hit = before(monkeypatch, SourceLink, "_on_open", lambda: peer.signal(fault))
    elif stage == "reading":
        hit = before(monkeypatch, ReadQueue, "_read_unit", lambda: peer.signal(fault))
    elif stage == "confirming":
        hit = before(monkeypatch, ReadQueue, "advance", lambda: peer.signal(fault))
    if stage != "granted":
        peer.tell("open", request_id="r1", ticket=ticket)
        peer.tell("announce", request_id="r1", blocks=BLOCKS, layers=(0, 4) if stage == "confirming" else (0, 2))
    if stage == "confirming":
        peer.tell("commit", request_id="r1")
    if stage == "announced":
        await until(lambda: target.stats().paths.get(target.transports[-1]) is not None, 60)
    if hit is not None:
        await hit.wait()
    else:
        peer.signal(fault)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("stage", ["granted", "opening", "announced", "reading", "confirming"])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_source_that_fails_costs_a_lease_at_most(kv, monkeypatch, transport, stage, fault):
    checks = "off" if stage == "confirming" else "full"
    peer = await kv.process("source", transport=transport, checks=checks)
    target = await kv.target(transport, lease_s=LEASE_S, stall_s=0.5, checks=checks)
    await source_until(kv, monkeypatch, target, peer, stage, fault)
    expected = LeaseExpired if stage == "granted" else (FAULTS[fault], TransferTimeout)
    async with asyncio.timeout(BOUND_S[signal.SIGSTOP] if stage == "granted" else BOUND_S[fault]):
        error = await target.event("failed", "r1")
        await target.event("released", "r1")
    assert isinstance(error, expected), error
    assert (target.stats().open_transfers, target.stats().quarantined_blocks) == (0, 0)
    monkeypatch.undo()
    again = await kv.process("source", transport=transport, epoch="p2", fill=2, checks=checks)  # the same worker, anew
    again.tell("open", request_id="r2", ticket=target.grant("r2", 0, BLOCKS, len(BLOCKS)).hex())
    again.tell("announce", request_id="r2", blocks=BLOCKS, layers=(0, 4))
    again.tell("commit", request_id="r2")
    await target.event("commit", "r2")
    again.tell("digest", blocks=BLOCKS)
    assert (await again.hear("digest"))["value"] == kv.lib.digest(target.memory, BLOCKS)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_source_that_dies_once_all_is_verified_costs_nothing(kv, monkeypatch, transport):
    peer = await kv.process("source", transport=transport)
    target = await kv.target(transport, lease_s=LEASE_S)
    before(monkeypatch, SourceLink, "_commit", lambda: peer.signal(signal.SIGKILL))
    peer.tell("open", request_id="r1", ticket=target.grant("r1", 0, BLOCKS, len(BLOCKS)).hex())
    peer.tell("announce", request_id="r1", blocks=BLOCKS, layers=(0, 4))
    peer.tell("commit", request_id="r1")
    await target.event("commit", "r1")
    assert (target.stats().open_transfers, target.stats().quarantined_blocks) == (0, 0)


# ---- the target fails, the source is here


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("stage", ["connecting", "opened", "announced", "committing"])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_target_that_fails_frees_the_source_within_a_lease(kv, monkeypatch, transport, stage, fault):
    checks = "off" if stage == "committing" else "full"
    peer = await kv.process("target", transport=transport, checks=checks)
    source = await kv.source(transport, lease_s=LEASE_S, checks=checks)
    peer.tell("grant", request_id="r1", blocks=BLOCKS)
    ticket = bytes.fromhex((await peer.hear("ticket"))["ticket"])
    if stage == "connecting":
        peer.signal(fault)
    transfer = source.open("r1", ticket)
    if stage in ("opened", "announced"):
        await next(iter(source.links.values())).ready("r1")
    transfer.announce(0, BLOCKS, range(2) if stage == "announced" else range(4))
    if stage in ("opened", "announced"):
        peer.signal(fault)
    elif stage == "committing":
        before(monkeypatch, TargetLink, "notify", lambda: peer.signal(fault))  # of the confirmation
    async with asyncio.timeout(BOUND_S[fault] + 2.0):
        with pytest.raises(tuple(FAULTS.values())):
            await transfer.commit(b"")
    assert source.stats().open_transfers == 0
    assert all([await has_room(link.window, WINDOW_BYTES) for link in source.links.values()])
    monkeypatch.undo()
    again = await kv.process("target", transport=transport, epoch="d2", checks=checks)
    again.tell("grant", request_id="r2", blocks=BLOCKS)
    transfer = source.open("r2", bytes.fromhex((await again.hear("ticket"))["ticket"]))
    transfer.announce(0, BLOCKS, range(4))
    await transfer.commit(b"")
    again.tell("await", kind="commit", request_id="r2", blocks=BLOCKS)
    assert (await again.hear("event"))["digest"] == kv.lib.digest(source.memory, BLOCKS)


async def test_both_sides_restarting_begin_anew(kv):
    for epoch in ("1", "2"):
        source, target = await kv.source("tcp", epoch=f"p{epoch}"), await kv.target("tcp", epoch=f"d{epoch}")
        await kv.send(source, target, "r1", BLOCKS, BLOCKS).commit(b"")
        held = target.grant("r2", 0, [1], 1)
        await target.aclose()
        await source.aclose()
    later = await kv.source("tcp")
    with pytest.raises(TransferError):
        await later.open("r2", held).commit(b"")


async def test_a_target_frozen_and_woken_again_writes_nothing_into_blocks_that_it_released(kv):
    """The other way round of fencing: what it still does after its lease concerns its own blocks only."""
    peer = await kv.process("target", transport="tcp", lease_s=0.5)
    source = await kv.source("tcp", lease_s=0.5)
    peer.tell("grant", request_id="r1", blocks=BLOCKS)
    transfer = source.open("r1", bytes.fromhex((await peer.hear("ticket"))["ticket"]))
    transfer.announce(0, BLOCKS, range(2))
    await next(iter(source.links.values())).ready("r1")
    peer.signal(signal.SIGSTOP)
    with pytest.raises((LeaseExpired, PeerLost)):
        await transfer.commit(b"")
    kv.lib.regions(source.memory)[:, BLOCKS] = 7  # the source re-uses them
    peer.signal(signal.SIGCONT)
    peer.tell("kinds", request_id="r1")
    while not (kinds := (await peer.hear("kinds"))["kinds"]):
        peer.tell("kinds", request_id="r1")
    assert kinds[0] == "failed"
