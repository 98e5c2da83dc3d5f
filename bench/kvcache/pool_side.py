"""One contender of bench/kvcache/pool.py in a process of its own: `pool_side.py NAME`, jobs as JSON lines in, times as
JSON lines out.

A job is one prompt length. Each request shares its first half with one of four prefixes and differs after that; the
pool holds eight prompts, so that from the ninth on every request evicts. What a contender does with a request:

    hash      names of the prompt's blocks, from a list of ints
    match     longest cached prefix, its blocks locked
    allocate  blocks for the rest
    append    the computed blocks go into the index
    free      everything is given back

SGLang hashes nothing: its tree is keyed by the tokens, which it gets as the array that it wants, made outside the
times. vLLM puts the blocks into its index while allocating.
"""

import json
import os
import random
import sys
import time
from array import array
from typing import Any, Protocol

BLOCK = 16
PROMPTS_KEPT = 8


class Contender(Protocol):
    def run(self, tokens: list[int]) -> dict[str, float]:
        """Seconds of each step of one request."""


class Ours:
    """kvrelay's pool and index."""

    def __init__(self, num_blocks: int) -> None:
        from kvrelay import hashing
        from kvrelay.kvcache.pool.block_pool import BlockPool

        self._hashing, self.pool = hashing, BlockPool(num_blocks, block_size=BLOCK)

    def run(self, tokens: list[int]) -> dict[str, float]:
        pool, clock = self.pool, time.perf_counter
        times = [clock()]
        packed = self._hashing.pack_tokens(tokens)
        chain = self._hashing.HashChain(self._hashing.root_hash())
        chain.extend(packed, BLOCK)
        times.append(clock())
        match = pool.match(chain, (len(tokens) - 1) // BLOCK)
        pool.acquire(match.blocks)
        times.append(clock())
        fresh = pool.allocate(-(-len(tokens) // BLOCK) - len(match))
        assert fresh is not None
        pool.use(match)
        blocks = match.blocks + fresh
        times.append(clock())
        pool.insert(chain, blocks, len(match), len(chain), packed[len(match) * 4 * BLOCK : len(chain) * 4 * BLOCK])
        times.append(clock())
        pool.release(blocks)
        times.append(clock())
        return _steps(("hash", "match", "allocate", "append", "free"), times)


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
        self._manager = KVCacheManager(config, 1 << 20, scheduler_block_size=BLOCK, hash_block_size=BLOCK)
        self._request, self._sampling, self._count = Request, SamplingParams(max_tokens=1), 0

    def run(self, tokens: list[int]) -> dict[str, float]:
        manager, clock = self._manager, time.perf_counter
        self._count += 1
        request = self._request(str(self._count), tokens, self._sampling, None)
        times = [clock()]
        request.block_hashes = self._hasher(request)
        times.append(clock())
        blocks, num_computed, _ = manager.get_computed_blocks(request)
        times.append(clock())
        fresh = manager.allocate_slots(request, len(tokens) - num_computed, num_computed, blocks)
        assert fresh is not None
        times.append(clock())
        manager.free(request)
        times.append(clock())
        return _steps(("hash", "match", "allocate", "free"), times)


class Sglang:
    """SGLang's prefix tree (in Python or its Rust core) with its paged allocator, as its scheduler calls them."""

    def __init__(self, num_blocks: int, core: str) -> None:
        import torch
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.base_prefix_cache import (
            DecLockRefParams,
            EvictParams,
            InsertParams,
            MatchPrefixParams,
        )
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
        table = ReqToTokenPool(size=1, max_context_len=1, device="cpu", enable_memory_saver=False)
        components = {} if core == "python" else {"tree_components": (ComponentType.FULL,), "tree_core_backend": core}
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=table,
            token_to_kv_pool_allocator=self._allocator,
            page_size=BLOCK,
            **components,
        )
        self._cache = RadixCache(params) if core == "python" else UnifiedRadixCache(params)
        self._is_python, self._torch = core == "python", torch
        self._key, self._match, self._insert = RadixKey, MatchPrefixParams, InsertParams
        self._evict, self._unlock = EvictParams, DecLockRefParams

    def run(self, tokens: list[int]) -> dict[str, float]:
        cache, allocator, clock = self._cache, self._allocator, time.perf_counter
        whole = array("q", tokens[: len(tokens) // BLOCK * BLOCK])
        count = -(-len(tokens) // BLOCK) * BLOCK
        times = [clock()]
        match = cache.match_prefix(self._match(key=self._key(whole)))
        node = match.last_device_node
        lock = cache.inc_lock_ref(node)
        held = cache.path_device_indices(node)
        times.append(clock())
        need = count - len(held)
        if need > allocator.available_size():
            cache.evict(self._evict(num_tokens=need - allocator.available_size()))
        fresh = allocator.alloc(need) if need else held[:0]
        assert fresh is not None
        indices = self._torch.cat([held, fresh])
        times.append(clock())
        result = cache.insert(self._insert(key=self._key(whole), value=indices[: len(whole)]))
        times.append(clock())
        if result.prefix_len > len(held):
            allocator.free(indices[len(held) : result.prefix_len])
        if count > len(whole):
            allocator.free(indices[len(whole) :])
        cache.dec_lock_ref(node) if self._is_python else cache.dec_lock_ref(node, _unlock_params(self._unlock, lock))
        times.append(clock())
        return _steps(("match", "allocate", "append", "free"), times)


def _unlock_params(kind: Any, lock: Any) -> Any:
    """What the lock's result says that the unlocking needs."""
    names = kind.__dataclass_fields__
    return kind(**{name: getattr(lock, name) for name in names if hasattr(lock, name)})


def _steps(names: tuple[str, ...], times: list[float]) -> dict[str, float]:
    return {name: end - begin for name, begin, end in zip(names, times, times[1:], strict=False)}


def _contender(name: str, num_blocks: int) -> Contender:
    if name == "kvrelay":
        return Ours(num_blocks)
    if name.startswith("vLLM"):
        return Vllm(num_blocks, "sha256_cbor" if "cbor" in name else "sha256")
    return Sglang(num_blocks, "rust" if "Rust" in name else "python")


def prompts(length: int, count: int) -> list[list[int]]:
    """The same ones in every process."""
    random_ids = random.Random(length)

    def some(number: int) -> list[int]:
        return [random_ids.randrange(150_000) for _ in range(number)]

    shared = [some(length // 2) for _ in range(4)]
    return [shared[index % 4] + some(length - length // 2) for index in range(count)]


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def main() -> None:
    name = sys.argv[1]
    if name != "kvrelay":
        import pydantic  # noqa: F401
        import transformers  # noqa: F401

        from bench import standins

        standins.install()
    contenders: dict[int, Contender] = {}
    work: dict[int, list[list[int]]] = {}
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        length, count = json.loads(line)
        contender = contenders.get(length)
        if contender is None:
            contender = contenders[length] = _contender(name, PROMPTS_KEPT * -(-length // BLOCK) + 8)
            work[length] = prompts(length, count)
            for tokens in work[length][: 2 * PROMPTS_KEPT]:
                contender.run(tokens)
        times = [contender.run(tokens) for tokens in work[length]]
        print(json.dumps({step: _median([each[step] for each in times]) for step in times[0]}), file=out, flush=True)
    out.flush()
    os._exit(0)  # the stand-ins make exit handlers stumble


if __name__ == "__main__":
    main()
