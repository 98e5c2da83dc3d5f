"""Nodes of the store that die or freeze at any time: what is served afterwards is right, and copies come back."""

import asyncio
import json
import os
import secrets
import signal
import threading

import pytest

from kvrelay.kvcache.stores.placement import places
from kvrelay.kvcache.stores.store import BackOff
from kvrelay.kvtransfer.slabs.slabs import SlabReader, StuckRead
from tests.cluster.store.store_nodes import BLOCK, META, block, until

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def hashes_of(count):
    return [secrets.token_bytes(16) for _ in range(count)]


def put(store, hashes):
    return store.store(hashes, [memoryview(block(digest)) for digest in hashes], [META] * len(hashes))


def get(store, hashes):
    """Which were served; AssertionError when one was wrong."""
    into = [memoryview(bytearray(BLOCK)) for _ in hashes]
    loaded = store.load(hashes, into)
    assert all(view == block(digest) for digest, view, good in zip(hashes, into, loaded, strict=True) if good)
    return loaded


def described(store):
    return {
        one["node_id"]: one
        for one in map(json.loads, store._wait(store._client.links.everywhere(lambda peer: peer.describe())))
    }


def total(store):
    return sum(one["blocks"] for one in described(store).values())


def kill(nodes, name):
    nodes.kill(name, signal.SIGKILL)
    nodes.run(nodes.processes.pop(name).process.wait())


def test_nodes_killed_during_puts_gets_and_repair_lose_nothing_that_has_another_copy(make_nodes):
    nodes = make_nodes(num_replicas=2, memory="32MiB")
    nodes.process("a", "b", "c", "d")
    store, hashes = nodes.client(), hashes_of(64)
    assert put(store, hashes) == [True] * 64
    problems, is_over, more = [], threading.Event(), hashes_of(64)

    def work(first):
        try:
            while not is_over.is_set():
                for at in range(first, 64, 2):
                    get(store, hashes[at : at + 8])
                    put(store, more[at : at + 8])
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: total(store) > 140, "puts are under way")
        kill(nodes, "a")  # in the middle of puts and gets
        assert get(store, hashes) == [True] * 64, "the other copies serve before anyone has been told"
        nodes.tell("a")
        until(lambda: sum(map(bool, get(store, hashes))) == 64, "all are served from what is left")
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert problems == []
    put(store, more)
    left = [nodes.addresses[name] for name in "bcd"]
    until(lambda: total(store) >= 2 * 128, "every block has two copies again")
    first = {digest: places([store.key(digest)], left, 2)[0][0].node_id for digest in hashes}
    kill(nodes, "b")
    nodes.tell("b")  # repair begins
    assert get(store, hashes) == [True] * 64, f"placed first on b were {sum(name == 'b' for name in first.values())}"
    nodes.process("e")
    kill(nodes, "e")  # the one to whom repair has begun to copy
    nodes.tell("e")
    until(lambda: total(store) >= 2 * 128, "every block has two copies again")
    assert get(store, hashes) == [True] * 64
    assert get(store, more) == [True] * 64


def test_a_node_that_is_started_again_is_filled_again(make_nodes):
    nodes = make_nodes(num_replicas=2)
    nodes.process("a", "b")
    store, hashes = nodes.client(), hashes_of(20)
    put(store, hashes)
    kill(nodes, "a")
    nodes.tell("a")
    nodes.process("a")
    until(lambda: described(store).get("a", {}).get("blocks") == 20, "the new one has copies")
    kill(nodes, "b")
    nodes.tell("b")
    assert get(store, hashes) == [True] * 20


def test_a_block_that_could_not_be_copied_is_copied_later(make_nodes, monkeypatch):
    nodes = make_nodes(num_replicas=2)
    node = nodes.inside("a").node
    store, hashes = nodes.client(), hashes_of(20)
    put(store, hashes)
    lease, refused = node.lease, []

    async def once_refused(keys):
        if not refused:
            refused.extend(keys)
            return [None] * len(keys)
        return await lease(keys)

    monkeypatch.setattr(node, "lease", once_refused)
    nodes.inside("b")
    until(lambda: described(store).get("b", {}).get("blocks") == 20, "the new one has copies")
    assert refused


def test_a_block_put_by_a_client_that_has_not_heard_of_the_change_gets_its_second_copy(make_nodes, monkeypatch):
    nodes = make_nodes(num_replicas=2)
    repair = nodes.inside("a").repair
    store, hashes, sweep = nodes.client(), hashes_of(20), repair.sweep
    monkeypatch.setattr(store, "set_nodes", lambda nodes: None)
    answers = []

    async def sweep_before_the_put():
        is_complete = await sweep()
        if not answers:
            answers.append(await asyncio.to_thread(put, store, hashes))
        return is_complete

    monkeypatch.setattr(repair, "sweep", sweep_before_the_put)
    node = nodes.inside("b").node
    until(lambda: len(node.keys()) == 20, "the new one has copies")
    assert answers == [[True] * 20]


def test_a_node_with_a_disk_has_its_blocks_again_after_a_kill(make_nodes, tmp_path):
    nodes = make_nodes(num_replicas=1, disk_path=str(tmp_path), disk_size="16MiB")
    nodes.process("a")
    store, hashes = nodes.client(), hashes_of(10)
    put(store, hashes)
    until(lambda: described(store)["a"]["stats"]["to_disk"] == 10, "all are on disk")
    kill(nodes, "a")
    nodes.tell("a")
    assert get(store, hashes) == [False] * 10
    nodes.process("a")
    assert store.contains(hashes) == [True] * 10
    assert get(store, hashes) == [True] * 10
    assert described(store)["a"]["stats"]["from_disk"] == 10


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_frozen_node_costs_one_wait_and_its_copies_elsewhere_serve(make_nodes, transport):
    nodes = make_nodes(num_replicas=2)
    nodes.process("a", "b")
    store, hashes = nodes.client(answer_s=0.5, stall_s=0.5, transport=transport), hashes_of(20)
    assert put(store, hashes) == [True] * 20
    nodes.kill("a", signal.SIGSTOP)
    more = hashes_of(10)
    assert get(store, hashes) == [True] * 20
    (frozen,) = [node for node in store._client.links.nodes if node.address.node_id == "a"]
    assert (frozen.peer, frozen.back_off.num_failures) == (None, 1)
    assert get(store, hashes) == [True] * 20
    assert put(store, more) == [True] * 10
    assert get(store, more) == [True] * 10
    frozen.back_off = BackOff()  # the back-off has ended
    nodes.kill("a", signal.SIGCONT)
    until(lambda: len(described(store)) == 2, "it is asked again")
    assert get(store, hashes) == [True] * 20


def test_a_client_that_is_killed_leaves_nothing_behind(make_nodes):
    """In the middle of a Put: what was being read from it is dropped, or kept whole."""
    nodes = make_nodes(num_replicas=1)
    service = nodes.inside("a")
    store = nodes.client()
    assert put(store, hashes_of(1)) == [True]
    script = (
        "import sys\n"
        "from tests.cluster.store.store_nodes import *\n"
        "from kvrelay.kvcache.stores.placement import StoreAddress\n"
        f"store = RemoteStore(BLOCK, b'n' * 16, ClientOptions(SECRET, 'w', '127.0.0.1', num_replicas=1),\n"
        f"    nodes=[StoreAddress('a', '127.0.0.1', {service.server.port}, 1)])\n"
        "store.start()\n"
        "print('ready', flush=True)\n"
        "n = 0\n"
        "while True:\n"
        "    n += 1\n"
        "    names = [(n * 16 + i).to_bytes(16, 'little') for i in range(16)]\n"
        "    store.store(names, [memoryview(block(name)) for name in names], [META] * 16)\n"
    )
    import subprocess
    import sys
    from pathlib import Path

    root = str(Path(__file__).resolve().parents[3])
    environment = {**os.environ, "PYTHONPATH": root}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=root, env=environment) as child:
        child.stdout.readline()
        until(lambda: service.node.stats.kept > 40, "it has put some")
        child.kill()
    until(lambda: len(service.server._clients) == 1, "its connection has ended")
    until(lambda: service.node.counts().reserved == 0, "nothing is reserved for it")
    known = [n.to_bytes(16, "little") for n in range(16, 16 + service.node.stats.kept)]
    assert sum(get(store, known)) > 0
    service.node._index.check()


def test_a_read_that_cannot_be_stopped_keeps_its_place_until_it_ends(make_nodes, monkeypatch):
    """What NIXL may do: the staging place is not used again while bytes may still land in it."""
    nodes = make_nodes(num_replicas=1)
    nodes.inside("a")
    store, hashes = nodes.client(), hashes_of(3)
    put(store, hashes)
    staging, reads, fetch = store._client._staging, [], SlabReader.read

    async def stuck(self, blocks):
        import asyncio

        reads.append(asyncio.get_running_loop().create_future())
        raise StuckRead("stuck", reads[-1])

    monkeypatch.setattr(SlabReader, "read", stuck)
    assert get(store, hashes) == [False] * 3
    assert len(staging._free) == staging.num_cells - 3
    monkeypatch.setattr(SlabReader, "read", fetch)
    for node in store._client.links.nodes:
        node.back_off = BackOff()  # the back-off has ended
    assert get(store, hashes) == [True] * 3
    assert len(staging._free) == staging.num_cells - 3
    store._loop.call_soon_threadsafe(reads[0].set_result, None)
    until(lambda: len(staging._free) == staging.num_cells, "the place is free again")
