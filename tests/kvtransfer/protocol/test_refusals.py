"""Every ticket and message that must not move KV is refused by its name; no grant of another suffers."""

import asyncio
import dataclasses
import errno
import socket
import time

import msgspec
import pytest

from kvrelay.errors import BackendUnavailable, ConnectionLost, LeaseExpired, PeerLost, TransferRefused, TransferTimeout
from kvrelay.kvtransfer.protocol.messages import (
    Announce,
    Commit,
    Open,
    Reason,
    Rejected,
    decode_to_source,
    encode,
    open_ticket,
    reason_of,
    seal,
)
from kvrelay.plane import connection as plane
from tests.fakes import until


def resealed(kv, ticket, **changes):
    """The ticket with other contents, sealed with the cluster's secret: what a buggy peer could send."""
    return seal(msgspec.structs.replace(open_ticket(ticket, kv.lib.SECRET), **changes), kv.lib.SECRET)


async def refusal_of(transfer, payload=b""):
    with pytest.raises(TransferRefused) as refused:
        await transfer.commit(payload)
    return refused.value


async def test_a_forged_ticket_is_refused_before_anything_is_sent(kv):
    source, target = await kv.pair()
    ticket = target.grant("r1", 0, [1], 1)
    forged = ticket[:-1] + bytes([ticket[-1] ^ 1])
    for bad in (forged, b"", b"x" * 200, ticket[:40]):
        with pytest.raises(TransferRefused) as refused:
            source.open("r1", bad)
        assert reason_of(refused.value) is Reason.BAD_MAC
    assert source.stats().refusals == 4


async def test_a_ticket_of_another_request_is_refused(kv):
    source, target = await kv.pair()
    with pytest.raises(TransferRefused) as refused:
        source.open("r2", target.grant("r1", 0, [1], 1))
    assert reason_of(refused.value) is Reason.UNKNOWN


async def test_an_invented_ticket_is_unknown_and_harms_no_grant(kv):
    source, target = await kv.pair()
    ticket = target.grant("r1", 0, [1], 1)
    transfer = source.open("r1", resealed(kv, ticket, nonce=b"n" * 16))
    assert reason_of(await refusal_of(transfer)) is Reason.UNKNOWN
    good = source.open("r1", ticket)
    good.announce(0, [1], kv.lib.ALL_LAYERS)
    await good.commit(b"")
    assert target.kinds("r1") == ["commit"]


async def test_a_ticket_with_swapped_blocks_is_refused(kv):
    source, target = await kv.pair()
    ticket = target.grant("r1", 0, [1, 2], 2)
    transfer = source.open("r1", resealed(kv, ticket, target_blocks=[2, 1]))
    assert reason_of(await refusal_of(transfer)) is Reason.UNKNOWN


async def test_a_ticket_admits_one_transfer(kv):
    source, target = await kv.pair()
    ticket = target.grant("r1", 0, [1], 1)
    first = source.open("r1", ticket)
    with pytest.raises(TransferRefused) as refused:
        source.open("r1", ticket)
    assert reason_of(refused.value) is Reason.USED
    first.announce(0, [1], kv.lib.ALL_LAYERS)
    await first.commit(b"")
    assert reason_of(await refusal_of(source.open("r1", ticket))) is Reason.USED


async def test_a_second_source_cannot_take_over_an_open_transfer(kv):
    source, target = await kv.pair()
    thief = await kv.source(epoch="p2", fill=9)
    ticket = target.grant("r1", 0, [1], 1)
    mine = source.open("r1", ticket)
    mine.announce(0, [1], range(1))
    seen = asyncio.Event()
    kv.tamper(lambda *_: seen.set())
    await seen.wait()
    assert reason_of(await refusal_of(thief.open("r1", ticket))) is Reason.USED
    mine.announce(0, [1], range(1, 4))
    await mine.commit(b"")
    assert kv.lib.digest(target.memory, [1]) == kv.lib.digest(source.memory, [1])


async def test_a_lease_of_a_silent_source_expires_and_frees(kv):
    source, target = await kv.pair(lease_s=0.2)
    ticket = target.grant("r1", 0, [1], 1)
    assert isinstance(await target.event("failed", "r1"), LeaseExpired)
    await target.event("released", "r1")
    assert reason_of(await refusal_of(source.open("r1", ticket))) is Reason.EXPIRED


async def test_an_open_transfer_keeps_its_lease_alive(kv):
    source, target = await kv.pair(lease_s=0.2)
    transfer = kv.send(source, target, "r1", [1], [2], layer_groups=[range(3)])
    (grant,), granted_at = target.grants.live, time.monotonic()
    await until(lambda: grant.last_sign > granted_at + 0.7)  # several leases later it is renewed still
    transfer.announce(0, [1], range(3, 4))
    await transfer.commit(b"")
    assert target.kinds("r1") == ["commit"]


async def test_a_ticket_of_an_earlier_incarnation_is_stale(kv):
    source, target = await kv.pair()
    ticket = target.grant("r1", 0, [1], 1)
    transfer = source.open("r1", resealed(kv, ticket, target_epoch="d0"))
    assert reason_of(await refusal_of(transfer)) is Reason.STALE_EPOCH


async def test_an_open_naming_another_epoch_is_refused_by_the_target_too(kv):
    source, target = await kv.pair()
    ticket = target.grant("r1", 0, [1], 1)
    transfer = source.open("r1", ticket)
    transfer._data = resealed(kv, ticket, target_epoch="d0")
    assert reason_of(await refusal_of(transfer)) is Reason.STALE_EPOCH


async def test_a_target_block_that_was_reused_since_the_grant_is_refused(kv):
    source, target = await kv.pair()
    ticket = target.grant("r1", 0, [1, 2], 2)
    target.generations[2] = 1
    error = await refusal_of(source.open("r1", ticket))
    assert reason_of(error) is Reason.STALE_GENERATION
    assert reason_of(await target.event("failed", "r1")) is Reason.STALE_GENERATION


async def test_a_block_that_was_reused_meanwhile_is_not_written_any_more(kv):
    source, target = await kv.pair()
    is_begun = asyncio.Event()
    kv.tamper(lambda *_: is_begun.set())
    transfer = kv.send(source, target, "r1", [1, 2], [7, 8], layer_groups=[range(2)])
    await is_begun.wait()
    target.generations[8] = 1
    transfer.announce(0, [1, 2], range(2, 4))
    assert reason_of(await target.event("failed", "r1")) is Reason.STALE_GENERATION
    await target.event("released", "r1")
    landed = kv.lib.regions(target.memory)[:, [7, 8]].any(axis=(1, 2))
    assert landed.tolist() == [True, True, False, False]


@pytest.mark.parametrize("checks", ["full", "sampled", "off"])
async def test_a_source_block_that_was_reused_before_the_commit_is_never_committed(kv, checks):
    source, target = await kv.pair(checks=checks)
    transfer = kv.send(source, target, "r1", [1, 2], [3, 4])
    source.generations[2] = 1  # the source let go of it and gave it to another sequence
    assert reason_of(await refusal_of(transfer)) is Reason.STALE_GENERATION
    await target.event("released", "r1")
    assert target.kinds("r1") == ["failed", "released"]


@pytest.mark.parametrize("checks", ["full", "off"])
async def test_a_source_block_that_was_reused_during_the_read_is_committed_only_where_its_bytes_were_verified(
    kv, checks
):
    source, target = await kv.pair(checks=checks)
    kv.tamper(lambda *_: source.generations.update({2: 1}))  # once it has landed
    transfer = kv.send(source, target, "r1", [1, 2], [3, 4])
    if checks == "full":
        await transfer.commit(b"")
        assert target.kinds("r1") == ["commit"]
        assert (kv.lib.regions(target.memory)[:, [3, 4]] == kv.lib.regions(source.memory)[:, [1, 2]]).all()
    else:
        assert reason_of(await refusal_of(transfer)) is Reason.STALE_GENERATION
        await target.event("released", "r1")


@pytest.mark.parametrize("field", ["model", "dtype", "block_size", "hash_seed"])
async def test_another_fingerprint_is_refused_with_the_field(kv, field):
    other = dataclasses.replace(kv.lib.FINGERPRINT, **{field: 24 if field == "block_size" else "other"})
    source, target = await kv.source(fingerprint=other), await kv.target()
    ticket = target.grant("r1", 0, [1], 1)
    with pytest.raises(TransferRefused) as refused:
        source.open("r1", ticket)
    assert reason_of(refused.value) is Reason.FINGERPRINT
    assert field in refused.value.why
    late = source.open("r1", resealed(kv, ticket, fingerprint=other))  # the handshake compares again
    error = await refusal_of(late)
    assert reason_of(error) is Reason.FINGERPRINT
    assert field in error.why


async def test_a_commit_before_every_region_came_is_incomplete(kv):
    source, target = await kv.pair()
    transfer = kv.send(source, target, "r1", [1, 2], [3, 4], layer_groups=[range(3)])
    error = await refusal_of(transfer)
    assert reason_of(error) is Reason.INCOMPLETE
    assert "2 of 8 regions" in error.why
    await target.event("released", "r1")


@pytest.mark.parametrize(
    "announce",
    [
        {"first_chunk": 0, "chunks": [64], "first_layer": 0, "num_layers": 4},
        {"first_chunk": 0, "chunks": [-1], "first_layer": 0, "num_layers": 4},
        {"first_chunk": 1, "chunks": [1, 2], "first_layer": 0, "num_layers": 4},
        {"first_chunk": -1, "chunks": [1], "first_layer": 0, "num_layers": 4},
        {"first_chunk": 0, "chunks": [1], "first_layer": 3, "num_layers": 2},
        {"first_chunk": 0, "chunks": [1], "first_layer": 0, "num_layers": 0},
        {"first_chunk": 0, "chunks": [], "first_layer": 0, "num_layers": 4},
    ],
)
async def test_announcements_out_of_range_are_refused(kv, announce):
    source, target = await kv.pair(checks="off")
    transfer = source.open("r1", target.grant("r1", 0, [1, 2], 2))
    await next(iter(source.links.values())).ready("r1")
    await asyncio.sleep(0)
    next(iter(source.links.values())).notify(Announce(nonce=transfer.ticket.nonce, **announce))
    assert reason_of(await target.event("failed", "r1")) is Reason.OUT_OF_RANGE
    assert not kv.lib.regions(target.memory).any()


async def test_a_region_announced_twice_is_refused(kv):
    source, target = await kv.pair()
    transfer = kv.send(source, target, "r1", [1], [2], layer_groups=[range(2), range(1, 4)])
    assert reason_of(await refusal_of(transfer)) is Reason.OUT_OF_RANGE


async def test_announcing_what_this_pool_or_ticket_does_not_have_is_our_own_bug(kv):
    source, target = await kv.pair()
    transfer = source.open("r1", target.grant("r1", 0, [1], 1))
    with pytest.raises(ValueError, match="not in the pool"):
        transfer.announce(0, [64], range(4))
    with pytest.raises(ValueError, match="beyond the 1 blocks"):
        transfer.announce(0, [1, 2], range(4))


async def test_announcements_without_checksums_are_refused_by_a_target_that_verifies(kv):
    source, target = await kv.source(checks="off"), await kv.target()
    error = await refusal_of(source.open("r1", target.grant("r1", 0, [1], 1)))
    assert reason_of(error) is Reason.CHECKSUM
    assert "transfer.checks" in error.why


async def test_a_source_with_another_secret_is_refused(kv):
    source, target = await kv.source(secret=b"another"), await kv.target()
    ticket = target.grant("r1", 0, [1], 1)
    forged = seal(open_ticket(ticket, kv.lib.SECRET), b"another")
    assert isinstance(await refusal_of(source.open("r1", forged)), TransferRefused)
    assert target.stats().open_transfers == 1


async def test_sides_without_a_common_transport_refuse(kv):
    source, target = await kv.source("tcp"), await kv.target("shm")
    error = await refusal_of(source.open("r1", target.grant("r1", 0, [1], 1)))
    assert reason_of(error) is Reason.TRANSPORT
    assert "tcp" in error.why
    assert "shm" in error.why


async def test_a_forced_transport_that_cannot_be_is_loud(kv):
    private = dataclasses.replace(kv.lib.allocate(), memfd=None)
    with pytest.raises(BackendUnavailable, match="shm is not available here"):
        await kv.source("shm", memory=private)
    with pytest.raises(BackendUnavailable, match="shm is not available here"):
        await kv.target("shm", memory=private)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff" * 40,
        msgspec.msgpack.encode({"type": "open"}),
        msgspec.msgpack.encode({"type": "hello", "protocol": 1}),
    ],
)
async def test_malformed_messages_end_their_connection_and_nothing_else(kv, frame):
    source, target = await kv.pair()
    intruder = await plane.connect("127.0.0.1", target.port, kv.lib.SECRET)
    await intruder.send(frame)
    assert isinstance(decode_to_source(await intruder.receive()), Rejected)
    with pytest.raises(ConnectionLost):
        await intruder.receive()
    await intruder.aclose()
    await kv.send(source, target, "r1", [1], [2]).commit(b"")
    assert target.kinds("r1") == ["commit"]


async def test_a_malformed_message_after_the_handshake_fails_that_sources_transfers(kv):
    source, target = await kv.pair()
    seen = asyncio.Event()
    kv.tamper(lambda *_: seen.set())
    kv.send(source, target, "r1", [1], [2], layer_groups=[range(1)])
    await seen.wait()
    next(iter(source.links.values()))._connection.send_nowait(
        msgspec.msgpack.encode({"type": "announce", "nonce": b"x"})
    )
    assert isinstance(await target.event("failed", "r1"), PeerLost)
    await target.event("released", "r1")
    await kv.send(source, target, "r2", [1], [2]).commit(b"")  # a new connection serves the next


async def test_messages_before_the_hello_are_rejected(kv):
    target = await kv.target()
    ticket = target.grant("r1", 0, [], 0)
    nonce = open_ticket(ticket, kv.lib.SECRET).nonce
    intruder = await plane.connect("127.0.0.1", target.port, kv.lib.SECRET)
    await intruder.send(encode(Open(nonce=nonce, request_id="r1", ticket=ticket)))
    await intruder.send(encode(Commit(nonce=nonce, payload=b"", seal=b"")))
    assert isinstance(decode_to_source(await intruder.receive()), Rejected)
    await intruder.aclose()
    assert target.kinds("r1") == []


async def test_a_target_that_never_answers_is_left_at_the_deadline(kv):
    async def silent(connection):
        await asyncio.Event().wait()

    server = plane.Server(silent, kv.lib.SECRET)
    port = await server.start("127.0.0.1")
    source, target = await kv.pair(deadline_s=0.2)
    ticket = resealed(kv, target.grant("r1", 0, [1], 1), target_port=port)
    with pytest.raises(TransferTimeout):
        await source.open("r1", ticket).commit(b"")
    await server.aclose()


async def test_granting_a_request_twice_is_our_own_bug(kv):
    target = await kv.target()
    target.grant("r1", 0, [1], 1)
    with pytest.raises(ValueError, match="earlier grant"):
        target.grant("r1", 0, [2], 1)
    for blocks in ([1, 1], [64], [1]):
        with pytest.raises(ValueError, match="r2"):
            target.grant("r2", 0, blocks, 2)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_sides_that_ran_out_of_file_descriptors_take_connections_again(kv, transport, monkeypatch):
    failures = [OSError(errno.EMFILE, "Too many open files")]
    accept = socket.socket.accept

    def failing(listener):
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    source, target = await kv.pair(transport)
    await kv.send(source, target, "r1", [1, 2], [3, 4]).commit(b"")
    assert target.kinds("r1") == ["commit"] and not failures


@pytest.mark.parametrize("field", ["payload", "chunks", "first_chunk"])
async def test_what_the_source_said_is_sealed_as_well_as_the_blocks(kv, field):
    """A bit of a message flips on the way: with checks off nothing but the seal of the whole transfer could tell."""
    source, target = await kv.pair(checks="off")
    transfer = source.open("r1", target.grant("r1", 0, [5, 6], 2))
    link = next(iter(source.links.values()))
    send = link.send

    async def garbling(request_id, message):
        if isinstance(message, Commit) and field == "payload":
            message = msgspec.structs.replace(message, payload=b"token 8")
        elif isinstance(message, Announce) and field == "chunks":
            message = msgspec.structs.replace(message, chunks=[chunk ^ 1 for chunk in message.chunks])
        elif isinstance(message, Announce) and field == "first_chunk":
            message = msgspec.structs.replace(message, first_chunk=1 - message.first_chunk)
        await send(request_id, message)

    link.send = garbling
    transfer.announce(0, [1], range(4))
    transfer.announce(1, [2], range(4))
    error = await refusal_of(transfer, b"token 7")
    assert reason_of(error) is Reason.CHECKSUM
    assert "commit" not in target.kinds("r1")
