"""Prompts that begin alike and are in line together: whether one finds in the next step what another computes in this one. Pure.

Computed beside each other they would both compute what they share, and the router, which counts on what is on its way to a worker,
would be wrong about the second. So it waits a step, if that spares it more than a step's own time.

Source: SGLang's in-batch prefix caching puts such a prompt back likewise, by a fixed 32 tokens (python/sglang/srt/managers/
schedule_policy.py); vLLM names blocks when they are planned instead, so that a step may read what it writes.
"""

from collections.abc import Iterable
from typing import Protocol

from kvrelay.hashing import HASH_BYTES, HashChain

BUDGET_CUT = 32
"""At least this part of a step's tokens: about what could be computed while a step is only begun and ended."""


class Chunk(Protocol):
    """Tokens `start` .. `start + num_tokens` of a prompt, which a step computes."""

    @property
    def start(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...


def least_blocks(token_budget: int, block_size: int) -> int:
    """As many blocks of a prompt as are worth a step's wait."""
    return max(1, -(-token_budget // (BUDGET_CUT * block_size)))


def begins_alike(chain: HashChain, other: HashChain) -> bool:
    """Whether they share their first block."""
    return len(other.data) >= HASH_BYTES and chain.data[:HASH_BYTES] == other.data[:HASH_BYTES]


def is_spared(
    chain: HashChain, num_found: int, num_usable: int, least: int, computed: Iterable[tuple[HashChain, int]]
) -> bool:
    """Whether at least so many of the chain's blocks after those found are among what is computed now.

    num_usable: blocks that can be found at all. computed: chains, and how many of their blocks will be there after this step.
    """
    last = num_found + least - 1
    if last >= num_usable:
        return False
    begin = last * HASH_BYTES
    name = chain.data[begin : begin + HASH_BYTES]  # stands for all before it, too
    return any(last < count and other.data[begin : begin + HASH_BYTES] == name for other, count in computed)
