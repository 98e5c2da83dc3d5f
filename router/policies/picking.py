"""What several policies share: numbers made of one draw, the best rows of a side, and ways made of two choices.

Pure: no torch, Ray, sockets, clock or random source.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvrelay.router.policies.base import MAX_CANDIDATES, Floats, Ints, RoutingContext, WorkerTable
from kvrelay.router.types import Candidate

Words = NDArray[np.uint64]
Column = Floats | Ints | Words

EACH = 4
"""Workers of each role that are paired in full, where there are so many."""
PREFILL_STREAM, DECODE_STREAM = 1, 2
"""Which numbers of one draw: the two roles' are independent."""
_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mixed(words: Words) -> Words:
    """Each word to one that tells nothing of it.

    Source: the output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))


def draws(draw: float, count: int, stream: int) -> Words:
    """So many independent numbers of 64 bits, always the same for the same draw, in [0, 1), and stream."""
    seed = mixed(np.array([(int(draw * 2**64) + stream * _GAMMA) & _MASK], dtype=np.uint64))
    return mixed(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA) + seed)


def unit(words: Words) -> Floats:
    """As numbers between 0 and 1, never either."""
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def best_rows(score: Column, tie: Column) -> Ints:
    """Rows of the least scores, least first, at most MAX_WAYS; equal ones by `tie`, then by row."""
    if len(score) <= MAX_CANDIDATES:
        return np.lexsort((tie, score))
    bound = np.partition(score, MAX_CANDIDATES - 1)[MAX_CANDIDATES - 1]
    sure, equal = np.flatnonzero(score < bound), np.flatnonzero(score == bound)
    room = MAX_CANDIDATES - len(sure)
    if len(equal) > room:
        equal = equal[np.argpartition(tie[equal], room - 1)[:room]]
    rows = np.sort(np.concatenate((sure, equal)))
    return rows[np.lexsort((tie[rows], score[rows]))]


class Ranked(NamedTuple):
    """The best workers of one side, best first: rows, scores, and a row of the policy's terms for each."""

    rows: list[int]
    scores: Floats  # [workers]
    parts: Floats  # [workers, terms]


def ranked(rows: Ints, score: Column, columns: Sequence[Column | float]) -> Ranked:
    """`rows` of a side with their scores and terms. columns: one for each of the policy's terms; a number: of every worker."""
    parts = np.empty((len(rows), len(columns)))
    for term, column in enumerate(columns):
        parts[:, term] = column[rows] if isinstance(column, np.ndarray) else column
    return Ranked(rows.tolist(), score[rows].astype(np.float64), parts)


def pairs(prefill: Ranked, decode: Ranked) -> list[Candidate]:
    """Each of the best prefill workers with each of the best decode workers, by the sum of their scores."""
    num_decodes = min(len(decode.rows), max(EACH, MAX_CANDIDATES // len(prefill.rows)))
    num_prefills = min(len(prefill.rows), max(EACH, MAX_CANDIDATES // num_decodes))
    total = np.add.outer(prefill.scores[:num_prefills], decode.scores[:num_decodes]).ravel()
    candidates = []
    for place in np.argsort(total, kind="stable")[:MAX_CANDIDATES].tolist():
        p, d = divmod(place, num_decodes)
        parts = tuple((prefill.parts[p] + decode.parts[d]).tolist())
        candidates.append(Candidate(prefill.rows[p], decode.rows[d], float(total[place]), parts))
    return candidates


def local_candidates(decode: Ranked) -> list[Candidate]:
    """The prompt computed by the decode worker itself."""
    listed = zip(decode.rows, decode.scores.tolist(), decode.parts.tolist(), strict=True)
    return [Candidate(None, row, score, tuple(parts)) for row, score, parts in listed]


def prefill_only(prefill: Ranked) -> list[Candidate]:
    """One token is all that is wanted."""
    listed = zip(prefill.rows, prefill.scores.tolist(), prefill.parts.tolist(), strict=True)
    return [Candidate(row, None, score, tuple(parts)) for row, score, parts in listed]


def uncached(context: RoutingContext, table: WorkerTable, cached: Ints) -> Ints:
    """Tokens that each worker would compute: at least the last one, whose logits give the first output token."""
    num_tokens = context.request.num_tokens
    usable = (num_tokens - 1) // table.block_size * table.block_size
    computed: Ints = num_tokens - np.minimum(cached, usable)
    return computed


class TwoChoices(ABC):
    """A policy that chooses the prefill worker by one rule and the decode worker by another; local only where it must be."""

    name: ClassVar[str]
    term_names: ClassVar[tuple[str, ...]]

    @abstractmethod
    def prefill(self, context: RoutingContext, table: WorkerTable) -> Ranked:
        """Who computes the prompt and hands it over. `table` is not empty."""

    @abstractmethod
    def decode(self, context: RoutingContext, table: WorkerTable) -> Ranked:
        """Who decodes what another has computed."""

    @abstractmethod
    def alone(self, context: RoutingContext, table: WorkerTable) -> Ranked:
        """Which decode worker does both."""

    def rank(self, context: RoutingContext, prefills: WorkerTable, decodes: WorkerTable) -> list[Candidate]:
        """See base.Policy."""
        if is_local(context, prefills):
            return local_candidates(self.alone(context, decodes)) if len(decodes) else []
        if not len(prefills) or (context.request.needs_decode and not len(decodes)):
            return []
        if not context.request.needs_decode:
            return prefill_only(self.prefill(context, prefills))
        return pairs(self.prefill(context, prefills), self.decode(context, decodes))


def is_local(context: RoutingContext, prefills: WorkerTable) -> bool:
    """Whether nothing else is asked for, or possible."""
    return context.request.force == "local" or (not len(prefills) and context.request.force != "remote")
