"""Which nodes keep which block: everyone agrees, shares are as the capacities, and a change moves no more than it
must.
"""

import random
from collections import Counter

import pytest

from kvrelay.kvcache.stores.placement import StoreAddress, copy_share, places, ranked

pytestmark = pytest.mark.pure


RNG = random.Random(0)
KEYS = [RNG.randbytes(16) for _ in range(4000)]


def node(name, gib=1, epoch=""):
    return StoreAddress(name, "127.0.0.1", 1, gib << 30, epoch)


def ids(found):
    return [[one.node_id for one in row] for row in found]


def test_the_order_of_the_list_an_address_and_an_epoch_do_not_matter():
    nodes = [node(f"n{i}") for i in range(5)]
    moved = [StoreAddress(one.node_id, "10.0.0.1", 99, one.capacity_bytes, "new") for one in reversed(nodes)]
    assert ids(places(KEYS, nodes, 2)) == ids(places(KEYS, moved, 2))


def test_placement_is_the_same_in_every_version():
    nodes = [node(f"n{i}") for i in range(4)]
    assert ids(places([bytes(range(16)), bytes(16)], nodes, 4)) == [["n0", "n3", "n1", "n2"], ["n1", "n3", "n2", "n0"]]


def test_replicas_are_on_different_nodes_and_as_many_as_there_can_be():
    nodes = [node(f"n{i}") for i in range(3)]
    for wanted, there in ((1, 1), (2, 2), (3, 3), (5, 3)):
        assert all(len(set(row)) == len(row) == there for row in ids(places(KEYS[:200], nodes, wanted)))
    assert ids(places(KEYS[:2], [], 2)) == [[], []]
    assert places([], nodes, 2) == []


@pytest.mark.parametrize("gibs", [(1, 1, 1), (1, 2, 5)])
def test_a_nodes_share_of_the_first_places_is_its_share_of_the_capacity(gibs):
    nodes = [node(f"n{i}", gib) for i, gib in enumerate(gibs)]
    counts = Counter(row[0] for row in ids(places(KEYS, nodes, 1)))
    for one, gib in zip(nodes, gibs, strict=True):
        assert counts[one.node_id] / len(KEYS) == pytest.approx(gib / sum(gibs), abs=0.04)


def test_who_joins_takes_only_its_share_and_moves_nothing_else():
    nodes = [node(f"n{i}") for i in range(4)]
    before, after = ids(places(KEYS, nodes, 1)), ids(places(KEYS, [*nodes, node("new")], 1))
    moved = [now for was, now in zip(before, after, strict=True) if was != now]
    assert all(row == ["new"] for row in moved)
    assert len(moved) / len(KEYS) == pytest.approx(1 / 5, abs=0.04)


def test_who_goes_leaves_only_its_own_blocks_to_others():
    nodes = [node(f"n{i}") for i in range(5)]
    before, after = ids(places(KEYS, nodes, 2)), ids(places(KEYS, nodes[1:], 2))
    for was, now in zip(before, after, strict=True):
        assert [name for name in was if name != "n0"] == now[: len(was) - was.count("n0")]


def test_after_a_change_a_block_is_among_its_first_places_and_one_more():
    """What clients rely on: they look in so many places that a block which has not moved yet is found."""
    nodes = [node(f"n{i}") for i in range(4)]
    before, after = ids(places(KEYS, nodes, 1)), ids(places(KEYS, [*nodes, node("new")], 2))
    assert all(was[0] in now for was, now in zip(before, after, strict=True))


def test_all_nodes_are_ranked():
    nodes = [node(f"n{i}") for i in range(6)]
    assert all(sorted(row) == list(range(6)) for row in ranked(KEYS[:50], nodes).tolist())


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(1,), (1, 1), (1, 2, 5), (1, 1, 1, 20)])
def test_the_shares_of_all_copies_add_up_to_one_and_are_where_copies_go(sizes, num_replicas):
    nodes = [node(f"n{i}", gib) for i, gib in enumerate(sizes)]
    shares = [copy_share(one, [other for other in nodes if other is not one], num_replicas) for one in nodes]
    assert sum(shares) == 1
    copies = Counter(one.node_id for row in places(KEYS, nodes, num_replicas) for one in row)
    for one, share in zip(nodes, shares, strict=True):
        assert copies[one.node_id] / copies.total() == pytest.approx(float(share), abs=0.02)
