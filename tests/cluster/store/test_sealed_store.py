"""Sealed blocks in the cluster's own store: its nodes keep what they cannot read, and workers read each other's plain
memory all the same.
"""

import msgspec
import pytest
import xxhash

from kvrelay.cluster.store.service import _disk
from kvrelay.config import settings_from
from kvrelay.kvcache.stores.placement import places
from kvrelay.kvtransfer.slabs.slabs import allocate_slab, free_slab
from tests.cluster.store.store_nodes import until
from tests.kvcache.stores.sealed_contract import NAMESPACE, SealedContract, StoredPayloads, lies_in, sealed
from tests.kvcache.stores.store_contract import BLOCK_BYTES, assert_right, chain, content, fetch, keep

pytestmark = pytest.mark.processes


class NodePayloads(StoredPayloads):
    """The blocks in a node's memory, for someone who rules its machine: checksums are made to fit."""

    def __init__(self, node):
        self._node = node

    def everything(self):
        return bytes(self._node._view)

    def read(self):
        rows = {bytes(key): self._node._index.row(key) for key in self._node._index.hashes()}
        return {key: bytes(self._node._row_view(row)[: self._node._blocks[row].num_bytes]) for key, row in rows.items()}

    def write(self, name, payload):
        row = self._node._index.row(name)
        self._node._row_view(row)[: len(payload)] = payload
        checksum = xxhash.xxh3_64_intdigest(payload)
        changed = msgspec.structs.replace(self._node._blocks[row], num_bytes=len(payload), checksum=checksum)
        self._node._blocks[row] = changed


class TestSealedClusterStore(SealedContract):
    @pytest.fixture
    def nodes(self, make_nodes):
        nodes = make_nodes(num_replicas=1)
        nodes.inside("a")
        return nodes

    @pytest.fixture
    def open_sealed(self, nodes):
        return lambda codec: nodes.client(BLOCK_BYTES, NAMESPACE.with_fields(codec=codec.name).digest, codec=codec)

    @pytest.fixture
    def payloads(self, nodes):
        return NodePayloads(nodes.services["a"].node)


def test_sealed_blocks_are_read_from_the_callers_slab_and_into_it(make_nodes):
    nodes = make_nodes()
    nodes.inside("a")
    memory, (hashes, metas) = allocate_slab(8 * BLOCK_BYTES), chain(4)
    try:
        store = nodes.client(BLOCK_BYTES, codec=sealed(), memory=memory)
        slots = [memory.view[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES] for i in range(8)]
        for digest, slot in zip(hashes, slots, strict=False):
            slot[:] = content(digest)
        assert store.is_shareable and store.store(hashes, slots[:4], metas) == [True] * 4
        assert store.load(hashes, slots[4:], metas) == [True] * 4
        assert assert_right(hashes, slots[4:]) == 4
        store.close()
    finally:
        free_slab(memory)


def test_a_replica_serves_what_was_changed_together_with_its_checksum_on_the_first_node(make_nodes):
    nodes = make_nodes(num_replicas=2)
    services = {name: nodes.inside(name) for name in "ab"}
    store, (hashes, metas) = nodes.client(BLOCK_BYTES, codec=sealed()), chain(4)
    keep(store, hashes, metas)
    key = store.key(hashes[0])
    first = NodePayloads(services[places([key], list(nodes.addresses.values()), 2)[0][0].node_id].node)
    first.write(key, first.read()[key][::-1])
    assert assert_right(hashes, fetch(store, hashes)) == 4
    assert store.stats().corrupt_blocks == 1


@pytest.mark.parametrize("is_sealed", [True, False])
def test_what_a_node_has_on_disk_is_as_sealed_as_it_came_and_found_after_a_restart(make_nodes, tmp_path, is_sealed):
    settings = settings_from(
        {
            "cache": {"host_memory": "1MiB", "remote": "cluster", "sealed": is_sealed},
            "store": {"disk_path": str(tmp_path), "disk_size": "4MiB"},
        }
    )
    nodes, (hashes, metas) = make_nodes(num_replicas=1), chain(4)
    service = nodes.inside("a", make_disk=_disk(settings, "a"))
    store = nodes.client(BLOCK_BYTES, codec=sealed() if is_sealed else None)
    keep(store, hashes, metas)
    until(lambda: service.node.stats.to_disk == 4, "all are on disk")
    nodes.run(nodes.services.pop("a").aclose())
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert lies_in(stored, hashes) is not is_sealed
    again = nodes.inside("a", make_disk=_disk(settings, "a"))
    assert store.contains(hashes) == [True] * 4
    assert assert_right(hashes, fetch(store, hashes)) == again.node.stats.from_disk == 4


def test_what_was_stored_plain_is_not_taken_for_sealed_on_a_nodes_disk(tmp_path):
    """And so is never served again; its folder stays until someone deletes it."""
    folders = []
    for is_sealed in (False, True, False):
        cache = {"host_memory": "1MiB", "remote": "cluster", "sealed": is_sealed}
        make = _disk(settings_from({"cache": cache, "store": {"disk_path": str(tmp_path)}}), "a")
        disk = make(16384, lambda tenant: None)
        disk.start()
        folders.append(disk._folder.path.name)
        disk.close()
    assert folders == ["worker-0", "worker-1", "worker-0"]
