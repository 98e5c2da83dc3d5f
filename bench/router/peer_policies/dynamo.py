"""NVIDIA Dynamo's cost: blocks that would have to be computed, and blocks in use. Pure.

Source: ai-dynamo/dynamo, lib/kv-router/src/scheduling/selector.rs (commit 01690d4), with the defaults of
ai-dynamo-runtime 1.6.1:

    prefill_load_scale * max(0, queue + prompt - credit * held - 0.75 * lower tiers - shared) + blocks in use, after
    admission

in blocks, least first, equal ones by chance. With prefill and decode pools (lib/llm/src/kv_router/prefill_router.rs)
the prefill pool is chosen without the blocks in use, the decode pool by those alone. A temperature above 0 draws from
the softmax of the costs over their range: with Gumbel noise the least is such a draw.

Conditional disaggregation (lib/kv-router/src/conditional_disagg.rs; prefill_router/conditional_bypass.rs, commit
07a6c9c; off unless asked for): the decode worker that would be chosen if it computed the prompt as well does so,

    isl_bounding   if it lacks less than 2,048 tokens, and less than 0.7 of the prompt (the default policy)
    prefill_load   if the prefill worker that would be chosen has more than `prefill_busy_threshold` batches of tokens
                   to compute; without a threshold never: it has no default (the router's queue threshold, which it
                   falls back to, was 4 and has none either since 1.4; a published recipe sets 16)
    isl_or_load    if either holds

and in no case if its blocks in use, with the request, exceed the share `decode_busy_threshold` of all (no default; 0.9
in that recipe).
"""

import math
from typing import ClassVar, Literal

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
    single,
    unit,
)
from kvrelay.router.types import Candidate


class DynamoOptions(PolicyOptions):
    """Dynamo's names without `router_`, `overlap_score_` and `conditional_disagg_`. predicted: count prefixes that are
    on their way, too. max_num_batched_tokens: the engine's, of a step.
    """

    credit: float = Field(1.0, ge=0)
    credit_decay: float = Field(0.0, ge=0)
    prefill_load_scale: float = Field(1.0, ge=0)
    host_cache_hit_weight: float = Field(0.75, ge=0, le=1)
    shared_cache_multiplier: float = Field(0.0, ge=0, le=1)
    decode_active_request_weight: float = Field(0.0, ge=0)
    temperature: float = Field(0.0, ge=0)
    predicted: bool = False
    conditional: Literal["off", "isl_bounding", "prefill_load", "isl_or_load"] = "off"
    eff_isl_threshold: int = Field(2048, ge=0)
    eff_isl_ratio_threshold: float = Field(0.7, ge=0, le=1)
    prefill_busy_threshold: float = Field(math.inf, ge=0)
    decode_busy_threshold: float = Field(math.inf, ge=0)
    max_num_batched_tokens: int = Field(2048, ge=1)


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

    def rank(self, context: RoutingContext, prefills: WorkerTable, decodes: WorkerTable) -> list[Candidate]:
        is_open = self._options.conditional != "off" and context.request.force is None and context.request.needs_decode
        if is_open and len(prefills) and len(decodes):
            local = self.rank_local(context, decodes)
            if self._bypasses(context, decodes, local.rows[0], prefills):
                return single(local, is_local=True)
        return super().rank(context, prefills, decodes)

    def _bypasses(self, context: RoutingContext, decodes: WorkerTable, row: int, prefills: WorkerTable) -> bool:
        """Whether the decode worker computes the prompt."""
        options, num_tokens = self._options, context.request.num_tokens
        if self._decode_terms(context, decodes)[0][row] > options.decode_busy_threshold * decodes.num_blocks[row]:
            return False
        lacking = max(0.0, num_tokens - float(self._cached(context, decodes)[row]))
        is_short = lacking < min(options.eff_isl_threshold, options.eff_isl_ratio_threshold * num_tokens)
        if options.conditional != "prefill_load" and is_short:
            return True
        chosen = self.rank_prefill(context, prefills).rows[0]
        busy_tokens = options.prefill_busy_threshold * options.max_num_batched_tokens
        return options.conditional != "isl_bounding" and bool(prefills.queued_tokens[chosen] > busy_tokens)

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
        scale, num_tokens = self._options.prefill_load_scale, context.request.num_tokens
        work = scale * (table.queued_tokens + num_tokens) / table.block_size
        return work, -np.minimum(work, scale * self._cached(context, table) / table.block_size)

    def _cached(self, context: RoutingContext, table: WorkerTable) -> Floats:
        """Tokens of the prompt, by where they are worth less than one."""
        options = self._options
        device = table.expected if options.predicted else table.held
        host = np.maximum(table.in_any_tier - device, 0)
        shared = np.maximum(context.stored_tokens - device, 0)
        cached: Floats = (
            self._credit(table, context.request.num_tokens) * device
            + options.host_cache_hit_weight * host
            + options.shared_cache_multiplier * shared
        )
        return cached

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
