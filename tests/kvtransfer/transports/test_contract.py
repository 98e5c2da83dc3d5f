"""What every transport must do, in one process. test_transport_processes.py repeats it between two."""

import asyncio

import numpy as np
import pytest

from kvrelay.errors import ChecksumMismatch, TransferRefused
from kvrelay.kvtransfer.protocol.messages import Reason, reason_of

TRANSPORTS = ["loopback", "shm", "tcp", "tcp x3", "tcp+tls", "tcp x3+tls", "nixl"]


def assert_moved(kv, source, target, source_blocks, target_blocks):
    """Those blocks are equal, and no other byte of the target was written."""
    sent, landed = kv.lib.regions(source.memory), kv.lib.regions(target.memory)
    assert np.array_equal(landed[:, target_blocks], sent[:, source_blocks])
    others = [block for block in range(target.memory.layout.num_blocks) if block not in target_blocks]
    assert not landed[:, others].any()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("source_blocks", "target_blocks"),
    [
        ([7], [3]),
        (list(range(10, 50)), list(range(4, 44))),
        ([5, 2, 9, 63, 0, 31, 30, 29], [63, 1, 17, 2, 40, 39, 38, 0]),
    ],
    ids=["one block", "contiguous", "scattered"],
)
async def test_blocks_land_where_they_were_granted_and_nowhere_else(kv, transport, source_blocks, target_blocks):
    source, target = await kv.pair(transport)
    transfer = kv.send(source, target, "r1", source_blocks, target_blocks)
    result = await transfer.commit(b"manifest")
    payload, received = await target.event("commit", "r1")
    assert_moved(kv, source, target, source_blocks, target_blocks)
    assert payload == b"manifest"
    assert result.transport == received.transport == kv.lib.table(transport)[0].replace("auto", "loopback")
    assert result.num_bytes == received.num_bytes == len(source_blocks) * source.memory.layout.block_bytes
    assert target.kinds("r1") == ["commit"]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_blocks_that_the_target_holds_already_are_not_sent(kv, transport):
    source, target = await kv.pair(transport)
    transfer = kv.send(source, target, "r1", [10, 11, 12, 13], [20, 5], first_block=2)
    result = await transfer.commit(b"")
    assert_moved(kv, source, target, [12, 13], [20, 5])
    assert result.num_blocks == 2


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_transfer_of_no_blocks_commits(kv, transport):
    source, target = await kv.pair(transport)
    transfer = kv.send(source, target, "r1", [1, 2], [], first_block=2)
    result = await transfer.commit(b"all cached")
    assert (await target.event("commit", "r1"))[0] == b"all cached"
    assert (result.num_blocks, result.num_bytes) == (0, 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_many_transfers_at_once_in_pieces_stay_apart(kv, transport):
    source, target = await kv.pair(transport)
    blocks = np.random.default_rng(0).permutation(64).reshape(16, 4).tolist()
    layers = [range(i, i + 1) for i in kv.lib.ALL_LAYERS]
    transfers = [
        kv.send(source, target, f"r{i}", mine, blocks[-1 - i], layer_groups=layers) for i, mine in enumerate(blocks)
    ]
    await asyncio.gather(*(transfer.commit(b"") for transfer in transfers))
    sent, landed = kv.lib.regions(source.memory), kv.lib.regions(target.memory)
    for i, mine in enumerate(blocks):
        assert np.array_equal(landed[:, blocks[-1 - i]], sent[:, mine])
    assert target.stats().transfers == source.stats().transfers == 16
    assert target.stats().open_transfers == source.stats().open_transfers == target.stats().quarantined_blocks == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_what_is_announced_early_is_read_before_the_commit(kv, transport):
    source, target = await kv.pair(transport)
    seen = asyncio.Event()
    kv.tamper(lambda *_: seen.set())
    transfer = kv.send(source, target, "r1", [1, 2], [3, 4], layer_groups=[range(2)])
    await seen.wait()
    kv.tamper(None)
    transfer.announce(0, [1, 2], range(2, 4))
    await transfer.commit(b"")
    assert_moved(kv, source, target, [1, 2], [3, 4])


def flip_one_bit(memory, offset, size):
    memory.view[offset + size // 2] ^= 0x10


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_one_flipped_bit_is_refused_on_both_sides(kv, transport):
    source, target = await kv.pair(transport)
    kv.tamper(flip_one_bit)
    transfer = kv.send(source, target, "r1", list(range(16)), list(range(16)))
    with pytest.raises(ChecksumMismatch):
        await transfer.commit(b"")
    assert isinstance(await target.event("failed", "r1"), ChecksumMismatch)
    await target.event("released", "r1")
    assert target.kinds("r1") == ["failed", "released"]


@pytest.mark.parametrize("transport", ["loopback", "shm"])
async def test_without_a_compiler_blocks_arrive_and_a_flipped_bit_is_refused(kv, transport, monkeypatch):
    monkeypatch.setattr("kvrelay.kvtransfer.mover.mover.library", lambda: None)
    source, target = await kv.pair(transport)
    await kv.send(source, target, "r1", [9, 8, 20], [1, 40, 2]).commit(b"")
    assert_moved(kv, source, target, [9, 8, 20], [1, 40, 2])
    kv.tamper(flip_one_bit)
    with pytest.raises(ChecksumMismatch):
        await kv.send(source, target, "r2", [9], [1]).commit(b"")


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_with_checks_off_a_flipped_bit_is_delivered(kv, transport):
    source, target = await kv.pair(transport, checks="off")
    kv.tamper(flip_one_bit)
    await kv.send(source, target, "r1", [1], [1]).commit(b"")
    assert not np.array_equal(kv.lib.regions(target.memory)[:, 1], kv.lib.regions(source.memory)[:, 1])


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_cancelling_source_ends_the_grant(kv, transport):
    source, target = await kv.pair(transport)
    transfer = kv.send(source, target, "r1", [1, 2], [3, 4], layer_groups=[range(2)])
    transfer.cancel("the client left")
    error = await target.event("failed", "r1")
    await target.event("released", "r1")
    assert reason_of(error) is Reason.CANCELLED
    assert "the client left" in error.why
    with pytest.raises(TransferRefused):
        await transfer.commit(b"")


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_revoking_target_ends_the_transfer_without_on_failed(kv, transport):
    source, target = await kv.pair(transport)
    transfer = kv.send(source, target, "r1", [1, 2], [3, 4], layer_groups=[range(2)])
    commit = asyncio.create_task(transfer.commit(b""))
    target.revoke("r1", "aborted")
    with pytest.raises(TransferRefused) as refused:
        await commit
    await target.event("released", "r1")
    assert reason_of(refused.value) is Reason.CANCELLED
    assert target.kinds("r1") == ["released"]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_request_can_be_granted_again_after_its_release(kv, transport):
    source, target = await kv.pair(transport)
    kv.send(source, target, "r1", [1], [2], layer_groups=[range(1)]).cancel()
    await target.event("released", "r1")
    await kv.send(source, target, "r1", [1], [5]).commit(b"")
    assert target.kinds("r1") == ["failed", "released", "commit"]
