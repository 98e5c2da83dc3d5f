"""Queued prompts with a common prefix: whether one finds in the next step what another computes in this one. Pure.

In one step both would compute what they share, and the router, which counts on KV that a worker is about to have,
would be wrong about the second. So it waits one step, if that saves more than a step's own time.

Source: SGLang's in-batch prefix caching defers such a prompt, too, by a fixed 32 tokens (python/sglang/srt/managers/
schedule_policy.py); vLLM names blocks when they are planned instead, so that a step may read what it writes.
"""

from collections.abc import Iterable
from typing import Protocol

from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.hashing import HASH_BYTES, HashChain
from kvrelay.kvcache.pool.block_pool import BlockPool

BUDGET_CUT = 32
"""A step's wait must save at least this part of a step's tokens: about what could be computed in a step's overhead."""


class PlannedChunk(Protocol):
    """Tokens `start` .. `start + num_tokens` of a prompt, which a step computes."""

    @property
    def seq(self) -> Sequence: ...
    @property
    def start(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...


def finds_more_next_step(seq: Sequence, chunks: Iterable[PlannedChunk], pool: BlockPool, token_budget: int) -> bool:
    """Whether this step's chunks compute enough of the prefix of `seq` that it should wait for them."""
    if not pool.is_caching or seq.request.sampling.prompt_logprobs is not None:
        return False
    chain, size = seq.block_chain(), seq.block_size
    alike = [one for one in chunks if one.seq.request.hints.keep and begins_alike(chain, one.seq.block_chain())]
    if not alike:
        return False
    computed = [(one.seq.block_chain(), (one.start + one.num_tokens) // size) for one in alike]
    num_usable = (seq.num_tokens - 1) // size
    least = least_blocks(token_budget, size)
    return is_spared(chain, len(pool.match(chain, num_usable)), num_usable, least, computed)


def least_blocks(token_budget: int, block_size: int) -> int:
    """The least number of a prompt's blocks that are worth a step's wait."""
    return max(1, -(-token_budget // (BUDGET_CUT * block_size)))


def begins_alike(chain: HashChain, other: HashChain) -> bool:
    """Whether they share their first block."""
    return len(other.data) >= HASH_BYTES and chain.data[:HASH_BYTES] == other.data[:HASH_BYTES]


def is_spared(
    chain: HashChain, num_found: int, num_usable: int, least: int, computed: Iterable[tuple[HashChain, int]]
) -> bool:
    """Whether at least `least` of the chain's blocks after those found are among what is computed now.

    Args:
        num_usable: blocks of the chain that can be used at all.
        computed: chains, and how many of their blocks will be there after this step.
    """
    last = num_found + least - 1
    if last >= num_usable:
        return False
    begin = last * HASH_BYTES
    digest = chain.data[begin : begin + HASH_BYTES]  # stands for all blocks before it, too
    return any(last < count and other.data[begin : begin + HASH_BYTES] == digest for other, count in computed)
