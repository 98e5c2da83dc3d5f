"""A quota over all nodes of the store, kept by each node alone: the bound, and that it can be used."""

import random

import pytest

from kvrelay.cluster.store.node_quotas import NodeQuotas
from kvrelay.kvcache.eviction.policies import Lru
from kvrelay.kvcache.index.tier_index import TierIndex, in_rows
from kvrelay.kvcache.stores.placement import StoreAddress, places
from kvrelay.types import BlockHash

pytestmark = pytest.mark.pure

ROW = 1000  # bytes of a block
QUOTA = 600 * ROW


class Store:
    """Nodes of these numbers of rows, as a client writes to them."""

    def __init__(self, sizes, num_replicas, default=None):
        self.num_replicas, self.now_s = num_replicas, 0.0
        self.random = random.Random(0)
        self.addresses = [StoreAddress(f"n{i}", "127.0.0.1", 1, rows * ROW) for i, rows in enumerate(sizes)]
        self.quotas = {one.node_id: NodeQuotas(default) for one in self.addresses}
        self.indexes = {
            one.node_id: TierIndex(rows, Lru(), quota=in_rows(self.quotas[one.node_id].bytes_here, ROW))
            for one, rows in zip(self.addresses, sizes, strict=True)
        }
        self.set_nodes(self.addresses)

    def set_nodes(self, addresses):
        self.addresses = addresses
        for one in addresses:
            self.quotas[one.node_id].set_nodes(one, addresses, self.num_replicas)
            self.indexes[one.node_id].trim(self.now_s)

    def set_quotas(self, **by_tenant):
        for name, quotas in self.quotas.items():
            quotas.set_quotas(by_tenant)
            self.indexes[name].trim(self.now_s)

    def write(self, tenant, count):
        """So many new blocks; returns their keys."""
        keys = [BlockHash(self.random.randbytes(16)) for _ in range(count)]
        for key, nodes in zip(keys, places(keys, self.addresses, self.num_replicas), strict=True):
            self.now_s += 1
            for node in nodes:
                index = self.indexes[node.node_id]
                if rows := index.reserve(1, self.now_s, tenant=tenant):
                    index.put(key, rows[0], self.now_s, parent=None, end_tokens=16)
        return keys

    def num_bytes(self, keys):
        """Of all copies of these blocks."""
        return ROW * sum(key in self.indexes[one.node_id] for one in self.addresses for key in keys)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(2000,), (900, 900), (500, 1000, 2500), (400, 400, 400, 8000)])
def test_whatever_a_tenant_writes_its_copies_on_uneven_nodes_stay_within_its_quota_and_others_stay(sizes, num_replicas):
    store = Store(sizes, num_replicas)
    store.set_quotas(greedy=QUOTA)
    others = store.write("modest", 100)
    copies = store.num_bytes(others)
    mine = store.write("greedy", 1000)
    assert store.num_bytes(mine) <= QUOTA
    assert store.num_bytes(mine) >= 0.98 * QUOTA, "it cannot use what it may have"
    assert store.num_bytes(others) == copies
    used = store.write("greedy", 5 * sum(sizes))
    assert store.num_bytes(mine) == 0 and store.num_bytes(used) >= 0.98 * QUOTA, "the newest stay"
    assert store.num_bytes(others) == copies


def test_nothing_goes_before_the_quota_is_nearly_full_though_placement_is_by_chance():
    """Some node has more of a tenant's blocks than its share: by a few in a hundred here."""
    store = Store((500, 1000, 2500), 2)
    store.set_quotas(greedy=QUOTA)
    keys = store.write("greedy", 270)  # nine tenths of the quota, in two copies
    assert store.num_bytes(keys) >= 0.99 * 2 * 270 * ROW


def test_nodes_that_come_and_go_change_the_parts_and_not_the_sum():
    store = Store((1000, 1000, 1000), 2)
    store.set_quotas(greedy=QUOTA)
    keys, all_three = store.write("greedy", 2000), store.addresses
    for nodes in (all_three[:1], all_three[:2], all_three):
        store.set_nodes(nodes)
        keys += store.write("greedy", 1000)
        assert 0.98 * QUOTA <= store.num_bytes(keys) <= QUOTA


def test_a_quota_that_changes_holds_at_once_and_one_that_is_taken_back_leaves_the_default():
    store = Store((1000, 2000), 2, default=900 * ROW)
    keys = store.write("greedy", 2000)
    assert 0.98 * 900 * ROW <= store.num_bytes(keys) <= 900 * ROW
    store.set_quotas(greedy=QUOTA)
    assert store.num_bytes(keys) <= QUOTA
    store.set_quotas()
    keys += store.write("greedy", 2000)
    assert 0.98 * 900 * ROW <= store.num_bytes(keys) <= 900 * ROW


def test_a_quota_below_one_block_keeps_none():
    store = Store((1000, 1000), 2)
    store.set_quotas(greedy=ROW)
    assert store.num_bytes(store.write("greedy", 20)) == 0  # one row, in two parts
