"""Which leaves of the prefix index are evicted first: by priority, the policy's score, and time in the queue. Pure.

A heap with void entries: a leaf that is used again gets a new entry, and its old one is skipped.
"""

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from kvrelay.hashing import HASH_BYTES, tenant_name
from kvrelay.kvcache.eviction.registry import EvictionPolicy
from kvrelay.kvcache.pool.radix import RadixNode, RadixTree
from kvrelay.types import BlockHash, BlockId

_Entry = tuple[int, float, int, int]  # priority, score, stamp, index of the node


class EvictionCandidate(NamedTuple):
    """An indexed block that may be evicted soon. `end_tokens`: from the prompt's beginning to the block's end."""

    digest: BlockHash
    block: BlockId
    parent: BlockHash | None
    end_tokens: int
    priority: int
    tenant: str  # see hashing.tenant_name


class LeafQueue:
    """The evictable leaves of one tree. Void entries are removed when they are the majority."""

    def __init__(self, tree: RadixTree, policy: EvictionPolicy) -> None:
        self._tree, self._policy = tree, policy
        self._heap: list[_Entry] = []
        self._stamp = 0
        self._num_revisions = policy.num_revisions

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, node: RadixNode, now_s: float) -> None:
        """This leaf is evictable from now on; an older entry of it is void."""
        self._stamp += 1
        node.stamp = self._stamp
        score = self._policy.score(node.usage, now_s)
        heapq.heappush(self._heap, (node.priority, score, node.stamp, node.index))
        if len(self._heap) > 64 + 4 * self._tree.num_nodes:
            self._heap = [entry for entry in self._heap if self._leaf(entry) is not None]
            heapq.heapify(self._heap)

    def _leaf(self, entry: _Entry) -> RadixNode | None:
        """The leaf of a valid entry, else None."""
        node = self._tree.nodes[entry[3]]
        return node if node is not None and node.stamp == entry[2] and node.is_open else None

    def first(self, now_s: float) -> RadixNode:
        """The leaf to evict from first; it stays queued. The caller knows that there is one."""
        if self._policy.num_revisions != self._num_revisions:
            self._rescore(now_s)
        heap, nodes = self._heap, self._tree.nodes
        while True:
            _, _, stamp, index = heap[0]
            node = nodes[index]
            if node is not None and node.stamp == stamp and not node.children and len(node.blocks) > node.held:
                return node
            heapq.heappop(heap)

    def _rescore(self, now_s: float) -> None:
        """The policy has revised its scores: ask again for every queued leaf."""
        self._num_revisions = self._policy.num_revisions
        leaves = [(entry, leaf) for entry in self._heap if (leaf := self._leaf(entry)) is not None]
        self._heap = [(entry[0], self._policy.score(leaf.usage, now_s), entry[2], entry[3]) for entry, leaf in leaves]
        heapq.heapify(self._heap)

    def in_order(self) -> Iterator[RadixNode]:
        """Leaves in eviction order, lazily."""
        heap = self._heap
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            entry, at = heapq.heappop(frontier)
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(heap):
                    heapq.heappush(frontier, (heap[child], child))
            if (leaf := self._leaf(entry)) is not None:
                yield leaf

    def members(self) -> set[int]:
        """Indices of the queued nodes."""
        return {entry[3] for entry in self._heap if self._leaf(entry) is not None}

    def candidates(self) -> Iterator[EvictionCandidate]:
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

    def _describe(self, node: RadixNode, at: int) -> EvictionCandidate:
        """Block number `at` of this node."""
        tree, end = self._tree, at * HASH_BYTES
        before = node if at else node.parent
        above = before.digests[end - HASH_BYTES : end or None] if before is not None else b""
        end_tokens = (node.start + at + 1) * tree.block_size
        tenant = tenant_name(tree.root_of(node).usage.digest)
        digest, block = BlockHash(bytes(node.digests[end : end + HASH_BYTES])), BlockId(node.blocks[at])
        return EvictionCandidate(
            digest, block, BlockHash(bytes(above)) if above else None, end_tokens, node.priority, tenant
        )
