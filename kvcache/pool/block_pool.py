"""The blocks of one worker: who holds which, which are cached, in what order they are re-used.

The only writer of reference counts, generations and the prefix index. Pure: no torch, no clock (see `tick`).

A block is in exactly one state:
  free    no content worth keeping
  used    ref-counted by sequences, reservations or transfers
  cached  nobody holds it, but it can still be matched; leaves of the index go first, from their end, by priority and policy

A block may be used and named at once. Named blocks that lie before a used or pinned one in a chain stay until that goes.
What is kept for each block is in the ledger, which works on many at once.
"""

from array import array
from collections.abc import Iterable
from itertools import islice

import msgspec
import numpy as np

from kvrelay.hashing import HASH_BYTES, TOKEN_BYTES, HashChain
from kvrelay.kvcache.eviction.registry import EntryUsage, EvictionPolicy, Lru
from kvrelay.kvcache.index.changes import CacheChange, ChangeLog
from kvrelay.kvcache.pool.leaf_queue import EvictionCandidate, LeafQueue
from kvrelay.kvcache.pool.ledger import BlockIds, BlockLedger
from kvrelay.kvcache.pool.pins import PinLedger
from kvrelay.kvcache.pool.radix import Match, RadixNode, RadixTree
from kvrelay.types import BlockHash, BlockId

PIN_SHARE = 0.25  # of the pool, for each tenant's pins
MIN_PARTIAL_TOKENS = 4  # fewer tokens are not worth copying a block for


class BlockCounts(msgspec.Struct, frozen=True, gc=False):
    """How many blocks are in each state; they add up to the pool's size. `pinned` ones are cached, or used too."""

    free: int
    used: int
    cached: int
    pinned: int = 0


class BlockPool:
    """Allocates, shares, caches and evicts fixed-size blocks. Not thread-safe: one owner thread.

    Tables of blocks come out as array("i"); any sequence of ids goes in, each block once in a call.
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
        """keeps_tokens: so that blocks whose beginnings are alike are found (`tail`); without, that much memory is spared."""
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.policy: EvictionPolicy = policy or Lru()
        self.now_s = 0.0
        self._prefix_caching = prefix_caching
        self._ledger = BlockLedger(num_blocks)
        self._tree = RadixTree(self._ledger, block_size, keeps_tokens=keeps_tokens)
        self._free = array("i", range(num_blocks - 1, -1, -1))  # the last is handed out next
        self._num_idle = 0  # named blocks without a reference
        self._pins = PinLedger(int(num_blocks * pin_share))
        self._changes = ChangeLog(num_blocks)
        self._queue = LeafQueue(self._tree, self.policy)

    def tick(self, now_s: float) -> None:
        """The owner's clock shows this; pins whose time is over end."""
        self.now_s = now_s
        if self._pins and (over := self._pins.expired(now_s)):
            self.release(over)

    @property
    def is_caching(self) -> bool:
        """Whether what is named can be found by others."""
        return self._prefix_caching

    # ---- allocation

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now, cached ones included."""
        return len(self._free) + self._tree.num_evictable

    def allocate(self, count: int) -> "BlockIds | None":
        """`count` fresh blocks with one reference each, or None (and no change) when there are not enough."""
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
        """How often this block has been handed out: a reference with an older number is stale."""
        return self._ledger.generations[block]

    # ---- sharing

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more holder for each of these used or cached blocks."""
        num_fresh, nodes = self._ledger.acquire(blocks if type(blocks) is array else array("i", blocks))
        self._num_idle -= num_fresh
        self._relock(nodes)

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less for each. What can still be matched becomes evictable, a chain's last blocks before its first."""
        num_idle, nodes, freed = self._ledger.release(blocks if type(blocks) is array else array("i", blocks))
        self._num_idle += num_idle
        if freed:
            self._free.frombytes(freed)
        self._relock(nodes)

    def _relock(self, nodes: list[int]) -> None:
        """References of some of these nodes' blocks came or went."""
        tree, held_of = self._tree, self._ledger.held
        for index in nodes:
            node = tree.nodes[index]
            assert node is not None
            held, was_held = held_of(node.blocks), node.held
            if held != was_held:
                tree.hold(node, held)
            if held < was_held:
                node.usage.used_s = self.now_s  # whoever held it has used it until now
                if not node.children:
                    self._queue.offer(node, self.now_s)

    def is_own(self, block: int) -> bool:
        """Whether its one holder may write into it: nobody shares it, nobody can match it."""
        return self._ledger.refs[block] == 1 and self._tree.node(block) is None

    def writable(self, block: int) -> BlockId | None:
        """A block that its holder may write instead of `block`: itself, or a fresh one, whose holder the caller is from now on.

        In the second case the caller copies the content (before anything is written into blocks allocated later) and
        has one reference to `block` less. None: no room, and nothing changed.
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
        """The longest cached prefix of this chain's first `limit` blocks; not acquired yet."""
        count = len(chain.data) // HASH_BYTES
        return self._tree.find(chain, count if limit is None or limit > count else limit)

    def partial_match(self, match: Match, tokens: bytes) -> tuple[int, int]:
        """(block, count): a cached block after `match` whose first `count` tokens are the next of the prompt, to copy from.

        To be asked straight after `match`. tokens: those that follow it, packed; less than a block of them counts. (-1, 0) when there are less than MIN_PARTIAL_TOKENS.
        """
        if not self._tree.width:
            return -1, 0
        block, count = self._tree.partial_match(match, tokens[: self._tree.width - TOKEN_BYTES])
        return (block, count) if count >= MIN_PARTIAL_TOKENS else (-1, 0)

    def use(self, match: Match, priority: int = 0) -> None:
        """A request goes on from this match: counts for the policy."""
        node = self._tree.node(match.blocks[-1]) if match.blocks else None  # not match.node: it may have merged since
        if node is None:
            return
        offset = len(match) - node.start
        if offset < len(node.blocks):
            self._split(node, offset)  # what follows was not used
        here: RadixNode | None = node
        while here is not None and here.blocks:
            usage = here.usage
            usage.hits += 1
            usage.used_s = self.now_s
            if priority > here.priority:
                here.priority = priority
            self.policy.used(usage, self.now_s)
            if not here.children and here.is_open:
                self._queue.offer(here, self.now_s)
            here = here.parent

    def insert(
        self,
        chain: HashChain,
        blocks: BlockIds,
        first: int,
        last: int,
        tokens: bytes = b"",
        *,
        priority: int = 0,
    ) -> None:
        """Blocks first .. last - 1 of this table are full and hold what the chain's hashes stand for. A second copy stays unnamed.

        blocks: the sequence's whole table; all of it is held. tokens: of blocks[first:last], packed; without them, their
        beginnings are not found by others.
        """
        if not self._prefix_caching or last <= first:
            return
        node, offset = self._place(chain, blocks, first)
        if node.children or offset < len(node.blocks):  # else it ends here, as while decoding
            node, offset = self._tree.descend(node, offset, chain, last)
        start = node.start + offset
        if start >= last:
            return
        if offset < len(node.blocks):
            self._split(node, offset)
        width = self._tree.width
        fresh, run = blocks[start:last], bytes(chain.data[start * HASH_BYTES : last * HASH_BYTES])
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

    def _place(self, chain: HashChain, blocks: BlockIds, first: int) -> tuple[RadixNode, int]:
        """Where the chain is after `first` blocks, or as far as the index has it."""
        node = self._tree.node(blocks[first - 1]) if first else None
        if node is not None:
            offset = first - node.start
            is_named_so = self._ledger.common(node.digests, offset - 1, chain.data, first - 1, 1)
            assert is_named_so, f"block {blocks[first - 1]} has another name"
            return node, offset
        root = self._tree.root(chain.root, EntryUsage(chain.root, 0, 0, self.now_s, self.now_s))
        return self._tree.descend(root, 0, chain, first)

    def _split(self, node: RadixNode, offset: int) -> None:
        rest = self._tree.split(node, offset)
        held = self._ledger.held(node.blocks)
        if held != node.held:  # whoever holds a block of the rest need not hold those before it: a tier that copies one
            self._tree.hold(node, held)
        if rest.is_open:
            self._queue.offer(rest, self.now_s)

    def reset_cache(self) -> int:
        """End all pins and forget every cached block that may go; returns how many. Beginnings of held chains stay."""
        while over := self._pins.next_to_expire():
            self.release(over)
        count = self._tree.num_evictable
        self._evict(count)
        return count

    def drain_changes(self) -> CacheChange | None:
        """What changed in the prefix index since the last call, or None."""
        return self._changes.drain()

    @property
    def has_changes(self) -> bool:
        """Whether the prefix index may have changed since they were drained."""
        return bool(self._changes)

    def cached_hashes(self) -> list[BlockHash]:
        """Every hash that `match` can find now, changes not yet drained included."""
        return list(self._tree.hashes())

    # ---- pins

    def pin(self, chain: HashChain, count: int, ttl_s: float) -> int:
        """Keep the first `count` blocks of this chain, those that are cached, for so long; how many are pinned now.

        Less than asked for when the tenant's quota is used up: the first ones are.
        """
        found = self.match(chain, count)
        fresh, pinned = self._pins.add(chain.root, found.blocks, self.now_s + ttl_s)
        self.acquire(fresh)
        return pinned

    def unpin(self, chain: HashChain, count: int) -> None:
        """End the pins of the first `count` blocks of this chain before their time."""
        self.release(self._pins.remove(self.match(chain, count).blocks))

    def unpin_for(self, count: int) -> bool:
        """End pins, those first that end next, until `count` blocks are available; whether they are."""
        while self.num_available < count and (over := self._pins.next_to_expire()):
            self.release(over)
        return self.num_available >= count

    @property
    def pinned(self) -> PinLedger:
        """Each block in it has one reference from there."""
        return self._pins

    # ---- eviction

    def _evict(self, count: int) -> None:
        """Move `count` blocks from the ends of leaves to the free ones; the caller knows that there are so many."""
        while count > 0:
            leaf = self._queue.first(self.now_s)
            count -= self._give_up(leaf, min(count, len(leaf.blocks) - leaf.held))

    def _give_up(self, leaf: RadixNode, count: int) -> int:
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
            self._child_gone(parent)
        return count

    def _child_gone(self, node: RadixNode) -> None:
        if node.parent is None:
            if not node.children:
                self._tree.drop_root(node.usage.digest)
        elif not node.children:
            if node.is_open:
                self._queue.offer(node, self.now_s)
        elif len(node.children) == 1:
            [child] = node.children.values()
            if child.priority == node.priority and child.usage.used_s >= node.usage.used_s:  # all of it was used last
                self._tree.merge(node)
                if node.is_open:
                    self._queue.offer(node, self.now_s)

    def eviction_candidates(self, count: int) -> list[EvictionCandidate]:
        """Up to `count` blocks about in the order in which they would be evicted, none of them held."""
        return list(islice(self._queue.candidates(), count))

    # ---- the ledger

    def num_holders(self, block: int) -> int:
        """References to this block, a pin's included."""
        return self._ledger.refs[block]

    def counts(self) -> BlockCounts:
        free, cached = len(self._free), self._num_idle
        if self._pins:
            cached += sum(self._ledger.refs[block] == 1 for block in self._pins)
        return BlockCounts(free, self.num_blocks - free - cached, cached, len(self._pins))

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one state, and index, queue and pins agree."""
        refs, named = self._ledger.ref_array, self._ledger.owner_array >= 0
        is_free = np.zeros(self.num_blocks, bool)
        is_free[np.array(self._free, np.int32)] = True
        assert int(is_free.sum()) == len(self._free), "a block is free twice"
        assert not (refs < 0).any(), "a block was released more often than held"
        assert not (is_free & named).any(), "a free block has a name"
        assert not (is_free & (refs > 0)).any(), "a free block is held"
        assert (is_free | named | (refs > 0)).all(), "a block is in no state: lost"
        assert int((named & (refs == 0)).sum()) == self._num_idle, "cached blocks are miscounted"
        assert all(refs[block] > 0 and named[block] for block in self._pins), "a pinned block is not held"
        self._tree.check()
        valid = self._queue.members()
        for node in self._tree.live():
            assert node.parent is None or node.held == self._ledger.held(node.blocks), (
                f"node {node.index}: wrongly locked"
            )
            assert not node.is_open or node.index in valid, f"node {node.index} may go, but is not in line"
