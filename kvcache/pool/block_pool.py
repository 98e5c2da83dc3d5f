"""The blocks of one worker: references, the prefix index, pins, and eviction.

The only writer of reference counts, generations and the prefix index. Pure: no torch, no clock (see `tick`).

A block is in exactly one state:
  free    holds no content worth keeping
  used    referenced by sequences, reservations or transfers
  cached  indexed and not referenced: can be matched; evicted from the ends of the index's leaves, by priority and
  policy

A used block may be indexed too. Indexed blocks before a used or pinned one of the same chain are not evicted.
"""

from array import array
from collections.abc import Iterable, KeysView
from itertools import islice

import msgspec
import numpy as np

from kvrelay.hashing import HASH_BYTES, TOKEN_BYTES, HashChain
from kvrelay.kvcache.eviction.policies import EvictionPolicy, Lru
from kvrelay.kvcache.index.changes import CacheChange, ChangeLog
from kvrelay.kvcache.index.pins import PinLedger
from kvrelay.kvcache.pool.leaf_queue import LeafQueue
from kvrelay.kvcache.pool.ledger import BlockIds, BlockLedger
from kvrelay.kvcache.pool.radix import Match, RadixNode, RadixTree
from kvrelay.types import BlockHash, BlockId, IndexedBlock

PIN_SHARE, ALL_PIN_SHARE = 0.25, 0.5  # of the pool: the most that one tenant, and all together, may pin
MIN_PARTIAL_TOKENS = 4  # fewer shared tokens are not worth the copy of a block


class BlockCounts(msgspec.Struct, frozen=True, gc=False):
    """How many blocks are in each state; free, used and cached add up to the pool. Pinned ones are cached or used."""

    free: int
    used: int
    cached: int
    pinned: int = 0


class BlockPool:
    """Allocates, shares, caches and evicts fixed-size blocks. Not thread-safe: one owner thread.

    Returns block id arrays (array("i")) and accepts any iterable of ids, each block once in a call. More than 25
    methods: allocation, index and pins change the same reference counts, and stay in one class so that only one
    writes them.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int = 16,
        prefix_caching: bool = True,
        policy: EvictionPolicy | None = None,
        pin_share: float = PIN_SHARE,
        keeps_tokens: bool = True,
    ) -> None:
        """A pool of free blocks.

        Args:
            block_size: tokens per block.
            prefix_caching: index full blocks, so that other sequences find them.
            pin_share: of the pool, that one tenant may pin.
            keeps_tokens: keep blocks' tokens, for `partial_match`; costs 4 bytes per token.

        Raises ValueError: no blocks.
        """
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.policy: EvictionPolicy = policy or Lru()
        self.now_s = 0.0
        self._prefix_caching = prefix_caching
        self._ledger = BlockLedger(num_blocks)
        self._tree = RadixTree(self._ledger, block_size, keeps_tokens=keeps_tokens)
        self._free = array("i", range(num_blocks - 1, -1, -1))  # the last one is allocated next
        self._num_idle = 0  # indexed blocks without a reference
        self._pins = PinLedger(int(num_blocks * pin_share), int(num_blocks * max(pin_share, ALL_PIN_SHARE)))
        self._changes = ChangeLog()
        self._queue = LeafQueue(self._tree, self.policy)

    def tick(self, now_s: float) -> None:
        """Set the clock, in seconds, and end the pins whose time has come."""
        self.now_s = now_s
        if self._pins.tenants and (ended := self._pins.expired(now_s)):
            self.release(ended)

    @property
    def is_caching(self) -> bool:
        """Whether full blocks are indexed for other sequences."""
        return self._prefix_caching

    # ---- allocation

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could return now: free and evictable ones."""
        return len(self._free) + self._tree.num_evictable

    def allocate(self, count: int) -> "BlockIds | None":
        """`count` blocks with one reference each, evicting if needed; None, and no change, when there are too few."""
        free, missing = self._free, count - len(self._free)
        if missing > 0:
            if missing > self._tree.num_evictable:
                return None
            self._evict(missing)
        start = len(free) - count
        blocks = free[start:]
        del free[start:]
        self._ledger.take(blocks)
        return blocks

    def generation(self, block: int) -> int:
        """How often this block was allocated: an id with an older number is stale."""
        return self._ledger.generations[block]

    # ---- sharing

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these used or cached blocks."""
        num_fresh, nodes = self._ledger.acquire(blocks if type(blocks) is array else array("i", blocks))
        self._num_idle -= num_fresh
        self._relock(nodes)

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each. Indexed blocks become evictable, the last blocks of a chain first."""
        num_idle, nodes, freed = self._ledger.release(blocks if type(blocks) is array else array("i", blocks))
        self._num_idle += num_idle
        if freed:
            self._free.frombytes(freed)
        self._relock(nodes)

    def _relock(self, nodes: list[int]) -> None:
        """Some blocks of these nodes gained their first or lost their last reference."""
        tree, queue, held_of = self._tree, self._queue, self._ledger.held
        for index in nodes:
            node = tree.nodes[index]
            assert node is not None
            held, was_held = held_of(node.blocks), node.held
            if held != was_held:
                tree.hold(node, held)
            if held < was_held:
                node.usage.used_s = self.now_s  # in use until now
                if not node.children:  # as in `_offer`
                    node.stamp = stamp = next(queue.stamps)
                    queue.push(node.priority, self.policy.score(node.usage, self.now_s), stamp, index)

    def _offer(self, node: RadixNode) -> None:
        """This leaf is evictable from now on; an older entry of it is void."""
        queue = self._queue
        node.stamp = stamp = next(queue.stamps)
        queue.push(node.priority, self.policy.score(node.usage, self.now_s), stamp, node.index)

    def is_own(self, block: int) -> bool:
        """Whether its holder may write into it: one reference, and not indexed."""
        return self._ledger.refs[block] == 1 and self._tree.node(block) is None

    def writable(self, block: int) -> BlockId | None:
        """Copy on write: the block itself, or a new one that takes its place in the caller's block table.

        In the second case the caller must copy the content before it writes into blocks allocated later, and its
        reference to `block` is released. None: no room, and nothing changed.
        """
        if self.is_own(block):
            return BlockId(block)
        fresh = self.allocate(1)
        if fresh is None:
            return None
        self.release((block,))
        return BlockId(fresh[0])

    # ---- prefix index

    def match(self, chain: HashChain, limit: int | None = None) -> Match:
        """The longest cached prefix of the chain's first `limit` blocks, without references to them."""
        count = len(chain.data) // HASH_BYTES
        return self._tree.find(chain, count if limit is None or limit > count else limit)

    def partial_match(self, match: Match, tokens: bytes) -> tuple[int, int]:
        """(block, count): a cached block after `match` that shares its first `count` tokens with `tokens`, to copy
        from.

        To be called right after `match`. (-1, 0): fewer than MIN_PARTIAL_TOKENS are shared.

        Args:
            tokens: the prompt's tokens after the match, packed int32; less than a block of them counts.
        """
        if not self._tree.width:
            return -1, 0
        block, count = self._tree.partial_match(match, tokens[: self._tree.width - TOKEN_BYTES])
        return (block, count) if count >= MIN_PARTIAL_TOKENS else (-1, 0)

    def use(self, match: Match, priority: int = 0) -> None:
        """A request of this priority uses this match: update usage for the eviction policy."""
        node = self._tree.node(match.blocks[-1]) if match.blocks else None  # not match.node, which may have been merged
        if node is None:
            return
        offset = len(match) - node.start
        if offset < len(node.blocks):
            self._split(node, offset)  # the rest was not used
        here: RadixNode | None = node
        while here is not None and here.blocks:
            usage = here.usage
            usage.hits += 1
            usage.used_s = self.now_s
            if priority > here.priority:
                here.priority = priority
            self.policy.used(usage, self.now_s)
            if not here.children and len(here.blocks) > here.held:
                self._offer(here)
            here = here.parent

    def insert(
        self, chain: HashChain, block_table: BlockIds, first: int, last: int, tokens: bytes = b"", *, priority: int = 0
    ) -> None:
        """Index blocks first .. last - 1 of this block table, which are full. Blocks of hashes indexed already are
        skipped.

        Args:
            chain: the hashes of the sequence's full blocks.
            block_table: the whole sequence's; every block is referenced.
            tokens: of these blocks, packed int32; without them `partial_match` does not find the blocks.
        """
        if not self._prefix_caching or last <= first:
            return
        node, offset = self._place(chain, block_table, first)
        if node.children or offset < len(node.blocks):  # else the chain ends here, as while decoding
            node, offset = self._tree.descend(node, offset, chain, last)
        start = node.start + offset
        if start >= last:
            return
        if offset < len(node.blocks):
            self._split(node, offset)
        width = self._tree.width
        fresh, run = block_table[start:last], bytes(chain.data[start * HASH_BYTES : last * HASH_BYTES])
        known = tokens[(start - first) * width :] if tokens and width and start >= first else b""
        assert not known or len(known) == width * len(fresh), "tokens do not fill the blocks"
        if not node.children and node.blocks and node.priority == priority:
            self._tree.extend(node, run, fresh, known)
        else:
            above = node.usage if node.blocks else None
            node = self._tree.add_child(node, run, fresh, known, self.now_s, above)
            node.priority = priority
            self.policy.inserted(node.usage, self.now_s)
        self._tree.hold(node, len(node.blocks))
        self._changes.stored(run)

    def _place(self, chain: HashChain, block_table: BlockIds, first: int) -> tuple[RadixNode, int]:
        """Where the chain is in the tree after `first` blocks, or as far as the tree has it."""
        node = self._tree.node(block_table[first - 1]) if first else None
        if node is not None:
            offset = first - node.start
            is_same = self._ledger.common(node.digests, offset - 1, chain.data, first - 1, 1)
            assert is_same, f"block {block_table[first - 1]} is indexed by another hash"
            return node, offset
        root = self._tree.roots.get(chain.root) or self._tree.add_root(chain.root, self.now_s)
        return self._tree.descend(root, 0, chain, first)

    def _split(self, node: RadixNode, offset: int) -> None:
        rest = self._tree.split(node, offset)
        held = self._ledger.held(node.blocks)
        if held != node.held:  # a copy to a tier may reference a block of the rest alone
            self._tree.hold(node, held)
        if rest.is_open:
            self._offer(rest)

    def reset_cache(self) -> int:
        """End all pins and evict every evictable block; returns how many. Prefixes of referenced chains stay."""
        while ended := self._pins.next_to_expire():
            self.release(ended)
        count = self._tree.num_evictable
        self._evict(count)
        return count

    def drain_changes(self) -> CacheChange | None:
        """The net changes of the prefix index since the last call, or None."""
        return self._changes.drain()

    @property
    def has_changes(self) -> bool:
        """Whether the prefix index may have changed since the last drain."""
        return bool(self._changes)

    def cached_hashes(self) -> list[BlockHash]:
        """Every hash that `match` can find now."""
        return list(self._tree.hashes())

    # ---- pins

    def pin(self, chain: HashChain, count: int, ttl_s: float, share: float | None = None) -> int:
        """Pin the first `count` blocks of this chain, those that are cached, for `ttl_s` seconds; returns how many.

        Fewer, from the first on, when the tenant's quota is used up: `share` of the pool; None: the pool's `pin_share`.
        """
        found, quota = self.match(chain, count), None if share is None else int(share * self.num_blocks)
        fresh, pinned = self._pins.add(chain.root, found.blocks, self.now_s + ttl_s, quota)
        self.acquire(fresh)
        return pinned

    def unpin(self, chain: HashChain, count: int) -> None:
        """End the pins of the first `count` blocks of this chain."""
        self.release(self._pins.remove(self.match(chain, count).blocks))

    def unpin_for(self, count: int) -> bool:
        """End pins, the next to expire first, until `count` blocks are available; returns whether they are."""
        while self.num_available < count and (ended := self._pins.next_to_expire()):
            self.release(ended)
        return self.num_available >= count

    @property
    def pinned(self) -> KeysView[int]:
        """The pinned blocks, with one reference each."""
        return self._pins.tenants.keys()

    # ---- eviction

    def _evict(self, count: int) -> None:
        """Free `count` blocks from the ends of leaves; the caller knows that there are enough."""
        while count > 0:
            leaf = self._queue.next_leaf(self.now_s)
            count -= self._evict_from(leaf, min(count, len(leaf.blocks) - leaf.held))

    def _evict_from(self, leaf: RadixNode, count: int) -> int:
        parent, usage, is_all = leaf.parent, leaf.usage, count == len(leaf.blocks)
        if not is_all:
            usage = usage.copy()
            usage.num_blocks = count
        blocks, run = self._tree.cut(leaf, count)
        self._free.extend(blocks)
        self._num_idle -= count
        self._changes.removed(run)
        self.policy.evicted(usage, self.now_s)
        if is_all and parent is not None:
            self._child_removed(parent)
        return count

    def _child_removed(self, node: RadixNode) -> None:
        if node.parent is None:
            if not node.children:
                self._tree.drop_root(node.usage.digest)
        elif not node.children:
            if node.is_open:
                self._offer(node)
        elif len(node.children) == 1:
            [child] = node.children.values()
            if child.priority == node.priority and child.usage.used_s >= node.usage.used_s:  # used no later
                self._tree.merge(node)
                if node.is_open:
                    self._offer(node)

    def discard(self, block: int) -> int:
        """Evict this block and all that continue its chain; returns how many. 0: it is not cached, or one is held."""
        node = self._tree.node(block)
        if node is None or node.num_locked or (offset := node.blocks.index(block)) < node.held:
            return 0
        count = 0
        while (leaf := self._tree.leaf_below(node)) is not node:
            count += self._evict_from(leaf, len(leaf.blocks))
        return count + self._evict_from(node, len(node.blocks) - offset)

    def idle_blocks(self, first: int, count: int) -> tuple[list[int], int]:
        """Up to `count` cached blocks without a reference, by id from `first` on and round; the id after the last."""
        blocks = self._ledger.idle(first)[:count].tolist()
        return blocks, blocks[-1] + 1 if blocks else 0

    def eviction_candidates(self, count: int) -> list[IndexedBlock]:
        """Up to `count` unreferenced blocks, roughly in eviction order."""
        return list(islice(self._queue.candidates(), count))

    # ---- reports

    def num_holders(self, block: int) -> int:
        """References to this block, pins included."""
        return self._ledger.refs[block]

    def counts(self) -> BlockCounts:
        free, cached, pinned = len(self._free), self._num_idle, self._pins.tenants
        if pinned:
            cached += sum(self._ledger.refs[block] == 1 for block in pinned)
        return BlockCounts(free, self.num_blocks - free - cached, cached, len(pinned))

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one state, and index, queue and pins agree."""
        refs, indexed = self._ledger.ref_array, self._ledger.owner_array >= 0
        is_free = np.zeros(self.num_blocks, bool)
        is_free[np.array(self._free, np.int32)] = True
        assert int(is_free.sum()) == len(self._free), "a block is free twice"
        assert not (refs < 0).any(), "a block was released more often than held"
        assert not (is_free & indexed).any(), "a free block is indexed"
        assert not (is_free & (refs > 0)).any(), "a free block is held"
        assert (is_free | indexed | (refs > 0)).all(), "a block is in no state: lost"
        assert int((indexed & (refs == 0)).sum()) == self._num_idle, "cached blocks are miscounted"
        assert all(refs[block] > 0 and indexed[block] for block in self.pinned), "a pinned block is not referenced"
        self._tree.check()
        valid = self._queue.members()
        for node in self._tree.live():
            assert node.parent is None or node.held == self._ledger.held(node.blocks), (
                f"node {node.index}: wrongly locked"
            )
            assert not node.is_open or node.index in valid, f"node {node.index} is evictable, but not queued"
