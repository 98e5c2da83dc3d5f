"""Which host and which direction a fault of hosts harms; the same is undone."""

import pytest

from kvrelay.cluster.chaos.hosts.cluster import HEAD
from kvrelay.cluster.chaos.hosts.faults import HOST_FAULTS

pytestmark = pytest.mark.pure

CHOICES = [number / 40 for number in range(40)]


class FakeHosts:
    """Notes which packets are lost: (host, to)."""

    count = 3

    def __init__(self):
        self.lost = set()

    def deafen(self, host, to):
        self.lost.add((host, to))

    def reconcile(self, host, to):
        self.lost.remove((host, to))


class FakeCluster:
    """Its hosts."""

    def __init__(self):
        self.hosts = FakeHosts()


async def test_a_one_way_link_loses_what_one_of_two_hosts_sends_to_the_other():
    cluster = FakeCluster()
    kind = HOST_FAULTS["one-way-link"](cluster)
    seen = set()
    for choice in CHOICES:
        await kind.strike(choice)
        seen |= cluster.hosts.lost
        assert len(cluster.hosts.lost) == 1
        kind.undo()
        assert not cluster.hosts.lost
    assert seen == {(HEAD, 2), (2, HEAD), (HEAD, 3), (3, HEAD)}


def test_the_workers_of_a_host_are_not_harmed_otherwise():
    for make in HOST_FAULTS.values():
        kind = make(FakeCluster())
        assert {"decode", "prefill"} <= set(kind.also) and kind.is_held and not kind.overlaps
