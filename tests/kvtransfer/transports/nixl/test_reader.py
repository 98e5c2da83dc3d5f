"""What a NIXL reader copies, verifies and tells: source and target in one process."""

import asyncio
import dataclasses
import importlib.util
import threading
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from kvrelay.errors import CorruptRead, TransportError
from kvrelay.kvtransfer.mover.copy_plan import CopyList
from kvrelay.kvtransfer.transports.nixl import reader as nixl
from kvrelay.kvtransfer.transports.nixl.reads import NixlRead

pytestmark = pytest.mark.processes


_spec = importlib.util.spec_from_file_location("kvrelay_nixl_reader_peer", Path(__file__).with_name("nixl_peer.py"))
peer = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(peer)
sides = peer.sides

if WHY_NOT := nixl.NIXL.why_not(sides.allocate()):
    pytest.skip(f"no NIXL: {WHY_NOT}", allow_module_level=True)

REGION = sides.LAYOUT.region_bytes


@pytest.fixture
async def pair():
    """(source's pool, target's pool, connected reader)."""
    source, target = sides.allocate(fill=1), sides.allocate()
    exporter = nixl.NIXL.make_exporter(source, sides.SECRET, peer.HOST)
    await exporter.start()
    exporter.set_busy(1)
    reader = peer.make_reader(target)
    await reader.connect(exporter.describe())
    yield source, target, reader
    await reader.aclose()
    exporter.set_busy(0)
    await exporter.aclose()


def copies(source, target, sizes):
    return CopyList(*(np.array(values, dtype=np.int64) for values in (source, target, sizes)))


def regions(count):
    """The pools' first regions, one copy each."""
    return copies(np.arange(count) * REGION, np.arange(count) * REGION, [REGION] * count)


def expected(source, plan):
    """The target's pool as these copies must leave it."""
    after = np.zeros(len(source.owner), dtype=np.uint8)
    for s_offset, t_offset, size in zip(*plan.rows(), strict=True):
        after[t_offset : t_offset + size] = source.owner[s_offset : s_offset + size]
    return after


async def test_what_has_landed_is_verified_in_order_on_another_thread_while_the_rest_comes(pair, monkeypatch):
    source, target, reader = pair
    monkeypatch.setattr(nixl, "PIECE_BYTES", 10 * REGION)
    calls = []

    def landed(num_bytes):
        blocks, _ = divmod(num_bytes, REGION)
        first = target.owner[: blocks * REGION]
        calls.append((num_bytes, np.array_equal(first, source.owner[: blocks * REGION]), threading.get_ident()))

    await reader.read(regions(45), landed)
    told = [num_bytes for num_bytes, _, _ in calls]
    assert told == sorted(set(told)) and told[0] < told[-1] == 45 * REGION
    assert all(is_there for _, is_there, _ in calls)
    assert threading.get_ident() not in {thread for _, _, thread in calls}


async def test_an_abandoned_read_is_never_taken_for_a_verified_one(pair):
    """Its last posted piece may land well, within the grace that its waiter grants it."""
    _, _, reader = pair
    loop, landed = asyncio.get_running_loop(), []
    read = NixlRead(None, 2 * REGION, deque(), landed.append, loop.create_future(), loop, is_abandoned=True)
    reader._agent._hand_over(read, REGION, True)
    with pytest.raises(TransportError, match="abandoned"):
        await read.done
    assert not landed


async def test_a_small_read_is_over_when_the_call_returns_unless_the_agent_is_busy(pair):
    source, target, reader = pair
    was_over = []
    for _ in range(100):
        read = reader.read(copies([7 * REGION], [3 * REGION], [REGION]))
        was_over.append(read.done())
        await read
    assert any(was_over)
    assert np.array_equal(target.owner[3 * REGION : 4 * REGION], source.owner[7 * REGION : 8 * REGION])


@pytest.mark.parametrize("seed", range(6))
async def test_copies_of_any_size_land_where_they_should_and_nowhere_else(pair, monkeypatch, seed):
    """Unequal layouts make such copies: parts of regions."""
    source, target, reader = pair
    monkeypatch.setattr(nixl, "PIECE_BYTES", 3000)
    rng = np.random.default_rng(seed)
    unit, num = int(rng.choice([64, 512, REGION])), 36
    cells = sides.LAYOUT.num_bytes // (4 * unit)
    sizes = rng.integers(1, 4, num) * unit
    plan = copies(rng.permutation(cells)[:num] * 4 * unit, rng.permutation(cells)[:num] * 4 * unit, sizes)
    await reader.read(plan)
    assert np.array_equal(target.owner, expected(source, plan))


async def test_pools_whose_regions_differ_in_size_are_read_all_the_same():
    source = sides.allocate(dataclasses.replace(sides.LAYOUT, block_size=8), fill=1)
    target = sides.allocate()
    exporter = nixl.NIXL.make_exporter(source, sides.SECRET, peer.HOST)
    await exporter.start()
    exporter.set_busy(1)
    reader = peer.make_reader(target)
    await reader.connect(exporter.describe())
    plan = copies([0, 3 * REGION], [2 * REGION, 0], [REGION, 2 * REGION])
    await reader.read(plan)
    after = expected(source, plan)
    assert np.array_equal(target.owner[: len(after)], after)
    await reader.aclose()
    await exporter.aclose()


@pytest.mark.parametrize("size", [REGION, 100])
@pytest.mark.parametrize("offset", [sides.LAYOUT.num_bytes, sides.LAYOUT.num_bytes - 50, -REGION])
@pytest.mark.parametrize("end", ["source", "target"])
async def test_a_read_outside_a_pool_is_refused_and_the_next_one_works(pair, size, offset, end):
    source, target, reader = pair
    plan = copies([offset], [0], [size]) if end == "source" else copies([0], [offset], [size])
    with pytest.raises(TransportError):
        await reader.read(plan)
    assert not target.owner.any()
    await reader.read(copies([0], [REGION], [2 * REGION]))
    assert np.array_equal(target.owner[REGION : 3 * REGION], source.owner[: 2 * REGION])


async def test_a_region_that_is_wrong_ends_the_read_and_no_more_is_verified(pair, monkeypatch):
    _, _, reader = pair
    monkeypatch.setattr(nixl, "PIECE_BYTES", 20 * REGION)
    calls = []

    def landed(num_bytes):
        calls.append(num_bytes)
        raise CorruptRead(1, 3)

    with pytest.raises(CorruptRead):
        await reader.read(regions(60), landed)
    assert len(calls) == 1 and calls[0] < 60 * REGION


async def test_many_reads_at_once_large_and_small_stay_apart(pair, monkeypatch):
    source, target, reader = pair
    monkeypatch.setattr(nixl, "PIECE_BYTES", 8 * REGION)
    rng = np.random.default_rng(3)
    num_blocks = len(source.owner) // REGION
    order, reads, start = rng.permutation(num_blocks), [], 0
    seen = []
    while start < num_blocks:
        mine = order[start : start + int(rng.choice([1, 2, 50]))]
        start += len(mine)
        plan = copies(mine * REGION, mine * REGION, [REGION] * len(mine))
        reads.append(reader.read(plan, seen.append))
        if rng.random() < 0.3:
            await asyncio.sleep(0)
    await asyncio.gather(*reads)
    assert np.array_equal(target.owner, source.owner)
    assert len(seen) >= len(reads)


@pytest.mark.slow
async def test_every_refused_transfer_is_released_exactly_once(kv):
    """Several reads of it are in flight when its first wrong region is found."""
    source, target = await kv.pair("nixl", lease_s=60.0)

    def flip(memory, offset, size):
        if next(countdown) == 0:
            memory.view[offset] ^= 1

    layers = [range(i, i + 1) for i in kv.lib.ALL_LAYERS]
    for number in range(300):
        countdown = iter(range(number % 96, -1000, -1))
        kv.tamper(flip)
        names = [f"{number}-{i}" for i in range(3)]
        transfers = [
            kv.send(
                source, target, name, list(range(8 * i, 8 * i + 8)), list(range(8 * i, 8 * i + 8)), layer_groups=layers
            )
            for i, name in enumerate(names)
        ]
        ends = await asyncio.gather(*(transfer.commit(b"") for transfer in transfers), return_exceptions=True)
        failed = [name for name, end in zip(names, ends, strict=True) if isinstance(end, Exception)]
        assert len(failed) == 1
        await target.event("released", failed[0])
    assert target.stats().quarantined_blocks == 0
    kinds = [kind for kind, _, _ in target.ends]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"commit": 600, "failed": 300, "released": 300}
