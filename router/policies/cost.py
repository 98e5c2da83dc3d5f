"""The cost of serving a request in any way, in seconds: predicted time to first token, and harm to others.

Columns in, columns out: a term is one array over all workers of a role, or over all ways asked for. Pure: never imports torch,
Ray, sockets, a clock or a random source. The terms are types.TERM_NAMES; a way costs their plain sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvrelay.router.policies.base import Bools, Floats, Ints, RoutingContext, WorkerTable, any_of, only
from kvrelay.router.types import TERM_NAMES, RouteRequest

HANDOFF, TRANSFER, STALL = (TERM_NAMES.index(name) for name in ("handoff", "transfer", "stall"))
COMPUTE, QUEUE, PRESSURE, LOAD = (
    TERM_NAMES.index(name) for name in ("prefill_compute", "prefill_queue", "prefill_pressure", "prefill_load")
)
WORK = slice(COMPUTE, LOAD + 1)
DECODE = slice(TERM_NAMES.index("decode_load"), TERM_NAMES.index("decode_wait") + 1)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Weights, and what to assume of a worker before its first measurement."""

    default_prefill_tokens_per_s: float = 2000.0
    default_decode_step_s: float = 0.03
    default_kv_bytes_per_s: float = 4e9  # between processes of one host
    tier_bytes_per_s: float = 2e9  # from a worker's own lower tiers into its pool
    other_node_share: float = 0.25  # of a bandwidth, between hosts
    unhidden_share: float = 0.05  # of a transfer, even under a long prefill: its last layers
    handoff_s: float = 0.002
    decode_load_weight: float = 0.1  # of a step, per sequence already there
    stall_weight: float = 0.1  # of the prefill's time, per sequence that it holds up
    next_stall_weight: float = 1.0  # the like, for those that will come while it is computed
    max_pressure: float = 8.0  # seconds that a second of work costs others, at most
    missed_s: float = 8.0  # that one missed target counts as
    ttft_s: float = 5.0  # target of a request that names none
    tpot_s: float = 0.1  # the like
    expected_output_tokens: int = 256  # mean output, and most that a request is charged blocks for in advance
    local_prefill_tokens: int = 32  # at most so many uncached ones ride along with a decode step: they stall nobody


Rows = Ints | slice
"""Some rows of a column; a slice (with both ends): those next to each other, which are not copied."""


class Source(NamedTuple):
    """Where the beginning of a prompt comes from on each worker. Tokens, and the seconds to load `loaded` of them."""

    cached: Ints  # in the pool by the time that it computes the prompt
    loaded: Ints  # from lower tiers or the cluster's store, where that is quicker than computing them
    load_s: Floats


def sources(context: RoutingContext, tables: Sequence[WorkerTable], model: CostModel) -> Source:
    """For every worker of these sides, one after the other. The last token is always computed: its logits give the first output."""
    expected, in_any_tier, size = joined(tables, "expected"), joined(tables, "in_any_tier"), block_sizes(tables)
    usable = (context.request.num_tokens - 1) // size * size
    cached: Ints = np.minimum(expected, usable)
    if not context.stored and not any_of(in_any_tier > expected):
        return Source(cached, np.zeros(len(cached), np.int64), np.zeros(len(cached)))
    token_bytes, kv_rate, speed = (
        joined(tables, name) for name in ("kv_bytes_per_token", "kv_bytes_per_s", "prefill_tokens_per_s")
    )
    own = np.maximum(np.minimum(in_any_tier, usable) - cached, 0)
    stored = np.maximum(np.minimum(context.stored // size * size, usable) - cached - own, 0)
    own_s, stored_s = (
        own * token_bytes / model.tier_bytes_per_s,
        stored * token_bytes / (kv_rate * model.other_node_share),
    )
    loads_own, loads_stored = own_s <= own / speed, stored_s <= stored / speed
    loaded = np.where(loads_own, own + np.where(loads_stored, stored, 0), 0)
    return Source(cached, loaded, np.where(loads_own, own_s + np.where(loads_stored, stored_s, 0.0), 0.0))


def joined(tables: Sequence[WorkerTable], name: str) -> np.ndarray:
    """One column of several sides, one after the other."""
    columns = [getattr(table, name) for table in tables]
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def block_sizes(tables: Sequence[WorkerTable]) -> Ints | int:
    """Of every worker of these sides, one after the other; one number where all are equal and that is known at once."""
    sizes = {only(table.block_size) for table in tables if len(table)}
    size = sizes.pop() if len(sizes) == 1 else None
    return joined(tables, "block_size") if size is None else size


class CommonCost:
    """What every way costs, whatever policy chose it.

    A worker that computes the prompt has a number: its row, or, for decode workers, the number of prefill workers plus its row.
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
        """`num_more`: terms that are 0 below the common ones, for the policy to fill."""
        self._num_terms = len(TERM_NAMES) + num_more
        self.request, self.model = context.request, model
        self.prefills, self.decodes = prefills, decodes
        self.num_prefills = len(prefills)
        self.ttft_s, self.tpot_s = targets(self.request, model)
        self.work, self.uncached = self._work(sources(context, (prefills, decodes), model))
        self.decode = self._decode()
        self.arriving_s: Floats = (
            (self.request.num_tokens - decodes.held) * decodes.kv_bytes_per_token / decodes.kv_bytes_per_s
        )
        """To move what each decode worker lacks from another process of its machine."""
        self.is_near: Bools = self.uncached[self.num_prefills :] <= model.local_prefill_tokens
        """Decode workers that lack at most local_prefill_tokens of the prompt."""
        self.has_near = any_of(self.is_near)
        self.stall = self._stall()

    def _work(self, source: Source) -> tuple[Floats, Ints]:
        """([4, numbers]: own work, the queue ahead, the harm to those behind, and loading; tokens to be computed).

        Near saturation a cached prefix *is* capacity: each second of own work counts once more for every request in the shortest
        queue of any prefill worker, for so many will wait behind it; an idle worker anywhere makes it 0.
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
        """Seconds that a second of work costs others: the prompts that wait in the shortest queue; 0 while a worker is idle."""
        if not self.num_prefills or self.request.force == "local":
            return 0.0
        queued = self.prefills.queued_requests
        return min(float(queued[queued.argmin()]), self.model.max_pressure)

    def _decode(self) -> Floats:
        """[3, decode workers]: the weight of the sequences and of the memory that are taken there, and the wait for blocks.

        The wait assumes a steady state, where as many blocks come free as the running sequences fill: sequences / block_size
        per step.
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
        """What must be reserved at once on each decode worker, and what it may grow to."""
        request, table = self.request, self.decodes
        size = block_sizes((table,))
        num_others = request.width - 1  # of a group: they share the prompt's full blocks
        held = table.held // size
        grown = -(-(request.num_tokens + min(request.max_tokens, self.model.expected_output_tokens)) // size)
        now = -(-(request.num_tokens + 1) // size) - held + num_others
        later = grown - held
        return now, later + num_others * (grown - request.num_tokens // size) if num_others else later

    def _stall(self) -> Floats:
        """Harm to a decode worker's sequences while it computes the prompt: each waits for it, and some miss their TPOT.

        Who has s seconds of slack per token is stalled for too long if its output ends up shorter than the stall over s. Outputs
        are taken to be of exponential length, of which those that run at any moment are the longer ones (length-biased).
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
        """The part of moving the KV of each pair that computing the prompt, for so long, does not hide."""
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
        """Of all prefill workers."""
        return slice(0, self.num_prefills)

    @property
    def decode_numbers(self) -> slice:
        """Of all decode workers."""
        return slice(self.num_prefills, self.num_prefills + len(self.decodes))

    def prefill_only(self, computing: Rows) -> Floats:
        """[terms, ways] of computing the prompt, by number, with nothing to follow."""
        count = computing.stop - computing.start if isinstance(computing, slice) else len(computing)
        parts = np.zeros((self._num_terms, count))
        parts[WORK] = self.work[:, computing]
        return parts

    def pairs(self, computing: Ints, decode: Ints) -> Floats:
        """[terms, ways] of a prefill worker (its row) and a decode worker (its row) each."""
        parts = self.prefill_only(computing)
        parts[HANDOFF] = self.model.handoff_s
        parts[TRANSFER] = self._transfer(computing, decode, parts[COMPUTE])
        parts[DECODE] = self.decode[:, decode]
        return parts

    def local(self, decode: Ints | None = None) -> Floats:
        """[terms, ways] of decode workers (their rows; None: all) that compute the prompt themselves."""
        rows: Rows = slice(0, len(self.decodes)) if decode is None else decode
        parts = self.prefill_only(self.decode_numbers if decode is None else decode + self.num_prefills)
        parts[DECODE] = self.decode[:, rows]
        parts[STALL] = self.stall[rows]
        return parts


def targets(request: RouteRequest, model: CostModel) -> tuple[float, float]:
    """Seconds that are wanted at most: to the first token, and for each further one."""
    wanted = request.slo.targets[0] if request.slo is not None else None
    ttft_s, tpot_s = (wanted.ttft_s, wanted.tpot_s) if wanted is not None else (None, None)
    return ttft_s or model.ttft_s, tpot_s or model.tpot_s
