"""llm-d's weighted scorers: first the decode worker, which computes a prompt itself that it nearly holds; then the
prefill worker. Pure.

Source: llm-d/llm-d-inference-scheduler (commit 520af47), deploy/config/pd-epp-config.yaml: prefix-cache-scorer of
weight 2 and queue-scorer of weight 1 in both profiles, max-score-picker (equal ones by chance), prefix-based-pd-decider
with nonCachedTokens 16. The prefix scorer gives the share of the prompt's blocks, of the first 256 at most; the queue
scorer (longest - own) / (longest - shortest) of the queues, 1 where all are equal; the kv-cache-utilization-scorer the
free share. nonCachedTokens 0 never disaggregates.

Scores here are what a worker falls short of each scorer's best, so that the least is the best. The decode worker is
chosen before the prefill worker, whatever that one's score: a candidate's score is the decode worker's; the prefill
worker's is only in its terms.
"""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from kvrelay.router.policies.base import (
    MAX_CANDIDATES,
    Floats,
    Ints,
    Options,
    PolicyOptions,
    RoutingContext,
    RoutingPolicy,
    WorkerTable,
    parse_options,
)
from kvrelay.router.policies.selection import (
    DECODE_STREAM,
    PAIRED_ROWS,
    PREFILL_STREAM,
    RankedRows,
    best_rows,
    draws,
    must_be_local,
    rank_rows,
    single,
)
from kvrelay.router.types import Candidate


class LlmDOptions(PolicyOptions):
    """Weights of the scorers. precise: what workers have announced instead of what was sent there; without a limit of
    blocks.
    """

    prefix_weight: float = Field(2.0, ge=0)
    queue_weight: float = Field(1.0, ge=0)
    kv_utilization_weight: float = Field(0.0, ge=0)
    non_cached_tokens: int = Field(16, ge=0)
    max_prefix_blocks: int = Field(256, ge=1)
    precise: bool = False


class LlmD(RoutingPolicy):
    """The best weighted score of each profile."""

    name: ClassVar[str] = "llm_d"
    term_names: ClassVar[tuple[str, ...]] = (
        "decode_prefix", "decode_queue", "decode_kv_utilization", "prefill_prefix", "prefill_queue",
        "prefill_kv_utilization",
    )  # fmt: skip

    def __init__(self, options: Options) -> None:
        self._options = parse_options(LlmDOptions, self.name, options)

    def rank(self, context: RoutingContext, prefills: WorkerTable, decodes: WorkerTable) -> list[Candidate]:
        """See RoutingPolicy."""
        if must_be_local(context, prefills):
            return single(self._decode(context, decodes), is_local=True) if len(decodes) else []
        if not len(prefills) or (context.request.needs_decode and not len(decodes)):
            return []
        if not context.request.needs_decode:
            return single(self._prefill(context, prefills), is_local=False)
        return self._staged(context, self._prefill(context, prefills), self._decode(context, decodes), decodes)

    def _staged(
        self, context: RoutingContext, prefill: RankedRows, decode: RankedRows, decodes: WorkerTable
    ) -> list[Candidate]:
        """Of each decode worker in turn: local, or with each of the best prefill workers."""
        is_remote = (
            np.full(len(decodes), True) if context.request.force == "remote" else self._is_remote(context, decodes)
        )
        each = max(PAIRED_ROWS, MAX_CANDIDATES // len(decode.rows))
        candidates = []
        for own in single(decode, is_local=True):
            if not is_remote[own.decode]:
                candidates.append(own)
                continue
            for row, parts in zip(prefill.rows[:each], prefill.parts[:each], strict=True):
                both = np.add(parts, own.parts).tolist()
                candidates.append(own._replace(prefill=row, parts=tuple(both)))
        return candidates[:MAX_CANDIDATES]

    def _is_remote(self, context: RoutingContext, table: WorkerTable) -> NDArray[np.bool_]:
        """Of each decode worker: whether a prefill worker computes the prompt for it."""
        least = self._options.non_cached_tokens
        lacking = context.request.num_tokens - self._matched_blocks(context, table) * table.block_size
        return (lacking >= least) & (least > 0)

    def _decode(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        short = self._short(context, table)
        score = short[0] + short[1] + short[2]
        rows = best_rows(score, draws(context.draw, len(table), DECODE_STREAM))
        return rank_rows(rows, score, (*short, 0.0, 0.0, 0.0))

    def _prefill(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        short = self._short(context, table)
        score = short[0] + short[1] + short[2]
        rows = best_rows(score, draws(context.draw, len(table), PREFILL_STREAM))
        return rank_rows(rows, score, (0.0, 0.0, 0.0, *short))

    def _short(self, context: RoutingContext, table: WorkerTable) -> tuple[Floats, Floats, Floats]:
        """What each worker falls short of the best by: prefix, queue and memory, weighted."""
        options = self._options
        blocks = -(-context.request.num_tokens // table.block_size)
        total = blocks if options.precise else np.minimum(blocks, options.max_prefix_blocks)
        line = table.waiting - table.waiting.min()
        return (
            options.prefix_weight * (1 - self._matched_blocks(context, table) / total),
            options.queue_weight * line / max(int(line.max()), 1),
            options.kv_utilization_weight * (1 - table.free_blocks / table.num_blocks),
        )

    def _matched_blocks(self, context: RoutingContext, table: WorkerTable) -> Ints:
        """Of the prompt's, as this setting of llm-d would know them."""
        matched: Ints = (table.held if self._options.precise else table.expected) // table.block_size
        return matched if self._options.precise else np.minimum(matched, self._options.max_prefix_blocks)
