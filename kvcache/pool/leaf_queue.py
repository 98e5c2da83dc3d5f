"""Which leaves of the prefix index are evicted first: by priority, the policy's score, and time in the queue. Pure.

A leaf that is used again gets a new entry, and its old one is void.
"""

import heapq
import itertools
from collections.abc import Iterator

from kvrelay.hashing import HASH_BYTES, tenant_name
from kvrelay.kvcache.eviction.policies import EvictionPolicy, EvictionQueue
from kvrelay.kvcache.pool.radix import RadixNode, RadixTree
from kvrelay.types import BlockHash, BlockId, BlockMeta, IndexedBlock


class LeafQueue(EvictionQueue[int]):
    """The evictable leaves of one tree, by the indices of their nodes; a ticket is the stamp of a node."""

    def __init__(self, tree: RadixTree, policy: EvictionPolicy) -> None:
        super().__init__(self._is_leaf)
        self._tree, self._policy = tree, policy
        self.stamps = itertools.count(1)
        self._num_revisions = policy.num_revisions

    def _is_leaf(self, index: int, stamp: int) -> bool:
        node = self._tree.nodes[index]
        return node is not None and node.stamp == stamp and not node.children and len(node.blocks) > node.held

    def next_leaf(self, now_s: float) -> RadixNode:
        """The leaf to evict from first; it stays queued. The caller knows that there is one."""
        if self._policy.num_revisions != self._num_revisions:
            self._rescore(now_s)
        items, nodes = self.items, self._tree.nodes
        while True:
            _, _, stamp, index = items[0]
            node = nodes[index]
            if node is not None and node.stamp == stamp and not node.children and len(node.blocks) > node.held:
                return node
            heapq.heappop(items)

    def _rescore(self, now_s: float) -> None:
        """The policy has revised its scores: ask again for every queued leaf."""
        self._num_revisions, nodes, score = self._policy.num_revisions, self._tree.nodes, self._policy.score
        self.items = [
            (priority, score(node.usage, now_s), stamp, index)
            for priority, _, stamp, index in self.items
            if self._is_leaf(index, stamp) and (node := nodes[index])
        ]
        heapq.heapify(self.items)

    def in_order(self) -> Iterator[RadixNode]:
        """Leaves in eviction order, lazily."""
        heap = self.items
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            entry, at = heapq.heappop(frontier)
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(heap):
                    heapq.heappush(frontier, (heap[child], child))
            leaf = self._tree.nodes[entry[3]]
            if leaf is not None and self._is_leaf(entry[3], entry[2]):
                yield leaf

    def members(self) -> set[int]:
        """Indices of the queued nodes."""
        return {index for _, _, stamp, index in self.items if self._is_leaf(index, stamp)}

    def candidates(self) -> Iterator[IndexedBlock]:
        """Blocks roughly in eviction order: leaves from their ends, then the nodes that become leaves."""
        num_evicted: dict[int, int] = {}  # by node: children evicted by then
        for leaf in self.in_order():
            here: RadixNode | None = leaf
            while here is not None and here.parent is not None and num_evicted.get(here.index, 0) == len(here.children):
                for at in range(len(here.blocks) - 1, here.held - 1, -1):
                    yield self._describe(here, at)
                here = here.parent if not here.held else None
                if here is not None:
                    num_evicted[here.index] = num_evicted.get(here.index, 0) + 1

    def _describe(self, node: RadixNode, at: int) -> IndexedBlock:
        """Block number `at` of this node."""
        tree, end = self._tree, at * HASH_BYTES
        before = node if at else node.parent
        above = before.digests[end - HASH_BYTES : end or None] if before is not None else b""
        end_tokens = (node.start + at + 1) * tree.block_size
        root = tree.root_of(node).usage.digest
        digest, block = BlockHash(bytes(node.digests[end : end + HASH_BYTES])), BlockId(node.blocks[at])
        meta = BlockMeta(
            BlockHash(bytes(above)) if above else None, end_tokens, node.priority, tenant_name(root), root=root
        )
        return IndexedBlock(digest, block, meta)
