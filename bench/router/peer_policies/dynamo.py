"""NVIDIA Dynamo's cost: blocks that would have to be computed, and blocks in use. Pure.

Source: ai-dynamo/dynamo, lib/kv-router/src/scheduling/selector.rs (commit 01690d4), with the defaults of
ai-dynamo-runtime 1.6.1:

    prefill_load_scale * max(0, queue + prompt - credit * held - 0.75 * lower tiers - shared) + blocks in use, after
    admission

in blocks, least first, equal ones by chance. With prefill and decode pools (lib/llm/src/kv_router/prefill_router.rs)
the prefill pool is chosen without the blocks in use, the decode pool by those alone. A temperature above 0 draws from
the softmax of the costs over their range: with Gumbel noise the least is such a draw.
"""

from typing import ClassVar

import numpy as np
from pydantic import Field

from kvrelay.router.policies.base import Floats, Options, PolicyOptions, RoutingContext, WorkerTable, parse_options
from kvrelay.router.policies.selection import (
    DECODE_STREAM,
    PREFILL_STREAM,
    IndependentChoice,
    RankedRows,
    best_rows,
    draws,
    rank_rows,
    unit,
)


class DynamoOptions(PolicyOptions):
    """Dynamo's names without `router_` and `overlap_score_`. predicted: count prefixes that are on their way, too."""

    credit: float = Field(1.0, ge=0)
    credit_decay: float = Field(0.0, ge=0)
    prefill_load_scale: float = Field(1.0, ge=0)
    host_cache_hit_weight: float = Field(0.75, ge=0, le=1)
    shared_cache_multiplier: float = Field(0.0, ge=0, le=1)
    decode_active_request_weight: float = Field(0.0, ge=0)
    temperature: float = Field(0.0, ge=0)
    predicted: bool = False


class Dynamo(IndependentChoice):
    """The least cost in blocks."""

    name: ClassVar[str] = "dynamo"
    term_names: ClassVar[tuple[str, ...]] = (
        "prefill_blocks",  # in the queue and of the prompt
        "overlap_credit",  # at most as much, negative
        "decode_blocks",
        "active_requests",
        "noise",
    )

    def __init__(self, options: Options) -> None:
        self._options = parse_options(DynamoOptions, self.name, options)

    def rank_prefill(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        return self._least(context, (*self._prefill_terms(context, table), 0.0, 0.0), PREFILL_STREAM)

    def rank_decode(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        return self._least(context, (0.0, 0.0, *self._decode_terms(context, table)), DECODE_STREAM)

    def rank_local(self, context: RoutingContext, table: WorkerTable) -> RankedRows:
        return self._least(
            context, (*self._prefill_terms(context, table), *self._decode_terms(context, table)), DECODE_STREAM
        )

    def _least(
        self,
        context: RoutingContext,
        terms: tuple[Floats | float, Floats | float, Floats | float, Floats | float],
        stream: int,
    ) -> RankedRows:
        cost = np.asarray(sum(terms))
        keys = draws(context.draw, len(cost), stream)
        noise: Floats | float = 0.0
        if self._options.temperature:
            gumbel = -np.log(-np.log(unit(keys)))
            noise = -self._options.temperature * np.ptp(cost) * gumbel
        score = cost + noise
        return rank_rows(best_rows(score, keys), score, (*terms, noise))

    def _prefill_terms(self, context: RoutingContext, table: WorkerTable) -> tuple[Floats, Floats]:
        """The work there, and what is taken off it for what is cached."""
        options, num_tokens = self._options, context.request.num_tokens
        device = table.expected if options.predicted else table.held
        host = np.maximum(table.in_any_tier - device, 0)
        shared = np.maximum(context.stored_tokens - device, 0)
        credit = (
            self._credit(table, num_tokens) * device
            + options.host_cache_hit_weight * host
            + options.shared_cache_multiplier * shared
        )
        work = options.prefill_load_scale * (table.queued_tokens + num_tokens) / table.block_size
        return work, -np.minimum(work, options.prefill_load_scale * credit / table.block_size)

    def _credit(self, table: WorkerTable, num_tokens: int) -> Floats | float:
        """For a cached token; less where the queue is longer than the shortest, if it is to decay."""
        options = self._options
        if not options.credit_decay:
            return options.credit
        request_blocks = -(-num_tokens // table.block_size)
        excess = (table.queued_tokens - table.queued_tokens.min()) / table.block_size / request_blocks
        credit: Floats = options.credit / (1 + options.credit_decay * excess)
        return credit

    def _decode_terms(self, context: RoutingContext, table: WorkerTable) -> tuple[Floats, Floats]:
        blocks = table.num_blocks - table.free_blocks + context.request.num_tokens // table.block_size
        weight = self._options.decode_active_request_weight
        return blocks.astype(np.float64), weight * table.sequences.astype(np.float64)
