"""The link between the two workers misbehaves: bounded time to a typed error, both sides freed, never a wrong byte."""

import asyncio

import msgspec
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
    target.port = proxy.port  # what it writes into its tickets
    transfer = source.open("r1", target.grant("r1", 0, LANDING, len(LANDING)))
    transfer.announce(0, BLOCKS, range(2))
    return source, target, proxy, transfer


async def both_freed(source, target, *, within_s):
    async with asyncio.timeout(within_s):
        await target.event("released", "r1")
    assert target.stats().open_transfers == source.stats().open_transfers == target.stats().quarantined_blocks == 0


@pytest.mark.parametrize("mode", ["delay", "slow"])
async def test_a_slow_control_link_costs_time_only(kv, mode):
    source, target, _proxy, transfer = await linked(kv, mode=mode)
    transfer.announce(0, BLOCKS, range(2, 4))
    await transfer.commit(b"")
    assert arrived(kv, source, target)


async def test_a_control_link_that_swallows_everything_costs_a_lease_on_both_sides(kv):
    source, target, proxy, transfer = await linked(kv)
    await next(iter(source.links.values())).ready("r1")
    proxy.mode = "drop"
    transfer.announce(0, BLOCKS, range(2, 4))
    async with asyncio.timeout(2.6):
        with pytest.raises(LeaseExpired):
            await transfer.commit(b"")
        assert isinstance(await target.event("failed", "r1"), LeaseExpired | PeerLost)
    await both_freed(source, target, within_s=1)


async def test_a_cut_control_link_is_a_lost_peer_at_once(kv):
    source, target, proxy, transfer = await linked(kv)
    await next(iter(source.links.values())).ready("r1")
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


# ---- the data link


async def over_a_bad_data_link(kv, monkeypatch, *, streams="", checks="full", **options):
    """(source, target, proxy between the target's reader and the source's data port)."""
    transport = f"tcp{streams}"
    source = await kv.source(transport, checks=checks)
    exporter = source.exports.exporters["tcp"]
    told = msgspec.msgpack.decode(exporter.describe())
    proxy = await kv.proxy(told["port"], **options)
    told["port"] = proxy.port
    monkeypatch.setattr(exporter, "describe", lambda: msgspec.msgpack.encode(told))
    return source, await kv.target(transport, stall_s=0.3, checks=checks), proxy


MANY, MANY_LANDING = list(range(60)), list(range(59, -1, -1))


async def carry(kv, source, target, request_id="r1"):
    layers = [range(layer, layer + 1) for layer in kv.lib.ALL_LAYERS]
    await kv.send(source, target, request_id, MANY, MANY_LANDING, layer_groups=layers).commit(b"")
    return np.array_equal(kv.lib.regions(target.memory)[:, MANY_LANDING], kv.lib.regions(source.memory)[:, MANY])


@pytest.mark.parametrize("streams", ["", " x3"])
@pytest.mark.parametrize("mode", ["delay", "slow"])
async def test_a_slow_data_link_costs_time_only(kv, monkeypatch, mode, streams):
    source, target, proxy = await over_a_bad_data_link(kv, monkeypatch, streams=streams, mode=mode)
    assert await carry(kv, source, target)
    assert proxy.num_bytes > target.stats().num_bytes == len(MANY) * source.memory.layout.block_bytes


@pytest.mark.parametrize("streams", ["", " x3"])
async def test_a_data_link_that_is_cut_is_opened_again_in_mid_transfer(kv, monkeypatch, streams):
    source, target, proxy = await over_a_bad_data_link(kv, monkeypatch, streams=streams)
    seen = asyncio.Event()
    kv.tamper(lambda *_: seen.set())
    layers = [range(layer, layer + 1) for layer in kv.lib.ALL_LAYERS]
    transfer = kv.send(source, target, "r1", MANY, MANY_LANDING, layer_groups=layers[:2])
    await seen.wait()
    before = proxy.num_connections
    proxy.cut()
    for group in layers[2:]:
        transfer.announce(0, MANY, group)
    await transfer.commit(b"")
    assert np.array_equal(kv.lib.regions(target.memory)[:, MANY_LANDING], kv.lib.regions(source.memory)[:, MANY])
    assert proxy.num_connections > before


async def test_a_data_link_that_swallows_everything_ends_in_a_typed_error_and_frees_all(kv, monkeypatch):
    source, target, _proxy = await over_a_bad_data_link(kv, monkeypatch, mode="drop", after=40_000)
    async with asyncio.timeout(10):
        with pytest.raises(PeerLost, match="no path"):
            await carry(kv, source, target)
    await both_freed(source, target, within_s=2)


@pytest.mark.parametrize("mode", ["duplicate", "flip"])
async def test_a_data_link_that_garbles_never_delivers(kv, monkeypatch, mode):
    source, target, _proxy = await over_a_bad_data_link(kv, monkeypatch, mode=mode, after=20_000)
    async with asyncio.timeout(15):
        with pytest.raises(TransferError):
            await carry(kv, source, target)
    assert "commit" not in target.kinds("r1")
    await both_freed(source, target, within_s=2)


async def test_without_checks_a_garbling_data_link_does_deliver(kv, monkeypatch):
    """The control: the flips are real."""
    source, target, _proxy = await over_a_bad_data_link(kv, monkeypatch, mode="flip", after=20_000, checks="off")
    try:
        assert not await carry(kv, source, target)
    except TransferError as error:  # it hit the protocol's own words
        assert "commit" not in target.kinds("r1"), error
