"""Each eviction policy's defining behaviour, through the cache that asks it; the sketch, and traces of our own."""

import gc
import json
import random

import pytest

from bench.kvcache.cache_replay import Belady, Prompt, load_prompts, replay
from kvrelay.cluster.workloads.choose import parse_mooncake
from kvrelay.cluster.workloads.conversations import SessionSpec, conversation_entries
from kvrelay.cluster.workloads.trace import as_mooncake
from kvrelay.config import settings_from
from kvrelay.errors import ConfigError
from kvrelay.hashing import HashChain
from kvrelay.kvcache.eviction.policies import POLICIES, EntryUsage, Lru, make_policy
from kvrelay.kvcache.eviction.reuse_rates import ReuseRates
from kvrelay.kvcache.index.tier_index import OfferedBefore, TierIndex
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.settings.cache import CacheSettings
from kvrelay.types import BlockHash

pytestmark = pytest.mark.pure


def name(text: str) -> BlockHash:
    return BlockHash(hash_of(text))


def hash_of(text: str) -> bytes:
    return int.from_bytes(text.encode().rjust(8, b"\0")).__mul__(0x9E3779B97F4A7C15F39CC0605CEDC835).to_bytes(32)[-16:]


class Cache:
    """A tier of single blocks, driven in words."""

    def __init__(self, policy: str, num_rows: int) -> None:
        self.tier = TierIndex(num_rows, make_policy(policy, num_rows))
        self.now_s = 0.0
        self.texts: dict[BlockHash, str] = {}

    def ask(self, *texts: str) -> None:
        """Each is used if it is here, else it comes in."""
        for text in texts:
            self.now_s += 1
            digest = name(text)
            self.texts[digest] = text
            if digest in self.tier:
                self.tier.use([digest], self.now_s)
                continue
            (slot,) = self.tier.reserve(1, self.now_s) or ()
            self.tier.put(digest, slot, self.now_s, parent=None, end_tokens=512)

    def order(self) -> str:
        """What would go, first to go first."""
        return "".join(self.texts[digest] for digest in self.tier.next_victims(self.tier.num_rows, self.now_s))

    def here(self) -> set[str]:
        return {self.texts[digest] for digest in self.tier.hashes()}


def num_alive(kind: type) -> int:
    gc.collect()
    return sum(type(one) is kind for one in gc.get_objects())


def test_lru_gives_up_what_was_used_longest_ago():
    cache = Cache("lru", 3)
    cache.ask("a", "b", "c", "a")
    assert cache.order() == "bca"


def test_lfu_gives_up_what_was_used_least():
    cache = Cache("lfu", 3)
    cache.ask("a", "b", "c", "a", "a", "b")
    assert cache.order() == "cba"


def test_past_fame_fades_under_lfu():
    cache = Cache("lfu", 2)
    cache.ask("a", "a", "a", *"bcdefgh")
    assert "a" not in cache.here()
    cache = Cache("lfu", 2)
    cache.ask("a", "a", "a", *"bcd")
    assert "a" in cache.here()  # but not at once


def test_a_sketch_counts_and_forgets():
    offers = OfferedBefore(16)
    assert [offers.offer(name("a")) for _ in range(3)] == [False, True, True]
    assert not offers.offer(name("b"))
    for number in range(400):
        offers.offer(name(f"other{number}"))
    assert not offers.offer(name("a"))


def test_reuse_rates_are_learned_by_kind_and_age():
    rates = ReuseRates()
    assert rates.value(None, 1) > rates.value(None, 100) > rates.value(None, 10_000)  # before: like LRU
    for number in range(300):
        rates.reused((3, 9), 60 + number % 20)  # kind 3 comes back after about a minute
        rates.lost((0, 9), 900)  # kind 0 never does
    rates.fit([])
    assert rates.value((3, 9), 50) > 5 * rates.value((0, 9), 50)
    assert rates.value((3, 9), 50) > rates.value((3, 9), 1)  # not before it had time to read
    assert rates.value((3, 9), 50) > 5 * rates.value((3, 9), 600)


def test_those_who_still_wait_count_against_the_rate():
    def value(num_waiting: int) -> float:
        rates = ReuseRates()
        for _ in range(50):
            rates.reused((0, 9), 60)
        rates.fit(((0, 9), 500.0) for _ in range(num_waiting))
        return rates.value((0, 9), 30)

    assert value(0) > 2 * value(200)


def conversations(num_turns: int, num_blocks: int) -> list[Prompt]:
    """Every 5 s a prompt that never comes back; every 20 s a short one that comes back each 60 s for `num_turns`
    turns.
    """
    prompts = []
    for number in range(400):
        once = tuple(name(f"o{number}/{block}") for block in range(num_blocks))
        prompts.append(Prompt(5.0 * number, 512 * num_blocks, once))
        if number % 4 == 0:
            for turn in range(num_turns):
                talk = tuple(name(f"c{number}/{block}") for block in range(2 + turn))
                prompts.append(Prompt(5.0 * number + 1 + 60 * turn, 512 * (2 + turn), talk))
    return sorted(prompts, key=lambda prompt: prompt.arrival_s)


def test_survival_keeps_conversations_and_evicts_one_off_prompts():
    prompts = conversations(num_turns=5, num_blocks=8)
    learned = replay(prompts, TierIndex(64, make_policy("survival", 64)))
    lru = replay(prompts, TierIndex(64, Lru()))
    best = replay(prompts, TierIndex(64, Belady(prompts)))
    assert learned.late_ratio > lru.late_ratio + (best.late_ratio - lru.late_ratio) / 3


def test_survival_watches_evicted_prompts_without_keeping_their_blocks():
    policy, num_blocks, num_prompts = make_policy("survival", 64), 40, 50
    index = TierIndex(64, policy)
    before = num_alive(EntryUsage)
    for prompt in range(num_prompts):
        parent, rows = None, index.reserve(num_blocks, float(prompt))
        for block, row in enumerate(rows):
            digest = name(f"{prompt}:{block}")
            index.put(digest, row, float(prompt), parent=parent, end_tokens=16 * (block + 1))
            parent = digest
    assert num_alive(EntryUsage) - before <= len(index) + num_blocks + num_prompts


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_beats_the_optimum_and_each_keeps_the_ledger(policy):
    prompts = load_prompts(None, num_requests=250, seed=3)
    tier = TierIndex(400, make_policy(policy, 400))
    found = replay(prompts, tier).hit_tokens
    tier.check()
    assert 0 < found <= replay(prompts, TierIndex(400, Belady(prompts))).hit_tokens
    assert found < replay(prompts, TierIndex(10_000, Lru())).hit_tokens


def test_belady_is_the_best_of_all_on_a_case_done_by_hand():
    chains = {text: (name(text),) for text in "abc"}
    prompts = [Prompt(float(at), 512, chains[text]) for at, text in enumerate("abcabcabc")]
    assert replay(prompts, TierIndex(2, Lru())).hit_tokens == 0
    assert replay(prompts, TierIndex(2, Belady(prompts))).hit_tokens == 3 * 512


def test_policies_go_by_name_and_a_wrong_name_tells_the_right_ones():
    assert set(POLICIES) == set(CacheSettings.model_fields["eviction_policy"].annotation.__args__)
    assert [make_policy(one, 8).name for one in POLICIES] == list(POLICIES)
    with pytest.raises(ValueError, match="lru, lfu"):
        make_policy("lrv", 8)
    with pytest.raises(ConfigError):
        settings_from({"cache": {"eviction_policy": "lrv"}})


# ---- traces of our own


def test_a_generated_trace_repeats_with_its_seed_and_survives_its_format():
    trace = conversation_entries(SessionSpec(seed=5), 300)
    assert trace == conversation_entries(SessionSpec(seed=5), 300) != conversation_entries(SessionSpec(seed=6), 300)
    assert list(parse_mooncake(as_mooncake(entry) for entry in trace)) == trace
    assert json.loads(as_mooncake(trace[0]))["hash_ids"] == list(trace[0].hash_ids)


def test_a_generated_trace_has_turns_shared_beginnings_and_prompts_that_come_once():
    trace = conversation_entries(SessionSpec(seed=5), 600)
    times = [entry.arrival_s for entry in trace]
    assert times == sorted(times)
    assert all(len(entry.hash_ids) == -(-entry.input_tokens // 512) for entry in trace)
    parents: dict[int, int | None] = {}
    seen: set[int] = set()
    deepest = []
    for entry in trace:
        before: int | None = None
        deepest.append(sum(block in seen for block in entry.hash_ids))
        for block in entry.hash_ids:
            assert parents.setdefault(block, before) == before, "a block with two prefixes"
            before = block
        seen.update(entry.hash_ids)
    assert sum(depth > 10 for depth in deepest) > 50  # turns that continue
    assert sum(depth == 0 for depth in deepest) < 300  # most share a beginning
    assert sum(0 < depth <= 10 for depth in deepest) > 50


def test_without_one_off_prompts_and_with_sure_replies_every_session_goes_on():
    spec = SessionSpec(one_off_share=0.0, first_continues=1.0, last_continues=1.0, starts_per_s=0.05, seed=1)
    trace = conversation_entries(spec, 200)
    once = conversation_entries(SessionSpec(one_off_share=1.0, starts_per_s=0.05, seed=1), 200)

    def total(entries):
        return sum(entry.input_tokens for entry in entries) / len(entries)

    assert total(trace) > 1.2 * total(once)  # contexts grow with their turns
    assert trace[-1].arrival_s < once[-1].arrival_s


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_the_devices_index_too(policy):
    """Runs of blocks that grow, split and merge, where entries come and go whole or in part."""
    pool = BlockPool(24, block_size=16, policy=make_policy(policy, 24))
    draw = random.Random(4)
    for number in range(400):
        pool.tick(3.0 * number)
        tokens = (
            [draw.randrange(3)] * 32 + [draw.randrange(2)] * 32 + [draw.randrange(1000)] * 16 * draw.randrange(1, 5)
        )
        chain = HashChain.of(tokens, 16)
        match = pool.match(chain)
        pool.use(match)
        pool.acquire(match.blocks)
        fresh = pool.allocate(len(chain) - len(match))
        assert fresh is not None
        table = match.blocks + fresh
        pool.insert(chain, table, len(match), len(chain))
        pool.release(table)
        pool.check()
    assert pool.counts().used == 0
