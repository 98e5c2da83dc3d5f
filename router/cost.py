"""The cost of serving a request in any way, in seconds: predicted time to first token, and harm to others.

Columns in, columns out: a term is one array over all workers of a role, or over all ways asked for. Pure: never imports torch,
Ray, sockets, a clock or a random source. The terms are types.TERM_NAMES; a way costs their plain sum.
"""

from dataclasses import dataclass

import numpy as np

from kvrelay.router.policies.base import Ask, Bools, Floats, Ints, Side
from kvrelay.router.types import TERM_NAMES

HANDOFF, TRANSFER, STALL = (TERM_NAMES.index(name) for name in ("handoff", "transfer", "stall"))
WORK = slice(TERM_NAMES.index("prefill_compute"), TERM_NAMES.index("prefill_pressure") + 1)
DECODE = slice(TERM_NAMES.index("decode_load"), TERM_NAMES.index("decode_wait") + 1)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Weights, and what to assume of a worker before its first measurement."""

    default_prefill_tokens_per_s: float = 2000.0
    default_decode_step_s: float = 0.03
    default_kv_bytes_per_s: float = 4e9  # between processes of one host
    other_node_share: float = 0.25  # of that bandwidth, between hosts
    unhidden_share: float = 0.05  # of a transfer, even under a long prefill: its last layers
    handoff_s: float = 0.002
    decode_load_weight: float = 0.1  # of a step, per sequence already there
    stall_weight: float = 1.0  # of the prefill's time, per sequence that it holds up
    max_pressure: int = 8
    expected_output_tokens: int = 256  # most output that a request is charged blocks for in advance
    local_prefill_tokens: int = 32  # at most so many uncached ones ride along with a decode step: they stall nobody


class CommonCost:
    """What every way costs, whatever policy chose it.

    A worker that computes the prompt has a number: its row, or, for decode workers, the number of prefill workers plus its row.
    """

    def __init__(self, ask: Ask, prefills: Side, decodes: Side, model: CostModel) -> None:
        self.request, self.model = ask.request, model
        self.prefills, self.decodes = prefills, decodes
        self.num_prefills = len(prefills)
        size = _both(prefills.block_size, decodes.block_size)
        last = self.request.num_tokens - 1  # the last token is always computed: its logits give the first output token
        coming = _both(prefills.coming, decodes.coming)
        self.cached: Ints = np.minimum(coming, last // size * size)
        """Of the prompt's tokens, in the worker's pool by the time that it computes them; by number."""
        self.uncached: Ints = self.request.num_tokens - self.cached
        self.work = self._work()
        self.decode = self._decode()
        self.lacking: Ints = self.request.num_tokens - decodes.held
        """Prompt tokens whose KV would have to travel to each decode worker."""
        self.arriving_s: Floats = self.lacking * decodes.kv_bytes_per_token / decodes.kv_bytes_per_s
        """To move those from another process of its machine."""
        self.is_near: Bools = self.uncached[self.num_prefills :] <= model.local_prefill_tokens
        """Decode workers that lack at most local_prefill_tokens of the prompt."""
        self.stall = self._stall()

    def _work(self) -> Floats:
        """[3, numbers]: own work, the queue ahead, and the delay to those behind.

        Near saturation a cached prefix *is* capacity: each token of own work counts once more for every request in the shortest
        queue of any prefill worker, for so many will wait behind it; an idle worker anywhere makes it 0.
        """
        prefills, decodes = self.prefills, self.decodes
        queued = _both(prefills.queued_tokens, decodes.queued_tokens)
        speed = _both(prefills.prefill_tokens_per_s, decodes.prefill_tokens_per_s)
        work = np.empty((3, len(queued)))
        np.divide(self.uncached, speed, out=work[0])
        np.divide(queued, speed, out=work[1])
        np.multiply(work[0], self._pressure(), out=work[2])
        return work

    def _pressure(self) -> int:
        if not self.num_prefills or self.request.force == "local":
            return 0
        return min(int(self.prefills.queued_requests.min()), self.model.max_pressure)

    def _decode(self) -> Floats:
        """[3, decode workers]: the weight of the sequences and of the memory that are taken there, and the wait for blocks.

        The wait assumes a steady state, where as many blocks come free as the running sequences fill: sequences / block_size
        per step.
        """
        side, model = self.decodes, self.model
        now, later = self._blocks()
        step_s, running = side.decode_step_s, np.maximum(side.sequences, 1)
        missing = np.maximum(now * (1 + side.waiting) - side.free_blocks, 0)
        terms = np.empty((3, len(side)))
        np.multiply(model.decode_load_weight * step_s, side.sequences, out=terms[0])
        np.multiply(step_s, np.minimum(1.0, later / np.maximum(side.free_blocks, 1)), out=terms[1])
        np.divide(missing * side.block_size * step_s, running, out=terms[2])
        return terms

    def _blocks(self) -> tuple[Ints, Ints]:
        """What must be reserved at once on each decode worker, and what it may grow to."""
        request, side = self.request, self.decodes
        size = side.block_size
        num_others = request.width - 1  # of a group: they share the prompt's full blocks
        held = side.held // size
        grown = -(-(request.num_tokens + min(request.max_tokens, self.model.expected_output_tokens)) // size)
        now = -(-(request.num_tokens + 1) // size) - held + num_others
        later = grown - held
        return now, later + num_others * (grown - request.num_tokens // size) if num_others else later

    def _stall(self) -> Floats:
        """Delay to a decode worker's sequences, and to the one that will be next, while it computes the prompt."""
        compute_s = self.work[0, self.num_prefills :]
        return np.where(self.is_near, 0.0, self.model.stall_weight * compute_s * (self.decodes.sequences + 1))

    def transfer(self, computing: Ints, decode: Ints) -> Floats:
        """The part of moving the KV of each pair that computing the prompt does not hide."""
        seconds = self.arriving_s[decode]
        is_far = self.prefills.nodes[computing] != self.decodes.nodes[decode]
        if is_far.any():
            seconds = np.where(is_far, seconds / self.model.other_node_share, seconds)
        share = self.model.unhidden_share
        hidden: Floats = np.minimum(seconds, self.work[0, computing])
        return seconds - (1 - share) * hidden

    def prefill_only(self, computing: Ints) -> Floats:
        """[terms, ways] of computing the prompt, by number, with nothing to follow."""
        parts = np.zeros((len(TERM_NAMES), len(computing)))
        parts[WORK] = self.work[:, computing]
        return parts

    def pairs(self, computing: Ints, decode: Ints) -> Floats:
        """[terms, ways] of a prefill worker (its row) and a decode worker (its row) each."""
        parts = self.prefill_only(computing)
        parts[HANDOFF] = self.model.handoff_s
        parts[TRANSFER] = self.transfer(computing, decode)
        parts[DECODE] = self.decode[:, decode]
        return parts

    def local(self, decode: Ints) -> Floats:
        """[terms, ways] of decode workers (their rows) that compute the prompt themselves."""
        parts = self.prefill_only(decode + self.num_prefills)
        parts[DECODE] = self.decode[:, decode]
        parts[STALL] = self.stall[decode]
        return parts


def _both(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.concatenate((first, second)) if len(first) else second
