"""The common cost of a candidate, in seconds: predicted time to first token, and harm to other requests.

Of one candidate, in plain numbers; native/candidates.c does the same for whole tables (see joint.py). Pure: never
imports torch, Ray, sockets, a clock or a random source. The terms are types.TERM_NAMES; a candidate's cost is their
plain sum.
"""

import math
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from kvrelay.router.policies.base import CostModel, RoutingContext, WorkerTable
from kvrelay.router.types import RouteRequest

UNSET_SHARE = 0.55  # of the default TPOT target: workers plan steps by it, as longer ones compute hardly more


class WorkerRow(NamedTuple):
    """One row of a WorkerTable, in plain numbers: the columns that costs depend on."""

    nodes: int
    held: int
    expected: int
    in_any_tier: int
    queued_tokens: int
    queued_requests: int
    overdue_tokens: int
    sequences: int
    waiting: int
    free_blocks: int
    turn: int
    block_size: int
    kv_bytes_per_token: int
    decodes: int
    prefill_tokens_per_s: float
    decode_step_s: float
    recent_step_s: float
    kv_bytes_per_s: float
    age_s: float
    output_tokens: float


columns_of = attrgetter(*WorkerRow._fields)


def row_of(table: WorkerTable, row: int) -> WorkerRow:
    return WorkerRow(*(column[row].item() for column in columns_of(table)))


def rows_of(table: WorkerTable) -> list[WorkerRow]:
    return list(map(WorkerRow, *(column.tolist() for column in columns_of(table))))


class PrefixSource(NamedTuple):
    """Where a worker gets the prefix of a prompt from, in tokens, and the seconds to load `loaded` of them."""

    cached: int  # in its pool by the time it computes the prompt
    loaded: int  # from its lower tiers or the cluster's store, where that is faster than computing them
    load_s: float


def prefix_source(context: RoutingContext, worker: WorkerRow, model: CostModel) -> PrefixSource:
    """The last token is always computed: its logits give the first output token."""
    size, speed, token_bytes = worker.block_size, worker.prefill_tokens_per_s, worker.kv_bytes_per_token
    usable = (context.request.num_tokens - 1) // size * size
    cached = min(worker.expected, usable)
    own = max(min(worker.in_any_tier, usable) - cached, 0)
    stored = max(min(context.stored_tokens // size * size, usable) - cached - own, 0)
    own_s = own * token_bytes / model.tier_bytes_per_s
    stored_s = stored * token_bytes / (worker.kv_bytes_per_s * model.other_node_share)
    if own_s > own / speed:
        return PrefixSource(cached, 0, 0.0)
    if stored_s > stored / speed:
        return PrefixSource(cached, own, own_s)
    return PrefixSource(cached, own + stored, own_s + stored_s)


def decode_wait_s(request: RouteRequest, workers: Any) -> Any:
    """Predicted wait for free blocks on a decode worker (a WorkerRow), or on each of a WorkerTable.

    It assumes a steady state, in which as many blocks are freed as the running sequences fill: sequences / block_size
    per step.
    """
    now = -(-(request.num_tokens + 1) // workers.block_size) - workers.held // workers.block_size + request.width - 1
    missing = now * (1 + workers.waiting) - workers.free_blocks
    missing_tokens = missing * (missing > 0) * workers.block_size
    return missing_tokens * workers.decode_step_s / (workers.sequences + (workers.sequences < 1))


class CommonCost:
    """The common cost of one request's candidates, whatever policy ranks them: lists of terms."""

    def __init__(self, context: RoutingContext, prefills: WorkerTable, decodes: WorkerTable, model: CostModel) -> None:
        """All workers that may take the request.

        Near saturation a cached prefix *is* capacity: a second of own prefill delays all later requests by one. So it
        counts `max_pressure` times more as soon as all workers that compute prompts have some, and hardly more while a
        few are idle: by the sixth power of the share that is busy. But no more than it would cost on a decode worker.
        """
        self.context, self.request, self.model = context, context.request, model
        self.ttft_s, self.tpot_s = targets(self.request, model)
        has_slo = self.request.slo is not None
        self._caution = 1.0 if has_slo else 2.0  # how often harm to running sequences counts
        self._is_split = bool(np.count_nonzero(prefills.decodes == 0))  # whether some compute prompts and do not decode
        known = decodes.output_tokens[decodes.output_tokens > 0]
        mean = known.cumsum()[-1].item() / len(known) if len(known) else model.expected_output_tokens  # summed as in C
        split, both = model.decode_load_weight * mean, model.both_load_weight
        held = decodes.expected.max(initial=0).item() / self.request.num_tokens
        self._new_share = 1.0 - held if has_slo and not self._is_split else 0.0  # of the prompt: no worker holds it
        self._load_weight = split if self._is_split else both + (split - both) * self._new_share
        queued = (prefills if len(prefills) and self.request.force != "local" else decodes).queued_requests
        busy = int(np.count_nonzero(queued)) / max(len(queued), 1)
        self._missed_s = 0.0 if has_slo and self._is_split else model.missed_s  # of a target that is lost to a stall
        self._pressure = self._price(decodes) * (busy * busy * busy) * (busy * busy * busy)

    def _price(self, decodes: WorkerTable) -> float:
        """`max_pressure`, or less: what a second of prefill costs on the decode worker with the fewest sequences."""
        if not self._is_split or self.request.force == "remote" or not len(decodes):
            return self.model.max_pressure
        worker, model = row_of(decodes, int(np.argmin(decodes.sequences))), self.model
        return min(model.max_pressure, self._caution * self._harm(worker, model.missed_s) / self._prompt_s(worker)[0])

    def uncached_tokens(self, worker: WorkerRow) -> int:
        """Tokens of the prompt that a worker has to compute."""
        source = prefix_source(self.context, worker, self.model)
        return self.request.num_tokens - source.cached - source.loaded

    def terms(self, prefill: WorkerRow | None, decode: WorkerRow | None) -> list[float]:
        """Of a prefill worker with a decode worker; of one alone: it computes the prompt, and decodes if it is a decode
        worker.
        """
        if prefill is None:
            assert decode is not None
            return [*self._work(decode), 0.0, 0.0, *self.decode(decode), self.stall(decode)]
        work, stall_s = self._work(prefill), self.stall(prefill) if prefill.decodes else 0.0
        if decode is None:
            return [*work, 0.0, 0.0, 0.0, 0.0, 0.0, stall_s]
        transfer_s = self._transfer(prefill, decode, work[0])
        return [*work, self.model.handoff_s, transfer_s, *self.decode(decode), stall_s]

    def _work(self, worker: WorkerRow) -> tuple[float, float, float, float]:
        """Own prefill, the queue ahead, harm to requests behind, loading."""
        own_s, queue_s, load_s = self._prompt_s(worker)
        return own_s, queue_s, own_s * self._pressure, load_s

    def _prompt_s(self, worker: WorkerRow) -> tuple[float, float, float]:
        """Own prefill, the queue ahead, loading."""
        speed, source = worker.prefill_tokens_per_s, prefix_source(self.context, worker, self.model)
        own_tokens = self.request.num_tokens - source.cached - source.loaded
        return own_tokens / speed, worker.queued_tokens / speed, source.load_s

    def decode(self, worker: WorkerRow) -> tuple[float, float, float]:
        """Load of the running sequences, share of the free memory, wait for free blocks.

        Each sequence makes the others' steps longer, throughout its output. Where all workers decode that hardly
        counts, as a few are to have most sequences; but under an SLO full batches leave new prompts no room in a step.
        """
        request, model, size, step_s = self.request, self.model, worker.block_size, worker.decode_step_s
        num_others = request.width - 1  # sequences of the group; they share the prompt's full blocks
        grown = -(-(request.num_tokens + min(request.max_tokens, model.expected_output_tokens)) // size)
        later = grown - worker.held // size + num_others * (grown - request.num_tokens // size)
        memory_s = step_s * min(later / max(worker.free_blocks, 1), 1.0)
        return self._load_weight * step_s * worker.sequences, memory_s, decode_wait_s(request, worker)

    def is_near(self, worker: WorkerRow) -> bool:
        """Whether a worker lacks at most `local_prefill_tokens` of the prompt."""
        return self.uncached_tokens(worker) <= self.model.local_prefill_tokens

    def stall(self, worker: WorkerRow) -> float:
        return self._harm(worker, self._missed_s)

    def _harm(self, worker: WorkerRow, missed_s: float) -> float:
        """Harm to a worker's sequences while it computes the prompt: each is stalled, and some miss their TPOT target.

        A sequence with s seconds of slack per token misses its target if its output is shorter than stall / s tokens.
        Output lengths are assumed exponential; those running at any moment are length-biased. Sequences that miss their
        target because of prompts queued before this one do not count, but where all workers decode they do: else long
        prompts would go where the queue is long. There stalls weigh twice, so that a few workers compute most prompts.
        Under an SLO, to which steps are held, none misses it beside prefill workers; elsewhere new prompts harm none.
        """
        if self.is_near(worker):
            return 0.0
        model, (own_s, queue_s, _) = self.model, self._prompt_s(worker)
        weight = model.stall_weight * (1.0 if self._is_split else self._caution)
        stalled_s = (weight * worker.sequences + model.next_stall_weight) * own_s
        queue_s = queue_s if self._is_split else 0.0
        output_tokens = worker.output_tokens if worker.output_tokens > 0 else model.expected_output_tokens
        slack_s = max(self.tpot_s - worker.recent_step_s, 0.1 * self.tpot_s) * output_tokens
        before, after = queue_s / slack_s, (queue_s + own_s) / slack_s
        missed = (1.0 + before) * math.exp(-before) - (1.0 + after) * math.exp(-after)
        return (1.0 - self._new_share) * (stalled_s + missed_s * worker.sequences * missed)

    def arriving_s(self, decode: WorkerRow) -> float:
        """Seconds to transfer the KV that a decode worker lacks from another process of its machine."""
        return (self.request.num_tokens - decode.held) * decode.kv_bytes_per_token / decode.kv_bytes_per_s

    def _transfer(self, computing: WorkerRow, decode: WorkerRow, compute_s: float) -> float:
        """The part of a pair's KV transfer that `compute_s` of prefill does not hide, seconds. Where the computing
        worker decodes too, no copy is needed, and it counts as the prefill to come of what it displaces.
        """
        seconds = self.arriving_s(decode)
        if computing.nodes != decode.nodes:
            seconds /= self.model.other_node_share
        seconds -= (1 - self.model.unhidden_share) * min(seconds, compute_s)
        if computing.decodes:
            copied_s = (self.request.num_tokens - decode.held) / decode.prefill_tokens_per_s
            seconds += self.model.displaced_share * copied_s * (1.0 + self._pressure)
        return seconds


def targets(request: RouteRequest, model: CostModel, unset_share: float = 1.0) -> tuple[float, float]:
    """(TTFT target, TPOT target), seconds: those of the request's first SLO class, else the defaults.

    unset_share: of the default TPOT.
    """
    wanted = request.slo.targets[0] if request.slo is not None else None
    ttft_s, tpot_s = (wanted.ttft_s, wanted.tpot_s) if wanted is not None else (None, None)
    return ttft_s or model.ttft_s, tpot_s or unset_share * model.tpot_s
