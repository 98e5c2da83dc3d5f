"""Audits: a sample of hashes to query a worker for, and its answer compared with the index.

Pure: the seed is an argument.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kvrelay.plane.messages import BELOW_POOL, CHANGING, IN_POOL, NOWHERE
from kvrelay.router.index.indexed_worker import IndexedWorker

_GOLDEN, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1


@dataclass(slots=True)
class AuditCounts:
    """Hashes of one worker that were compared: `wrong` are claimed and not held, `missed` are held and not claimed."""

    compared: int = 0
    wrong: int = 0
    missed: int = 0


def draws(seed: int) -> Iterator[int]:
    """Endless 64-bit random numbers, the same for the same seed.

    Source: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    state = seed & _WORD
    while True:
        state = (state + _GOLDEN) & _WORD
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
        yield mixed ^ (mixed >> 31)


def sample(member: IndexedWorker, seed: int, num_hashes: int) -> list[bytes]:
    """Up to `num_hashes`: half that it is known to hold, half that it is not (other workers hold them, or it removed
    them recently).
    """
    numbers, holders, own_bits = draws(seed), member.holders, member.both
    num_claimed = num_hashes - num_hashes // 2
    claimed = holders.sample(lambda mask: mask & own_bits != 0, member.num_blocks, num_claimed, numbers)
    others = holders.sample(lambda mask: mask & own_bits == 0, len(holders), num_hashes, numbers)
    unclaimed = (one for one in (*reversed(member.recently_removed), *others) if not holders.mask(one) & own_bits)
    return [*dict.fromkeys(claimed), *islice(dict.fromkeys(unclaimed), num_hashes // 2)]


def compare(member: IndexedWorker, hashes: Sequence[bytes], tiers: Sequence[int]) -> AuditCounts:
    """Compare the index with the worker's answer, hash by hash."""
    counts = AuditCounts()
    for block_hash, tier in zip(hashes, tiers, strict=False):
        if tier == CHANGING:
            continue
        own_bits = member.holders.mask(block_hash) & member.both
        claimed = IN_POOL if own_bits == member.both else BELOW_POOL if own_bits else NOWHERE
        counts.compared += 1
        counts.wrong += claimed > tier
        counts.missed += claimed < tier
    return counts
