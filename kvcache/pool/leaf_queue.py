"""Which leaves of the prefix index go first: by priority, then by the policy's score, then by how long they have been in line. Pure.

A heap with void entries: a leaf that is used again gets a new entry, and the old one is skipped when it comes up.
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
    """A named block that may go soon. `end_tokens`: from the prompt's beginning to the block's end."""

    digest: BlockHash
    block: BlockId
    parent: BlockHash | None
    end_tokens: int
    priority: int
    tenant: str  # see hashing.tenant_name


class LeafQueue:
    """The open leaves of one tree. Bounded: void entries are swept when they are most of it."""

    def __init__(self, tree: RadixTree, policy: EvictionPolicy) -> None:
        self._tree, self._policy = tree, policy
        self._heap: list[_Entry] = []
        self._stamp = 0
        self._num_revisions = policy.num_revisions

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, node: RadixNode, now_s: float) -> None:
        """This leaf may go from now on; an older entry of it is void."""
        self._stamp += 1
        node.stamp = self._stamp
        score = self._policy.score(node.usage, now_s)
        heapq.heappush(self._heap, (node.priority, score, node.stamp, node.index))
        if len(self._heap) > 64 + 4 * self._tree.num_nodes:
            self._heap = [entry for entry in self._heap if self._leaf(entry) is not None]
            heapq.heapify(self._heap)

    def _leaf(self, entry: _Entry) -> RadixNode | None:
        """The leaf of an entry that still counts."""
        node = self._tree.nodes[entry[3]]
        return node if node is not None and node.stamp == entry[2] and node.is_open else None

    def first(self, now_s: float) -> RadixNode:
        """The leaf that goes first; it stays in line. The caller knows that there is one."""
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
        """The policy has changed its mind: ask again for every leaf in line."""
        self._num_revisions = self._policy.num_revisions
        leaves = [(entry, leaf) for entry in self._heap if (leaf := self._leaf(entry)) is not None]
        self._heap = [(entry[0], self._policy.score(leaf.usage, now_s), entry[2], entry[3]) for entry, leaf in leaves]
        heapq.heapify(self._heap)

    def in_order(self) -> Iterator[RadixNode]:
        """Leaves in the order in which they would go, looking no further than is asked for."""
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
        """Indices of the nodes in line."""
        return {entry[3] for entry in self._heap if self._leaf(entry) is not None}

    def candidates(self) -> Iterator[EvictionCandidate]:
        """Blocks about in the order in which they would go: leaves from their ends, and what becomes a leaf by that."""
        num_gone: dict[int, int] = {}  # by node: children that would have gone by then
        for leaf in self.in_order():
            here: RadixNode | None = leaf
            while here is not None and here.parent is not None and num_gone.get(here.index, 0) == len(here.children):
                for at in range(len(here.blocks) - 1, here.held - 1, -1):
                    yield self._describe(here, at)
                here = here.parent if not here.held else None
                if here is not None:
                    num_gone[here.index] = num_gone.get(here.index, 0) + 1

    def _describe(self, node: RadixNode, at: int) -> EvictionCandidate:
        """The block `at` of this node: as a tier below asks for it."""
        tree, end = self._tree, at * HASH_BYTES
        before = node if at else node.parent
        above = before.digests[end - HASH_BYTES : end or None] if before is not None else b""
        end_tokens = (node.start + at + 1) * tree.block_size
        tenant = tenant_name(tree.root_of(node).usage.digest)
        digest, block = BlockHash(bytes(node.digests[end : end + HASH_BYTES])), BlockId(node.blocks[at])
        return EvictionCandidate(
            digest, block, BlockHash(bytes(above)) if above else None, end_tokens, node.priority, tenant
        )
