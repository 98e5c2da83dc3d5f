"""What several policies share: random numbers from one draw, the best rows of a table, and candidates made of two
rankings.

Pure: no torch, Ray, sockets, clock or random source.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvrelay.router.policies.base import MAX_CANDIDATES, Floats, Ints, RoutingContext, RoutingPolicy, WorkerTable
from kvrelay.router.types import Candidate

Words = NDArray[np.uint64]
Column = Floats | Ints | Words

PAIRED_ROWS = 4
"""Workers of each role, at least, of which all pairs are candidates."""
PREFILL_STREAM, DECODE_STREAM = 1, 2
"""Independent streams of random numbers, one for each role."""
_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mixed(words: Words) -> Words:
    """A hash of each word.

    Source: the output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))


def draws(draw: float, count: int, stream: int) -> Words:
    """`count` independent random words, the same for the same draw (in [0, 1)) and stream."""
    seed = mixed(np.array([(int(draw * 2**64) + stream * _GAMMA) & _MASK], dtype=np.uint64))
    return mixed(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA) + seed)


def unit(words: Words) -> Floats:
    """The words as numbers in (0, 1)."""
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def best_rows(score: Column, tie: Column) -> Ints:
    """Rows of the lowest scores, lowest first, at most MAX_CANDIDATES; ties are broken by `tie`, then by row."""
    if len(score) <= MAX_CANDIDATES:
        return np.lexsort((tie, score))
    bound = np.partition(score, MAX_CANDIDATES - 1)[MAX_CANDIDATES - 1]
    sure, equal = np.flatnonzero(score < bound), np.flatnonzero(score == bound)
    room = MAX_CANDIDATES - len(sure)
    if len(equal) > room:
        equal = equal[np.argpartition(tie[equal], room - 1)[:room]]
    rows = np.sort(np.concatenate((sure, equal)))
    return rows[np.lexsort((tie[rows], score[rows]))]


class RankedRows(NamedTuple):
    """The best workers of one table, best first."""

    rows: list[int]
    scores: Floats  # [workers]
    parts: Floats  # [workers, terms]


def rank_rows(rows: Ints, score: Column, columns: Sequence[Column | float]) -> RankedRows:
    """`rows` with their scores and terms. columns: one per term of the policy; a number holds for every worker."""
    parts = np.empty((len(rows), len(columns)))
    for term, column in enumerate(columns):
        parts[:, term] = column[rows] if isinstance(column, np.ndarray) else column
    return RankedRows(rows.tolist(), score[rows].astype(np.float64), parts)


def pairs(prefill: RankedRows, decode: RankedRows) -> list[Candidate]:
    """The best prefill workers with the best decode workers, by the sum of their scores."""
    num_decodes = min(len(decode.rows), max(PAIRED_ROWS, MAX_CANDIDATES // len(prefill.rows)))
    num_prefills = min(len(prefill.rows), max(PAIRED_ROWS, MAX_CANDIDATES // num_decodes))
    total = np.add.outer(prefill.scores[:num_prefills], decode.scores[:num_decodes]).ravel()
    candidates = []
    for index in np.argsort(total, kind="stable")[:MAX_CANDIDATES].tolist():
        p, d = divmod(index, num_decodes)
        parts = tuple((prefill.parts[p] + decode.parts[d]).tolist())
        candidates.append(Candidate(prefill.rows[p], decode.rows[d], float(total[index]), parts))
    return candidates


def local_candidates(decode: RankedRows) -> list[Candidate]:
    """Decode workers that compute the prompt themselves."""
    listed = zip(decode.rows, decode.scores.tolist(), decode.parts.tolist(), strict=True)
    return [Candidate(None, row, score, tuple(parts)) for row, score, parts in listed]


def prefill_only(prefill: RankedRows) -> list[Candidate]:
    """Prefill workers alone, for requests of a single token."""
    listed = zip(prefill.rows, prefill.scores.tolist(), prefill.parts.tolist(), strict=True)
    return [Candidate(row, None, score, tuple(parts)) for row, score, parts in listed]


def uncached(context: RoutingContext, table: WorkerTable, cached: Ints) -> Ints:
    """Tokens that each worker would compute: at least the last one, whose logits give the first output token."""
    num_tokens = context.request.num_tokens
    usable = (num_tokens - 1) // table.block_size * table.block_size
    computed: Ints = num_tokens - np.minimum(cached, usable)
    return computed


def matched_share(context: RoutingContext, table: WorkerTable) -> Floats:
    """Share of the prompt that each worker holds, or is expected to hold."""
    return table.expected / context.request.num_tokens


class IndependentChoice(RoutingPolicy):
    """A policy that ranks prefill workers by one rule and decode workers by another; local only if forced."""

    @abstractmethod
    def rank_prefill(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        """Prefill workers for a prompt that is decoded elsewhere. `table` is not empty."""

    @abstractmethod
    def rank_decode(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        """Decode workers for a prompt that a prefill worker computes."""

    def rank_local(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        """Decode workers that also compute the prompt."""
        return self.rank_decode(context, table)

    def rank(self, context: RoutingContext, prefills: WorkerTable, decodes: WorkerTable) -> list[Candidate]:
        """See RoutingPolicy."""
        if must_be_local(context, prefills):
            return local_candidates(self.rank_local(context, decodes)) if len(decodes) else []
        if not len(prefills) or (context.request.needs_decode and not len(decodes)):
            return []
        if not context.request.needs_decode:
            return prefill_only(self.rank_prefill(context, prefills))
        return pairs(self.rank_prefill(context, prefills), self.rank_decode(context, decodes))


def must_be_local(context: RoutingContext, prefills: WorkerTable) -> bool:
    """Whether the request forces local prefill, or there are no prefill workers."""
    return context.request.force == "local" or (not len(prefills) and context.request.force != "remote")
