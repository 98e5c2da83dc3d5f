"""The common cost of a candidate, in seconds: predicted time to first token, and harm to other requests.

Columns in, columns out: a term is one array over all workers of a role, or over all candidates. Pure: never imports
torch, Ray, sockets, a clock or a random source. The terms are types.TERM_NAMES; a candidate's cost is their plain sum.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvrelay.router.policies.base import Bools, CostModel, Floats, Ints, RoutingContext, WorkerTable, any_of, only
from kvrelay.router.types import TERM_NAMES, RouteRequest

HANDOFF, TRANSFER, STALL = (TERM_NAMES.index(name) for name in ("handoff", "transfer", "stall"))
COMPUTE, QUEUE, PRESSURE, LOAD = (
    TERM_NAMES.index(name) for name in ("prefill_compute", "prefill_queue", "prefill_pressure", "prefill_load")
)
WORK = slice(COMPUTE, LOAD + 1)
DECODE = slice(TERM_NAMES.index("decode_load"), TERM_NAMES.index("decode_wait") + 1)


Rows = Ints | slice
"""Rows of a column; a slice (with both ends) selects adjacent rows without a copy."""


class PrefixSource(NamedTuple):
    """Where each worker gets the prefix of a prompt from, in tokens, and the seconds to load `loaded` of them."""

    cached: Ints  # in its pool by the time it computes the prompt
    loaded: Ints  # from its lower tiers or the cluster's store, where that is faster than computing them
    load_s: Floats


def prefix_sources(context: RoutingContext, tables: Sequence[WorkerTable], model: CostModel) -> PrefixSource:
    """For all workers of these tables, concatenated.

    The last token is always computed: its logits give the first output token.
    """
    expected, in_any_tier, size = joined(tables, "expected"), joined(tables, "in_any_tier"), block_sizes(tables)
    usable = (context.request.num_tokens - 1) // size * size
    cached: Ints = np.minimum(expected, usable)
    if not context.stored_tokens and not any_of(in_any_tier > expected):
        return PrefixSource(cached, np.zeros(len(cached), np.int64), np.zeros(len(cached)))
    token_bytes, kv_rate, speed = (
        joined(tables, name) for name in ("kv_bytes_per_token", "kv_bytes_per_s", "prefill_tokens_per_s")
    )
    own = np.maximum(np.minimum(in_any_tier, usable) - cached, 0)
    stored = np.maximum(np.minimum(context.stored_tokens // size * size, usable) - cached - own, 0)
    own_s, stored_s = (
        own * token_bytes / model.tier_bytes_per_s,
        stored * token_bytes / (kv_rate * model.other_node_share),
    )
    loads_own, loads_stored = own_s <= own / speed, stored_s <= stored / speed
    loaded = np.where(loads_own, own + np.where(loads_stored, stored, 0), 0)
    return PrefixSource(cached, loaded, np.where(loads_own, own_s + np.where(loads_stored, stored_s, 0.0), 0.0))


def joined(tables: Sequence[WorkerTable], name: str) -> np.ndarray:
    columns = [getattr(table, name) for table in tables]
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def block_sizes(tables: Sequence[WorkerTable]) -> Ints | int:
    """Block sizes of all workers of these tables, concatenated; one number if all tables store the same one."""
    sizes = {only(table.block_size) for table in tables if len(table)}
    size = sizes.pop() if len(sizes) == 1 else None
    return joined(tables, "block_size") if size is None else size


class CommonCost:
    """The common cost of candidates, whatever policy ranks them. 15 attributes: one array for each term.

    Workers that may compute the prompt are numbered: prefill workers by their row, decode workers by their row plus the
    number of prefill workers.
    """

    def __init__(
        self,
        context: RoutingContext,
        prefills: WorkerTable,
        decodes: WorkerTable,
        model: CostModel,
        *,
        num_more: int = 0,
    ) -> None:
        """`num_more`: further terms, of zeros, after the common ones: for the policy to fill."""
        self._num_terms = len(TERM_NAMES) + num_more
        self.request, self.model = context.request, model
        self.prefills, self.decodes = prefills, decodes
        self.num_prefills = len(prefills)
        self.ttft_s, self.tpot_s = targets(self.request, model)
        self.work, self.uncached = self._work(prefix_sources(context, (prefills, decodes), model))
        self.decode = self._decode()
        self.arriving_s: Floats = (
            (self.request.num_tokens - decodes.held) * decodes.kv_bytes_per_token / decodes.kv_bytes_per_s
        )
        """Seconds to transfer the KV that each decode worker lacks from another process of its machine."""
        self.is_near: Bools = self.uncached[self.num_prefills :] <= model.local_prefill_tokens
        """Decode workers that lack at most `local_prefill_tokens` of the prompt."""
        self.has_near = any_of(self.is_near)
        self.stall = self._stall()

    def _work(self, source: PrefixSource) -> tuple[Floats, Ints]:
        """([4, workers] seconds: own prefill, the queue ahead, harm to requests behind, loading; tokens to compute).

        Near saturation a cached prefix *is* capacity: each second of own prefill counts once more for every request in
        the shortest prefill queue, because so many will wait behind it; with an idle prefill worker it counts nothing.
        """
        tables = (self.prefills, self.decodes)
        queued, speed = joined(tables, "queued_tokens"), joined(tables, "prefill_tokens_per_s")
        uncached = self.request.num_tokens - source.cached - source.loaded
        work = np.empty((4, len(queued)))
        np.divide(uncached, speed, out=work[0])
        np.divide(queued, speed, out=work[1])
        np.multiply(work[0], self._pressure(), out=work[2])
        work[3] = source.load_s
        return work, uncached

    def _pressure(self) -> float:
        """Harm per second of prefill: requests in the shortest prefill queue; 0 while a worker is idle."""
        if not self.num_prefills or self.request.force == "local":
            return 0.0
        queued = self.prefills.queued_requests
        return min(float(queued[queued.argmin()]), self.model.max_pressure)

    def _decode(self) -> Floats:
        """[3, decode workers] seconds: load of the running sequences, share of the free memory, wait for free blocks.

        The wait assumes a steady state, in which as many blocks are freed as the running sequences fill: sequences /
        block_size per step.
        """
        table, model = self.decodes, self.model
        now, later = self._blocks()
        step_s, sequences, free = table.decode_step_s, table.sequences, table.free_blocks
        terms = np.empty((3, len(table)))
        np.multiply(model.decode_load_weight * step_s, sequences, out=terms[0])
        np.multiply(step_s, np.minimum(1.0, later / np.maximum(free, 1)), out=terms[1])
        missing = now * (1 + table.waiting) - free
        if any_of(missing > 0):
            missing = np.maximum(missing, 0) * block_sizes((table,))
            np.divide(missing * step_s, np.maximum(sequences, 1), out=terms[2])
        else:
            terms[2] = 0.0
        return terms

    def _blocks(self) -> tuple[Ints, Ints]:
        """Blocks to reserve on each decode worker, and blocks that the request may grow to."""
        request, table = self.request, self.decodes
        size = block_sizes((table,))
        num_others = request.width - 1  # sequences of the group; they share the prompt's full blocks
        held = table.held // size
        grown = -(-(request.num_tokens + min(request.max_tokens, self.model.expected_output_tokens)) // size)
        now = -(-(request.num_tokens + 1) // size) - held + num_others
        later = grown - held
        return now, later + num_others * (grown - request.num_tokens // size) if num_others else later

    def _stall(self) -> Floats:
        """Harm to a decode worker's sequences while it computes the prompt: each is stalled, and some miss their TPOT
        target.

        A sequence with s seconds of slack per token misses its target if its output is shorter than stall / s tokens.
        Output lengths are assumed exponential; those running at any moment are length-biased.
        """
        table, model = self.decodes, self.model
        own_s, queue_s = self.work[0, self.num_prefills :], self.work[1, self.num_prefills :]
        output_tokens = np.where(table.output_tokens > 0, table.output_tokens, model.expected_output_tokens)
        slack_s = np.maximum(self.tpot_s - table.recent_step_s, 0.1 * self.tpot_s) * output_tokens
        share = np.empty((2, len(table)))  # before it has come, and after
        share[0] = queue_s
        np.add(queue_s, own_s, out=share[1])
        share /= slack_s
        kept = (1.0 + share) * np.exp(-share)
        missed = kept[0] - kept[1]
        stalled_s = (model.stall_weight * table.sequences + model.next_stall_weight) * own_s
        harm_s: Floats = stalled_s + model.missed_s * table.sequences * missed
        return np.where(self.is_near, 0.0, harm_s) if self.has_near else harm_s

    def _transfer(self, computing: Ints, decode: Ints, compute_s: Floats) -> Floats:
        """The part of each pair's KV transfer that `compute_s` of prefill does not hide, seconds."""
        seconds = self.arriving_s[decode]
        node = only(self.prefills.nodes)
        if node is None or node != only(self.decodes.nodes):
            is_far = self.prefills.nodes[computing] != self.decodes.nodes[decode]
            if any_of(is_far):
                seconds = np.where(is_far, seconds / self.model.other_node_share, seconds)
        share = self.model.unhidden_share
        hidden: Floats = np.minimum(seconds, compute_s)
        return seconds - (1 - share) * hidden

    @property
    def prefill_numbers(self) -> slice:
        return slice(0, self.num_prefills)

    @property
    def decode_numbers(self) -> slice:
        return slice(self.num_prefills, self.num_prefills + len(self.decodes))

    def prefill_only(self, computing: Rows) -> Floats:
        """[terms, candidates] of computing the prompt on these workers (by number) without decode."""
        count = computing.stop - computing.start if isinstance(computing, slice) else len(computing)
        parts = np.zeros((self._num_terms, count))
        parts[WORK] = self.work[:, computing]
        return parts

    def pairs(self, computing: Ints, decode: Ints) -> Floats:
        """[terms, candidates] of a prefill worker (by row) with a decode worker (by row) each."""
        parts = self.prefill_only(computing)
        parts[HANDOFF] = self.model.handoff_s
        parts[TRANSFER] = self._transfer(computing, decode, parts[COMPUTE])
        parts[DECODE] = self.decode[:, decode]
        return parts

    def local(self, decode: Ints | None = None) -> Floats:
        """[terms, candidates] of decode workers (by row; None: all) that compute the prompt themselves."""
        rows: Rows = slice(0, len(self.decodes)) if decode is None else decode
        parts = self.prefill_only(self.decode_numbers if decode is None else decode + self.num_prefills)
        parts[DECODE] = self.decode[:, rows]
        parts[STALL] = self.stall[rows]
        return parts


def targets(request: RouteRequest, model: CostModel) -> tuple[float, float]:
    """(TTFT target, TPOT target), seconds: those of the request's first SLO class, else the defaults."""
    wanted = request.slo.targets[0] if request.slo is not None else None
    ttft_s, tpot_s = (wanted.ttft_s, wanted.tpot_s) if wanted is not None else (None, None)
    return ttft_s or model.ttft_s, tpot_s or model.tpot_s
