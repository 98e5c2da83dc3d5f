"""The prefix index: a radix tree over blocks, keyed by chained hashes. Pure: no clock; knows no reference counts.

A node is a run of blocks that follow each other: their hashes in one run of bytes, their ids in one array, their tokens
packed (for tails that are shared in part). Nodes split where chains part and merge when they part no longer. There is one
root for every root hash (tenant and adapter): nothing is shared between roots. What is held is told by the block pool,
as `held` (leading blocks of a node that must stay); the tree adds up what follows from it for the nodes above.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvrelay.hashing import HASH_BYTES, TOKEN_BYTES, HashChain
from kvrelay.kvcache.eviction import Usage
from kvrelay.types import BlockHash

BlockTable: TypeAlias = "array[int]"  # "i": block ids in order; as quick to cut and join as bytes
Ints = NDArray[np.int32]

_FEW = 16  # up to here a loop is faster than an array operation
_NO_TOKEN = b"\xff" * TOKEN_BYTES  # -1: no prompt has it


@dataclass(slots=True, eq=False)
class Node:
    """A run of blocks. The root of a tree has none. Owned by the RadixTree."""

    index: int  # in the tree's list of nodes
    parent: "Node | None"
    start: int  # blocks of the chain before its first
    usage: Usage
    digests: bytearray = field(default_factory=bytearray)
    blocks: BlockTable = field(default_factory=lambda: array("i"))
    tokens: bytearray = field(default_factory=bytearray)
    children: dict[bytes, "Node"] = field(default_factory=dict)  # by the first hash
    heads: list[bytes] | None = None  # children's first blocks, tokens + hash, sorted; None: not asked for yet
    held: int = 0  # its first so many blocks must stay
    num_locked: int = 0  # children under which something must stay
    priority: int = 0
    stamp: int = 0  # of its valid entry in the queue for eviction

    @property
    def is_locked(self) -> bool:
        return self.held > 0 or self.num_locked > 0

    @property
    def num_evictable(self) -> int:
        """Blocks at its end that may go once what is below it is gone, and all of that may."""
        return 0 if self.num_locked else len(self.blocks) - self.held

    @property
    def first(self) -> bytes:
        return bytes(self.digests[:HASH_BYTES])

    @property
    def is_open(self) -> bool:
        """A leaf with blocks at its end that may go now."""
        return not self.children and len(self.blocks) > self.held


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The longest cached prefix of a chain: its blocks, and the place in the tree where it ends."""

    blocks: BlockTable
    node: Node | None  # None: not even a root
    offset: int  # blocks of `node` that belong to it

    def __len__(self) -> int:
        return len(self.blocks)


class RadixTree:
    """Nodes by hash, and each block's node. Not thread-safe."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.width = TOKEN_BYTES * block_size
        self.roots: dict[bytes, Node] = {}
        self.nodes: list[Node | None] = []
        self.num_nodes = 0
        self.num_evictable = 0  # blocks that could go, one after another, before a held one is in the way
        self._unused: list[int] = []
        self.index_of = array("i", [-1]) * num_blocks  # of each block's node
        self.node_of: Ints = np.frombuffer(self.index_of, dtype=np.int32)  # the same memory

    # ---- finding

    def node(self, block: int) -> Node | None:
        """The node in which this block is named."""
        index = self.index_of[block]
        return None if index < 0 else self.nodes[index]

    def root_of(self, node: Node) -> Node:
        while node.parent is not None:
            node = node.parent
        return node

    def find(self, chain: HashChain, limit: int) -> Match:
        """The longest prefix of the chain's first `limit` blocks."""
        blocks = array("i")
        root = self.roots.get(chain.root)
        if root is None:
            return Match(blocks, None, 0)
        node, offset = self.descend(root, 0, chain, limit, blocks)
        return Match(blocks, node, offset)

    def descend(
        self, node: Node, offset: int, chain: HashChain, limit: int, blocks: "BlockTable | None" = None
    ) -> tuple[Node, int]:
        """From `offset` blocks into `node`, as far as the chain's first `limit` hashes go; gathers the blocks on the way.

        Compares whole runs at once; only where they part is the first difference looked for.
        """
        data, position = chain.data, node.start + offset
        while position < limit:
            if offset == len(node.blocks):
                child = node.children.get(bytes(data[position * HASH_BYTES : (position + 1) * HASH_BYTES]))
                if child is None:
                    break
                node, offset = child, 0
            count = self._common(node, offset, data, position, limit)
            if blocks is not None:
                blocks.extend(
                    node.blocks[offset : offset + count] if offset or count < len(node.blocks) else node.blocks
                )
            offset += count
            position += count
            if offset < len(node.blocks):
                break
        return node, offset

    @staticmethod
    def _common(node: Node, offset: int, data: bytearray, position: int, limit: int) -> int:
        """How many hashes the run from `offset` and the chain from `position` have in common, up to `limit`."""
        most = min(len(node.blocks) - offset, limit - position)  # never 0
        if not offset and most == len(node.blocks) and data.startswith(node.digests, position * HASH_BYTES):
            return most
        mine = np.frombuffer(node.digests, np.uint64, 2 * most, offset * HASH_BYTES)
        other = np.frombuffer(data, np.uint64, 2 * most, position * HASH_BYTES)
        unlike = mine != other
        at = int(unlike.argmax())
        return at // 2 if unlike[at] else most

    def tail(self, match: Match, tokens: bytes) -> tuple[int, int]:
        """(block, tokens) of the block after `match` that has the most leading tokens in common with these; (-1, 0): none."""
        node, offset = match.node, match.offset
        if node is None or not tokens:
            return -1, 0
        if offset < len(node.blocks):
            count = _common_tokens(node.tokens[offset * self.width : (offset + 1) * self.width], tokens)
            return (node.blocks[offset], count) if count else (-1, 0)
        heads = self._heads(node)
        at = bisect_left(heads, tokens)  # the longest common prefix is with a neighbour in sorted order
        best, count = b"", 0
        for head in heads[max(0, at - 1) : at + 1]:
            if (common := _common_tokens(head[: self.width], tokens)) > count:
                best, count = head, common
        return (node.children[best[self.width :]].blocks[0], count) if count else (-1, 0)

    def _heads(self, node: Node) -> list[bytes]:
        if node.heads is None:
            node.heads = sorted(self._head(child) for child in node.children.values())
        return node.heads

    def _head(self, node: Node) -> bytes:
        return bytes(node.tokens[: self.width]) + node.first

    # ---- growing

    def root(self, digest: BlockHash, usage: Usage) -> Node:
        """The root of this tenant's tree, made if it is not there."""
        node = self.roots.get(digest)
        if node is None:
            node = self.roots[digest] = self._new(None, 0, usage)
        return node

    def _new(self, parent: Node | None, start: int, usage: Usage) -> Node:
        index = self._unused.pop() if self._unused else len(self.nodes)
        node = Node(index, parent, start, usage)
        if index == len(self.nodes):
            self.nodes.append(node)
        else:
            self.nodes[index] = node
        self.num_nodes += 1
        return node

    def add_child(self, parent: Node, digests: bytes, blocks: BlockTable, tokens: bytes, usage: Usage) -> Node:
        """A new leaf under the end of `parent`."""
        node = self._new(parent, parent.start + len(parent.blocks), usage)
        self._append(node, digests, blocks, tokens)
        self._describe(node)
        self._link(parent, node)
        return node

    def extend(self, leaf: Node, digests: bytes, blocks: BlockTable, tokens: bytes) -> None:
        """More blocks at the end of a leaf."""
        assert not leaf.children and leaf.parent is not None
        self._append(leaf, digests, blocks, tokens)
        self._describe(leaf)

    def _describe(self, node: Node) -> None:
        """Bring its usage in line with its blocks."""
        usage = node.usage
        usage.num_blocks = len(node.blocks)
        usage.digest = BlockHash(bytes(node.digests[-HASH_BYTES:]))
        usage.end_tokens = (node.start + len(node.blocks)) * self.width // TOKEN_BYTES

    def _append(self, node: Node, digests: bytes, blocks: BlockTable, tokens: bytes) -> None:
        node.digests += digests
        node.blocks.extend(blocks)
        node.tokens += tokens or _NO_TOKEN * (len(blocks) * self.width // TOKEN_BYTES)
        assert len(node.tokens) == self.width * len(node.blocks), "tokens do not fill the blocks"
        self._set_node(blocks, node.index)
        self.num_evictable += len(blocks)

    def _set_node(self, blocks: BlockTable, index: int) -> None:
        if len(blocks) <= _FEW:
            for block in blocks:
                self.index_of[block] = index
        else:
            self.node_of[np.frombuffer(blocks, np.int32)] = index

    def _link(self, parent: Node, child: Node) -> None:
        parent.children[child.first] = child
        if parent.heads is not None:
            insort(parent.heads, self._head(child))

    def _unlink(self, parent: Node, child: Node) -> None:
        del parent.children[child.first]
        if parent.heads is not None:
            head = self._head(child)
            at = bisect_left(parent.heads, head)
            assert parent.heads[at] == head
            del parent.heads[at]

    def split(self, node: Node, offset: int) -> Node:
        """Cut `node` after `offset` blocks: it keeps the first ones; the rest is returned as its child."""
        rest = self._new(node, node.start + offset, node.usage)
        rest.digests, rest.blocks = node.digests[offset * HASH_BYTES :], node.blocks[offset:]
        rest.tokens = node.tokens[offset * self.width :]
        rest.children, rest.heads, rest.priority = node.children, node.heads, node.priority
        rest.held, rest.num_locked = max(0, node.held - offset), node.num_locked
        for child in rest.children.values():
            child.parent = rest
        del node.digests[offset * HASH_BYTES :], node.blocks[offset:], node.tokens[offset * self.width :]
        node.held, node.num_locked = min(node.held, offset), int(rest.is_locked)
        node.children, node.heads, node.usage = {rest.first: rest}, None, replace(node.usage)
        self._describe(node)
        self._describe(rest)
        self._set_node(rest.blocks, rest.index)
        return rest

    def merge(self, node: Node) -> None:
        """Append the only child of `node` to it; the child's usage stands for both."""
        [child] = node.children.values()
        if child.held:
            node.held = len(node.blocks) + child.held
        node.digests += child.digests
        node.tokens += child.tokens
        node.blocks.extend(child.blocks)
        node.children, node.heads, node.num_locked = child.children, child.heads, child.num_locked
        for grandchild in node.children.values():
            grandchild.parent = node
        node.usage = child.usage
        self._describe(node)
        self._set_node(child.blocks, node.index)
        self._drop(child)

    # ---- what must stay

    def hold(self, node: Node, held: int) -> None:
        """The first `held` blocks of `node` must stay from now on, and no more than these."""
        was_locked = node.is_locked
        if not node.num_locked:
            self.num_evictable += node.held - held
        node.held = held
        parent = node.parent
        while parent is not None and node.is_locked != was_locked:
            was_locked, change = parent.is_locked, 1 if node.is_locked else -1
            self.num_evictable -= parent.num_evictable
            parent.num_locked += change
            self.num_evictable += parent.num_evictable
            node, parent = parent, parent.parent

    # ---- shrinking

    def cut(self, leaf: Node, count: int) -> tuple[BlockTable, bytes]:
        """Forget the last `count` blocks of a leaf, none of them held; returns (blocks, their hashes)."""
        assert not leaf.children and count <= len(leaf.blocks) - leaf.held
        keep = len(leaf.blocks) - count
        blocks, digests = leaf.blocks[keep:], bytes(leaf.digests[keep * HASH_BYTES :])
        if not keep:
            assert leaf.parent is not None
            self._unlink(leaf.parent, leaf)
            self._drop(leaf)
        del leaf.blocks[keep:], leaf.digests[keep * HASH_BYTES :], leaf.tokens[keep * self.width :]
        if keep:
            self._describe(leaf)
        self._set_node(blocks, -1)
        self.num_evictable -= count
        return blocks, digests

    def drop_root(self, digest: BlockHash) -> None:
        """Forget a root without children."""
        self._drop(self.roots.pop(digest))

    def _drop(self, node: Node) -> None:
        self.nodes[node.index] = None
        self._unused.append(node.index)
        self.num_nodes -= 1

    # ---- everything

    def live(self) -> Iterator[Node]:
        """Every node, roots included."""
        return (node for node in self.nodes if node is not None)

    def check(self) -> None:
        """Raise AssertionError unless nodes, links, blocks' nodes and counts agree."""
        num_named = num_evictable = 0
        for node in self.live():
            size = len(node.blocks)
            assert (size > 0) == (node.parent is not None), f"node {node.index} is empty"
            assert len(node.digests) == HASH_BYTES * size and len(node.tokens) == self.width * size
            if node.parent is not None:
                assert node.parent.children.get(node.first) is node and self.nodes[node.parent.index] is node.parent
                assert node.start == node.parent.start + len(node.parent.blocks)
                assert node.usage.num_blocks == size and node.usage.digest == bytes(node.digests[-HASH_BYTES:])
                assert (self.node_of[np.frombuffer(node.blocks, np.int32)] == node.index).all(), (
                    "a block has another node"
                )
            else:
                assert node.children and self.roots[node.usage.digest] is node, "a root without children"
            assert node.num_locked == sum(child.is_locked for child in node.children.values()), "locks do not add up"
            assert node.heads is None or node.heads == sorted(map(self._head, node.children.values()))
            num_named += size
            num_evictable += node.num_evictable
        assert num_named == int((self.node_of >= 0).sum()), "a named block is in no node, or in two"
        assert num_evictable == self.num_evictable, "evictable blocks are miscounted"

    def hashes(self) -> Iterator[BlockHash]:
        for node in self.live():
            run = bytes(node.digests)
            for at in range(0, len(run), HASH_BYTES):
                yield BlockHash(run[at : at + HASH_BYTES])


def _common_tokens(one: bytes | bytearray, other: bytes) -> int:
    """Leading int32 that both have."""
    length = min(len(one), len(other))
    unlike = int.from_bytes(one[:length], "little") ^ int.from_bytes(other[:length], "little")
    if not unlike:
        return length // TOKEN_BYTES
    return ((unlike & -unlike).bit_length() - 1) // (8 * TOKEN_BYTES)
