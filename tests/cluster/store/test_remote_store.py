"""The cluster's own store: the contract of all stores over every path, replicas, quotas, leases, and what must be
refused.
"""

import asyncio
import secrets

import numpy as np
import pytest

from kvrelay.errors import StoreError
from kvrelay.kvcache.stores.codecs import LosslessCodec
from kvrelay.kvcache.stores.disk.tier import DiskOptions, DiskStore
from kvrelay.kvcache.stores.namespace import Namespace
from kvrelay.kvcache.stores.placement import places
from kvrelay.kvtransfer.paths.selection import transports_for
from kvrelay.kvtransfer.slabs.client import BlockRequest, SlabPeer
from kvrelay.kvtransfer.slabs.messages import AcquireLease, BlockOffer, LeaseGranted, PutBlocks, ReleaseLease
from kvrelay.kvtransfer.slabs.slabs import BlockArrival, BlockRead, SharedSlab, allocate_slab, free_slab
from kvrelay.plane.tls import ClusterTls
from kvrelay.types import BlockMeta
from tests.cluster.store.store_nodes import BLOCK, META, SECRET, block, until
from tests.kvcache.stores.store_contract import BLOCK_BYTES, StoreContract, chain, content, fetch, keep
from tests.kvtransfer.damage import damaged

pytestmark = pytest.mark.processes


def hashes_of(count):
    return [secrets.token_bytes(16) for _ in range(count)]


def put(store, hashes, meta=META):
    return store.store(hashes, [memoryview(block(digest)) for digest in hashes], [meta] * len(hashes))


def get(store, hashes):
    into = [memoryview(bytearray(BLOCK)) for _ in hashes]
    loaded = store.load(hashes, into)
    assert all(view == block(digest) for digest, view, good in zip(hashes, into, loaded, strict=True) if good)
    return loaded


def held_by(service, store, hashes):
    here = set(service.node.keys())
    return [store.key(digest) in here for digest in hashes]


class TestClusterStore(StoreContract):
    keeps_a_limit = False  # its nodes do: see test_a_full_node_gives_up_what_was_used_least_recently

    @pytest.fixture(params=["auto", "tcp+tls"])
    def open_store(self, request, make_nodes):
        transport = request.param.partition("+")[0] if request.param != "lossless" else "auto"
        codec = LosslessCodec("bfloat16") if request.param == "lossless" else None
        tls = ClusterTls.derived(SECRET) if "tls" in request.param else None
        nodes = make_nodes()

        def open_store(num_blocks, namespace="model-a"):
            if not nodes.addresses:
                nodes.settings["memory"] = num_blocks * 16384
                for name in ("a", "b"):
                    nodes.inside(name, tls=tls, transport=transport)
            return nodes.client(
                BLOCK_BYTES,
                namespace.ljust(16).encode(),
                tls=tls,
                transports=transports_for(tls),
                transport=transport,
                codec=codec,
            )

        return open_store

    def test_what_is_stored_is_loaded_bit_for_bit(self, open_store):
        """As in the contract, less `num_blocks`: only the nodes know it, and stats() asks nobody."""
        store, (hashes, metas) = open_store(32), chain(20)
        assert keep(store, hashes, metas) == [True] * 20
        assert store.contains(hashes) == [True] * 20
        assert fetch(store, hashes) == [content(digest) for digest in hashes]
        stats = store.stats()
        assert (stats.stored_blocks, stats.loaded_blocks) == (20, 20)


def test_blocks_go_from_the_callers_slab_and_into_it_without_a_copy(make_nodes):
    nodes = make_nodes()
    nodes.inside("a")
    memory = allocate_slab(8 * BLOCK)
    try:
        store = nodes.client(memory=memory)
        slots = [memory.view[i * BLOCK : (i + 1) * BLOCK] for i in range(8)]
        hashes = hashes_of(4)
        for digest, slot in zip(hashes, slots, strict=False):
            slot[:] = block(digest)
        store._client._stager._codec = None  # what is staged would fail
        assert store.store(hashes, slots[:4], [META] * 4) == [True] * 4
        assert store.load(hashes, slots[4:]) == [True] * 4
        assert slots[4:] == [block(digest) for digest in hashes]
        store.close()
    finally:
        free_slab(memory)


def test_each_block_is_on_as_many_nodes_as_asked_for_and_where_placement_says(make_nodes):
    nodes = make_nodes(num_replicas=2)
    services = [nodes.inside(name) for name in "abc"]
    store, hashes = nodes.client(), hashes_of(20)
    assert put(store, hashes) == [True] * 20
    for digest in hashes:
        wanted = {one.node_id for one in places([store.key(digest)], list(nodes.addresses.values()), 2)[0]}
        assert {one.node.node_id for one in services if store.key(digest) in set(one.node.keys())} == wanted
    assert get(store, hashes) == [True] * 20


def test_a_node_that_comes_gets_its_share_and_others_let_go_of_theirs(make_nodes):
    nodes = make_nodes(num_replicas=1)
    first = nodes.inside("a")
    store, hashes = nodes.client(), hashes_of(30)
    put(store, hashes)
    second = nodes.inside("b")
    until(lambda: first.repair.is_settled and second.repair.is_settled, "repair settles")
    there, here = held_by(second, store, hashes), held_by(first, store, hashes)
    expected = [
        one[0].node_id == "b" for one in places([store.key(h) for h in hashes], list(nodes.addresses.values()), 1)
    ]
    assert any(expected)
    assert there == expected
    assert [not one for one in here] == expected
    assert get(store, hashes) == [True] * 30


def test_blocks_are_found_before_they_have_moved(make_nodes):
    nodes = make_nodes(num_replicas=1)
    first = nodes.inside("a")
    store, hashes = nodes.client(), hashes_of(30)
    put(store, hashes)
    nodes.run(first.repair.aclose())  # it will never move them
    nodes.inside("b")
    assert get(store, hashes) == [True] * 30


# ---- room


def test_a_full_node_gives_up_what_was_used_least_recently(make_nodes):
    nodes = make_nodes(num_replicas=1, memory=8 * (BLOCK + 4096))
    service = nodes.inside("a")
    store, hashes = nodes.client(), hashes_of(8)
    put(store, hashes)
    assert get(store, hashes[:4]) == [True] * 4  # used
    assert put(store, more := hashes_of(4)) == [True] * 4
    assert store.contains(hashes + more) == [True] * 4 + [False] * 4 + [True] * 4
    assert service.node.counts().cached == 8


def test_pinned_blocks_stay_until_their_time_is_over(make_nodes):
    now = [0.0]
    nodes = make_nodes(num_replicas=1, memory=8 * (BLOCK + 4096))
    nodes.inside("a", clock=lambda: now[0])
    store, hashes = nodes.client(), hashes_of(8)
    put(store, hashes)
    store.pin(hashes[:3], 10.0)
    put(store, hashes_of(8))
    assert store.contains(hashes) == [True] * 3 + [False] * 5
    now[0] = 11.0
    put(store, hashes_of(8))
    assert store.contains(hashes) == [False] * 8


def test_a_tenant_over_its_quota_loses_blocks_of_its_own_only(make_nodes):
    nodes = make_nodes(num_replicas=1, memory=12 * (BLOCK + 4096), tenant_quota=4 * (BLOCK + 4096))
    nodes.inside("a")
    store, mine, theirs = nodes.client(), hashes_of(6), hashes_of(4)
    put(store, theirs, BlockMeta(None, 16, tenant="other"))
    put(store, mine, BlockMeta(None, 16, tenant="greedy"))
    assert store.contains(theirs) == [True] * 4
    assert sum(store.contains(mine)) == 4


def test_a_store_laid_out_for_smaller_blocks_refuses_larger_ones(make_nodes, caplog):
    nodes = make_nodes()
    nodes.inside("a")
    assert put(nodes.client(), hashes := hashes_of(1)) == [True]
    larger = nodes.client(2 * BLOCK)
    assert larger.store(hashes, [memoryview(bytes(2 * BLOCK))], [META]) == [False]
    assert "laid out for blocks of" in caplog.text


def test_blocks_come_back_from_the_disk_below_the_memory(make_nodes, tmp_path):
    def disk(row_bytes, quota):
        options = DiskOptions(is_admission_on=False, quota=quota)
        return DiskStore(tmp_path / "disk", 16 << 20, row_bytes, Namespace.of({"slot": row_bytes}), options=options)

    nodes = make_nodes(num_replicas=1, memory=8 * (BLOCK + 4096))
    service = nodes.inside("a", make_disk=disk)
    store, hashes = nodes.client(), hashes_of(20)
    for digest in hashes:
        assert put(store, [digest]) == [True]
        until(lambda: service.node.stats.to_disk == service.node.stats.kept, "written to disk")
    assert service.node.counts().cached == 8
    assert store.contains(hashes) == [True] * 20
    assert get(store, hashes[:4]) == [True] * 4
    assert service.node.stats.from_disk == 4
    store.delete(hashes[:4])
    assert store.contains(hashes[:5]) == [False] * 4 + [True]


def test_what_comes_back_from_disk_counts_for_its_tenant_and_takes_no_others_place(make_nodes, tmp_path):
    def disk(row_bytes, quota):
        options = DiskOptions(is_admission_on=False, quota=quota)
        return DiskStore(tmp_path / "disk", 16 << 20, row_bytes, Namespace.of({"slot": row_bytes}), options=options)

    nodes = make_nodes(num_replicas=1, memory=8 * (BLOCK + 4096))
    service = nodes.inside("a", make_disk=disk)
    store, mine, theirs = nodes.client(), hashes_of(6), hashes_of(5)
    for digest in mine:
        put(store, [digest], BlockMeta(None, 16, tenant="greedy"))
        until(lambda: service.node.stats.to_disk == service.node.stats.kept, "written to disk")
    service.set_quotas({"greedy": 3 * (BLOCK + 4096)})
    until(lambda: sum(store.contains(mine)) == 3, "the disk is trimmed")
    put(store, theirs, BlockMeta(None, 16, tenant="other"))
    in_memory = held_by(service, store, theirs)
    for _ in range(3):
        get(store, mine)
        assert held_by(service, store, theirs) == in_memory == [True] * 5
        assert sum(held_by(service, store, mine)) <= 3


# ---- what must be refused


def damage(service, key):
    """Change one byte where the node has this block."""
    slot = service.node._index.row(key)
    view = service.node._row_view(slot)
    view[7] ^= 1
    return slot


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_block_that_has_changed_in_a_nodes_memory_is_refused_and_deleted(make_nodes, transport):
    nodes = make_nodes(num_replicas=1)
    service = nodes.inside("a", transport=transport)
    store, hashes = nodes.client(transport=transport), hashes_of(5)
    put(store, hashes)
    damage(service, store.key(hashes[2]))
    assert get(store, hashes) == [True, True, False, True, True]
    assert store.stats().corrupt_blocks == 1
    until(lambda: not store.contains(hashes[2:3])[0], "the node has deleted it")


def test_without_its_checksum_the_changed_block_would_have_been_served(make_nodes):
    """The negative control of the test above."""
    import msgspec
    import xxhash

    nodes = make_nodes(num_replicas=1)
    service = nodes.inside("a")
    store, hashes, into = nodes.client(), hashes_of(1), [memoryview(bytearray(BLOCK))]
    put(store, hashes)
    slot = damage(service, store.key(hashes[0]))
    known = service.node._blocks[slot]
    service.node._blocks[slot] = msgspec.structs.replace(
        known, checksum=xxhash.xxh3_64_intdigest(service.node._row_view(slot)[:BLOCK])
    )
    assert store.load(hashes, into) == [True]
    assert into[0] != block(hashes[0])


def test_a_replica_serves_what_has_changed_on_the_first_node(make_nodes):
    nodes = make_nodes(num_replicas=2)
    services = {name: nodes.inside(name) for name in "ab"}
    store, hashes = nodes.client(), hashes_of(4)
    put(store, hashes)
    first = places([store.key(hashes[0])], list(nodes.addresses.values()), 2)[0][0].node_id
    damage(services[first], store.key(hashes[0]))
    assert get(store, hashes) == [True] * 4
    assert store.stats().corrupt_blocks == 1


def test_bytes_that_change_on_their_way_are_refused_at_both_ends(make_nodes, monkeypatch):
    def flip(memory, offset, num_bytes):
        memory.view[offset] ^= 1

    nodes = make_nodes(num_replicas=1)
    nodes.inside("a")
    good, hashes = nodes.client(), hashes_of(3)
    put(good, hashes)
    monkeypatch.setattr("kvrelay.kvtransfer.slabs.slabs.BlockArrival", damaged(BlockArrival, flip))
    assert get(nodes.client(), hashes) == [False] * 3


def test_a_block_that_the_client_writes_over_while_it_is_taken_is_not_kept(make_nodes):
    nodes = make_nodes(num_replicas=1)
    service = nodes.inside("a")
    store = nodes.client()

    async def lie():
        slab = SharedSlab(allocate_slab(BLOCK), SECRET, "127.0.0.1")
        await slab.start()
        peer = SlabPeer("127.0.0.1", service.server.port, SECRET, slab, peer_id="liar", block_bytes=BLOCK, answer_s=5.0)
        await peer.connect()
        try:
            return await peer.put([BlockOffer(b"k" * 16, 0, BLOCK, 1234)], within_s=5.0)
        finally:
            await peer.aclose()
            await slab.aclose()
            free_slab(slab.memory)

    assert nodes.run(lie()) == [False]
    assert service.node.stats.dropped == 1
    assert service.node.counts().reserved == 0
    assert put(store, hashes_of(2)) == [True] * 2


# ---- leases and clients that go


def num_leased(service):
    return sum(len(leases) for client in service.server._clients for leases, _ in client._leases.values())


async def connected(nodes, service, slab):
    peer = SlabPeer(
        "127.0.0.1", service.server.port, SECRET, slab, peer_id="p", block_bytes=BLOCK, answer_s=10.0, stall_s=10.0
    )
    await peer.connect()
    return peer


def test_a_lease_that_ends_frees_the_block_and_a_late_reader_is_told_by_the_checksum(make_nodes):
    nodes = make_nodes(num_replicas=1)
    service = nodes.inside("a", lease_s=0.05)
    store, hashes = nodes.client(), hashes_of(1)
    put(store, hashes)
    key = store.key(hashes[0])

    async def borrow():
        slab = SharedSlab(allocate_slab(BLOCK), SECRET, "127.0.0.1")
        await slab.start()
        peer = await connected(nodes, service, slab)
        try:
            lent = await peer._request(AcquireLease(number=99, keys=[key]), LeaseGranted)
            in_time = await peer._reader.read([BlockRead(lent.offsets[0], 0, BLOCK, lent.checksums[0])])
            while num_leased(service):  # its lease ends by itself
                await asyncio.sleep(0.01)
            await peer.forget([key])
            view = service.node._view
            view[lent.offsets[0] : lent.offsets[0] + 16] = b"another block's!"
            late = await peer._reader.read([BlockRead(lent.offsets[0], 0, BLOCK, lent.checksums[0])])
            peer._notify(ReleaseLease(number=99))  # too late: nothing happens
            return in_time, late
        finally:
            await peer.aclose()
            await slab.aclose()
            free_slab(slab.memory)

    assert nodes.run(borrow()) == ([True], [False])
    assert service.node.counts().held == 0


def test_a_client_that_goes_gives_back_what_was_lent_to_it(make_nodes):
    nodes = make_nodes(num_replicas=1)
    service = nodes.inside("a", lease_s=1000.0)
    store, hashes = nodes.client(), hashes_of(2)
    put(store, hashes)

    async def borrow_and_go():
        slab = SharedSlab(allocate_slab(BLOCK), SECRET, "127.0.0.1")
        await slab.start()
        peer = await connected(nodes, service, slab)
        await peer._request(AcquireLease(number=99, keys=[store.key(digest) for digest in hashes]), LeaseGranted)
        assert num_leased(service) == 2
        await peer.aclose()
        await slab.aclose()
        free_slab(slab.memory)

    nodes.run(borrow_and_go())
    until(lambda: num_leased(service) == 0 and service.node.counts().held == 0, "the blocks come back")


def test_no_more_than_half_the_slots_are_lent_at_once(make_nodes):
    nodes = make_nodes(num_replicas=1, memory=8 * (BLOCK + 4096))
    service = nodes.inside("a", lease_s=1000.0)
    store, hashes = nodes.client(), hashes_of(8)
    put(store, hashes)

    async def borrow():
        slab = SharedSlab(allocate_slab(BLOCK), SECRET, "127.0.0.1")
        await slab.start()
        peer = await connected(nodes, service, slab)
        try:
            lent = await peer._request(
                AcquireLease(number=1, keys=[store.key(digest) for digest in hashes]), LeaseGranted
            )
            return sum(offset >= 0 for offset in lent.offsets)
        finally:
            await peer.aclose()
            await slab.aclose()
            free_slab(slab.memory)

    assert nodes.run(borrow()) <= 5
    assert put(store, hashes_of(4)) == [True] * 4


def test_who_does_not_know_the_secret_gets_nothing(make_nodes):
    nodes = make_nodes(num_replicas=1)
    service = nodes.inside("a")
    store, hashes = nodes.client(), hashes_of(1)
    put(store, hashes)
    stranger = nodes.client(secret=b"another secret")
    assert stranger.contains(hashes) == get(stranger, hashes) == [False]
    assert len(service.server._clients) == 1


def test_a_node_that_is_not_there_costs_one_attempt_and_rests(make_nodes):
    nodes = make_nodes(num_replicas=2)
    nodes.inside("a")
    gone = nodes.inside("b")
    store, hashes = nodes.client(), hashes_of(10)
    put(store, hashes)
    nodes.run(gone.aclose())
    assert get(store, hashes) == [True] * 10
    assert get(store, hashes) == [True] * 10
    (down,) = [node for node in store._client.links.nodes if node.address.node_id == "b"]
    assert down.back_off.num_failures == 1
    del nodes.services["b"]


def test_a_forced_transport_that_cannot_be_is_told_at_the_start(make_nodes):
    nodes = make_nodes()
    nodes.inside("a")
    with pytest.raises(StoreError, match="no such transport"):
        nodes.client(transport="pigeon")


def test_random_bytes_instead_of_messages_end_that_connection_only(make_nodes):
    from kvrelay.plane import connection as plane

    nodes = make_nodes(num_replicas=1)
    service = nodes.inside("a")
    store, hashes = nodes.client(), hashes_of(1)
    put(store, hashes)

    async def babble():
        connection = await plane.connect("127.0.0.1", service.server.port, SECRET)
        await connection.send(np.random.default_rng(0).bytes(100))
        with pytest.raises(Exception, match="closed"):
            await connection.receive()
        await connection.aclose()

    nodes.run(babble())
    assert get(store, hashes) == [True]


def test_a_take_from_a_slab_that_was_never_offered_fails_alone(make_nodes):
    nodes = make_nodes(num_replicas=1)
    service = nodes.inside("a")
    store, hashes = nodes.client(), hashes_of(1)

    async def ask():
        peer = SlabPeer("127.0.0.1", service.server.port, SECRET, None, peer_id="p", block_bytes=BLOCK, answer_s=5.0)
        await peer.connect()
        try:
            wrong = PutBlocks(number=7, hold_s=1.0, blocks=[BlockOffer(b"k" * 16, 0, BLOCK, 1)])
            with pytest.raises(Exception, match="never offered"):
                await peer._request(wrong, LeaseGranted)
            return await peer.get([BlockRequest(b"k" * 16, 0, BLOCK)])
        finally:
            await peer.aclose()

    assert nodes.run(ask()) == [0]
    assert put(store, hashes) == [True]
