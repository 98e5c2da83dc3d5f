"""One contender of bench/kvcache/pool.py in a process of its own: `pool_side.py NAME`, jobs as JSON lines in, times as
JSON lines out.

A job is a prompt length, the share of it that is cached (percent), and a number of requests. Each request begins with
one of four prefixes, differs after that, and computes OUTPUT tokens; the pool holds eight prompts, so that all but the
first requests evict. What a contender does in a request's life:

    hash      names of the prompt's blocks, from a list of ints
    match     longest cached prefix, its blocks locked
    allocate  blocks for the rest
    insert    the prompt's computed blocks go into the index
    decode    for each block of output: its hash, a block, and where the contender does so, into the index
    free      everything is given back
    events    what was stored and removed, as the lists that are published

SGLang's tree is keyed by the tokens, which it gets as the array that it wants, made outside the times. It hashes for
events alone, while it takes them, and by default it has none ("events" in the name: it has). vLLM puts blocks into its
index while it allocates.
"""

import json
import os
import random
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any, Protocol

BLOCK = 16
OUTPUT = 4 * BLOCK
PROMPTS_KEPT = 8
STEPS = ("hash", "match", "allocate", "insert", "decode", "free", "events")
Lap = Callable[[str], None]  # ends a step


class Contender(Protocol):
    def run(self, tokens: list[int], output: list[int], lap: Lap) -> None:
        """One request's life; `lap("")` begins the first step."""


class Ours:
    """kvrelay's pool, index and events, as the scheduler calls them."""

    def __init__(self, num_blocks: int) -> None:
        from kvrelay import hashing
        from kvrelay.kvcache.index.changes import EventLog
        from kvrelay.kvcache.pool.block_pool import BlockPool

        self._hashing, self._pool, self._log = hashing, BlockPool(num_blocks, block_size=BLOCK), EventLog()

    def run(self, tokens: list[int], output: list[int], lap: Lap) -> None:
        pool, pack = self._pool, self._hashing.pack_tokens
        tokens = tokens.copy()
        lap("")
        chain = self._hashing.HashChain(self._hashing.root_hash())
        chain.extend(pack(tokens), BLOCK)
        lap("hash")
        match = pool.match(chain, (len(tokens) - 1) // BLOCK)
        pool.acquire(match.blocks)
        lap("match")
        blocks = match.blocks + self._fresh(len(tokens), len(match))
        pool.use(match)
        lap("allocate")
        first, full = len(match), len(chain)
        pool.insert(chain, blocks, first, full, pack(tokens, first * BLOCK, full * BLOCK))
        lap("insert")
        for start in range(0, len(output), BLOCK):
            tokens += output[start : start + BLOCK]
            blocks += self._fresh(len(tokens), len(blocks))
            chain.extend(pack(tokens, full * BLOCK), BLOCK)
            first, full = full, len(chain)
            pool.insert(chain, blocks, first, full, pack(tokens, first * BLOCK, full * BLOCK))
        lap("decode")
        pool.release(blocks)
        lap("free")
        self._log.number(pool.drain_changes())
        lap("events")

    def _fresh(self, num_tokens: int, num_blocks: int) -> "array[int]":
        fresh = self._pool.allocate(-(-num_tokens // BLOCK) - num_blocks)
        assert fresh is not None
        return fresh


class Vllm:
    """vLLM's KVCacheManager with its default hash (name it "vLLM cbor" for the one that is alike in every Python)."""

    def __init__(self, num_blocks: int, hash_name: str) -> None:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        function = get_hash_fn_by_name(hash_name)
        init_none_hash(function)
        self._hasher = get_request_block_hasher(BLOCK, function)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float16)
        config = KVCacheConfig(num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        self._manager = KVCacheManager(
            config, 1 << 20, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_kv_cache_events=True
        )
        self._request, self._sampling, self._count = Request, SamplingParams(max_tokens=OUTPUT), 0

    def run(self, tokens: list[int], output: list[int], lap: Lap) -> None:
        manager = self._manager
        self._count += 1
        request = self._request(str(self._count), tokens, self._sampling, None)
        request._block_hasher = self._hasher
        lap("")
        request.update_block_hashes()
        lap("hash")
        blocks, num_computed, _ = manager.get_computed_blocks(request)
        lap("match")
        assert manager.allocate_slots(request, len(tokens) - num_computed, num_computed, blocks) is not None
        request.num_computed_tokens = len(tokens)
        lap("allocate")
        for start in range(0, len(output), BLOCK):
            request.append_output_token_ids(output[start : start + BLOCK])
            assert manager.allocate_slots(request, BLOCK) is not None
            request.num_computed_tokens += BLOCK
        lap("decode")
        manager.free(request)
        lap("free")
        manager.take_events()
        lap("events")


class Sglang:
    """SGLang's prefix tree (in Python or its Rust core) with its paged allocator, as its scheduler calls them."""

    def __init__(self, num_blocks: int, core: str, *, has_events: bool) -> None:
        import torch
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        class Memory:  # the allocator asks nothing else of it
            device = "cpu"

        self._allocator = PagedTokenToKVPoolAllocator(
            num_blocks * BLOCK, BLOCK, torch.float16, "cpu", Memory(), need_sort=False
        )
        self._row = torch.empty(num_blocks * BLOCK, dtype=torch.int64)  # of the table of requests, for one
        table = ReqToTokenPool(size=1, max_context_len=1, device="cpu", enable_memory_saver=False)
        components = {} if core == "python" else {"tree_components": (ComponentType.FULL,), "tree_core_backend": core}
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=table,
            token_to_kv_pool_allocator=self._allocator,
            page_size=BLOCK,
            enable_kv_cache_events=has_events,
            **components,
        )
        self._cache = RadixCache(params) if core == "python" else UnifiedRadixCache(params)
        self._is_python = core == "python"
        self._key, self._match, self._insert, self._evict = RadixKey, MatchPrefixParams, InsertParams, EvictParams

    def run(self, tokens: list[int], output: list[int], lap: Lap) -> None:
        prompt, whole = array("q", tokens), array("q", tokens + output)
        prompt, whole = prompt[: len(prompt) // BLOCK * BLOCK], whole[: len(whole) // BLOCK * BLOCK]
        cache, row = self._cache, self._row
        lap("")
        lock = cache.lock(cache.match_prefix(self._match(key=self._key(prompt))).last_device_node)
        held = cache.path_device_indices(lock.node)
        lap("match")
        row[: len(held)] = held
        num_slots = self._extend(len(held), len(tokens))
        lap("allocate")
        lock = self._checkpoint(prompt, len(held), lock)
        lap("insert")
        for start in range(0, len(output), BLOCK):
            num_slots = self._extend(num_slots, len(tokens) + start + BLOCK)
        lap("decode")
        lock = self._checkpoint(whole, len(prompt), lock, split=prompt)
        if num_slots > len(whole):
            self._allocator.free(row[len(whole) : num_slots].clone())
        cache.unlock(lock)
        lap("free")
        cache.take_events()
        lap("events")

    def _extend(self, num_slots: int, num_tokens: int) -> int:
        """Slots for so many tokens, in whole blocks; returns their number."""
        allocator, most = self._allocator, -(-num_tokens // BLOCK) * BLOCK
        need = most - num_slots
        if need > allocator.available_size():
            self._cache.evict(self._evict(num_tokens=need - allocator.available_size()))
        fresh = allocator.alloc(need) if need else self._row[:0]
        assert fresh is not None
        self._row[num_slots:most] = fresh
        return most

    def _checkpoint(self, tokens: "array[int]", first: int, lock: Any, split: "array[int] | None" = None) -> Any:
        """Insert these tokens, of which the first are the tree's, and hold them with another lock; split: a node is to
        end there. The Rust core frees slots of tokens that others have inserted meanwhile; the tree in Python does not.
        """
        cache, row = self._cache, self._row
        values = row[: len(tokens)].clone()
        params = {"prev_prefix_len": first, "inserted_len": first}
        result = cache.insert(self._insert(key=self._key(tokens), value=values, **params))
        if split is not None and len(split) < len(tokens):
            own = len(split)
            params = {"prev_prefix_len": own, "inserted_len": own, "priority": 1}
            cache.insert(self._insert(key=self._key(split), value=values[:own], **params))
        node = result.last_device_node
        if self._is_python:
            self._allocator.free_segment(values[first : result.prefix_len], start_pos=first)
            node = cache.match_prefix(self._match(key=self._key(tokens))).last_device_node
        path = cache.path_device_indices(node)
        row[first : len(path)] = path[first:]
        cache.unlock(lock)
        return cache.lock(node)


def _contender(name: str, num_blocks: int) -> Contender:
    if name == "kvrelay":
        return Ours(num_blocks)
    if name.startswith("vLLM"):
        return Vllm(num_blocks, "sha256_cbor" if "cbor" in name else "sha256")
    return Sglang(num_blocks, "rust" if "Rust" in name else "python", has_events="events" in name)


def requests(length: int, cached: int, count: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and outputs; the same ones in every process."""
    random_ids = random.Random(length)

    def some(number: int) -> list[int]:
        return random_ids.choices(range(150_000), k=number)

    num_shared = length * cached // 100
    shared = [some(num_shared) for _ in range(4)]
    return [(shared[index % 4] + some(length - num_shared), some(OUTPUT)) for index in range(count)]


def _measure(contender: Contender, tokens: list[int], output: list[int]) -> dict[str, float]:
    """Seconds of each step of one request."""
    times = dict.fromkeys(("", *STEPS), 0.0)
    last_s = 0.0

    def lap(step: str) -> None:
        nonlocal last_s
        now_s = time.perf_counter()
        times[step] += now_s - last_s
        last_s = time.perf_counter()

    contender.run(tokens, output, lap)
    return {step: times[step] for step in STEPS}


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def main() -> None:
    name = sys.argv[1]
    if name != "kvrelay":
        import pydantic  # noqa: F401
        import transformers  # noqa: F401

        from bench import standins

        standins.install()
    contenders: dict[tuple[int, int], Contender] = {}
    work: dict[tuple[int, int], list[tuple[list[int], list[int]]]] = {}
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        length, cached, count = json.loads(line)
        key = length, cached
        if key not in contenders:
            contenders[key] = _contender(name, PROMPTS_KEPT * -(-(length + OUTPUT) // BLOCK) + 8)
            work[key] = requests(length, cached, max(count, 4 * PROMPTS_KEPT))
            for tokens, output in work[key]:
                contenders[key].run(tokens, output, lambda step: None)
        times = [_measure(contenders[key], tokens, output) for tokens, output in work[key]]
        print(json.dumps({step: _median([each[step] for each in times]) for step in STEPS}), file=out, flush=True)
    out.flush()
    os._exit(0)  # the stand-ins make exit handlers stumble


if __name__ == "__main__":
    main()
