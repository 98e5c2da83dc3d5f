"""A random life of the block pool and its index, held against a plain model of what each block contains.

Most operations are done in bursts from a drawn seed: Hypothesis itself takes longer than they do.
"""

import functools
import random
from array import array
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay.hashing import HashChain, pack_tokens
from kvrelay.kvcache.index.changes import EventLog
from kvrelay.kvcache.pool import ledger as ledger_module
from kvrelay.kvcache.pool.block_pool import BlockPool
from tests.kvcache.pool import machine_steps

pytestmark = pytest.mark.pure


SIZE = 4  # tokens of a block
BLOCKS = 40
BURST = 40
KINDS = ["start"] * 4 + ["grow"] * 6 + ["end"] * 3 + ["fork", "pin", "tick", "press", "unpin", "reset", "publish"]
KINDS += ["discard"]


@functools.lru_cache(4096)
def chain(tokens: tuple[int, ...], salt: str) -> HashChain:
    return HashChain.of(tokens, SIZE, salt)


@dataclass(eq=False)
class Seq:
    """What a sequence's owner knows."""

    tokens: list[int]
    salt: str
    blocks: array = field(default_factory=lambda: array("i"))
    generations: list[int] = field(default_factory=list)
    named: int = 0

    @property
    def chain(self) -> HashChain:
        return chain(tuple(self.tokens), self.salt)


class Life(RuleBasedStateMachine):
    """`content` is the model's memory: for each block, (salt, all tokens up to its end) as last written."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.log = BlockPool(BLOCKS, block_size=SIZE, pin_share=0.3), EventLog()
        self.seqs: list[Seq] = []
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.generations = [0] * BLOCKS
        self.pins: dict[int, float] = {}
        self.mirror: set[bytes] = set()
        self.now_s = 0.0
        self.count = 0

    # ---- helpers

    def fresh(self, count: int) -> array | None:
        """Allocate, and check what went: no held or pinned block, leaves first, generations grown."""
        before = {block for seq in self.seqs for block in seq.blocks} | set(self.pins)
        available = self.pool.num_available
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > available)
        for block in blocks or ():
            assert block not in before, "a held or pinned block was handed out"
            assert self.pool.generation(block) == self.generations[block] + 1
            self.generations[block] += 1
            self.content.pop(block, None)
        return blocks

    def end_of(self, seq: Seq) -> None:
        self.pool.release(seq.blocks)
        self.seqs.remove(seq)

    def write(self, seq: Seq, index: int) -> bool:
        """The block takes the sequence's tokens; False: there was no room for a copy of a shared one."""
        block = self.pool.writable(seq.blocks[index])
        if block is None:
            assert not self.pool.num_available
            return False
        if block != seq.blocks[index]:
            held = {b for other in self.seqs for b in other.blocks} | set(self.pins)
            assert block not in held
            assert self.pool.generation(block) == self.generations[block] + 1
            self.generations[block] += 1
            seq.blocks[index] = block
        assert self.pool.num_holders(block) == 1
        self.content[block] = (seq.salt, tuple(seq.tokens[: (index + 1) * SIZE]))
        return True

    # ---- rules

    @rule(seed=st.integers(0, 2**32 - 1))
    def burst(self, seed):
        """Many operations at once, as often as each other one is likely."""
        rng = random.Random(seed)
        for _ in range(BURST):
            self.one_of(rng)
            self.adds_up()

    def one_of(self, rng: random.Random) -> None:
        pick, kind = rng.randrange(64), rng.choice(KINDS)
        if kind == "start":
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 48))]
            self.start(tokens, rng.randint(1, 3), rng.choice(("", "b")), rng.choice((0, 0, 0, 1)))
        elif kind == "grow" and self.seqs:
            self.grow(pick, [rng.randrange(2) for _ in range(rng.randint(1, 9))])
        elif kind in ("end", "fork") and self.seqs:
            (self.end if kind == "end" or len(self.seqs) > 12 else self.fork)(pick)
        elif kind == "pin" and self.seqs:
            self.pin(pick, rng.randint(1, 5))
        elif kind == "tick":
            self.tick(rng.randrange(4))
        elif kind == "press":
            self.press(rng.randint(0, BLOCKS // 2))
        elif kind in ("unpin", "reset") and not rng.randrange(8):
            (self.unpin if kind == "unpin" else self.reset)()
        elif kind == "discard":
            self.discard(pick % BLOCKS)
        elif kind == "publish":
            self.publish()

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=48),
        repeat=st.integers(1, 3),
        salt=st.sampled_from(["", "b"]),
        priority=st.sampled_from([0, 0, 0, 1]),
    )
    def start(self, tokens, repeat, salt, priority):
        seq = Seq((tokens * repeat)[:100], salt)
        chain = seq.chain
        match = self.pool.match(chain)
        for index, block in enumerate(match.blocks):
            assert self.content[block] == (salt, tuple(seq.tokens[: (index + 1) * SIZE])), "another prompt's block"
        rest = seq.tokens[len(match) * SIZE :]
        tail, common = self.pool.partial_match(match, pack_tokens(rest))
        if tail >= 0:
            self.check_tail(tail, common, seq, len(match))
        self.pool.acquire(match.blocks)
        seq.blocks = array("i", match.blocks)
        self.seqs.append(seq)
        fresh = self.fresh(-(-len(seq.tokens) // SIZE) - len(match))
        if fresh is None:
            return self.end_of(seq)
        self.pool.use(match, priority)
        seq.blocks += fresh
        seq.named = len(match)
        for index in range(len(match), len(seq.blocks)):
            assert self.write(seq, index)
        self.name(seq, len(chain), priority)

    def check_tail(self, tail: int, common: int, seq: Seq, matched: int) -> None:
        salt, whole = self.content[tail]
        begin = matched * SIZE
        assert salt == seq.salt and whole[:begin] == tuple(seq.tokens[:begin]) and len(whole) == begin + SIZE
        assert list(whole[begin : begin + common]) == seq.tokens[begin : begin + common]

    def name(self, seq: Seq, last: int, priority: int = 0) -> None:
        tokens = pack_tokens(seq.tokens, seq.named * SIZE, last * SIZE)
        self.pool.insert(seq.chain, seq.blocks, seq.named, last, tokens, priority=priority)
        seq.named = max(seq.named, last)

    @precondition(lambda self: self.seqs)
    @rule(pick=st.integers(0, 63), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def grow(self, pick, tokens):
        seq = self.seqs[pick % len(self.seqs)]
        old = len(seq.tokens)
        seq.tokens = seq.tokens + tokens
        need = -(-len(seq.tokens) // SIZE) - len(seq.blocks)
        fresh = self.fresh(need)
        if fresh is None:
            return self.end_of(seq)
        seq.blocks += fresh
        for index in range(old // SIZE, len(seq.blocks)):
            if not self.write(seq, index):
                return self.end_of(seq)
        self.name(seq, len(seq.tokens) // SIZE)

    @precondition(lambda self: self.seqs)
    @rule(pick=st.integers(0, 63))
    def fork(self, pick):
        seq = self.seqs[pick % len(self.seqs)]
        self.pool.acquire(seq.blocks)
        self.seqs.append(Seq(list(seq.tokens), seq.salt, array("i", seq.blocks), named=seq.named))

    @precondition(lambda self: self.seqs)
    @rule(pick=st.integers(0, 63))
    def end(self, pick):
        self.end_of(self.seqs[pick % len(self.seqs)])

    @precondition(lambda self: self.seqs)
    @rule(pick=st.integers(0, 63), ttl=st.integers(1, 5))
    def pin(self, pick, ttl):
        seq = self.seqs[pick % len(self.seqs)]
        named = self.pool.match(seq.chain).blocks
        before, of_tenant = set(self.pins), {b for b in self.pins if self.content[b][0] == seq.salt}
        pinned = self.pool.pin(seq.chain, len(seq.chain), ttl)
        for block in named[:pinned]:
            self.pins[block] = max(self.pins.get(block, 0.0), self.now_s + ttl)
        room = min(int(BLOCKS * 0.3) - len(of_tenant), BLOCKS // 2 - len(before))
        assert len(set(named[:pinned]) - before) <= room
        assert pinned == len(named) or len(set(named[: pinned + 1]) - before) > room

    @rule(passed=st.integers(0, 3))
    def tick(self, passed):
        self.now_s += passed
        self.pool.tick(self.now_s)
        self.pins = {block: until for block, until in self.pins.items() if until > self.now_s}
        assert set(self.pins) == set(self.pool.pinned)

    @rule()
    def unpin(self):
        if self.pool.unpin_for(BLOCKS // 2):
            assert self.pool.num_available >= BLOCKS // 2
        self.pins = {block: until for block, until in self.pins.items() if block in self.pool.pinned}

    @rule()
    def reset(self):
        self.pool.reset_cache()
        self.pins.clear()
        assert self.seqs or self.pool.counts().free == BLOCKS

    @rule(block=st.integers(0, BLOCKS - 1))
    def discard(self, block):
        """A block and all that continue it are given up, unless one of them is held."""
        known = [self.pool.match(self.chain_of(one)).blocks for one in self.named()]
        after = {other for one in known if block in one for other in one[one.index(block) :]}
        held = {b for seq in self.seqs for b in seq.blocks} | set(self.pins)
        num_free = self.pool.counts().free
        assert self.pool.discard(block) == (0 if after & held else len(after))
        assert self.pool.counts().free == num_free + (0 if after & held else len(after))

    @rule(count=st.integers(0, BLOCKS))
    def press(self, count):
        """Another's blocks push cached ones out: a block is never given up before one that it is the beginning of."""
        known = [self.pool.match(self.chain_of(block)).blocks for block in self.named()[:: 1 + count % 4]]
        fresh = self.fresh(count)
        if fresh is None:
            return
        gone = set(fresh)
        for chain in known:
            kept = [block not in gone for block in chain]
            assert kept == sorted(kept, reverse=True), "a beginning went before its end"
        self.pool.release(fresh)

    def named(self) -> list[int]:
        return [block for block in self.content if self.pool._tree.node(block) is not None]

    def chain_of(self, block: int) -> HashChain:
        salt, tokens = self.content[block]
        return chain(tokens, salt)

    @rule()
    def publish(self):
        event = self.log.number(self.pool.drain_changes())
        if event is not None:
            assert not set(event.stored) & set(event.removed)
            assert set(event.removed) <= self.mirror and not set(event.stored) & self.mirror
            self.mirror = (self.mirror - set(event.removed)) | set(event.stored)
        assert self.mirror == set(self.pool.cached_hashes()) == set(self.log.snapshot().hashes)

    # ---- always

    @invariant()
    def adds_up(self):
        self.count += 1
        machine_steps.taken["pool"] += 1
        counts = self.pool.counts()
        assert counts.free + counts.used + counts.cached == BLOCKS
        if self.count % 12:
            return
        self.pool.check()
        holders: dict[int, int] = dict.fromkeys(self.pins, 1)
        for seq in self.seqs:
            for block in seq.blocks:
                holders[block] = holders.get(block, 0) + 1
        assert holders == {b: n for b in range(BLOCKS) if (n := self.pool.num_holders(b))}
        assert counts.used == len({block for seq in self.seqs for block in seq.blocks})
        for seq in self.seqs:
            for index, block in enumerate(seq.blocks[: seq.named]):
                assert self.content[block] == (seq.salt, tuple(seq.tokens[: (index + 1) * SIZE])), "overwritten"

    def teardown(self):
        for seq in list(self.seqs):
            self.end_of(seq)
        self.pool.reset_cache()
        self.pool.check()
        assert self.pool.counts().free == BLOCKS and not self.pool.cached_hashes()


@pytest.mark.slow
def test_any_life_of_the_pool():
    machine_steps.live("pool", Life, examples=40, rules_each=50)


def test_a_life_of_the_pool_without_a_compiler(monkeypatch):
    monkeypatch.setattr(ledger_module, "binder", lambda: None)
    assert "_held" in repr(BlockPool(1)._ledger.held)
    before = machine_steps.taken["pool"]
    machine_steps.run_until(lambda: machine_steps.taken["pool"] > before + 500, Life, examples=10, rules_each=50)
