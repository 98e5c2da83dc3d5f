"""The link between the two workers misbehaves: bounded time to a typed error, both sides freed, never a wrong byte."""

import asyncio

import numpy as np
import pytest

from kvrelay.errors import LeaseExpired, PeerLost, TransferError

BLOCKS = [5, 2, 9, 63, 0, 31, 30, 29]
LANDING = list(range(40, 48))


def arrived(kv, source, target):
    return np.array_equal(kv.lib.regions(target.memory)[:, LANDING], kv.lib.regions(source.memory)[:, BLOCKS])


async def linked(kv, *, transport="loopback", **options):
    """(source, target, proxy on the control connection, a transfer half announced over it)."""
    source, target = await kv.pair(transport, lease_s=0.6)
    proxy = await kv.proxy(target.port, **options)
    target._port = proxy.port  # what it writes into its tickets
    transfer = source.open("r1", target.grant("r1", 0, LANDING, len(LANDING)))
    transfer.announce(0, BLOCKS, range(2))
    return source, target, proxy, transfer


async def both_freed(source, target, *, within_s):
    async with asyncio.timeout(within_s):
        await target.event("released", "r1")
    assert (target.stats().open_transfers, target.quarantined_blocks(), source.stats().open_transfers) == (0, 0, 0)


@pytest.mark.parametrize("mode", ["delay", "slow"])
async def test_a_slow_control_link_costs_time_only(kv, mode):
    source, target, _proxy, transfer = await linked(kv, mode=mode)
    transfer.announce(0, BLOCKS, range(2, 4))
    await transfer.commit(b"")
    assert arrived(kv, source, target)


async def test_a_control_link_that_swallows_everything_costs_a_lease_on_both_sides(kv):
    source, target, proxy, transfer = await linked(kv)
    await transfer._link.ready("r1")
    proxy.mode = "drop"
    transfer.announce(0, BLOCKS, range(2, 4))
    async with asyncio.timeout(2.6):
        with pytest.raises(LeaseExpired):
            await transfer.commit(b"")
        assert isinstance(await target.event("failed", "r1"), LeaseExpired | PeerLost)
    await both_freed(source, target, within_s=1)


async def test_a_cut_control_link_is_a_lost_peer_at_once(kv):
    source, target, proxy, transfer = await linked(kv)
    await transfer._link.ready("r1")
    proxy.cut()
    async with asyncio.timeout(2):
        with pytest.raises(PeerLost):
            await transfer.commit(b"")
        error = await target.event("failed", "r1")
    assert isinstance(error, PeerLost | LeaseExpired)
    await both_freed(source, target, within_s=2)
    await kv.send(source, target, "r2", BLOCKS, LANDING).commit(b"")  # over a new connection
    assert arrived(kv, source, target)


@pytest.mark.parametrize("mode", ["duplicate", "flip"])
@pytest.mark.parametrize("after", [0, 400, 1500])
async def test_a_control_link_that_garbles_ends_in_an_error_or_in_the_right_bytes(kv, mode, after):
    source, target, proxy, transfer = await linked(kv, mode=mode, after=after)
    transfer.announce(0, BLOCKS, range(2, 4))
    async with asyncio.timeout(15):
        try:
            await transfer.commit(b"")
        except TransferError:
            await both_freed(source, target, within_s=5)
        else:
            assert arrived(kv, source, target)
    assert proxy.num_bytes > after
    assert "commit" not in target.kinds("r1") or arrived(kv, source, target)
