"""The prefix index: a radix tree over blocks, keyed by chained hashes. Pure: no clock, no reference counts.

A node is a run of consecutive blocks: concatenated hashes, an id array, and packed tokens (for partial blocks). Nodes
split where chains diverge and merge when they no longer do. There is one root per root hash (tenant): roots
share nothing. The block pool reports how many leading blocks of a node are referenced (`held`); the tree counts what
that means for the nodes above.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvrelay.hashing import HASH_BYTES, TOKEN_BYTES, HashChain
from kvrelay.kvcache.eviction.policies import EntryUsage
from kvrelay.kvcache.pool.ledger import BlockIds, BlockLedger, Run
from kvrelay.types import BlockHash

_NO_TOKEN = b"\xff" * TOKEN_BYTES  # -1: in no prompt


@dataclass(slots=True, eq=False, repr=False)
class RadixNode:
    """A run of blocks; a root has none. Owned by the RadixTree.

    More than 12 attributes: a record of one node, whose fields change together.
    """

    index: int  # in the tree's list of nodes
    parent: "RadixNode | None"
    start: int  # number of blocks of the chain before this node
    usage: EntryUsage
    digests: bytearray
    blocks: BlockIds
    tokens: bytearray
    children: "dict[bytes, RadixNode]" = field(default_factory=dict)  # by the first hash
    heads: list[bytes] | None = None  # children's first blocks, tokens + hash, sorted; None: not built yet
    held: int = 0  # number of leading blocks that must stay
    num_locked: int = 0  # children with blocks that must stay at or below them
    priority: int = 0
    stamp: int = 0  # of its valid entry in the eviction queue; 0: it has none

    @property
    def is_locked(self) -> bool:
        return self.held > 0 or self.num_locked > 0

    @property
    def num_evictable(self) -> int:
        """Blocks at its end that can be evicted after everything below it; 0 while something below must stay."""
        return 0 if self.num_locked else len(self.blocks) - self.held

    @property
    def first(self) -> bytes:
        return bytes(self.digests[:HASH_BYTES])

    @property
    def is_open(self) -> bool:
        """Whether this is a leaf with evictable blocks."""
        return not self.children and len(self.blocks) > self.held


@dataclass(slots=True, eq=False)
class Match:
    """The longest cached prefix of a chain: its block ids, and where it ends in the tree. Do not modify."""

    blocks: BlockIds
    node: RadixNode | None  # None: the chain has no root here
    offset: int  # blocks of `node` that belong to it

    def __len__(self) -> int:
        return len(self.blocks)


class RadixTree:
    """Nodes by hash, and the node of each block. Not thread-safe."""

    def __init__(self, ledger: BlockLedger, block_size: int, *, keeps_tokens: bool = True) -> None:
        self._ledger, self.block_size = ledger, block_size
        self.width = TOKEN_BYTES * block_size if keeps_tokens else 0  # bytes of tokens kept per block
        self.roots: dict[bytes, RadixNode] = {}
        self.nodes: list[RadixNode | None] = []
        self.num_evictable = 0  # blocks that can be evicted one after another
        self._unused: list[int] = []

    # ---- finding

    def node(self, block: int) -> RadixNode | None:
        """The node of this block; None: not indexed."""
        index = self._ledger.owners[block]
        return None if index < 0 else self.nodes[index]

    def root_of(self, node: RadixNode) -> RadixNode:
        while node.parent is not None:
            node = node.parent
        return node

    def leaf_below(self, node: RadixNode) -> RadixNode:
        """Any leaf at the end of a path through this node; perhaps the node itself."""
        while node.children:
            node = next(iter(node.children.values()))
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
        self, node: RadixNode, offset: int, chain: HashChain, limit: int, blocks: "BlockIds | None" = None
    ) -> tuple[RadixNode, int]:
        """Follow the chain's first `limit` hashes from `offset` blocks into `node`; appends the block ids to `blocks`.

        Compares whole runs at once.
        """
        data, position, common = chain.data, node.start + offset, self._ledger.common
        while position < limit:
            size = len(node.blocks)
            if offset == size:
                child = node.children.get(bytes(data[position * HASH_BYTES : (position + 1) * HASH_BYTES]))
                if child is None:
                    break
                node, offset, size = child, 0, len(child.blocks)
            count = common(node.digests, offset, data, position, limit - position)
            end = offset + count
            if blocks is not None:
                blocks += node.blocks if count == size else node.blocks[offset:end]
            offset = end
            position += count
            if end < size:
                break
        return node, offset

    def partial_match(self, match: Match, tokens: bytes) -> tuple[int, int]:
        """(block, count): the block after `match` that shares the most leading tokens with these, or (-1, 0)."""
        node, offset = match.node, match.offset
        if node is None or not tokens:
            return -1, 0
        if offset < len(node.blocks):
            count = _common_tokens(node.tokens[offset * self.width : (offset + 1) * self.width], tokens)
            return (node.blocks[offset], count) if count else (-1, 0)
        heads = self._heads(node)
        at = bisect_left(heads, tokens)  # the longest common prefix is with a neighbour
        best, count = b"", 0
        for head in heads[max(0, at - 1) : at + 1]:
            if (common := _common_tokens(head[: self.width], tokens)) > count:
                best, count = head, common
        return (node.children[best[self.width :]].blocks[0], count) if count else (-1, 0)

    def _heads(self, node: RadixNode) -> list[bytes]:
        if node.heads is None:
            node.heads = sorted(self._head(child) for child in node.children.values())
        return node.heads

    def _head(self, node: RadixNode) -> bytes:
        return bytes(node.tokens[: self.width]) + node.first

    # ---- growing

    def add_root(self, digest: BlockHash, now_s: float) -> RadixNode:
        """A new root with this hash."""
        node = self.roots[digest] = self._new(None, 0, EntryUsage(digest, 0, 0, now_s), b"", array("i"), b"")
        return node

    def _new(
        self, parent: RadixNode | None, start: int, usage: EntryUsage, digests: Run, blocks: BlockIds, tokens: Run
    ) -> RadixNode:
        index = self._unused.pop() if self._unused else len(self.nodes)
        node = RadixNode(index, parent, start, usage, bytearray(digests), blocks, bytearray(tokens))
        if index == len(self.nodes):
            self.nodes.append(node)
        else:
            self.nodes[index] = node
        return node

    def add_child(
        self, parent: RadixNode, digests: bytes, blocks: BlockIds, tokens: bytes, now_s: float, above: EntryUsage | None
    ) -> RadixNode:
        """A new leaf below `parent`, which keeps `blocks`. `above`: the usage of the entry that it continues."""
        start, size = parent.start + len(parent.blocks), len(blocks)
        end_tokens = (start + size) * self.block_size
        usage = EntryUsage(BlockHash(digests[-HASH_BYTES:]), size, end_tokens, now_s, above=above)
        node = self._new(parent, start, usage, digests, blocks, tokens or self._no_tokens(size))
        self._ledger.assign(blocks, node.index)
        self.num_evictable += size
        parent.children[digests[:HASH_BYTES]] = node
        if parent.heads is not None:
            insort(parent.heads, self._head(node))
        return node

    def extend(self, leaf: RadixNode, digests: bytes, blocks: BlockIds, tokens: bytes) -> None:
        """More blocks at the end of a leaf."""
        assert not leaf.children and leaf.parent is not None
        leaf.digests += digests
        leaf.blocks += blocks
        leaf.tokens += tokens or self._no_tokens(len(blocks))
        self._describe(leaf, digests)
        self._ledger.assign(blocks, leaf.index)
        self.num_evictable += len(blocks)

    def _no_tokens(self, num_blocks: int) -> bytes:
        """For blocks that are indexed without their tokens."""
        return _NO_TOKEN * (num_blocks * self.width // TOKEN_BYTES)

    def _describe(self, node: RadixNode, digests: bytes | bytearray) -> None:
        """Update its usage to its blocks. `digests`: a run that ends with the node's last hash."""
        usage, size = node.usage, len(node.blocks)
        usage.num_blocks = size
        usage.digest = BlockHash(bytes(digests[-HASH_BYTES:]))
        usage.end_tokens = (node.start + size) * self.block_size

    def _unlink(self, parent: RadixNode, child: RadixNode) -> None:
        del parent.children[child.first]
        if parent.heads is not None:
            head = self._head(child)
            at = bisect_left(parent.heads, head)
            assert parent.heads[at] == head
            del parent.heads[at]

    def split(self, node: RadixNode, offset: int) -> RadixNode:
        """Split `node` after `offset` blocks; returns the rest, which becomes its child."""
        digests, tokens = node.digests[offset * HASH_BYTES :], node.tokens[offset * self.width :]
        rest = self._new(node, node.start + offset, node.usage, digests, node.blocks[offset:], tokens)
        rest.children, rest.heads, rest.priority = node.children, node.heads, node.priority
        rest.held, rest.num_locked = max(0, node.held - offset), node.num_locked
        for child in rest.children.values():
            child.parent = rest
        del node.digests[offset * HASH_BYTES :], node.blocks[offset:], node.tokens[offset * self.width :]
        node.held, node.num_locked = min(node.held, offset), int(rest.is_locked)
        node.children, node.heads, node.usage = {rest.first: rest}, None, node.usage.copy()
        self._describe(node, node.digests)
        self._describe(rest, digests)
        self._ledger.assign(rest.blocks, rest.index)
        return rest

    def merge(self, node: RadixNode) -> None:
        """Append the only child of `node` to it, with the child's usage."""
        [child] = node.children.values()
        if child.held:
            node.held = len(node.blocks) + child.held
        node.digests += child.digests
        node.tokens += child.tokens
        node.blocks += child.blocks
        node.children, node.heads, node.num_locked = child.children, child.heads, child.num_locked
        for grandchild in node.children.values():
            grandchild.parent = node
        child.usage.above = node.usage.above  # else each merge kept the usage before it, for as long as the run is used
        node.usage = child.usage
        self._describe(node, child.digests)
        self._ledger.assign(child.blocks, node.index)
        self._drop(child)

    # ---- what must stay

    def hold(self, node: RadixNode, held: int) -> None:
        """Exactly the first `held` blocks of `node` must stay from now on."""
        was_held, node.held = node.held, held
        if node.num_locked:
            return
        self.num_evictable += was_held - held
        if bool(held) == bool(was_held):
            return
        change, parent = 1 if held else -1, node.parent
        while parent is not None:  # its number of locked children changes
            num_locked = parent.num_locked
            parent.num_locked = num_locked + change
            if num_locked and parent.num_locked:
                break
            self.num_evictable -= change * (len(parent.blocks) - parent.held)
            if parent.held:
                break
            parent = parent.parent

    # ---- shrinking

    def cut(self, leaf: RadixNode, count: int) -> tuple[BlockIds, bytes]:
        """Remove the last `count` blocks of a leaf, none of which must stay; returns (block ids, concatenated
        hashes).
        """
        assert not leaf.children and count <= len(leaf.blocks) - leaf.held
        self.num_evictable -= count
        keep = len(leaf.blocks) - count
        if keep:
            blocks, digests = leaf.blocks[keep:], bytes(leaf.digests[keep * HASH_BYTES :])
            del leaf.blocks[keep:], leaf.digests[keep * HASH_BYTES :], leaf.tokens[keep * self.width :]
            self._describe(leaf, leaf.digests)
        else:
            assert leaf.parent is not None
            self._unlink(leaf.parent, leaf)
            self._drop(leaf)
            blocks, digests = leaf.blocks, bytes(leaf.digests)
        self._ledger.assign(blocks, -1)
        return blocks, digests

    def drop_root(self, digest: BlockHash) -> None:
        """Remove a root without children."""
        self._drop(self.roots.pop(digest))

    def _drop(self, node: RadixNode) -> None:
        self.nodes[node.index] = None
        self._unused.append(node.index)

    # ---- everything

    def live(self) -> Iterator[RadixNode]:
        """Every node, roots included."""
        return (node for node in self.nodes if node is not None)

    def check(self) -> None:
        """Raise AssertionError unless nodes, links, blocks' nodes and counts agree."""
        num_indexed = num_evictable = 0
        for node in self.live():
            size = len(node.blocks)
            assert (size > 0) == (node.parent is not None), f"node {node.index} is empty"
            assert len(node.digests) == HASH_BYTES * size and len(node.tokens) == self.width * size
            if node.parent is not None:
                assert node.parent.children.get(node.first) is node and self.nodes[node.parent.index] is node.parent
                assert node.start == node.parent.start + len(node.parent.blocks)
                assert node.usage.num_blocks == size and node.usage.digest == bytes(node.digests[-HASH_BYTES:])
                assert (self._ledger.owner_array[np.frombuffer(node.blocks, np.int32)] == node.index).all(), (
                    "a block has another node"
                )
            else:
                assert node.children and self.roots[node.usage.digest] is node, "a root without children"
            assert node.num_locked == sum(child.is_locked for child in node.children.values()), "locks do not add up"
            assert node.heads is None or node.heads == sorted(map(self._head, node.children.values()))
            num_indexed += size
            num_evictable += node.num_evictable
        assert num_indexed == int((self._ledger.owner_array >= 0).sum()), "an indexed block is in no node, or in two"
        assert num_evictable == self.num_evictable, "evictable blocks are miscounted"

    def hashes(self) -> Iterator[BlockHash]:
        for node in self.live():
            run = bytes(node.digests)
            for at in range(0, len(run), HASH_BYTES):
                yield BlockHash(run[at : at + HASH_BYTES])


def _common_tokens(one: bytes | bytearray, other: bytes) -> int:
    """The number of common leading int32 tokens."""
    length = min(len(one), len(other))
    unlike = int.from_bytes(one[:length], "little") ^ int.from_bytes(other[:length], "little")
    if not unlike:
        return length // TOKEN_BYTES
    return ((unlike & -unlike).bit_length() - 1) // (8 * TOKEN_BYTES)
